"""The thread that owns an engine: it runs jobs in their turn, and idle work while none waits."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any, TypeVar

from localspec.errors import Cancelled
from localspec.runtime.idle import IdleTask, IdleWork, NoIdleWork
from localspec.runtime.jobs import FairQueue, Job, wait_for
from localspec.system.ending import at_end
from localspec.system.forking import REFUSAL, in_child
from localspec.system.presence import answering

Result = TypeVar("Result")

_ENDING_S = 10.0
"""How long the end of the program waits for the passes that are under way."""


class Worker:
    """The thread that owns an engine, and the queue in front of it.

    It keeps no reference to what submits the jobs, so an owner that is dropped can be collected.

    Args:
        max_waiting: most jobs that may wait; None is any number.
        idle: takes what is to be done while the queue is empty; None does nothing then.

    Attributes:
        running: the jobs that run now.
        beside: runs a job that has a ``request``, and others that come meanwhile beside it; None runs it alone.
    """

    def __init__(self, max_waiting: int | None = None, idle: IdleWork | None = None) -> None:
        self.queue = FairQueue(max_waiting)
        self._idle = idle or NoIdleWork()
        self.running: list[Job] = []
        self.beside: Callable[[Job], None] | None = None
        self._last: tuple[Callable[[], None], ...] = ()
        self._thread = threading.Thread(target=self._run, name="localspec", daemon=True)
        self._thread.start()
        _WORKERS.add(self)
        in_child(self, Worker._renounce)

    @property
    def n_running(self) -> int:
        """How many jobs run now."""
        return sum(job.state == "running" for job in list(self.running))

    def serve_beside(self, run: Callable[[Job], None], at_once: int) -> None:
        """From now on run jobs that have a ``request`` so, at most so many at a time."""
        self.beside, self.queue.at_once = run, at_once

    def call(self, function: Callable[[], Result], *, conversation: Hashable | None = None) -> Result:
        """Run a function on the thread, in its turn, and wait for what it returns.

        Raises:
            Closed: the worker was closed.
        """
        if threading.current_thread() is self._thread:
            return function()
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        good: list[Result] = []

        def work(job: Job) -> None:
            good.append(function())

        job = Job(
            work,
            done.put,
            abandoned=lambda job: Cancelled("the LLM was closed before its turn came"),
            conversation=conversation,
        )
        self.queue.put(job, bounded=False)
        try:
            error = wait_for(done, job)
        except BaseException:
            job.cancel()
            raise
        if error is not None:
            raise error
        return good[0]

    def when_idle(self, task: IdleTask, *, priority: int = 0, warn: Callable[[str], None] | None = None) -> None:
        """Have a task done on the thread while nothing waits, step by step; see ``IdleWork.add``."""
        self._idle.add(task, priority=priority, warn=warn)
        self.queue.stir()

    def forget_idle(self, task: IdleTask) -> None:
        """Do no more of a task."""
        self._idle.remove(task)

    def idle_work_waits(self) -> None:
        """Have tasks looked at again, as they may have new work; happens by itself after every job."""
        self._idle.renew()
        self.queue.stir()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no job and no idle work that may be done now is left; whether that came about in time."""
        return self.queue.wait_at_rest(timeout)

    def close(self, *last: Callable[[], None], cancel: bool = False, wait: bool = True) -> None:
        """End the thread after what waits is done.

        Args:
            last: run on the thread at the very end, one after the other.
            cancel: stop the running job and drop those that wait, instead of finishing them.
            wait: return only when the thread has ended; not from the thread itself.
        """
        self._last = self._last or last
        self.queue.close()
        if cancel:
            self.cancel_all()
        if wait and threading.current_thread() is not self._thread:
            while self._thread.is_alive():
                self._thread.join(timeout=1.0)

    def cancel_all(self) -> None:
        """Stop the running job and keep those that wait from starting."""
        for job in [*self.queue.waiting(), *self.running]:
            job.cancel()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            job = self.queue.get(self._idle.pause)
            if job is not None:
                self.running.append(job)
                with answering():
                    run = Job.run if self.beside is None or job.request is None else self.beside
                    run(job)
                    self.running.clear()
                    del job  # at once: whoever waited for it may drop what it holds
                self._idle.renew(after_job=True)
            elif self.queue.ended:
                break
            else:
                self._idle.step(lambda: self.queue.presses)
        self._idle.clear()
        with ExitStack() as ending:  # each of them, whatever another raises
            for last in reversed(self._last):
                ending.callback(last)

    def _renounce(self) -> None:
        """In a forked child: refuse everything, and let nothing of it be freed."""
        self.queue = FairQueue()
        self.queue.close(REFUSAL)
        self._idle = NoIdleWork()
        self.running = []
        _WORKERS.discard(self)
        _RENOUNCED.append(self)


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()
_RENOUNCED: list[Worker] = []
"""Kept, because with a worker goes what it is to close at its end."""


def _end_all() -> None:
    """Stop every worker at its next round, and wait for them. What they own is left to the system."""
    workers = list(_WORKERS)
    for worker in workers:
        worker.close(cancel=True, wait=False)
    ends_at = time.monotonic() + _ENDING_S
    for worker in workers:
        worker.join(max(0.0, ends_at - time.monotonic()))


at_end("workers", _end_all)
