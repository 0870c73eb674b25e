"""The target's hidden states at the end of a text, for drafters that go on from them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from localspec.backends.base import FloatArray


class StateWindow:
    """States after the last tokens of a text, by the tokens' positions: without gaps, and at most ``size``.

    Attributes:
        start: position of the first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = 0
        self._rows: list[FloatArray] = []

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.start + len(self._rows)

    def put(self, position: int, rows: Iterable[FloatArray]) -> None:
        """States from a position on [n, width], for any known from there on; what lies before a gap is dropped."""
        if self.start <= position <= self.end:
            self.cut(position)
        else:
            self._rows, self.start = [], position
        self._rows.extend(rows)
        n_old = max(0, len(self._rows) - self.size)
        del self._rows[:n_old]
        self.start += n_old

    def cut(self, end: int) -> None:
        """Forget the states from a position on."""
        del self._rows[max(0, end - self.start) :]
        self.start = min(self.start, end)

    def between(self, first: int, end: int) -> FloatArray:
        """The states at positions from ``first`` to before ``end`` [n, width]."""
        return np.stack(self._rows[first - self.start : end - self.start])
