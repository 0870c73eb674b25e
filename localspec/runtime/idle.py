"""Idle work: tasks that a worker takes up while its queue is empty.

A task does one step at a time, at most one pass of a model or a tenth of a second; its ``stopped`` turns true when a
request has come. So a request waits for one pass at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from localspec.errors import Cancelled, LocalspecError
from localspec.system.power import on_battery

Stopped = Callable[[], bool]
"""Whether a step has to end: a job waits, or the worker is closed. Cheap; also fit for ``Context.interrupted``."""

IdleTask = Callable[[Stopped], bool]
"""One step of work. True: there is more to do now. False: nothing until there is new work, see ``IdleWork.renew``.

``Cancelled`` from a step that was stopped means that there is more to do. After any other exception the task is
dropped.
"""

PREPARATION = 10
"""Priority of measuring and copying: what readies the next answer of a conversation goes before."""

log = logging.getLogger("localspec")

ASK_AGAIN_S = 30.0
"""How long an answer to "is it on battery?" is believed, and how soon it is asked again while work waits for mains."""


GRACE_S = 0.05
"""For so long after a request another is waited for: a program that asks again at once need not wait for a step."""


class Pause(NamedTuple):
    """How long nothing is to be done.

    Attributes:
        seconds: 0 is no time, None is until there is new work.
        at_rest: whether nothing is left that may be done now.
    """

    seconds: float | None
    at_rest: bool


@dataclass(slots=True)
class _Entry:
    task: IdleTask
    priority: int
    warn: Callable[[str], None]
    rests: bool = False


@dataclass(slots=True)
class IdleWork:
    """The tasks of one worker. All but ``step`` may be called from any thread.

    Attributes:
        allowed: whether there may be any idle work now; asked before every step.
    """

    allowed: Callable[[], bool] = lambda: True
    _entries: list[_Entry] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _forbidden_until: float = 0.0
    _not_before: float = 0.0

    def add(self, task: IdleTask, *, priority: int = 0, warn: Callable[[str], None] | None = None) -> None:
        """Have a task asked for steps whenever there is time.

        Args:
            task: see ``IdleTask``.
            priority: tasks of a lower number go first, and to their end, before others get a step.
            warn: takes the line of a ``LocalspecError`` that ended the task, where the user should know.
        """
        with self._lock:
            entries = [*self._entries, _Entry(task, priority, warn or (lambda line: None))]
            self._entries = sorted(entries, key=lambda entry: entry.priority)

    def remove(self, task: IdleTask) -> None:
        """Forget a task; one that is not there is fine."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.task != task]

    def clear(self) -> None:
        """Forget all tasks, and what they hold on to."""
        with self._lock:
            self._entries = []

    def renew(self, *, after_job: bool = False) -> None:
        """There may be new work: ask every task again. Happens by itself after every job."""
        if after_job:
            self._not_before = time.monotonic() + GRACE_S
        with self._lock:
            for entry in self._entries:
                entry.rests = False

    def pause(self) -> Pause:
        """When a step should be taken."""
        if all(entry.rests for entry in self._entries):
            return Pause(None, at_rest=True)
        now = time.monotonic()
        if now < self._forbidden_until:
            return Pause(self._forbidden_until - now, at_rest=True)
        return Pause(max(0.0, self._not_before - now), at_rest=False)

    def step(self, stopped: Stopped) -> None:
        """Let the first task that has work do a step of it, if that is allowed; nothing that it raises gets out."""
        if not self.allowed():
            self._forbidden_until = time.monotonic() + ASK_AGAIN_S
            return
        with self._lock:
            entry = next((entry for entry in self._entries if not entry.rests), None)
            if entry is None:
                return
            entry.rests = True  # and not if there is new work meanwhile
        try:
            more = entry.task(stopped)
        except BaseException as error:
            more = isinstance(error, Cancelled) and stopped()
            if not more:
                log.debug("a task for idle time failed and is dropped", exc_info=error)
                self.remove(entry.task)
                if isinstance(error, LocalspecError):
                    entry.warn(str(error))
        if more:
            entry.rests = False


class NoIdleWork(IdleWork):
    """Takes tasks, and never does any."""

    def add(self, task: IdleTask, *, priority: int = 0, warn: Callable[[str], None] | None = None) -> None:
        return


class OnMains:
    """Whether the machine is not known to run on battery, asked of the system now and then only."""

    def __init__(self, reader: Callable[[], bool | None] = on_battery) -> None:
        self._reader = reader
        self._asked: float | None = None
        self._on_mains = True

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._asked is None or now - self._asked >= ASK_AGAIN_S:
            self._asked, self._on_mains = now, not self._reader()
        return self._on_mains
