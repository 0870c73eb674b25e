"""How many answers at a time: chosen from t(w) and from memory, and said why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Model
from localspec.backends.placement import Placement
from localspec.controllers.cost_model import PassTimes
from localspec.engine.fit import ParallelChoice, choose_parallel, open_memory
from localspec.engine.loading import Loader
from localspec.engine.options import LoadOptions
from localspec.engine.state import SPARE
from localspec.errors import EngineError
from tests.conftest import TinyFiles, open_backend
from tests.support.simulator import CURVES

GROWTH = 3e-5
PLENTY = 1 << 40


def choice(tiny: TinyFiles, curve: str, n_ctx: int = 8192, available: int = PLENTY, **options: Any) -> ParallelChoice:
    device = "gpu" if curve == "gpu" else "cpu"
    capabilities = SimpleNamespace(
        **({"batches": True, "own_cells": False, "keeps_kv_type": True, "device": device} | options)
    )
    model: Any = SimpleNamespace(capabilities=capabilities, backend="it", path=tiny.quick.target, kv_type="f16")
    return choose_parallel(model, PassTimes(dict(CURVES[curve]), growth=GROWTH), n_ctx, available)


@pytest.mark.parametrize(
    ("curve", "options", "n", "why"),
    [
        ("ik", {}, 3, "times the tokens of one"),  # more rows pass over more cells, too
        ("llama.cpp", {}, 4, "times the tokens of one"),  # 5 rows take 170 ms, 4 take 125
        ("gpu", {"n_ctx": 1024}, 2, "there is room for no more than 2"),
        ("gpu", {"n_ctx": 1 << 20, "available": 100_000}, 1, "3 contexts of 1,048,576 tokens take"),
        ("linear", {}, 1, "a pass over several takes as long here as theirs one after the other"),
        ("gpu", {"batches": False}, 1, "it computes one conversation of this model at a time"),
        ("gpu", {"keeps_kv_type": False}, 1, "in 16 bits, and a f16 cache was asked for"),
    ],
)
def test_as_many_as_gain_throughput_and_have_memory(
    tiny: TinyFiles, curve: str, options: dict[str, Any], n: int, why: str
) -> None:
    found = choice(tiny, curve, **options)
    assert found.n == n
    assert why in found.reason


def test_more_where_rows_are_cheaper(tiny: TinyFiles) -> None:
    assert choice(tiny, "gpu").n > choice(tiny, "ik").n
    assert choice(tiny, "ik", own_cells=True).n > choice(tiny, "ik").n


def test_a_cache_of_another_type_that_was_asked_for_is_kept(tiny: TinyFiles) -> None:
    for engine, keeps in (("llama-cpp", True), ("ik-llama", False)):
        with open_backend(engine).load(tiny.bpe, n_threads=1, kv_type="q8_0") as model:
            assert model.capabilities.keeps_kv_type is keeps


def test_with_servers_that_can_be_lost_it_is_one(tiny: TinyFiles) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    with open_backend("reference").load(tiny.quick.target) as model:
        options = LoadOptions(placement=Placement(rpc="127.0.0.1:9"), parallel="auto")
        times = PassTimes(dict(CURVES["gpu"]), growth=GROWTH)
        found, _, context, batch = open_memory(options, model, times, 256, never)
        context.close()
        assert (found.n, batch) == (1, None)
        assert "if a server is lost" in found.reason


def loaded_with(curve: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(self: Loader, *args: Any, **options: Any) -> PassTimes:
        return PassTimes(dict(CURVES[curve]), growth=GROWTH)

    monkeypatch.setattr(Loader, "times", times)


def test_a_pair_is_loaded_for_so_many(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    open_backend("llama-cpp")
    loaded_with("gpu", monkeypatch)
    with LLM(tiny.pair.target, draft="ngram", backend="llama-cpp", n_ctx=2048, n_threads=1, parallel="auto") as llm:
        n = llm.parallel_info()["parallel"]
        assert n == 4  # two contexts of 2,048 tokens have room for so many
        batch = llm.inspect().state.batch
        assert batch.n_sequences == n + SPARE
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        streams = [llm.rounds(f"la la {i}", params) for i in range(n + 1)]
        assert [len(stream.reply.token_ids) for stream in streams] == [20] * (n + 1)


def test_where_the_engine_has_no_memory_for_several_it_is_one(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    open_backend("llama-cpp")
    loaded_with("gpu", monkeypatch)

    def refusing(*args: Any, **options: Any) -> None:
        raise EngineError("no memory for it")

    monkeypatch.setattr(Model, "new_batch", refusing)
    with LLM(tiny.pair.target, draft="ngram", backend="llama-cpp", n_ctx=2048, n_threads=1, parallel="auto") as llm:
        assert llm.parallel_info() == {"parallel": 1, "running": 0, "reason": "no memory for it"}
        assert llm.generate("la", SamplingParams(max_tokens=3, ignore_eos=True)).token_ids
    with pytest.raises(EngineError, match="no memory for it"):
        LLM(tiny.pair.target, draft="ngram", backend="llama-cpp", n_ctx=2048, n_threads=1, parallel=2)
