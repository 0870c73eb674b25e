"""Lessons: passages cut and packed into batches, in an order that can be resumed at any place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.heads.trained import MAX_STATES
from localspec.heads.training.shards import Passage

_REACH = 192  # places seen before the first lesson of a piece that begins inside of a longer text

# Tokens [n] -> their embeddings in the target [n, n_embd]
Embed = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]


OUTSIDE, NOWHERE = -1, -2  # in the place of a row of the trimmed output matrix: the token has none; there is no token


class Batch(NamedTuple):
    """Rows of several passages, one after the other, in arrays of fixed sizes; what is left over is padding.

    A row is a place: the states after token t, and token t + 1. It guesses token t + 2.
    """

    states: Any  # float16 [n_rows, n_taps * n_embd]: the target's states
    embeddings: Any  # float32 [n_rows, n_embd]: the target's embedding of the next token
    passage: Any  # int32 [n_rows]: number of the passage; -1 is padding
    position: Any  # int32 [n_rows]: place in the passage
    ids: Any  # int32 [n_rows, top_k]: likeliest tokens to be guessed, as places in candidates
    probs: Any  # float32 [n_rows, top_k]: their probabilities; 0 where there is nothing to learn
    best: Any  # int32 [n_rows]: what the target would say there; OUTSIDE if it is not in the trimmed vocabulary
    lessons: Any  # int32 [n_lessons]: rows that are to guess; the others are only seen by them
    starts: Any  # int32 [n_starts]: those of the lessons that go on to further steps
    candidates: Any  # int32 [n_candidates]: rows of the trimmed output matrix that the loss looks at
    log_weights: Any  # float32 [n_candidates]: logarithm of how many rows each of them stands for


@dataclass(frozen=True)
class Size:
    """Size of a ``Batch``. All batches of a network have one size, or it would be compiled again."""

    n_rows: int
    n_lessons: int
    n_starts: int
    n_candidates: int = 0  # output rows that the loss looks at; 0 is all


@dataclass(frozen=True)
class Stretch:
    """Places of a passage from ``begin`` to before ``end``."""

    passage: Passage
    begin: int
    end: int

    @property
    def first_row(self) -> int:
        """The first place that its lessons see: of a prompt as many as a drafter reads."""
        return max(0, self.begin - _REACH, first_lesson(self.passage) + 1 - MAX_STATES)


def first_lesson(passage: Passage) -> int:
    """The first place whose guess, two tokens on, is of the target's own words."""
    return max(0, passage.start - 2)


def n_lessons(passage: Passage) -> int:
    """Places that can be learned from: what follows the last one is unknown."""
    return max(0, len(passage) - 1 - first_lesson(passage))


class Packer:
    """Makes batches of pieces; ``token_map`` is the trimmed vocabulary, ascending [n_out]."""

    def __init__(self, token_map: npt.NDArray[np.int32], embed: Embed, size: Size, steps: int) -> None:
        self.size = size
        self._token_map = token_map
        self._embed = embed
        self._steps = steps

    def rows_of(self, piece: Stretch) -> int:
        """Rows that it takes in a batch: lessons, what they see, and what further steps are compared with."""
        return self._last_row(piece) - piece.first_row

    def _last_row(self, piece: Stretch) -> int:
        return min(len(piece.passage) - 1, piece.end + self._steps - 1)

    def end_within(self, passage: Passage, begin: int, rows: int) -> int:
        """The end of the longest piece from ``begin`` on that takes no more rows than these."""
        last, room = len(passage) - 1, Stretch(passage, begin, begin).first_row + rows
        return last if last <= room else room - self._steps + 1

    def pack(
        self, pieces: Sequence[Stretch], starts: npt.NDArray[np.int32], rng: np.random.Generator | None = None
    ) -> Batch:
        """Put pieces together; they must fit.

        ``starts`` are lessons that go on to further steps, counted over all pieces, at most ``size.n_starts``; ``rng``
        draws candidates, None takes all output rows.
        """
        size, sample, n_out = self.size, pieces[0].passage, len(self._token_map)
        n_candidates = n_out if rng is None else min(n_out, size.n_candidates or n_out)
        n_embd, top_k = sample.states.shape[1:], sample.top_ids.shape[1]
        batch = Batch(
            states=np.zeros((size.n_rows, int(np.prod(n_embd))), np.float16),
            embeddings=np.zeros((size.n_rows, n_embd[-1]), np.float32),
            passage=np.full(size.n_rows, -1, np.int32),
            position=np.zeros(size.n_rows, np.int32),
            ids=np.zeros((size.n_rows, top_k), np.int32),
            probs=np.zeros((size.n_rows, top_k), np.float32),
            best=np.full(size.n_rows, OUTSIDE, np.int32),
            lessons=np.full(size.n_lessons, size.n_rows - 1, np.int32),
            starts=np.full(size.n_starts, size.n_lessons - 1, np.int32),
            candidates=np.arange(n_candidates, dtype=np.int32),
            log_weights=np.zeros(n_candidates, np.float32),
        )
        at = taught = 0
        tokens = np.zeros(size.n_rows, np.int32)
        for number, piece in enumerate(pieces):
            passage, first, last = piece.passage, piece.first_row, self._last_row(piece)
            rows = slice(at, at + last - first)
            batch.states[rows] = passage.states[first:last].reshape(last - first, -1)
            tokens[rows] = passage.tokens[first + 1 : last + 1]
            batch.passage[rows] = number
            batch.position[rows] = np.arange(last - first)
            # The row of token t guesses token t + 2, whose probabilities stand at the place of token t + 1.
            ids = passage.top_ids[first + 1 : last + 1]
            found = np.searchsorted(self._token_map, ids).clip(max=len(self._token_map) - 1)
            known = self._token_map[found] == ids
            batch.ids[rows] = np.where(known, found, 0)
            batch.probs[rows] = np.exp(passage.top_logprobs[first + 1 : last + 1].astype(np.float32)) * known
            batch.best[rows] = np.where(known[:, 0], found[:, 0], OUTSIDE)
            lessons = np.arange(piece.begin, piece.end) - first + at
            batch.lessons[taught : taught + len(lessons)] = lessons
            taught += len(lessons)
            at = rows.stop
        batch.embeddings[:at] = self._embed(tokens[:at])
        batch.starts[: len(starts)] = starts
        if rng is not None and n_candidates < n_out:
            self._sample(batch, rng)
        return batch

    def _sample(self, batch: Batch, rng: np.random.Generator) -> None:
        """Take as candidates the tokens that are likely somewhere in the batch, and some of the others."""
        n_out, n = len(self._token_map), len(batch.candidates)
        mass = np.bincount(batch.ids.ravel(), batch.probs.ravel().astype(np.float64), minlength=n_out)
        # Room for others is kept, or nothing would hold them down.
        likely = np.argsort(-mass, kind="stable")[: min(np.count_nonzero(mass), n - n // 4)]
        others = rng.permutation(np.setdiff1d(np.arange(n_out), likely))
        drawn = others[: n - len(likely)]
        batch.candidates[:] = np.concatenate([likely, drawn])
        batch.log_weights[len(likely) :] = np.log(len(others) / len(drawn))
        places = np.full(n_out, -1, np.int32)
        places[likely] = np.arange(len(likely))
        ids = places[batch.ids]
        batch.ids[:] = np.maximum(ids, 0)
        batch.probs[ids < 0] = 0


class Reading:
    """Batches without end over passages; each epoch has every lesson once, in an order of its own.

    Attributes:
        place: the epoch, and how many batches of it were read.
    """

    def __init__(self, passages: Sequence[Passage], packer: Packer, seed: int, place: tuple[int, int] = (0, 0)) -> None:
        self._passages, self._packer, self._seed = passages, packer, seed
        self.place = place
        self._epoch = self._batches_of(place[0])

    def batch(self) -> tuple[Batch, int]:
        """The next batch, and the lessons in it."""
        epoch, index = self.place
        if index >= len(self._epoch):
            epoch, index = epoch + 1, 0
            self._epoch = self._batches_of(epoch)
        pieces = self._epoch[index]
        n = sum(piece.end - piece.begin for piece in pieces)
        rng = np.random.default_rng((self._seed, 1 << 32, epoch, index))
        starts = np.sort(rng.choice(n, min(n, self._packer.size.n_starts), replace=False)).astype(np.int32)
        self.place = epoch, index + 1
        return self._packer.pack(pieces, starts, rng), n

    def _batches_of(self, epoch: int) -> list[list[Stretch]]:
        """The passages in a random order, cut to fill batches."""
        size, batches = self._packer.size, list[list[Stretch]]()
        rows = lessons = 0
        for i in np.random.default_rng((self._seed, epoch)).permutation(len(self._passages)):
            passage = self._passages[i]
            begin, last = first_lesson(passage), len(passage) - 1
            while begin < last:
                end = min(last, begin + lessons, self._packer.end_within(passage, begin, rows))
                if end <= begin:
                    # The last row and the last lesson stay free: what is padding points to them.
                    rows, lessons = size.n_rows - 1, size.n_lessons - 1
                    batches.append([])
                    continue
                piece = Stretch(passage, begin, end)
                batches[-1].append(piece)
                rows, lessons, begin = rows - self._packer.rows_of(piece), lessons - (end - begin), end
        return batches
