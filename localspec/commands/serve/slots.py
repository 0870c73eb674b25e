"""Slots of ``/infill``: an editor has one, in which its newest request takes the place of the one before.

An editor sends a window of so many lines before the cursor. With every line that is typed one slides out of it, and a
prompt that begins one line later has nothing in common with what was read. So what slid out is put in front again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from localspec.commands.serve.errors import ApiError

MAX_WINDOWS, MAX_CHARACTERS = 64, 1 << 18
"""Slots whose windows are remembered, the latest, and the longest window [characters]: 16 MB together."""

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
            if self._turns[slot] is turn:
                del self._turns[slot]


class Windows:
    """What each slot's editor showed before the cursor, from as far up as it was read. From any thread."""

    def __init__(self) -> None:
        self._shown: dict[int, str] = {}
        self._changing = threading.Lock()

    def joined(self, slot: int | None, prefix: str) -> str:
        """The text before the cursor, with what slid out of the slot's window put in front of it."""
        if slot is None or not prefix:
            return prefix
        with self._changing:
            whole = join(self._shown.pop(slot, ""), prefix)
            if len(whole) <= MAX_CHARACTERS:
                self._shown[slot] = whole
            if len(self._shown) > MAX_WINDOWS:
                del self._shown[next(iter(self._shown))]
        return whole


def join(before: str, prefix: str) -> str:
    """A window with what an earlier one has in front of it; the window alone if they are not of one text.

    They are where the window's beginning stands in the earlier one, and half of what follows is the same in both:
    something else may have been typed at the end.
    """
    start = before.find(prefix[:HEAD_CHARACTERS])
    if start <= 0 or start + len(prefix) > MOST_WINDOWS * len(prefix):
        return prefix
    half = min(len(before) - start, len(prefix)) // 2
    return before[:start] + prefix if before.startswith(prefix[:half], start) else prefix
