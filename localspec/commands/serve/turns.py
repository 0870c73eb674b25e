"""One request speculates at a time; the others wait in a line of bounded length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from localspec.commands.serve.errors import ApiError, too_busy

_FADE = 0.8


class Turns:
    """The line in front of the engine.

    Args:
        most_waiting: how many may wait; the one whose turn it is does not.

    Attributes:
        waiting: how many do.
        running: whether somebody has the turn.
    """

    def __init__(self, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        self.waiting = 0
        self._lock = asyncio.Lock()
        self._seconds = 2.0

    @property
    def running(self) -> bool:
        return self._lock.locked()

    @asynccontextmanager
    async def turn(self, seconds: float) -> AsyncIterator[None]:
        """Wait for the turn, and hold it within the block. A task that is cancelled leaves the line.

        Args:
            seconds: longest wait.

        Raises:
            ApiError: the line is full (429), or it took too long (503).
        """
        if (self._lock.locked() or self.waiting) and self.waiting >= self.most_waiting:
            message = f"{self.waiting} requests wait already, and one is being answered: try again later"
            raise too_busy(message, self._seconds * (self.waiting + 1))
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError:
            message = f"the request waited for {seconds:g} s and its turn did not come"
            raise ApiError(503, message, code="timeout", headers={"Retry-After": "10"}) from None
        finally:
            self.waiting -= 1
        started = time.monotonic()
        try:
            yield
        finally:
            self._lock.release()
            self._seconds = _FADE * self._seconds + (1 - _FADE) * (time.monotonic() - started)
