"""The thread that owns an engine: it runs jobs in their turn, and idle work while none waits."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from localspec.errors import (
    MAX_COUNT,
    Cancelled,
    Closed,
    LocalspecError,
    QueueFull,
    UsageError,
    as_float,
    checked_whole,
    is_number,
    shown,
)
from localspec.system.machine import on_battery
from localspec.system.process import REFUSAL, answering, at_end, in_child

# Idle work: tasks that a worker takes up while its queue is empty.
#
# A task does one step at a time, at most one pass of a model or a tenth of a second; its ``stopped`` turns true when a
# request has come. So a request waits for one pass at most.

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


# Work for the one thread that owns the engine: ``Job``, and ``FairQueue`` in which jobs wait; ``worker`` runs them.

CancelledBy = Literal["caller", "deadline"]
JobState = Literal["waiting", "running", "done"]


class Job:
    """One piece of work; it runs at most once, and not at all if it is cancelled or late before its turn.

    It is claimed once: by the worker that runs it, or by what cancels it while it waits; that one delivers its result.
    Claiming takes no lock that others hold, so a job may be cancelled from anywhere, a destructor included.

    Args:
        work: what to do, given the job; its result, or its exception, is delivered.
        deliver: takes what the job gives; called from the worker's thread, or from the one that cancels. What it raises
            ends the job, and is given to it in place of the result; if that raises too, nothing is delivered.
        abandoned: makes what is delivered in place of a result if the job never runs.
        conversation: jobs of one conversation run in order; None is a conversation of its own.
        deadline: seconds from now in which it has to be done, waiting included; None is for ever.
        priority: of those that wait the ones with the highest come first.
        request: what it is about, if it may be answered beside others; None: it runs alone.

    Raises:
        UsageError: the deadline is not a positive number, the priority no whole one, or the conversation not hashable.
    """

    def __init__(
        self,
        work: Callable[[Job], Any],
        deliver: Callable[[Any], Any],
        *,
        abandoned: Callable[[Job], Any] | None = None,
        conversation: Hashable | None = None,
        deadline: float | None = None,
        priority: int = 0,
        request: Any = None,
    ) -> None:
        try:
            hash(conversation)
        except TypeError:
            kind = type(conversation).__name__
            raise UsageError(f"conversation must be hashable, such as a number or a text; a {kind} is not") from None
        if deadline is not None:
            seconds = as_float(deadline) if is_number(deadline) else math.nan
            if not (math.isfinite(seconds) and seconds > 0):
                raise UsageError(f"the deadline must be a number of seconds over 0, not {shown(deadline)}")
            deadline = seconds
        self.priority = checked_whole("priority", priority, -MAX_COUNT, MAX_COUNT)
        self.request = request
        self.conversation: Hashable = self if conversation is None else conversation
        self.submitted = time.monotonic()
        self.ends_at = None if deadline is None else self.submitted + deadline
        self.started = 0.0  # when its turn came, by time.perf_counter()
        self.seconds_waited = 0.0
        self.cancelled_by: CancelledBy | None = None
        self.state: JobState = "waiting"
        self._work: Callable[[Job], Any] | None = work
        self._deliver = deliver
        self._abandoned = abandoned
        self._refused: BaseException | None = None
        self._claim = threading.Lock()
        self._process = os.getpid()

    def run(self) -> None:
        """Do the work, unless the job was cancelled or it is too late; called by the worker."""
        work = self._work
        if self.start():
            assert work is not None
            self.end(lambda: work(self))

    def start(self) -> bool:
        """Claim it for the worker, which has to ``end`` it; False if it was cancelled or it is too late."""
        if self.expire() or not self._claimed():
            return False
        self.state, self._work = "running", None
        self.started, self.seconds_waited = time.perf_counter(), time.monotonic() - self.submitted
        return True

    def give(self, item: Any) -> None:
        """Deliver something; if that fails, the job ends."""
        if self._refused is None:
            try:
                self._deliver(item)
            except BaseException as error:  # the thread that works for all must outlive what one of them does
                self._refused = error
                self.forget()

    def end(self, make: Callable[[], Any]) -> None:
        """Give the last thing: a result, or why there is none or it could not be delivered."""
        try:
            result = make()
        except StopIteration as error:  # raised again by an iterator, it would look like a proper end
            result = RuntimeError(f"unexpected {error!r}")
        except BaseException as error:
            result = error
        self.state = "done"
        self.give(result)
        if self._refused is not None:
            with suppress(BaseException):  # an event loop that is closed
                self._deliver(self._refused)

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
            self._work = None
            abandoned = self._abandoned
            if abandoned is None:
                self.state = "done"
            else:
                self.end(lambda: abandoned(self))
                if isinstance(self._refused, KeyboardInterrupt):  # it was meant for the thread that cancels
                    raise self._refused

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

    @property
    def orphaned(self) -> bool:
        """Whether it was queued before this process was forked: the thread that would run it is the parent's."""
        return self._process != os.getpid()

    def _claimed(self) -> bool:
        return self._claim.acquire(blocking=False)


class FairQueue:
    """Jobs of one conversation in order, conversations in turns, so that ten requests of one delay another by one.

    Of the conversations those come first whose next job has the highest priority.

    Args:
        max_waiting: most conversations that may wait, besides those that are served; None is any number.

    Attributes:
        at_once: how many are served at a time, see ``take``.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self.max_waiting = max_waiting
        self.at_once = 1
        self._conversations: dict[Hashable, deque[Job]] = {}
        self._served: set[Hashable] = set()  # the conversations whose jobs were given last, while they may be running
        self._changed = threading.Condition()
        self._closed: str | None = None
        self._at_rest = False

    def put(self, job: Job, *, bounded: bool = True) -> None:
        """Add a job at the end of its conversation.

        Raises:
            QueueFull: ``max_waiting`` conversations wait already, the job's is another, and the bound holds for it.
            Closed: the queue was closed.
        """
        with self._changed:
            self.check_open()
            known = job.conversation in self._served or job.conversation in self._conversations
            if bounded and self.max_waiting is not None and not known:
                others = (jobs for each, jobs in self._conversations.items() if each not in self._served)
                waiting = sum(any(map(_waits, jobs)) for jobs in others)
                # What finds nothing before it does not wait.
                if waiting >= self.max_waiting and (waiting or len(self._served) >= self.at_once):
                    raise QueueFull(f"{waiting} requests are waiting already; try again later")
            self._conversations.setdefault(job.conversation, deque()).append(job)
            self._prune()
            self._wake()

    def check_open(self) -> None:
        """Raises ``Closed`` where no more jobs are taken."""
        if self._closed:
            raise Closed(self._closed)

    def get(self, pause: Callable[[], Pause] = lambda: Pause(None, at_rest=True)) -> Job | None:
        """The next job, once there is one; None when the queue was closed and is empty, or it is time for other work.

        Args:
            pause: when it is time for other work, where there is no job; asked again after that time and by ``wake``.
        """
        with self._changed:
            while True:
                seconds, at_rest = pause()  # before the look at what came: it is long enough for something to come
                for conversation in list(self._served):
                    self._release(conversation)
                if (job := self._first()) is not None:
                    return self._given(job)
                if self._closed:
                    return None
                if seconds == 0:
                    return None
                self._at_rest = at_rest
                self._changed.notify_all()
                self._changed.wait(seconds)
                self._at_rest = False

    def take(self, above: int | None = None) -> Job | None:
        """Without waiting: the next job, if it may run beside those that were given and not released; else None.

        Args:
            above: only one of a higher priority; None takes any.
        """
        with self._changed:
            job = self._first()
            if job is None or job.request is None or (above is not None and job.priority <= above):
                return None
            return self._given(job)

    def release(self, job: Job) -> None:
        """A job that was taken is over: its conversation may be served again, after those that came meanwhile."""
        with self._changed:
            self._release(job.conversation)

    def _first(self) -> Job | None:
        heads = [jobs[0] for conversation, jobs in self._conversations.items() if conversation not in self._served]
        return max(heads, key=lambda job: job.priority, default=None)

    def _given(self, job: Job) -> Job:
        jobs = self._conversations[job.conversation]
        jobs.popleft()
        if not jobs:
            del self._conversations[job.conversation]
        self._served.add(job.conversation)
        return job

    def _release(self, conversation: Hashable) -> None:
        self._served.discard(conversation)
        if conversation in self._conversations:
            self._conversations[conversation] = self._conversations.pop(conversation)

    def wake(self) -> None:
        """Have ``get`` ask its ``pause`` again."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._at_rest = False
        self._changed.notify_all()

    def wait_at_rest(self, timeout: float | None) -> bool:
        """Wait until ``get`` waits, having nothing to give; whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._at_rest or self._closed is not None, timeout)

    @property
    def is_urgent(self) -> bool:
        """Whether idle work has to end: a job came, or the queue was closed."""
        return bool(self._conversations) or self._closed is not None

    @property
    def ended(self) -> bool:
        """Whether the queue was closed and has nothing left."""
        return self._closed is not None and not self._conversations

    def waiting(self) -> list[Job]:
        """The jobs that wait and were not cancelled."""
        with self._changed:
            return [job for jobs in self._conversations.values() for job in jobs if _waits(job)]

    def __len__(self) -> int:
        return len(self.waiting())

    def close(self, reason: str = "this LLM was closed") -> None:
        """Take no more jobs, for a reason; those that wait are still handed out."""
        with self._changed:
            self._closed = self._closed or reason
            self._wake()

    def _prune(self) -> None:
        """Drop jobs that were cancelled while they waited: a long answer must not let them pile up."""
        for conversation, jobs in list(self._conversations.items()):
            alive = deque(job for job in jobs if job.cancelled_by is None)
            if not alive:
                del self._conversations[conversation]
            elif len(alive) < len(jobs):
                self._conversations[conversation] = alive


def _waits(job: Job) -> bool:
    return job.state == "waiting" and not job.stopped()


def wait_for(items: queue.SimpleQueue[Any], job: Job | None = None) -> Any:
    """The next thing delivered; a job that is too late while it waits for its turn is cancelled here.

    Raises:
        Closed: nothing will be delivered, as the process was forked meanwhile.
    """
    while True:
        timeout = 1.0  # a wait without one cannot be interrupted by Ctrl-C on Windows
        if job is not None and job.state == "waiting" and job.seconds_left is not None:
            timeout = min(timeout, max(0.01, job.seconds_left))
        orphaned = job is not None and job.orphaned
        try:
            return items.get(timeout=0.0 if orphaned else timeout)
        except queue.Empty:
            if orphaned:
                raise Closed(REFUSAL) from None
            if job is not None and job.state == "waiting":  # one that runs looks at the clock itself
                job.expire()


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

    def serve_batch(self, run: Callable[[Job], None], at_once: int) -> None:
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
        self.queue.wake()

    def forget_idle(self, task: IdleTask) -> None:
        """Do no more of a task."""
        self._idle.remove(task)

    def idle_work_waits(self) -> None:
        """Have tasks looked at again, as they may have new work; happens by itself after every job."""
        self._idle.renew()
        self.queue.wake()

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
                self._idle.step(lambda: self.queue.is_urgent)
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
