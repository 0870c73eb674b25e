"""How often a head is right about text that it has not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.model_files.head_card import ALL_TEXTS, HeadCard
from localspec.training.lessons import Embed, Packer, Size, Stretch, first_lesson, memory_of, n_lessons
from localspec.training.network import NOWHERE, Batch, HeadNetwork, Weights
from localspec.training.shards import Passage

_SIZE = Size(n_rows=1024, n_lessons=257, n_starts=256)


class Tally:
    """Counts of places where a head was right, by category."""

    def __init__(self) -> None:
        self._right: dict[str, Any] = defaultdict(int)
        self._real: dict[str, Any] = defaultdict(int)

    def add(self, category: str, guessed: npt.NDArray[np.int32], true: npt.NDArray[np.int32]) -> None:
        """Count places of a category: rows of the output matrix, as ``HeadNetwork.guesses`` has them [steps, n]."""
        right = np.logical_and.accumulate(guessed == true, axis=0).sum(1)
        real = (true != NOWHERE).sum(1)
        for name in (ALL_TEXTS, category):
            self._right[name] += right
            self._real[name] += real

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Category -> share of places at which the first n guesses are all what the target would say itself, for
        n = 1, 2, …; ``ALL_TEXTS`` is all of them."""
        return {name: tuple((n / np.maximum(self._real[name], 1)).tolist()) for name, n in sorted(self._right.items())}


class HeldOutTest:
    """The same places of held-out passages, asked again and again while a head is trained.

    Args:
        passages: held-out ones.
        card: the head.
        embed: the target's embeddings.
        n_places: about how many places to ask, spread evenly; None for all. 2,000 give a share to within 0.02 (two
            standard errors).
    """

    def __init__(self, passages: Sequence[Passage], card: HeadCard, embed: Embed, n_places: int | None = 2000) -> None:
        self._packer = Packer(card.token_map, embed, _SIZE, card.steps, memory_of(card.kind))
        total = sum(map(n_lessons, passages))
        stride = 1 if n_places is None else max(1, -(-total // n_places))
        self._groups = list(self._grouped(passages, stride))

    def _grouped(self, passages: Sequence[Passage], stride: int) -> Iterator[list[Stretch]]:
        """Pieces that fit into a batch together."""
        group, rows, lessons = list[Stretch](), 0, 0
        for piece in (piece for passage in passages for piece in self._pieces(passage, stride)):
            n_rows, n = self._packer.rows_of(piece), len(places(piece))
            if group and (rows + n_rows >= _SIZE.n_rows or lessons + n > _SIZE.n_starts):
                yield group
                group, rows, lessons = [], 0, 0
            group.append(piece)
            rows, lessons = rows + n_rows, lessons + n
        if group:
            yield group

    def _pieces(self, passage: Passage, stride: int) -> Iterator[Stretch]:
        at, last = first_lesson(passage), first_lesson(passage) + n_lessons(passage)
        while at < last:
            # A piece sees at most as many places before it as it may have lessons; so two of these halves always fit.
            end = min(last, at + _SIZE.n_starts * min(stride, 2))
            yield Stretch(passage, at, end, stride, self._packer.memory)
            at += -(-(end - at) // stride) * stride

    def rates(
        self, network: HeadNetwork, weights: Weights, stopping: Callable[[], bool] = lambda: False
    ) -> dict[str, tuple[float, ...]] | None:
        """As ``Tally.rates``; None if ``stopping`` before it was done.

        Places whose token lies outside of the trimmed vocabulary count, as wrong ones.
        """
        found = Tally()
        for group in self._groups:
            if stopping():
                return None
            n = sum(len(places(piece)) for piece in group)
            guessed, true = (np.asarray(rows)[:, :n] for rows in network.guesses(weights, self._batch(group)))
            at = 0
            for piece in group:
                here = slice(at, at := at + len(places(piece)))
                found.add(piece.passage.category, guessed[:, here], true[:, here])
        return found.rates()

    def _batch(self, group: Sequence[Stretch]) -> Batch:
        n = sum(len(places(piece)) for piece in group)
        return self._packer.pack(group, np.arange(n, dtype=np.int32))


def places(piece: Stretch) -> range:
    """Places of the passage that a piece asks about."""
    return range(piece.begin, piece.end, piece.stride)
