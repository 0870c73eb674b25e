"""Processes: interrupts, ends, forks, other localspec processes, locks."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from localspec.system.files import home


@contextmanager
def on_interrupt(stop: Callable[[], None], *, ended_too: bool = False) -> Iterator[None]:
    """Within the block the first Ctrl-C calls ``stop`` in the main thread; a second raises ``KeyboardInterrupt``.

    ``ended_too``: likewise when the process is asked to end, or its terminal is closed and that is not ignored (nohup).
    """
    numbers: list[int] = [signal.SIGINT]
    if ended_too:
        known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        numbers += [number for number in known if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        stop()

    with _handled(numbers, handler):
        yield


def interrupts_left_to_others() -> AbstractContextManager[None]:
    """Within the block Ctrl-C does nothing here: it is for the program in front, which gets it too."""
    # A handler, and not SIG_IGN, which the other program would inherit.
    return _handled([signal.SIGINT], lambda number, frame: None)


@contextmanager
def _handled(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


# A thread inside a C++ library while the interpreter or that library is taken down aborts the process. So the threads
# that call engines end first, then the threads of the engines; ``atexit`` alone runs what was registered last first,
# which is the engines.

Stage = Literal["workers", "engines"]

_STAGES: dict[Stage, list[Callable[[], None]]] = {"workers": [], "engines": []}


def at_end(stage: Stage, function: Callable[[], None]) -> None:
    """Have a function called once at the program's end: all of ``workers`` before any of ``engines``."""
    _STAGES[stage].append(function)


@atexit.register
def _end() -> None:
    for functions in _STAGES.values():
        while functions:
            functions.pop()()


# The child of a fork has a copy of all that its parent has loaded, and none of the threads. An engine waits for its
# threads when it computes, and when it is freed. So in the child a loaded engine is refused with one clear line, and
# never freed; the parent goes on with it.

REFUSAL = "this LLM was loaded before the process was forked, and belongs to the parent: load one in the child"

_KNOWN: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def in_child(owner: Any, renounce: Callable[[Any], None]) -> None:
    """Have ``renounce(owner)`` called in children that are forked while the owner lives, before anything else there.
    Locks may be held for ever by threads of the parent, so it takes none, and makes new ones."""
    _KNOWN[owner] = renounce


def _forked() -> None:
    known = list(_KNOWN.items())
    _KNOWN.clear()
    for owner, renounce in known:
        renounce(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


# Pauses background work while another process answers. A process that answers has a file named by its number in a
# folder of the home; the file of a killed process is ignored.

QUIET_SECONDS = 5.0  # Between answers that follow each other, as those of a program, there is no use in starting

_POLL_SECONDS = 0.25


@contextmanager
def answering(folder: Path) -> Iterator[None]:
    """Within the block this process answers a request; ``folder`` is its ``home``."""
    mark = folder / "answering" / str(os.getpid())
    with suppress(OSError):  # no home yet, or one that cannot be written
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink()


def another_answers() -> bool:
    """Whether another process with this home answers a request."""
    try:
        marks = list(os.scandir(home() / "answering"))
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
    """Pauses background work while other processes answer: ``waiting`` is called with True when it begins to wait and
    with False when it goes on; ``stopped`` says to go on at once. ``seconds`` were waited."""

    def __init__(self, waiting: Callable[[bool], None], stopped: Callable[[], bool]) -> None:
        self._waiting = waiting
        self._stopped = stopped
        self._looked = 0.0
        self.seconds = 0.0

    def __call__(self) -> None:
        """Return when no process has answered for ``QUIET_SECONDS``; at once where none does. Cheap: call it often."""
        began = time.monotonic()
        if began - self._looked < _POLL_SECONDS:
            return
        self._looked = began
        if not another_answers():
            return
        self._waiting(True)
        seen = time.monotonic()
        while time.monotonic() - seen < QUIET_SECONDS and not self._stopped():
            time.sleep(_POLL_SECONDS)
            if another_answers():
                seen = time.monotonic()
        self.seconds += time.monotonic() - began
        self._waiting(False)


def read_text(path: Path) -> str:
    """A small file, as those of ``/proc`` and ``/sys``, stripped; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def output(*command: str) -> str:
    """What a program prints, stripped; empty where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class SharedLock:
    """Held by any number of threads that share it, or by one alone; while one waits for that, no more may share it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_sharing = self._n_alone = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it with others; not within itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._n_alone)
            self._n_sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold it alone, once all others have let it go."""
        with self._changed:  # all the time, but for the wait
            self._n_alone += 1
            try:
                self._changed.wait_for(lambda: not self._n_sharing)
                yield
            finally:
                self._n_alone -= 1
                self._changed.notify_all()
