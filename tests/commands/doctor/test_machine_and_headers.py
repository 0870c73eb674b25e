"""What the doctor says of the machine, and what it reads in the headers of model files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localspec.commands.doctor.facts import MachineFacts, machine_findings
from localspec.commands.doctor.fit import of_path
from localspec.commands.doctor.ranking import bytes_per_token
from localspec.engine.fit import need
from localspec.model_files.gguf import GGUFFile
from tests.conftest import TinyFiles
from tests.support import ggufs

MIB = 1 << 20


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


# -- headers -----------------------------------------------------------------------------------------------------------


def test_bytes_read_for_a_token(tmp_path: Path, tiny: TinyFiles) -> None:
    with GGUFFile(tiny.spm) as gguf:
        embedding = gguf.tensors["token_embd.weight"].n_bytes
        assert bytes_per_token(gguf) == sum(each.n_bytes for each in gguf.tensors.values()) - embedding
    shape = ggufs.Shape(n_layer=1, tied=True)
    with GGUFFile(ggufs.write_llama(tmp_path / "tied.gguf", shape)) as gguf:
        assert bytes_per_token(gguf) == sum(each.n_bytes for each in gguf.tensors.values())
    weights = ggufs.llama_weights(shape, 384)
    for kind in ("gate", "up", "down"):
        weights[f"blk.0.ffn_{kind}_exps.weight"] = np.ones((8, 32, 32), np.float32)
        del weights[f"blk.0.ffn_{kind}.weight"]
    extra = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    path = ggufs.write_llama(tmp_path / "experts.gguf", shape, weights=weights, extra=extra)
    with GGUFFile(path) as gguf:
        experts = sum(each.n_bytes for name, each in gguf.tensors.items() if "_exps" in name)
        dense = sum(each.n_bytes for each in gguf.tensors.values()) - experts
        assert bytes_per_token(gguf) == dense + experts / 4


def test_need_grows_with_context_and_cache_type(tiny: TinyFiles) -> None:
    model = of_path(tiny.bpe)
    assert model.sizes is not None
    per_token = 2 * 2 * 2 * 32  # layers · (keys and values) · heads · width
    sizes = model.sizes
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
    assert sizes is not None
    needed = need(sizes, 2048, "f16", "ik-llama")
    with ik_llama.load(path) as model:
        engine_log.recent.clear()
        with model.new_context(2048):
            said = "".join(engine_log.recent)
    kv, compute = (
        float(found[1]) * MIB
        for kind in ("KV", "compute")
        if (found := re.search(rf"CPU {kind} buffer size =\s+([\d.]+) MiB", said)) is not None
    )
    assert needed.kv == pytest.approx(kv, rel=0.01)
    assert needed.compute == pytest.approx(compute, rel=0.03)
