"""Slots of ``/infill``: an editor has one, in which its newest request takes the place of the one before.

An editor sends a window of so many lines before the cursor. With every line that is typed one slides out of it, and a
prompt that begins one line later has nothing in common with what was read. So what slid out is put in front again.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from localspec.commands.serve.errors import ApiError

MAX_WINDOWS, MAX_CHARACTERS = 64, 1 << 18
"""Editors whose windows are remembered, the latest, and the longest window [characters]: 16 MB together."""

HEAD_CHARACTERS = 200
"""Of a window's beginning, looked for in the one before: some five lines."""

MOST_WINDOWS = 2
"""A prompt grows to so many windows; then it begins anew with the one that was sent."""


@dataclass(slots=True, eq=False)
class _Turn:
    task: asyncio.Task[Any]
    superseded: bool = False


class Slots:
    """Which request has which slot. Used from the event loop only."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}

    @contextmanager
    def newest(self, slot: int | None) -> Iterator[None]:
        """Within the block the task has the slot; one that had it before is cancelled, as nobody waits for it.

        Args:
            slot: its number; None is one of its own.

        Raises:
            ApiError: a newer request took the slot.
        """
        if slot is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        if older := self._turns.get(slot):
            older.superseded = True
            older.task.cancel()
        turn = self._turns[slot] = _Turn(task)
        try:
            yield
        except asyncio.CancelledError:
            # As asyncio.timeout does it: only if nobody else cancels the task as well.
            if turn.superseded and task.uncancel() == 0:
                raise ApiError(409, f"a newer request took slot {slot}", code="superseded") from None
            raise
        finally:
            if self._turns.get(slot) is turn:  # a newer request may have had it, and be gone already
                del self._turns[slot]


class Windows:
    """What each editor showed before the cursor, from as far up as it was read. From any thread.

    Not every plugin names a slot. A window without one goes on from that without one which it is most like.
    """

    def __init__(self) -> None:
        self._shown: dict[int, str] = {}  # without a slot, under numbers below 0
        self._unnamed = itertools.count(-1, -1)
        self._changing = threading.Lock()

    def joined(self, slot: int | None, prefix: str) -> str:
        """The text before the cursor, with what slid out of the editor's window put in front of it."""
        if not prefix or (slot is None and len(prefix) < HEAD_CHARACTERS):  # so little may stand in any text
            return prefix
        with self._changing:
            key = self._most_alike(prefix) if slot is None else slot
            whole = join(self._shown.pop(key, ""), prefix)
            if len(whole) <= MAX_CHARACTERS:
                self._shown[key] = whole
            if len(self._shown) > MAX_WINDOWS:
                del self._shown[next(iter(self._shown))]
        return whole

    def _most_alike(self, prefix: str) -> int:
        """Under what number the window without a slot is that overlaps most with this one; a new one if none does."""
        found, most = None, 0
        for key, before in self._shown.items():
            if key < 0 and (start := _place(before, prefix)) >= 0:
                overlap = _n_alike(before[start:], prefix)
                if overlap > most:
                    found, most = key, overlap
        return next(self._unnamed) if found is None else found


def join(before: str, prefix: str) -> str:
    """A window with what an earlier one has in front of it; the window alone if they are not of one text."""
    start = _place(before, prefix)
    if start <= 0 or start + len(prefix) > MOST_WINDOWS * len(prefix):
        return prefix
    return before[:start] + prefix


def _place(before: str, prefix: str) -> int:
    """Where in an earlier window this one begins; -1 if they are not of one text.

    That is where the window's beginning stands in the earlier one, and half of what follows is the same in both:
    something else may have been typed at the end.
    """
    start = before.find(prefix[:HEAD_CHARACTERS])
    if start < 0:
        return -1
    half = min(len(before) - start, len(prefix)) // 2
    return start if before.startswith(prefix[:half], start) else -1


def _n_alike(one: str, other: str) -> int:
    """How many characters two texts have in common from their beginnings on; by halving, as windows are long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
