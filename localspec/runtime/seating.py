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
        """A sequence for an answer: the one whose conversation the prompt continues, or the first with none to keep.

        What drafts in a sequence learns apart: so requests that come one at a time learn from each other, and for the
        next load. If all hold conversations that stay there, the one least recently used.
        """
        best = self._best_for(prompt)
        self._taken.add(best)
        self._used[best] = next(self._clock)
        return best

    def _best_for(self, prompt: Sequence[int]) -> int:
        free = [i for i in range(self.batch.n_sequences) if i not in self._taken]
        shared = {i: shared_prefix(self.batch[i].tokens, prompt) for i in free}
        best = max(free, key=lambda i: shared[i])
        # What another begins with can be had from there; only what goes on from it is better in its place.
        if shared[best] < max(MIN_TOKENS, len(self.batch[best].tokens) - MIN_TOKENS):
            best = min(free, key=lambda i: self._used[i] if self._stays(self.batch, i) else i - self.batch.n_sequences)
        return best

    def shareable(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """What an answer to a prompt would share: the sequence that holds it, and so many tokens; None: nothing."""
        return self._cache.shareable(self.batch[self._best_for(prompt)], prompt)

    def make_room_for(self, prompt: Sequence[int], sequence: int, slack: int) -> None:
        """Have room for a prompt in a sequence that was taken for it; what it can begin with stays, if it can."""
        needed = len(prompt) + slack - self.batch[sequence].n_past
        shared = self._cache.shareable(self.batch[sequence], prompt)
        if shared is not None:
            source, n = shared  # what the sequence holds makes way for it
            needed = len(prompt) + slack - n - self.batch.cells.n_own(sequence)
            if self.make_room(needed, keep=[source]):
                return
        self.make_room(needed)

    def leave(self, sequence: int) -> None:
        """An answer is over; its conversation stays until the room is needed."""
        self._taken.discard(sequence)
        self._used[sequence] = next(self._clock)

    def put_idle_aside(self) -> None:
        """Put aside the conversations that no answer is made in, where the rows of each pass would go over their cells.

        They are brought back when a prompt goes on from them. On a CPU copying a token out and in takes as long as
        going over its cell 10 to 35 times (1.5B on ik-llama), and a row does so in every pass. Elsewhere cells are read
        faster than they are copied, and what the cache does not keep stays.
        """
        for memory in (self.batch, *self._beside):
            for i in self._idle():
                if memory[i].tokens and not self._stays(memory, i):
                    self._cache.empty(memory[i])

    def make_room(self, n: int, keep: Iterable[int] = ()) -> bool:
        """Have room for n more tokens, putting conversations aside that no answer is made in; whether there is.

        Args:
            keep: sequences that stay whatever happens.
        """
        idle = [i for i in self._idle() if i not in keep]
        self._empty(self.batch, idle, n)
        # A draft model that has no room drafts nothing, so these need not be asked whether there is enough.
        for memory in self._beside:
            unread = sum(max(0, self.batch[i].n_past - memory[i].n_past) for i in self._taken)
            self._empty(memory, idle, unread + n)
        return self.batch.free_cells >= n

    def _stays(self, memory: SequenceBatch, i: int) -> bool:
        """Whether a sequence holds a conversation, and goes on to when another answer begins."""
        costs = memory.shares_prefix and memory.model.capabilities.device == "cpu"
        return bool(memory[i].tokens) and not (costs and self._cache.would_keep(memory[i]))

    def _idle(self) -> list[int]:
        """Sequences that no answer is made in, least recently used first."""
        return sorted(set(range(self.batch.n_sequences)) - self._taken, key=self._used.__getitem__)

    def _empty(self, memory: SequenceBatch, idle: Sequence[int], n: int) -> None:
        for i in idle:
            if memory.free_cells >= n:
                break
            self._cache.empty(memory[i])
