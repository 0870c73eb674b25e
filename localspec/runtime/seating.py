"""Which conversation is in which sequence of a memory that several answers share, and whether another one fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from localspec.backends.base import SequenceBatch, shared_prefix
from localspec.runtime.prefix_cache import MIN_TOKENS, PrefixCache


class Seating:
    """The sequences of a memory: those that answers are made in, and those that hold conversations for later.

    Args:
        batch: the memory.
        cache: takes conversations that have to make room, least recently used first.
        beside: memories of draft models, with the same conversations in sequences of the same numbers.
    """

    def __init__(self, batch: SequenceBatch, cache: PrefixCache, beside: Sequence[SequenceBatch] = ()) -> None:
        self.batch = batch
        self._beside = beside
        self._cache = cache
        self._taken: set[int] = set()
        self._used = [0] * batch.n_sequences
        self._clock = count(1)

    @property
    def has_free(self) -> bool:
        """Whether another answer has a sequence."""
        return len(self._taken) < self.batch.n_sequences

    def take(self, prompt: Sequence[int]) -> int:
        """A sequence for an answer: the one whose conversation the prompt continues, or the one least recently used."""
        free = [i for i in range(self.batch.n_sequences) if i not in self._taken]
        shared = {i: shared_prefix(self.batch[i].tokens, prompt) for i in free}
        best = max(free, key=lambda i: shared[i])
        # What another begins with can be had from there; only what goes on from it is better in its place.
        if shared[best] < max(MIN_TOKENS, len(self.batch[best].tokens) - MIN_TOKENS):
            best = min(free, key=lambda i: (bool(self.batch[i].tokens), self._used[i]))
        self._taken.add(best)
        self._used[best] = next(self._clock)
        return best

    def leave(self, sequence: int) -> None:
        """An answer is over; its conversation stays until the room is needed."""
        self._taken.discard(sequence)
        self._used[sequence] = next(self._clock)

    def make_room(self, n: int, keep: Iterable[int] = ()) -> bool:
        """Have room for n more tokens, putting conversations aside that no answer is made in; whether there is.

        Args:
            keep: sequences that stay whatever happens.
        """
        idle = [i for i in range(self.batch.n_sequences) if i not in self._taken and i not in keep]
        idle.sort(key=self._used.__getitem__)
        self._empty(self.batch, idle, n)
        # A draft model that has no room drafts nothing, so these need not be asked whether there is enough.
        for memory in self._beside:
            unread = sum(max(0, self.batch[i].n_past - memory[i].n_past) for i in self._taken)
            self._empty(memory, idle, unread + n)
        return self.batch.free_cells >= n

    def _empty(self, memory: SequenceBatch, idle: Sequence[int], n: int) -> None:
        for i in idle:
            if memory.free_cells >= n:
                break
            self._cache.empty(memory[i])
