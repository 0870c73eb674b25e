"""What doctor says of the machine, reads in the headers of files, and says of a target on several devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from localspec import Placement
from localspec.backends.llama import llama_cpp
from localspec.backends.llama.binding import Place, Places
from localspec.commands.doctor import fit
from localspec.commands.doctor.facts import MachineFacts, machine_findings
from localspec.commands.doctor.fit import of_path
from localspec.commands.doctor.ranking import bytes_per_token
from localspec.engine.fit import need
from localspec.engine.options import LoadOptions
from localspec.model_files.gguf import GGUFFile
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs

MIB = 1 << 20
CARD, OTHER = Place("CUDA0", 1, "CUDA0", True), Place("CUDA1", 2, "CUDA1", True)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    open_backend("llama-cpp")
    places = Places([CARD, OTHER], [CARD, OTHER], {"CPU": 3, "CUDA0": 1, "CUDA1": 2}, 16)
    monkeypatch.setattr(llama_cpp.LlamaCppBinding, "places", lambda self, placement: places)
    monkeypatch.setattr(fit, "_free", lambda place, engine: 10**9 if place is CARD else 10**5)


def test_what_goes_where_and_does_not_fit(tiny: TinyFiles, cards: None) -> None:
    load = LoadOptions(placement=Placement(tensor_split=(2, 1), cpu_moe=True))
    (cpu, first, second), on_cpu = fit.spread(of_path(tiny.experts), load, "llama-cpp", 256)
    assert [row.name for row in (cpu, first, second)] == ["CPU", "CUDA0", "CUDA1"]
    assert [row.status for row in (cpu, first, second)] == ["info", "ok", "fail"]
    assert "no layers" in cpu.text  # but experts and input
    assert "layers 0 to 1" in first.text
    assert "--tensor-split" in str(second.advice)
    by_memory, _ = fit.spread(of_path(tiny.experts), LoadOptions(n_gpu_layers=2), "llama-cpp", 256)
    assert [row.text.partition(":")[0] for row in by_memory] == ["layer 0", "layers 1 to 2", "no layers"]
    with GGUFFile(tiny.experts) as gguf:
        kept = [each for name, each in gguf.tensors.items() if "exps" in name or name == "token_embd.weight"]
        assert on_cpu == sum(each.n_bytes for each in kept)


def test_an_obstacle_is_a_row(tiny: TinyFiles) -> None:
    open_backend("llama-cpp")
    for placement, said in (
        (Placement(device="CUDA9"), "--device CUDA9"),
        (Placement(rpc="127.0.0.1:9"), "no RPC server answers at 127.0.0.1:9"),
    ):
        (row,), _ = fit.spread(of_path(tiny.spm), LoadOptions(placement=placement), "llama-cpp", 256)
        assert (row.status, row.name, said in row.text) == ("fail", "devices", True)


def test_what_is_elsewhere_needs_no_memory_here(tiny: TinyFiles) -> None:
    models, room = [of_path(tiny.spm), of_path(tiny.bpe)], fit.Room(None, None, 10**9, 10**9)
    here, spread = (fit.fit(models, 256, "f16", room, on_cpu) for on_cpu in (None, 0))
    target = here.models[0]
    assert here.ram_needed_bytes - spread.ram_needed_bytes == target.weights_bytes + (target.kv_bytes or 0)


def test_what_slows_a_machine_is_noted() -> None:
    for n_threads, more, noted in (
        (8, {"cpu_quota": 2.0}, {"CPU": "use --threads 2"}),
        (2, {"cpu_quota": 2.0}, {}),
        (16, {}, {"CPU": "use --threads 8"}),
        (2, {"busy_share": 0.5, "on_battery": True}, {"load": "--calibrate", "power": "plug it in"}),
    ):
        facts = MachineFacts("Linux", "A CPU", ["AVX2"], 8, n_threads, MIB, MIB, **more)  # type: ignore[arg-type]
        found = {check.name: check for check in machine_findings(facts) if check.name != "clock"}
        assert {name for name, check in found.items() if check.status == "note"} == set(noted)
        assert all(advice in str(found[name].advice) for name, advice in noted.items())


def test_bytes_read_for_a_token(tmp_path: Path, tiny: TinyFiles) -> None:
    """Two of four experts, and embeddings where they are the output too."""
    tied = ggufs.write_llama(tmp_path / "tied.gguf", ggufs.Shape(n_layer=1, tied=True))
    for path, is_output in ((tiny.experts, False), (tied, True)):
        with GGUFFile(path) as gguf:
            sizes = {name: each.n_bytes for name, each in gguf.tensors.items()}
            read = bytes_per_token(gguf)
        unread = sum(n_bytes for name, n_bytes in sizes.items() if "_exps" in name) / 2
        assert read == sum(sizes.values()) - unread - (0 if is_output else sizes["token_embd.weight"])


def test_need_grows_with_context_and_cache_type(tiny: TinyFiles) -> None:
    per_token = 2 * 2 * 2 * 32  # layers · (keys and values) · heads · width
    sizes = of_path(tiny.bpe).sizes
    f16 = need(sizes, 1000, "f16", "ik-llama")
    assert f16.weights == tiny.bpe.stat().st_size
    assert f16.kv == 1024 * per_token * 2  # engines round up to 256
    assert need(sizes, 1000, "q8_0", "ik-llama").kv == 1024 * per_token * 34 // 32
    assert need(sizes, 1000, "f16", "reference").kv == 1000 * per_token * 8
    assert need(sizes, 1000, "f16", "reference").weights == 8 * sizes.n_params


@pytest.mark.real
def test_memory_of_a_real_model(real_model: Callable[[str], Path]) -> None:
    """What the engine itself reports for the cache and the buffers of a pass is what the header gave."""
    from localspec.backends.llama import ik_llama
    from localspec.backends.llama.ggml import engine_log

    path = real_model("qwen2.5-coder-0.5b")
    sizes = of_path(path).sizes
    needed = need(sizes, 2048, "f16", "ik-llama")
    with ik_llama.load(path) as model:
        engine_log.recent.clear()
        with model.new_context(2048):
            said = "".join(engine_log.recent)
    for kind, expected, rel in (("KV", needed.kv, 0.01), ("compute", needed.compute, 0.03)):
        (reported,) = re.findall(rf"CPU {kind} buffer size =\s+([\d.]+) MiB", said)
        assert expected == pytest.approx(float(reported) * MIB, rel=rel)
