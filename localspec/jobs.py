"""Work for the one thread that owns the engine: ``Job``, ``FairQueue``, ``Worker``."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from numbers import Real
from typing import Any, Literal

from localspec.ending import at_end
from localspec.errors import Cancelled, Closed, QueueFull, UsageError

CancelledBy = Literal["caller", "deadline"]
JobState = Literal["waiting", "running", "done"]

_ENDING_S = 10.0
"""How long the end of the program waits for the passes that are under way."""


class Job:
    """One piece of work; it runs at most once, and not at all if it is cancelled or late before its turn.

    Whoever claims a job answers for it: the worker that runs it, or whoever cancels it while it waits. Claiming takes
    no lock that others hold, so a job may be cancelled from anywhere, a destructor included.

    Args:
        work: what to do, given the job; its result, or its exception, is delivered.
        deliver: takes what the job gives; called from the worker's thread, or from the one that cancels. A RuntimeError
            from it says that nobody is there any more to take it.
        abandoned: makes what is delivered in place of a result if the job never runs.
        conversation: jobs of one conversation run in order; None is a conversation of its own.
        deadline: seconds from now in which it has to be done, waiting included; None is for ever.

    Raises:
        UsageError: the deadline is not a positive number, or the conversation not hashable.
    """

    def __init__(
        self,
        work: Callable[[Job], Any],
        deliver: Callable[[Any], Any],
        *,
        abandoned: Callable[[Job], Any] | None = None,
        conversation: Hashable | None = None,
        deadline: float | None = None,
    ) -> None:
        if deadline is not None and not (isinstance(deadline, Real) and math.isfinite(deadline) and deadline > 0):
            raise UsageError(f"the deadline must be a number of seconds over 0, not {deadline!r}")
        try:
            hash(conversation)
        except TypeError:
            raise UsageError(f"a conversation must be hashable, not {type(conversation).__name__}") from None
        self.conversation: Hashable = self if conversation is None else conversation
        self.submitted = time.monotonic()
        self.ends_at = None if deadline is None else self.submitted + deadline
        self.cancelled_by: CancelledBy | None = None
        self.state: JobState = "waiting"
        self._work: Callable[[Job], Any] | None = work
        self._deliver = deliver
        self._abandoned = abandoned
        self._claim = threading.Lock()

    def run(self) -> None:
        """Do the work, unless somebody else has claimed the job or it is too late; called by the worker."""
        if self.expire() or not self._claimed():
            return
        self.state = "running"
        work, self._work = self._work, None
        assert work is not None
        try:
            result = work(self)
        except BaseException as error:
            result = error
        self.state = "done"
        self.give(result)

    def give(self, item: Any) -> None:
        """Hand something to whoever waits for this job."""
        try:
            self._deliver(item)
        except RuntimeError:  # an event loop that is closed
            self.forget()

    def stopped(self) -> bool:
        """Whether the work should end: polled by the work itself."""
        if self.cancelled_by is None and self.ends_at is not None and time.monotonic() >= self.ends_at:
            self.cancelled_by = "deadline"
        return self.cancelled_by is not None

    def cancel(self, by: CancelledBy = "caller") -> None:
        """Stop the work at its next look, or keep it from ever starting."""
        if self.state == "done":
            return
        if self.cancelled_by is None:
            self.cancelled_by = by
        if self._claimed():
            self.state = "done"
            self._work = None
            if self._abandoned is not None:
                self.give(self._abandoned(self))

    def expire(self) -> bool:
        """Cancel it if it is too late; whether it is cancelled."""
        if self.stopped():
            self.cancel("deadline")
        return self.cancelled_by is not None

    def forget(self) -> None:
        """Nobody waits for the result any more: stop, and deliver nothing. For destructors, so it only sets flags."""
        if self.cancelled_by is None:
            self.cancelled_by = "caller"

    @property
    def seconds_left(self) -> float | None:
        """Until the deadline; None if there is none."""
        return None if self.ends_at is None else self.ends_at - time.monotonic()

    def _claimed(self) -> bool:
        return self._claim.acquire(blocking=False)


class FairQueue:
    """Jobs of one conversation in order, conversations in turns: who asks ten things at once delays nobody else much.

    Args:
        max_waiting: most jobs that may wait; None is any number.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self.max_waiting = max_waiting
        self._lanes: dict[Hashable, deque[Job]] = {}
        self._served: tuple[Hashable, deque[Job]] | None = None
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job, *, bounded: bool = True) -> None:
        """Add a job at the end of its conversation.

        Raises:
            QueueFull: ``max_waiting`` jobs wait already, and the job is subject to the bound.
            Closed: the queue was closed.
        """
        with self._changed:
            if self._closed:
                raise Closed("this LLM was closed")
            if bounded and self.max_waiting is not None:
                waiting = len(self)
                if waiting >= self.max_waiting:
                    raise QueueFull(f"{waiting} requests are waiting already; try again later")
            if self._served is not None and self._served[0] == job.conversation:
                self._served[1].append(job)
            else:
                self._lanes.setdefault(job.conversation, deque()).append(job)
            self._prune()
            self._changed.notify()

    def get(self) -> Job | None:
        """The next job, once there is one; None when the queue was closed and is empty."""
        with self._changed:
            while True:
                if self._served is not None and self._served[1]:
                    # Its conversation had its turn, and lines up behind those that came meanwhile.
                    self._lanes[self._served[0]] = self._served[1]
                self._served = None
                if self._lanes:
                    conversation = next(iter(self._lanes))
                    lane = self._lanes.pop(conversation)
                    self._served = conversation, lane
                    return lane.popleft()
                if self._closed:
                    return None
                self._changed.wait()

    def waiting(self) -> list[Job]:
        """The jobs that wait and were not cancelled."""
        with self._changed:
            lanes = [*([self._served[1]] if self._served else []), *self._lanes.values()]
            return [job for lane in lanes for job in lane if job.state == "waiting" and not job.stopped()]

    def __len__(self) -> int:
        return len(self.waiting())

    def close(self) -> None:
        """Take no more jobs; those that wait are still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _prune(self) -> None:
        """Drop jobs that were cancelled while they waited: a long answer must not let them pile up."""
        for conversation, lane in list(self._lanes.items()):
            alive = deque(job for job in lane if job.cancelled_by is None)
            if not alive:
                del self._lanes[conversation]
            elif len(alive) < len(lane):
                self._lanes[conversation] = alive


class Worker:
    """The thread that owns an engine, and the queue in front of it.

    It keeps no reference to what submits the jobs, so an owner that is dropped can be collected.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self.queue = FairQueue(max_waiting)
        self.running: Job | None = None
        self._last: tuple[Callable[[], None], ...] = ()
        self._thread = threading.Thread(target=self._run, name="localspec", daemon=True)
        self._thread.start()
        _WORKERS.add(self)

    def call(self, function: Callable[[], Any], *, conversation: Hashable | None = None) -> Any:
        """Run a function on the thread, in its turn, and wait for what it returns.

        Raises:
            Closed: the worker was closed.
        """
        if threading.current_thread() is self._thread:
            return function()
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        good: list[Any] = []

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
            error = wait_for(done)
        except BaseException:
            job.cancel()
            raise
        if error is not None:
            raise error
        return good[0]

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
        running = self.running
        for job in [*self.queue.waiting(), *([running] if running else [])]:
            job.cancel()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self.queue.get()) is not None:
            self.running = job
            job.run()
            self.running = None
            del job
        for last in self._last:
            last()


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


def _end_all() -> None:
    """Stop every worker at its next round, and wait for them. What they own is left to the system."""
    workers = list(_WORKERS)
    for worker in workers:
        worker.close(cancel=True, wait=False)
    ends_at = time.monotonic() + _ENDING_S
    for worker in workers:
        worker.join(max(0.0, ends_at - time.monotonic()))


at_end("workers", _end_all)


def wait_for(items: queue.SimpleQueue[Any], job: Job | None = None) -> Any:
    """The next thing delivered; a job that is too late while it waits for its turn is cancelled here."""
    while True:
        timeout = 1.0  # a wait without one cannot be interrupted by Ctrl-C on Windows
        if job is not None and job.state == "waiting" and job.seconds_left is not None:
            timeout = min(timeout, max(0.01, job.seconds_left))
        try:
            return items.get(timeout=timeout)
        except queue.Empty:
            if job is not None:
                job.expire()
