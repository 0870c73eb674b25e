"""What a model found most probable after each short run of tokens: a table of bounded size."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ORDERS = (1, 2, 4)
"""Lengths of the runs, in tokens. Of 5,900 tokens of answers whose table came from other answers, 0.09, 0.16 and 0.37
followed a run of that length as they had the only time before."""

N_SLOTS = 1 << 17
"""Runs that there is room for: those of the last 40,000 tokens or so, and for longer those that came again. 1.3 MB."""

SEEN = (1, 2, 3, 5)
"""Lower ends of the ranges of how often a successor came."""

CONTRADICTED = (0, 1, 2)
"""The same of how often another came instead."""

_MAGIC = f"localspec successors 1 {sys.byteorder}\n".encode()
N_BYTES = len(_MAGIC) + 10 * N_SLOTS
"""Of a table that is kept."""

_MOST = 255
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)
_WORD = (1 << 64) - 1


class Evidence(NamedTuple):
    """What is known of a successor.

    Attributes:
        order: tokens of the run that it follows, one of ``ORDERS``.
        seen: how often it came, as an index of ``SEEN``.
        contradicted: how often another came instead, as an index of ``CONTRADICTED``.
    """

    order: int
    seen: int
    contradicted: int


class SuccessorTable:
    """One successor for each run of tokens that has a slot: the one that comes most, and lately.

    A hash of the run picks the slot, and another 32 bits of it tell whether the slot is that run's. A successor gives
    way to another once that has come as often since, and so does a run to one that wants its slot: what comes often
    stays, what came once goes.
    """

    def __init__(self) -> None:
        self._checks, self._tokens = array("I", bytes(4 * N_SLOTS)), array("i", bytes(4 * N_SLOTS))
        self._seen, self._contradicted = bytearray(N_SLOTS), bytearray(N_SLOTS)

    def successors(self, tokens: Sequence[int]) -> Iterator[tuple[int, Evidence]]:
        """What is known to follow the last token, the last two, and so on; nothing for runs without a slot."""
        for order, slot, check in _places(tokens):
            if self._checks[slot] == check:
                seen = bisect_right(SEEN, self._seen[slot]) - 1
                contradicted = bisect_right(CONTRADICTED, self._contradicted[slot]) - 1
                yield self._tokens[slot], Evidence(order, seen, contradicted)

    def learn(self, tokens: Sequence[int], successor: int) -> None:
        """``successor`` followed these tokens."""
        for _, slot, check in _places(tokens):
            n_seen, n_contradicted = self._seen[slot], self._contradicted[slot]
            is_mine = self._checks[slot] == check
            if is_mine and self._tokens[slot] == successor:
                if n_seen == _MOST:
                    n_seen, n_contradicted = n_seen // 2, n_contradicted // 2
                self._seen[slot], self._contradicted[slot] = n_seen + 1, n_contradicted
                continue
            if is_mine:
                n_contradicted = min(n_contradicted + 1, _MOST)
            if n_seen > 1:
                self._seen[slot], self._contradicted[slot] = n_seen - 1, n_contradicted
            else:
                self._checks[slot], self._tokens[slot] = check, successor
                self._seen[slot], self._contradicted[slot] = 1, n_contradicted if is_mine else 0

    # -- across runs -----------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        return b"".join((_MAGIC, *self._parts()))

    def restore(self, data: bytes) -> None:
        """Go on from what ``to_bytes`` returned; anything else is ignored."""
        if len(data) == N_BYTES and data.startswith(_MAGIC):
            at = len(_MAGIC)
            for part in self._parts():
                part[:] = data[at : at + len(part)]
                at += len(part)

    def _parts(self) -> list[memoryview]:
        return [memoryview(each).cast("B") for each in (self._checks, self._tokens, self._seen, self._contradicted)]


def _places(tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Order, slot and check of the runs that end with the last token; a check is never 0, which marks an empty slot."""
    key, end = 0, len(tokens)
    for order in range(1, min(end, ORDERS[-1]) + 1):
        key = (key ^ (tokens[end - order] + 1)) * _MULTIPLIER & _WORD
        key ^= key >> 32
        if order in ORDERS:
            yield order, key % N_SLOTS, key >> 32 | 1
