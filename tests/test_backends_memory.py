"""Memories that cannot simply drop rows: sliding windows and recurrent states roll back all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localspec.backends.base import FloatArray, Model
from tests.conftest import Backend, TinyFiles, open_backend
from tests.test_backends import rows, some_tokens


def fresh_tail(model: Model, prefix: list[int], tail: list[int], n_ctx: int) -> FloatArray:
    """The rows of ``tail`` from a new context that was fed ``prefix``."""
    with model.new_context(n_ctx) as context:
        if prefix:
            context.decode(prefix, "none")
        return rows(context, tail)


def divergence(p_logits: FloatArray, q_logits: FloatArray) -> float:
    """The largest Kullback-Leibler divergence of two rows that should be equal, in nats."""
    p, q = (x.astype(np.float64) - x.max(axis=1, keepdims=True) for x in (p_logits, q_logits))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=1).max())


def check_rollback(model: Model, tokens: list[int], cuts: list[int], noise: float, n_ctx: int) -> None:
    """Guess, reject, go on from each cut, and compare with a fresh context; then take it all back and refill."""
    smallest_defect = np.inf
    with model.new_context(n_ctx) as context:
        context.decode(tokens, "none")
        for cut in cuts:
            context.decode(tokens[5:9])
            context.truncate(cut)
            more = tokens[20:25]
            ours, wanted = rows(context, more), fresh_tail(model, tokens[:cut], more, n_ctx)
            assert divergence(wanted, ours) < noise, f"after truncating to {cut}"
            if cut > 2:
                # One token taken back too many, as a wrong rollback would.
                smallest_defect = min(
                    smallest_defect, divergence(wanted, fresh_tail(model, tokens[: cut - 1], more, n_ctx))
                )
            context.reuse(tokens)
            if context.n_past < len(tokens):
                context.decode(tokens[context.n_past :], "none")
    assert smallest_defect > 3 * noise, "this test could not tell a defect from noise"


def test_a_sliding_window_rolls_back_inside_and_past_the_window(fast_backend: Backend, tiny: TinyFiles) -> None:
    with fast_backend.load(tiny.sliding, n_threads=1) as model:
        check_rollback(model, some_tokens(900), [900, 897, 850, 600, 300, 33, 31, 1, 0], 1e-3, 1024)


def test_a_recurrent_memory_replays(tiny: TinyFiles) -> None:
    with open_backend("llama-cpp").load(tiny.recurrent, n_threads=1) as model:
        assert model.capabilities.rollback == "replay"
        check_rollback(model, some_tokens(60), [60, 59, 57, 30, 1, 0], 1e-3, 128)


@pytest.mark.real
@pytest.mark.timeout(1200)
def test_gemma3_rolls_back_inside_and_past_its_window(fast_backend: Backend, real_model: Callable[[str], Path]) -> None:
    """The real sliding-window model: 512 tokens of window. MLX takes 0.13 s a token on these CPUs, so fewer there."""
    length, cuts = (530, [521]) if fast_backend.name == "mlx" else (1000, [998, 700, 300])
    with fast_backend.load(real_model("gemma3-270m")) as model:
        tokens = model.tokenize(Path(__file__).read_text(), add_special=True)[:length]
        assert len(tokens) == length
        check_rollback(model, tokens, cuts, 0.05, 1280)
