"""A part of a corpus on disk: tokens, and their places in the order of the texts that end there.

The texts are kept backwards, so that what ends like the text at hand *begins* like it backwards, and all places of it
stand together in the suffix array (Manber and Myers 1990): one binary search finds the longest match, two more how
often it occurs. Only ``DEPTH`` tokens are compared, so sorting is bounded, and what a longer match would add is little.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localspec.corpora.text_files import TextFile
from localspec.system.steps import Steps

MAGIC = b"localspec corpus 1\n"

DEPTH = 32
"""Tokens of the text's end that are compared: half as much again as n-grams tell apart (21)."""

WIDTH = 4
"""Bytes of a token, the most significant first: then bytes compare as tokens do."""

BREAK = 0xFFFFFFFF
"""Stands before and after the tokens of a file; no vocabulary has such a token."""

BUCKET = 1 << 18
"""Places that are sorted in a step (a quarter of a second), unless all are over 64 times as many."""

Tokens = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


class DamagedSegment(Exception):
    """The file is no whole segment."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file in a segment.

    Attributes:
        file: as it was when it was read.
        start: where its tokens begin, backwards.
        n_tokens: how many there are; 0 if it was no text.
    """

    file: TextFile
    start: int
    n_tokens: int


class Segment:
    """An immutable segment, mapped into memory.

    Args:
        path: its file.

    Attributes:
        files: what it was made of, by name.
        n_tokens: tokens of text.
        size_bytes: of its file.
        kept: names of files that are not passed over; ``n_kept``: their tokens.

    Raises:
        DamagedSegment: the file is cut short or altered, as far as a few looks can tell.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            header, offset = _read_header(file)
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise DamagedSegment(str(error)) from None
        try:
            rows = [(TextFile(*row[:3]), *row[3:]) for row in header["files"]]
            self.files = {file.name: IndexedFile(file, start, n) for file, start, n in rows}
            n, self.n_tokens = int(header["n"]), int(header["n_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedSegment(str(error)) from None
        self.size_bytes = len(self._map)
        if self.size_bytes != offset + WIDTH * (n + self.n_tokens):
            raise DamagedSegment("it is cut short")
        self._offset = offset
        self._order = memoryview(self._map)[offset + WIDTH * n :].cast("I")
        self.tokens: Tokens = np.frombuffer(self._map, ">u4", n, offset)  # [n], with BREAK around every file
        self.keep(list(self.files))
        self._check()

    def _check(self) -> None:
        """A few looks, the same every time: places are in range and in order."""
        for i in np.linspace(0, self.n_tokens - 2, 64).astype(np.int64).tolist() if self.n_tokens > 1 else ():
            here, there = (self._at(self._order[j]) for j in (i, i + 1))
            if not b"" < here <= there < BREAK.to_bytes(WIDTH, "big"):
                raise DamagedSegment("its sort order is invalid")

    def _at(self, place: int, n_bytes: int = WIDTH) -> bytes:
        start = self._offset + WIDTH * place
        return self._map[start : start + n_bytes]

    def _beginning(self, n_bytes: int) -> Callable[[int], bytes]:
        """What gives the first bytes of a place: the inner loop of a search, so without a look at an attribute."""
        mapped, offset = self._map, self._offset

        def at(place: int) -> bytes:
            start = offset + 4 * place
            return mapped[start : start + n_bytes]

        return at

    def keep(self, names: Collection[str]) -> None:
        """Pass over all files but these from now on."""
        spans = sorted((self.files[name].start, self.files[name].n_tokens) for name in names)
        self._spans = [(start, start + n) for start, n in spans] if len(spans) < len(self.files) else None
        self.kept, self.n_kept = list(names), sum(n for _, n in spans)

    def longest(self, text: bytes) -> int:
        """How many tokens the longest match of a text has.

        Args:
            text: its last tokens, at most ``DEPTH``, backwards, each in ``WIDTH`` bytes.
        """
        n_bytes = len(text)
        i = bisect_left(self._order, text, key=self._beginning(n_bytes))
        near = (self._at(self._order[j], n_bytes) for j in (i - 1, i) if 0 <= j < self.n_tokens)
        return max((_n_shared(text, other) for other in near), default=0)

    def places(self, text: bytes, most: int) -> tuple[list[int], bool]:
        """Where a text ends in the segment.

        Args:
            text: as for ``longest``.
            most: so many places at most, spread evenly over all.

        Returns:
            The places, of files that are kept, and whether these are all.
        """
        beginning = self._beginning(len(text))
        first = bisect_left(self._order, text, key=beginning)
        last = bisect_right(self._order, text, lo=first, key=beginning)
        step = max(1, -(-(last - first) // most))
        found = self._order[first:last:step].tolist()
        return (found if self._spans is None else _within(self._spans, found)), step == 1

    def next_token(self, place: int) -> int:
        """The token that follows a place; ``BREAK`` at the end of a file."""
        return int.from_bytes(self._at(place - 1), "big")

    def tokens_of(self, name: str) -> Tokens:
        """A file's tokens, backwards [n]."""
        each = self.files[name]
        return self.tokens[each.start : each.start + each.n_tokens]


def backwards(tokens: Sequence[int]) -> bytes:
    """The last tokens of a text as ``Segment.longest`` wants them."""
    return b"".join([token.to_bytes(WIDTH, "big") for token in tokens[: -DEPTH - 1 : -1]])


def _within(spans: Sequence[tuple[int, int]], places: Iterable[int]) -> list[int]:
    found = ((place, bisect_right(spans, (place, BREAK)) - 1) for place in places)
    return [place for place, i in found if i >= 0 and place < spans[i][1]]


def _n_shared(text: bytes, other: bytes) -> int:
    """Tokens that two texts of the same length begin with."""
    if len(other) < len(text):
        other = other.ljust(len(text), b"\xff")
    differing = int.from_bytes(text, "big") ^ int.from_bytes(other, "big")
    return (8 * len(text) - differing.bit_length()) // (8 * WIDTH)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_segment(file: BinaryIO, path: Path, texts: Sequence[tuple[TextFile, Tokens]]) -> Steps[None]:
    """Sort the tokens of files, and write them, a bucket a step.

    Args:
        file: takes the segment.
        path: of the file, from where the tokens are mapped while they are sorted.
        texts: files, with their tokens backwards [n]; they can be mapped from other segments.
    """
    rows: list[list[Any]] = []
    at = 1
    for each, tokens in texts:
        rows.append([each.name, each.size, each.mtime_ns, at, len(tokens)])
        at += len(tokens) + 1
    n_tokens = sum(len(tokens) for _, tokens in texts)
    header = json.dumps({"n": at, "n_tokens": n_tokens, "files": rows}).encode()
    start = MAGIC + len(header).to_bytes(8, "big") + header
    start += b" " * (-len(start) % 8)
    file.write(start)
    edge = np.full(1, BREAK, ">u4").tobytes()
    file.write(edge)
    for _, tokens in texts:
        file.write(tokens.astype(">u4").tobytes() + edge)
    file.flush()
    mapped: Tokens = np.memmap(path, ">u4", "r", len(start), (at,))
    yield
    chunks = range(0, at, 1 << 24)
    counts = sum((_counts(mapped[i : i + (1 << 24)]) for i in chunks), np.zeros(1 << 20, dtype=np.int64))
    for low, high in _buckets(counts, max(BUCKET, n_tokens // 64)):
        parts = []
        for i in chunks:
            part = mapped[i : i + (1 << 24)]
            parts.append(np.flatnonzero((part >= low) & (part < high)) + i)
        file.write(_sorted(mapped, np.concatenate(parts)).astype(np.uint32).tobytes())
        yield
    del mapped


def _counts(tokens: Tokens) -> Places:
    """How often each token occurs; of the vocabularies that there are, none has a million."""
    return np.bincount(tokens[tokens != BREAK], minlength=1 << 20)


def _buckets(counts: Places, size: int) -> list[tuple[int, int]]:
    """Ranges of tokens of which there are about as many as ``size``."""
    ends = np.searchsorted(np.cumsum(counts), np.arange(0, counts.sum(), size) + size, side="left") + 1
    edges = [0, *np.unique(ends).clip(max=len(counts)).tolist(), len(counts)]
    return [(low, high) for low, high in pairwise(edges) if counts[low:high].any()]


def _sorted(tokens: Tokens, places: Places) -> Places:
    """Places by the ``DEPTH`` tokens that begin there: two more at a time, of those that are still alike."""
    order, last = places.copy(), len(tokens) - 1
    alike, group = np.arange(len(order)), np.zeros(len(order), dtype=np.int64)
    for depth in range(0, DEPTH, 2):
        if not len(alike):
            break
        at = order[alike] + depth
        pair = tokens[np.minimum(at, last)].astype(np.uint64) << np.uint64(32)
        pair |= tokens[np.minimum(at + 1, last)].astype(np.uint64)
        by = np.lexsort((pair, group))
        order[alike], pair = order[alike][by], pair[by]  # a group stays where it is
        is_new = np.ones(len(by), dtype=bool)
        is_new[1:] = (group[1:] != group[:-1]) | (pair[1:] != pair[:-1])
        starts = np.flatnonzero(is_new)
        sizes = np.diff(np.append(starts, len(by)))
        stay = np.repeat(sizes > 1, sizes)
        group, alike = np.repeat(starts, sizes)[stay], alike[stay]
    return order


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    start = file.read(len(MAGIC) + 8)
    n_bytes = int.from_bytes(start[len(MAGIC) :], "big")
    if not start.startswith(MAGIC) or n_bytes > 1 << 30:
        raise DamagedSegment("it is no segment")
    try:
        header = json.loads(file.read(n_bytes))
    except ValueError as error:
        raise DamagedSegment(str(error)) from None
    if not isinstance(header, dict):
        raise DamagedSegment("it is no segment")
    return header, -(-(len(start) + n_bytes) // 8) * 8
