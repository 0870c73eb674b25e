"""Rows of the examples that a head's first matrices are fitted to in closed form, and the ridge regression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from localspec.model_files.head_card import HeadCard
from localspec.training.lessons import Embed, first_lesson
from localspec.training.shards import Passage

Floats = npt.NDArray[np.float32]

RIDGE = 100.0
"""Rows' worth of regularisation, where inputs have about the size 1. Between 40 and 550 little changes."""

ROWS_PER_INPUT = 24
"""Examples that are fitted to at most, for each of the inputs."""

ROWS_AT_ONCE = 4096

_PROMPT_ROWS = 64
"""Rows of a prompt that are fitted to besides those of the answer: they need no memory, so more of them are only more
examples."""

_OUTLIER = 4.0
"""The first tokens of texts have states forty times as long as others; they are no examples."""


class Examples:
    """Rows of inputs and what comes of them, shuffled passage by passage.

    Args:
        card: the head.
        embed: the target's embeddings.
        norm: the weight of its last norm.
        passages: whose last state, where the head does not read "norm", is that.

    Attributes:
        sizes: the usual size of each input, of the states one after the other and then of an embedding.
        weight: what makes u of a last state.
    """

    def __init__(self, card: HeadCard, embed: Embed, norm: Floats, passages: Sequence[Passage]) -> None:
        self._embed, self._passages = embed, passages
        self._last = card.taps.index("norm") if "norm" in card.taps else -1
        # A channel that the last norm takes away cannot be told.
        kept = np.abs(norm) > 1e-3 * np.median(np.abs(norm))
        self.weight = np.where(kept, 1 / np.where(kept, norm, 1), 0).astype(np.float32)
        some = np.concatenate([p.states[first_row(p) :][:256] for p in passages[:32]]).astype(np.float32)
        self._longest = _OUTLIER * np.median(lengths_of(some), axis=0)
        tokens = np.concatenate([p.tokens for p in passages[:32]])
        states = np.median(np.abs(some), axis=0)
        floor = 0.05 * np.median(states, axis=1, keepdims=True) + 1e-6
        embedded = np.full(card.n_embd, np.median(np.abs(embed(tokens[:2048]))) + 1e-6)
        self.sizes: Floats = 1.5 * np.concatenate([np.maximum(states, floor).ravel(), embedded]).astype(np.float32)

    def inputs(self, passage: Passage, first: int, last: int) -> Floats:
        """[n, (n_taps + 1) n_embd], of about the size 1."""
        states = passage.states[first:last].reshape(last - first, -1).astype(np.float32)
        rows: Floats = np.concatenate([states, self._embed(passage.tokens[first + 1 : last + 1])], axis=1)
        rows /= self.sizes
        return rows

    def __iter__(self) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Inputs of rows, u of the next token, the embedding of the one after it (sizes as in inputs), and its u."""
        for passage in self._passages:
            first, last = first_row(passage), len(passage) - 2
            if last <= first:
                continue
            x = self.inputs(passage, first, last)
            u = passage.states[first + 1 : last + 2, self._last].astype(np.float32) * self.weight
            lengths = lengths_of(passage.states[first : last + 2].astype(np.float32))
            usual = np.all(lengths < self._longest, axis=1)
            usual = usual[:-2] & usual[1:-1] & usual[2:]
            n = self.weight.size
            after = self._embed(passage.tokens[first + 2 : last + 2]) / self.sizes[-n:]
            yield x[usual], u[:-1][usual], after[usual], u[1:][usual]


def first_row(passage: Passage) -> int:
    """The first place that is fitted to."""
    return max(1, min(first_lesson(passage), len(passage) - 1) - _PROMPT_ROWS)


def lengths_of(states: Floats) -> Floats:
    """Root mean square of each state."""
    lengths: Floats = np.sqrt(np.mean(states**2, axis=-1))
    return lengths


def groups_of(examples: Examples, n: int) -> Iterator[list[Floats]]:
    """Rows of several passages together, about n."""
    waiting: list[tuple[Floats, ...]] = []
    for each in examples:
        waiting.append(each)
        if sum(len(rows[0]) for rows in waiting) >= n:
            yield [np.concatenate(part) for part in zip(*waiting, strict=True)]
            waiting = []
    if waiting:
        yield [np.concatenate(part) for part in zip(*waiting, strict=True)]
