"""Memories that cannot simply drop rows, or keep them in few bits: windows, recurrent states, quantised caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.llama import model as model_module
from localspec.backends.llama import rollback
from localspec.errors import UsageError
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support.contexts import (
    BROKEN,
    breaking_off,
    check_next,
    every_state,
    fresh_rows,
    rows,
    some_tokens,
    try_any_order,
)


def divergence(p_logits: FloatArray, q_logits: FloatArray) -> float:
    """The largest Kullback-Leibler divergence of two rows that should be equal, in nats."""
    p, q = (x.astype(np.float64) - x.max(axis=1, keepdims=True) for x in (p_logits, q_logits))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=1).max())


def n_examples(model: Model) -> int:
    """``test_mlx_backend`` tries MLX with every architecture."""
    return 3 if model.backend == "mlx" else 6


def test_anything_in_a_sliding_window(fast_backend: Backend, tiny: TinyFiles) -> None:
    """llama.cpp gives cells before the window to other sequences, and leaves them out of a state: a cut then has to
    read again. Rows side by side in a tree count once towards what a window sees."""
    with fast_backend.load(tiny.sliding, n_threads=1) as model:
        try_any_order(model, model, hidden=every_state(model), noise=0.1, n_examples=n_examples(model))


@pytest.mark.parametrize(("engine", "kv_type"), [("mlx", "q4_0"), ("llama-cpp", "q8_0")])
def test_anything_in_a_quantised_cache(tiny: TinyFiles, engine: str, kv_type: str) -> None:
    """Kept rows move with their scales."""
    with open_backend(engine).load(tiny.spm, kv_type=kv_type, n_threads=1) as model:
        try_any_order(model, model, noise=0.2, n_examples=6)


RECURRENT = ["llama-cpp mamba", "llama-cpp hybrid", "llama-cpp hybrid 0.3", "llama-cpp hybrid 9", "ik-llama hybrid",
             "mlx mamba", "mlx convolutions", "mlx hybrid"]  # fmt: skip
"""Engine, and file; and for snapshots that are kept of a state memory of so many times the weights'."""


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, tiny: TinyFiles) -> Iterator[Model]:
    """Models whose memory is a state that cannot be rewound, on every engine that computes them."""
    engine, kind, *share = request.param.split()
    file = {"mamba": tiny.recurrent, "hybrid": tiny.hybrid, "convolutions": tiny.convolutions}[kind]
    with pytest.MonkeyPatch.context() as patch, open_backend(engine).load(file, n_threads=1) as model:
        patch.setattr(model_module, "SNAPSHOT_SHARE", float(share[0]) if share else 0.0)
        assert model.capabilities.rollback == "replay"
        yield model


def test_anything_in_a_memory_that_cannot_be_rewound(recurrent: Model) -> None:
    try_any_order(recurrent, recurrent, hidden=every_state(recurrent), n_examples=n_examples(recurrent))


def test_a_state_of_another_text_is_never_gone_back_to(recurrent: Model) -> None:
    """MLX keeps the states before several passes, of which any order of operations hardly ever meets one again."""
    first, second = some_tokens(50), some_tokens(60, seed=1)
    with recurrent.new_context(128) as context:
        context.decode(first[:40], "none")
        context.decode(first[40:], "none")
        context.truncate(0)
        context.decode(second[:50], "none")
        context.truncate(45)
        check_next(recurrent, context, second[45:])


def test_a_rejected_draft_of_which_there_are_snapshots_costs_no_pass(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what goes further back is fed again from the last copy, not from the beginning of a long text."""
    monkeypatch.setattr(model_module, "SNAPSHOT_SHARE", 9.0)
    fed: list[int] = []
    with open_backend("llama-cpp").load(tiny.hybrid, n_threads=1) as model, model.new_context(512) as context:
        context.decode(some_tokens(200), "none")
        decode = model.binding.lib.llama_decode

        def counted(handle: int, batch: Any) -> int:
            fed.append(batch.n_tokens)
            return int(decode(handle, batch))

        with monkeypatch.context() as patch:
            patch.setattr(model.binding.lib, "llama_decode", counted)
            for step in range(30):
                context.decode(some_tokens(5, seed=step))
                context.truncate(context.n_past - 1 - step % 4)
            assert fed == [5] * 30
            context.truncate(context.n_past - 6)
            assert 0 < sum(fed[30:]) < 2 * rollback.CHECKPOINT_EVERY
        kept, more = list(context.tokens), some_tokens(3)
        assert divergence(fresh_rows(model, [*kept, *more], len(kept)), rows(context, more)) < 1e-3


def test_a_copy_of_a_memory_with_snapshots_serves_one_without(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken right after a rejection, when the engine has only noted which snapshot to go on from; and back again."""
    tokens, load = some_tokens(60), open_backend("llama-cpp").load
    with load(tiny.hybrid, n_threads=1) as one, load(tiny.hybrid, n_threads=1) as other:
        for model, share in ((one, 9.0), (other, 0.0)):
            monkeypatch.setattr(model_module, "SNAPSHOT_SHARE", share)
            assert (model.n_snapshots > 0) == (share > 0)
        with one.new_context(128) as context, other.new_context(128) as plain:
            context.decode(tokens[:40], "none")
            context.decode(tokens[40:46], "none")
            context.truncate(43)
            plain.import_state(context.export_state())
            for each in (plain, context):
                assert divergence(fresh_rows(other, tokens[:50], 43), rows(each, tokens[43:50])) < 1e-3
            context.import_state(plain.export_state())
            context.decode(tokens[50:54], "none")
            context.truncate(52)
            assert divergence(fresh_rows(other, tokens, 52), rows(context, tokens[52:])) < 1e-3


def go_back_and_on(context: Context, n: int, token: int) -> None:
    """MLX replays where it first needs what it lost, the others at once."""
    context.truncate(n)
    context.decode([token])


def test_what_a_replay_that_failed_lost_is_not_taken_for_kept(recurrent: Model) -> None:
    """The engine runs out of memory in the middle of a replay: the next request finds a memory that is what it says."""
    tokens = some_tokens(60)
    with recurrent.new_context(128) as context:
        context.decode(tokens[:40], "none")
        context.decode(tokens[40:50])
        with breaking_off(recurrent, 99), pytest.raises(BROKEN):
            go_back_and_on(context, 45, tokens[45])
        assert context.tokens == tokens[: context.n_past]
        context.decode(tokens[context.n_past : 50], "none")
        assert divergence(fresh_rows(recurrent, tokens, 50), rows(context, tokens[50:])) < 1e-3


def test_what_a_memory_that_replays_cannot_do_is_refused(recurrent: Model) -> None:
    """Rows of floats could not be fed again, and neither could what came before rows of the first layers at once."""
    with recurrent.new_context(32, hidden=("layer:0",)) as context:
        context.decode([5, 6])
        with pytest.raises(UsageError, match="cannot be fed with rows of floats"):
            context.decode_floats(np.zeros((1, recurrent.n_embd), np.float32), [5])
        if not recurrent.capabilities.first_layers:
            with pytest.raises(UsageError, match="cannot end a pass early"):
                context.decode_first_layers([5], 1)
        assert context.tokens == [5, 6]


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama", pytest.param("mlx", marks=pytest.mark.slow)])
def test_gemma3_rolls_back_inside_and_past_its_window(engine: str, real_model: Callable[[str], Path]) -> None:
    """The real sliding-window model: 512 tokens of window. MLX takes 0.13 s a token on these CPUs, so fewer there."""
    length, cuts, noise = (530, [521], 1e-3) if engine == "mlx" else (1000, [998, 700, 300], 0.05)
    with open_backend(engine).load(real_model("gemma3-270m")) as model:
        # A text on which a token too many or too few can be told from noise at each of these places.
        text = (Path(__file__).parents[1] / "data" / "text_1000_tokens.txt").read_text(encoding="utf-8")
        tokens = model.tokenize(text, add_special=True)[:length]
        assert len(tokens) == length
        smallest_defect, more = np.inf, tokens[20:25]
        with model.new_context(1280) as context:
            for cut in cuts:
                if context.reuse(tokens) < len(tokens):
                    context.decode(tokens[context.n_past :], "none")
                context.decode(tokens[5:9])
                context.truncate(cut)
                ours, wanted = rows(context, more), fresh_rows(model, [*tokens[:cut], *more], cut)
                assert divergence(wanted, ours) < noise, f"after truncating to {cut}"
                defect = fresh_rows(model, [*tokens[: cut - 1], *more], cut - 1)  # as after a token taken back too many
                smallest_defect = min(smallest_defect, divergence(wanted, defect))
        assert smallest_defect > 3 * noise, "this test could not tell a defect from noise"
