"""Passages that a tiny model has read, as ``distill`` makes them, or made up; and what an engine guesses in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from localspec.backends import reference
from localspec.backends.base import FloatArray
from localspec.heads.base import STATE
from localspec.heads.trained import Head
from localspec.heads.training.lessons import Stretch
from localspec.heads.training.shards import Passage, as_states

MADE_UP_TAPS, MADE_UP_WIDTH = ("layer:0", "norm"), 8


def made_up(name: str, n: int, *, start: int = 3, held_out: bool = False) -> Passage:
    """Random numbers at n places."""
    rng = np.random.default_rng(n)
    return Passage(
        name,
        "own",
        start,
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
                    False,
                    np.array(tokens, dtype=np.int32),
                    as_states(np.concatenate(states)),
                    top.astype(np.int32),
                    np.take_along_axis(logprobs, top, 1).astype(np.float16),
                )
            )
    return found


def engine_logits(head: Head, piece: Stretch) -> Iterator[FloatArray]:
    """An engine's logits of every step [steps, n_out], at every place; steps are given the passage's tokens."""
    first, end, passage = piece.first_row, piece.end, piece.passage
    states = passage.states[first:end].reshape(end - first, -1).astype(np.float32)
    tokens = passage.tokens[first + 1 :].tolist()
    # What lies behind the end of the passage is asked too, about anything: it is not counted.
    told = [*tokens, *[tokens[-1]] * head.steps]
    with head.new_context(end - first + head.steps) as context:
        rows = head.true_rows(context, states, told[: end - first])
        for place, row in enumerate(rows[:, None]):
            if place < piece.begin - first:
                context.decode_floats(row, told[place : place + 1], "none")
                continue
            found = list[FloatArray]()
            for at in range(place, place + head.steps):
                forward = context.decode_floats(row, told[at : at + 1])
                found.append(forward.logits[0].copy())
                row = head.chained_rows(forward.hidden[STATE], told[at + 1 : at + 2])
            yield np.stack(found)
            context.truncate(place + 1)
