"""Passages: that a tiny model has read, with its states and probabilities, as ``distill`` makes them; and made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from localspec.backends import reference
from localspec.heads.training.shards import Passage, as_states

MADE_UP_TAPS, MADE_UP_WIDTH = ("layer:0", "norm"), 8


def made_up(name: str, n: int, *, start: int = 3, held_out: bool = False) -> Passage:
    """Random numbers at n places."""
    rng = np.random.default_rng(n)
    return Passage(
        name,
        "own",
        start,
        0.8,
        held_out,
        rng.integers(0, 100, n + 1, dtype=np.int32),
        as_states(rng.standard_normal((n, len(MADE_UP_TAPS), MADE_UP_WIDTH), dtype=np.float32)),
        rng.integers(0, 100, (n, 4), dtype=np.int32),
        rng.standard_normal((n, 4)).astype(np.float16),
    )


def written_by(target: Path, taps: Sequence[str], lengths: Sequence[int], *, top_k: int = 8) -> list[Passage]:
    """Texts that a model of the reference backend goes on with greedily after a random half; n tokens have n places."""
    rng, found = np.random.default_rng(0), []
    with reference.load(target) as model:
        for number, n in enumerate(lengths):
            tokens = rng.integers(3, model.n_vocab, n // 2).tolist()
            logits, states = [], []
            with model.new_context(n, hidden=taps) as context:
                while context.n_past < n:
                    forward = context.decode(tokens[context.n_past :])
                    logits.append(forward.logits.copy())
                    states.append(np.stack([forward.hidden[tap] for tap in taps], axis=1))
                    tokens = [*tokens, int(forward.logits[-1].argmax())]
            rows = np.concatenate(logits)
            logprobs = rows - np.log(np.exp(rows).sum(1, keepdims=True))
            top = np.argsort(-rows, axis=1, kind="stable")[:, :top_k]
            found.append(
                Passage(
                    f"passage {number}",
                    ("chat", "code")[number % 2],
                    n // 2,
                    0.0,
                    False,
                    np.array(tokens, dtype=np.int32),
                    as_states(np.concatenate(states)),
                    top.astype(np.int32),
                    np.take_along_axis(logprobs, top, 1).astype(np.float16),
                )
            )
    return found
