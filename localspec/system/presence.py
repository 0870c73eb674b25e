"""Who of us answers somebody now: work that nobody waits for, in another process, steps aside meanwhile.

A process that works for somebody has a file named by its number in a folder of the home. It is removed afterwards; that
of a process that was killed counts for nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from localspec.system.home import home

QUIET_SECONDS = 5.0
"""Between answers that follow each other, as those of a program, there is no use in starting."""

_POLL_SECONDS = 0.25


def _folder() -> Path:
    return home() / "answering"


@contextmanager
def answering() -> Iterator[None]:
    """Within the block this process works for somebody who waits."""
    mark = _folder() / str(os.getpid())
    with suppress(OSError):  # no home yet, or one that cannot be written: then nobody can see it
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink()


def somebody_answers() -> bool:
    """Whether another process with this home works for somebody."""
    try:
        marks = list(os.scandir(_folder()))
    except OSError:
        return False
    return any(_counts(mark) for mark in marks)


def _counts(mark: os.DirEntry[str]) -> bool:
    if not mark.name.isdigit() or int(mark.name) == os.getpid():
        return False
    import psutil

    try:
        # A process that began after the mark was made has only the number in common with the one that made it.
        alive = psutil.Process(int(mark.name)).create_time() < mark.stat().st_mtime + 1.0
    except psutil.NoSuchProcess:
        alive = False
    except (psutil.Error, OSError):
        return False
    if not alive:
        with suppress(OSError):
            os.unlink(mark.path)
    return alive


class Courtesy:
    """Steps aside while others answer.

    Args:
        waiting: called with True when it begins to wait, and with False when it goes on.
        stopped: whether to go on at once, as everything is to end.

    Attributes:
        seconds: waited so far.
    """

    def __init__(self, waiting: Callable[[bool], None], stopped: Callable[[], bool]) -> None:
        self._waiting = waiting
        self._stopped = stopped
        self._looked = 0.0
        self.seconds = 0.0

    def __call__(self) -> None:
        """Return when nobody has answered for ``QUIET_SECONDS``; at once where nobody does. Cheap: call it often."""
        began = time.monotonic()
        if began - self._looked < _POLL_SECONDS:
            return
        self._looked = began
        if not somebody_answers():
            return
        self._waiting(True)
        seen = time.monotonic()
        while time.monotonic() - seen < QUIET_SECONDS and not self._stopped():
            time.sleep(_POLL_SECONDS)
            if somebody_answers():
                seen = time.monotonic()
        self.seconds += time.monotonic() - began
        self._waiting(False)
