"""Which places of a memory that several sequences share are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Cells:
    """An account of a memory of ``n_cells`` tokens; one that several sequences begin with is counted once.

    Engines have no function that says how much is free, and end a pass, or the process, where nothing is. Where in the
    engine's memory a token lies is not what is kept here, only how many lie there.

    Attributes:
        n_cells: room in all [tokens].
    """

    def __init__(self, n_cells: int, n_sequences: int) -> None:
        self.n_cells = n_cells
        self._held: list[list[int]] = [[] for _ in range(n_sequences)]
        self._holders: Counter[int] = Counter()
        self._next = 0

    @property
    def n_free(self) -> int:
        """Tokens that still have room."""
        return self.n_cells - len(self._holders)

    def n_own(self, sequence: int) -> int:
        """Tokens that would have room if a sequence were emptied, besides those that are free."""
        return sum(self._holders[cell] == 1 for cell in self._held[sequence])

    def n_held(self, sequences: Iterable[int], source: int = 0, n: int = 0) -> int:
        """Room that sequences take together, and with them one that begins with the first n tokens of another."""
        return len(set(self._held[source][:n]).union(*(self._held[each] for each in sequences)))

    def take(self, sequence: int, n: int) -> None:
        """A sequence has n tokens more."""
        self._hold(sequence, range(self._next, self._next + n))
        self._next += n

    def share(self, source: int, target: int, n: int) -> None:
        """An empty sequence has the first n tokens of another."""
        self._hold(target, self._held[source][:n])

    def cut(self, sequence: int, n: int) -> None:
        """A sequence has its first n tokens only."""
        held = self._held[sequence]
        for cell in held[n:]:
            self._holders[cell] -= 1
            if not self._holders[cell]:
                del self._holders[cell]
        del held[n:]

    def _hold(self, sequence: int, cells: Iterable[int]) -> None:
        cells = list(cells)
        self._held[sequence] += cells
        self._holders.update(cells)
