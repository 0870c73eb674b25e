"""``benchmarks/gpu_proof.py`` and what it is made of, on tiny files and the CPU: no GPU is where these tests run."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from localspec.backends.registry import engine_module
from localspec.backends.trust import check_model
from localspec.model_files.gguf import GGUFFile
from tests.conftest import open_backend

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def proof() -> ModuleType:
    return import_module("gpu_proof")


@pytest.fixture
def shapes() -> ModuleType:
    return import_module("random_ggufs")


# Gigabytes of the published Q4_K_M files' tensors.
SIZES = {"qwen2.5-0.5b": 0.395, "qwen2.5-1.5b": 0.98, "qwen2.5-7b": 4.68, "qwen2.5-32b": 19.85, "qwen3-30b-a3b": 18.55}


def test_real_shapes_have_the_sizes_of_real_files(shapes: ModuleType) -> None:
    for name, size in SIZES.items():
        n_bytes = sum(tensor.n_bytes for tensor in shapes.tensors(shapes.SHAPES[name]))
        assert n_bytes / 1e9 == pytest.approx(size, rel=0.0125, abs=0.05 if size > 10 else None), name
    types = {tensor.name: tensor.type_name for tensor in shapes.tensors(shapes.SHAPES["qwen2.5-0.5b"])}
    assert types["token_embd.weight"] == "Q8_0"  # 896 channels are not whole blocks of 256
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["blk.0.ffn_down.weight"] == "Q6_K"
    assert "output.weight" not in types


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b"])
def test_random_files_are_computed_rightly(name: str, shapes: ModuleType, tmp_path: Path) -> None:
    """Tied, with an output matrix of its own, and with experts; logits of finite, sensible size."""
    engine = open_backend("llama-cpp")
    shape = shapes.small(shapes.SHAPES[name])
    path = shapes.write(tmp_path / "deep" / "random.gguf", name, shape)
    with GGUFFile(path) as file:
        assert {tensor.name for tensor in shapes.tensors(shape)} == set(file.tensors)
    with engine.load(path, n_threads=1, n_gpu_layers=0) as model, model.new_context(64) as context:
        assert model.n_vocab == shape.n_vocab
        logits = context.decode(model.tokenize("the and in", add_special=True)).logits
        assert np.isfinite(logits).all()
        assert 0.3 < logits.std() < 3
        assert check_model(model).holds


def test_a_slim_archive_lacks_what_compiling_needs_not(proof: ModuleType, tmp_path: Path) -> None:
    kept = ["CMakeLists.txt", "llama_cpp/__init__.py"]
    kept += [
        f"vendor/llama.cpp/{name}" for name in ("CMakeLists.txt", "src/models/x.cpp", ".git", "ggml/src/ggml-cuda/x.cu")
    ]
    left_out = ["tests/x", ".git/x", "vendor/llama.cpp/models/x", "vendor/llama.cpp/tools/ui/x"]
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as packed:
        for name in (*kept, *left_out):
            member = tarfile.TarInfo(f"llama_cpp_python-1/{name}")
            member.size = len(name)
            packed.addfile(member, io.BytesIO(name.encode()))
    proof.build_llama_cpp.slim(tmp_path / "whole.tar.gz", tmp_path / "slim.tar.xz")
    with tarfile.open(tmp_path / "slim.tar.xz") as found:
        left = {member.name.partition("/")[2]: found.extractfile(member) for member in found}
        assert {name: file.read().decode() for name, file in left.items() if file} == dict(zip(kept, kept, strict=True))
    assert not (tmp_path / "slim.tar.xz.part").exists()


def test_stages_on_tiny_files(tmp_path: Path) -> None:
    """``test_check_here`` has what is kept of them from run to run."""
    open_backend("llama-cpp")
    names = ["machine", "install", "head-qwen2.5-7b", "sequences-qwen3-30b-a3b"]
    names += [f"{what}-qwen2.5-7b" for what in ("noise", "rounds", "ahead")]
    models = ("qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b")
    names += [f"{what}-{model}" for model in models for what in ("write", "passes")]
    script = [sys.executable, str(ROOT / "benchmarks/gpu_proof.py"), "run", "--cpu", "--small"]
    folders = ["--folder", str(tmp_path / "work"), "--pack", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    chosen = [word for name in names for word in ("--only", name)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*script, *folders, *chosen], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads((tmp_path / "out/gpu-proof.json").read_text(encoding="utf-8"))["stages"]
    page = (tmp_path / "out/gpu-proof.md").read_text(encoding="utf-8")
    assert set(found) == set(names)
    assert "nothing here says anything about a GPU" in page
    assert set(found["passes-qwen2.5-0.5b"]["ms_all_rows"]) == {"1", "2", "3", "4", "5", "6", "8"}
    headings = (
        "qwen3-30b-a3b, 0.0 GB, last; qwen2.5-7b, drafted, sampled; qwen3-30b-a3b, 8; qwen2.5-7b on cpu, 0.5B on cpu"
    )
    assert [heading for heading in headings.split("; ") if heading not in page] == []
    assert "while the device computes: for none." in page  # there is none
    rounds, ahead = found["rounds-qwen2.5-7b"], found["ahead-qwen2.5-7b"]["counts"]
    assert min(rounds["ms_to_begin"], *(rounds[kind]["ms_own"] for kind in ("plain_greedy", "drafted_greedy"))) > 0
    counts = ahead["ahead"]
    assert 0 == ahead["ordinary"]["prepared"] <= counts["taken"] <= counts["prepared"]
    # Four in five are right, and those after a wrong one lost.
    assert 0.5 < counts["accepted"] / counts["drafted"] < 0.9


def test_what_is_missing_is_said_before_anything_is_done(
    proof: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"c++": "/usr/bin/c++"}
    monkeypatch.setattr(proof.shutil, "which", lambda name, path=None: there.get(name))
    monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name: None if name in ("yaml", "hypothesis") else 1)
    monkeypatch.setattr(proof.Stages, "run", lambda self, *rest: pytest.fail("it began"))
    folders = ["--folder", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    for options, wanted in (
        ([], "pyyaml, hypothesis, cmake, the CUDA toolkit"),
        (["--cpu", "--build"], "pyyaml, hypothesis, cmake"),
        (["--cpu"], "pyyaml, hypothesis"),
    ):
        with pytest.raises(SystemExit, match=f"^not on this machine, and not carried: {wanted}$"):
            proof.main(["run", *folders, *options])


def test_everything_fits_into_half_an_hour_and_every_stage_has_its_place(
    proof: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU, which is not here: what would be run, and on what."""
    seen: list[list[object]] = []
    monkeypatch.setattr(proof.Stages, "run", lambda self, *rest: seen.append(self.stages) or True)
    monkeypatch.setattr(proof, "missing", lambda **given: [])
    folders = ["--folder", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert proof.main(["run", *folders]) == 0
    (stages,) = seen
    assert sum(stage.minutes for stage in stages) <= 30
    known: set[str] = set()
    assert all((ROOT / name).exists() for name in proof.CONTRACT)
    for stage in stages:
        assert not stage.skip
        assert known.issuperset(stage.needs), stage.name
        known.add(stage.name)
        assert "--cpu" not in stage.command
        assert "--small" not in stage.command
    measures = [stage for stage in stages if stage.name.startswith("passes")]
    assert str(tmp_path / "work/build/site") in measures[0].environment["PYTHONPATH"]
    with pytest.raises(SystemExit, match="no such stage: nothing"):
        proof.main(["run", *folders, "--only", "nothing"])


def test_a_machine_without_a_gpu_is_refused_in_one_line(proof: ModuleType, tmp_path: Path) -> None:
    open_backend("llama-cpp")
    if engine_module("llama-cpp").binding().gpu:
        pytest.skip("there is one")
    command = [sys.executable, str(ROOT / "benchmarks/gpu_measures.py"), "passes", str(tmp_path / "none.gguf")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "llama-cpp-python is here without a GPU; --cpu measures on the CPU\n"
