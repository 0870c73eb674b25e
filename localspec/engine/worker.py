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
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from localspec.errors import (
    MAX_COUNT,
    Cancelled,
    Closed,
    QueueFull,
    UsageError,
    as_float,
    checked_whole,
    is_number,
    shown,
)
from localspec.system.files import home
from localspec.system.machine import on_battery
from localspec.system.process import REFUSAL, answering, at_end, in_child

Stopped = Callable[[], bool]
"""Whether a step has to end: a job waits, or the worker is closed. Cheap; also fit for ``Context.interrupted``."""

IdleTask = Callable[[Stopped], Generator[bool | None, None, None]]
"""Idle work in steps of at most one pass of a model, or a tenth of a second, as a request may wait for one.

It yields after every step; False means that there is nothing to do until ``IdleWork.renew``. It is over at its end or
after an exception. Where it is stopped and raises ``Cancelled``, it begins anew later.
"""

log = logging.getLogger("localspec")

ASK_AGAIN_S = 30.0
"""How long an answer of ``IdleWork.allowed`` counts."""

GRACE_S = 0.05
"""For so long after a request another is waited for: a program that asks again at once need not wait for a step."""

BESIDE_ANSWERS_S = 0.25
"""After which idle work is thought of again, while another model on the same cores answers."""


def on_mains() -> bool:
    return not on_battery()


@dataclass(eq=False, slots=True)
class _Entry:
    task: IdleTask
    priority: int
    due: float
    rests: bool
    steps: Generator[bool | None, None, None] | None = None


class IdleWork:
    """The tasks of one worker. All but ``step`` and ``drop`` may be called from any thread. ``allowed``: whether there
    may be idle work now, asked every ``ASK_AGAIN_S``; None takes no tasks."""

    def __init__(self, allowed: Callable[[], bool] | None) -> None:
        self._allowed = allowed
        self._entries: list[_Entry] = []
        self._at_work: _Entry | None = None
        self._lock = threading.Lock()
        self._may, self._believed_until = True, 0.0
        self._not_before = 0.0

    def add(self, task: IdleTask, priority: int = 0, *, after: float = 0.0) -> None:
        """Take steps of a task whenever there is time; those of a lower priority go first. The next ``renew`` that is
        ``after`` so many seconds begins it."""
        if self._allowed is not None:
            entry = _Entry(task, priority, time.monotonic() + after, rests=after > 0)
            with self._lock:
                self._entries = sorted([*self._entries, entry], key=lambda entry: entry.priority)

    def drop(self, *priorities: int) -> None:
        """Forget tasks, all where no priorities are named, and free what they hold; the one at work, which may call
        this, ends by itself."""
        with self._lock:
            dropped = [entry for entry in self._entries if not priorities or entry.priority in priorities]
            self._entries = [entry for entry in self._entries if entry not in dropped]
        for entry in dropped:
            if entry.steps is not None and entry is not self._at_work:
                entry.steps.close()

    def renew(self, *, after_job: bool = False) -> None:
        """Ask every task again, as there may be new work."""
        now = time.monotonic()
        if after_job:
            self._not_before = now + GRACE_S
        with self._lock:
            for entry in self._entries:
                entry.rests = entry.due > now

    def pause(self, *, others_answer: bool = False) -> tuple[float | None, bool]:
        """How long nothing is to be done [s], None until there is new work; and whether nothing is left for now. While
        another worker answers on the same cores, ``others_answer``, nothing is to be done."""
        if all(entry.rests for entry in self._entries):
            return None, True
        now = time.monotonic()
        if not self._may and now < self._believed_until:
            return self._believed_until - now, True
        return max(BESIDE_ANSWERS_S if others_answer else 0.0, self._not_before - now), others_answer

    def step(self, stopped: Stopped) -> None:
        """Have the first task that has work do a step of it, if that is allowed; nothing that it raises gets out."""
        now = time.monotonic()
        if self._allowed is not None and now >= self._believed_until:
            self._may, self._believed_until = self._allowed(), now + ASK_AGAIN_S
        if not self._may:
            return
        with self._lock:
            entry = next((entry for entry in self._entries if not entry.rests), None)
            if entry is None:
                return
            entry.rests = True  # and not if there is new work meanwhile
        self._at_work = entry
        try:
            entry.steps = entry.steps or entry.task(stopped)
            more = next(entry.steps) is not False
        except BaseException as error:
            entry.steps, more = None, isinstance(error, Cancelled) and stopped()
            if not more:
                if not isinstance(error, StopIteration):
                    log.debug("a task for idle time failed and is dropped", exc_info=error)
                with self._lock:
                    self._entries = [each for each in self._entries if each is not entry]
        finally:
            self._at_work = None
        if more:
            entry.rests = False


class Turns:
    """Whose turn it is among workers that share the cores: one round, or one step of idle work, at a time.

    Turns are given in the order in which they are asked for, so that two models that answer alternate. While
    ``n_answering`` workers have a request, the others do no idle work.
    """

    def __init__(self) -> None:
        self.n_answering = 0
        self._changed = threading.Condition()
        self._n_asked = self._n_done = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Within the block it is the thread's turn; not within itself."""
        with self._changed:
            number, self._n_asked = self._n_asked, self._n_asked + 1
            self._changed.wait_for(lambda: self._n_done == number)
        try:
            yield
        finally:
            with self._changed:
                self._n_done += 1
                self._changed.notify_all()

    @contextmanager
    def answering(self) -> Iterator[None]:
        with self._changed:
            self.n_answering += 1
        try:
            yield
        finally:
            with self._changed:
                self.n_answering -= 1


CancelledBy = Literal["caller", "deadline"]
JobState = Literal["waiting", "running", "done"]


class Job(Future[Any]):
    """One piece of work; it runs at most once, and not at all if it is cancelled or late before its turn.

    It is claimed once, as a future is: by the worker that runs it, or by what cancels it while it waits.

    Args:
        work: what to do, given the job; ``reply`` returns its result, or raises its exception.
        deliver: takes what the job gives, and at its end the job itself; called from the worker's thread, or from the
            one that cancels. If it raises, the work is cancelled, and ``reply`` raises the same.
        abandoned: makes the reply of a job that never ran; None raises ``Cancelled``.
        request: what it is about, if it may share passes with others; None: it runs alone.
        submit: queues it, for a stream that reads what it gives.
        told_to_stop: what else stops it, besides its caller and its deadline; polled.

    Attributes:
        settle: is called with the job at its end, before it is delivered.
        ends_at: its deadline by ``time.monotonic``.
        started: when its turn came, by ``time.perf_counter``.
        refused: what ``deliver`` raised.

    Raises:
        UsageError: the deadline is not a positive number, the priority no whole one, or the conversation not hashable.
    """

    def __init__(
        self,
        work: Callable[[Job], Any],
        deliver: Callable[[Any], Any] = lambda item: None,
        *,
        abandoned: Callable[[Job], Any] | None = None,
        conversation: Hashable | None = None,
        deadline: float | None = None,
        priority: int = 0,
        request: Any = None,
        submit: Callable[[Job], None] = lambda job: None,
        told_to_stop: Stopped = lambda: False,
    ) -> None:
        super().__init__()
        try:
            hash(conversation)
        except TypeError:
            kind = type(conversation).__name__
            raise UsageError(f"conversation must be hashable, such as a number or a text; a {kind} is not") from None
        if deadline is not None and not (is_number(deadline) and 0 < as_float(deadline) < math.inf):
            raise UsageError(f"the deadline must be a number of seconds over 0, not {shown(deadline)}")
        self.priority = checked_whole("priority", priority, -MAX_COUNT, MAX_COUNT)
        self.request = request
        self.conversation: Hashable = self if conversation is None else conversation
        self.submitted = time.monotonic()
        self.ends_at = None if deadline is None else self.submitted + float(deadline)
        self.started = 0.0
        self.seconds_waited = 0.0
        self.cancelled_by: CancelledBy | None = None
        self.refused: BaseException | None = None
        self.process = os.getpid()  # in a child process no thread will run it
        self.thread: threading.Thread | None = None  # will run it, once it is queued
        self._work: Callable[[Job], Any] | None = work
        self.deliver, self.submit, self._abandoned, self._told_to_stop = deliver, submit, abandoned, told_to_stop
        self.settle: Callable[[Job], None] = lambda job: None

    @property
    def state(self) -> JobState:
        return "running" if self.running() else "done" if self.done() else "waiting"

    def run(self) -> None:
        work = self._work
        if self.start():
            assert work is not None
            try:
                outcome = work(self)
            except BaseException as error:
                outcome = error
            self.end(outcome)

    def start(self) -> bool:
        """Claim it for the worker, which has to ``end`` it; False if it was cancelled or is too late."""
        if self.stopped():
            self.cancel("deadline")
        self._work = None
        if not self.set_running_or_notify_cancel():
            return False
        self.started, self.seconds_waited = time.perf_counter(), time.monotonic() - self.submitted
        return True

    def give(self, item: Any) -> None:
        """Deliver something; where that fails the work is cancelled, and the thread that works for all goes on."""
        try:
            if item is self:
                self.settle(self)
            self.deliver(item)
        except BaseException as error:
            self.refused, self.cancelled_by = error, self.cancelled_by or "caller"
            if self.cancelled() and isinstance(error, KeyboardInterrupt):  # meant for the thread that cancels
                raise

    def end(self, outcome: Any = None) -> None:
        """Its work is over, and returned this, or raised it; or it was cancelled before."""
        if isinstance(outcome, StopIteration):  # raised by an iterator, it would look like a proper end
            outcome = RuntimeError(f"unexpected {outcome!r}")
        if isinstance(outcome, BaseException):
            self.set_exception(outcome)
        elif not self.cancelled():
            self.set_result(outcome)
        self.give(self)
        if self.refused is not None:
            with suppress(BaseException):  # an event loop that is closed
                self.deliver(self)
        self.deliver = lambda item: None  # what it was delivered to may hold the job

    def reply(self) -> Any:
        """Its result, once it is done; what its work, or delivering it, raised is raised here."""
        if self.refused is not None:
            raise self.refused
        if not self.cancelled():
            return self.result()
        if self._abandoned is None:
            raise Cancelled(f"the request was cancelled by its {self.cancelled_by} while it waited")
        return self._abandoned(self)

    def outcome(self) -> Any:
        """Queue it, wait for its end, and return its ``reply``; what it gives before is dropped. A wait that is broken
        off cancels it."""
        items = queue.SimpleQueue[Any]()
        self.deliver = items.put
        self.submit(self)
        try:
            while self.wait_for(items) is not self:
                pass
        except BaseException:
            self.cancel()
            raise
        return self.reply()

    def stopped(self) -> bool:
        """Whether the work should end: polled by the work itself."""
        if self.cancelled_by is None and self._told_to_stop():
            self.cancelled_by = "caller"
        if self.cancelled_by is None and self.ends_at is not None and time.monotonic() >= self.ends_at:
            self.cancelled_by = "deadline"
        return self.cancelled_by is not None

    def cancel(self, by: CancelledBy = "caller") -> bool:
        """Stop the work at its next look, or keep it from ever starting; whether it never starts."""
        if self.done():
            return self.cancelled()
        self.cancelled_by = self.cancelled_by or by
        if never_starts := super().cancel():
            self.end()
        return never_starts

    def wait_for(self, items: queue.SimpleQueue[Any]) -> Any:
        """The next thing that it puts into ``items``; too late while it waits for its turn, it is cancelled here.
        ``Closed``: the process was forked meanwhile; ``UsageError``: the thread that waits would have to run it."""
        while True:
            if threading.current_thread() is self.thread and not self.done():
                raise UsageError("work that runs on the model's thread cannot wait for an answer of that model")
            timeout = 1.0  # a wait without one cannot be interrupted by Ctrl-C on Windows
            waits, orphaned = not (self.running() or self.done()), self.process != os.getpid()
            if waits and self.ends_at is not None:
                timeout = min(timeout, max(0.01, self.ends_at - time.monotonic()))
            try:
                return items.get(timeout=0.0 if orphaned else timeout)
            except queue.Empty:
                if orphaned:
                    raise Closed(REFUSAL) from None
                if waits and self.stopped():  # one that runs looks at the clock itself
                    self.cancel()


class FairQueue:
    """Jobs of one conversation in order, conversations in turns, so that ten requests of one delay another by one. Of
    the conversations those come first whose next job has the highest priority.

    Attributes:
        max_waiting: most conversations that may wait, besides those that are served; None is any number.
        at_once: how many are served at a time, see ``take``.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self.max_waiting = max_waiting
        self.at_once = 1
        self.closed: str | None = None  # why no more jobs are taken
        self.thread: threading.Thread | None = None  # takes the jobs
        self._conversations: dict[Hashable, deque[Job]] = {}
        self._served: set[Hashable] = set()  # the conversations whose jobs were given last, while they may be running
        self._changed = threading.Condition()
        self._at_rest = False

    def put(self, job: Job, *, bounded: bool = True) -> None:
        """Add a job at the end of its conversation. ``QueueFull``: ``max_waiting`` conversations wait already, the
        job's is another, and the bound holds for it."""
        with self._changed:
            if self.closed:
                raise Closed(self.closed)
            known = job.conversation in self._served or job.conversation in self._conversations
            if bounded and self.max_waiting is not None and not known:
                others = (jobs for each, jobs in self._conversations.items() if each not in self._served)
                waiting = sum(any(map(_waits, jobs)) for jobs in others)
                # What finds nothing before it does not wait.
                if waiting >= self.max_waiting and (waiting or len(self._served) >= self.at_once):
                    raise QueueFull(f"{waiting} requests are waiting already; try again later")
            job.thread = self.thread
            self._conversations.setdefault(job.conversation, deque()).append(job)
            # Jobs that were cancelled while they waited are dropped: a long answer must not let them pile up.
            alive = {
                conversation: deque(job for job in jobs if job.cancelled_by is None)
                for conversation, jobs in self._conversations.items()
            }
            self._conversations = {conversation: jobs for conversation, jobs in alive.items() if jobs}
            self._at_rest = False
            self._changed.notify_all()

    def get(self, pause: Callable[[], tuple[float | None, bool]] = lambda: (None, True)) -> Job | None:
        """The next job, once there is one; None when the queue is closed and empty, or ``IdleWork.pause`` is over."""
        with self._changed:
            while True:
                seconds, at_rest = pause()  # before the look at what came: it is long enough for something to come
                for conversation in list(self._served):
                    self.release(conversation)
                job = self._pop()
                if job is not None or self.closed or seconds == 0:
                    return job
                self._at_rest = at_rest
                self._changed.notify_all()
                self._changed.wait(seconds)
                self._at_rest = False

    def take(self, above: int | None = None) -> Job | None:
        """Without waiting: the next job, if it may share passes, and its priority is ``above`` another."""
        with self._changed:
            return self._pop(lambda job: job.request is not None and (above is None or job.priority > above))

    def release(self, conversation: Hashable) -> None:
        """A conversation's job is over: it may be served again, after those that came meanwhile."""
        with self._changed:
            self._served.discard(conversation)
            if conversation in self._conversations:
                self._conversations[conversation] = self._conversations.pop(conversation)

    def _pop(self, fits: Callable[[Job], bool] = lambda job: True) -> Job | None:
        heads = [jobs[0] for conversation, jobs in self._conversations.items() if conversation not in self._served]
        job = max(heads, key=lambda job: job.priority, default=None)
        if job is None or not fits(job):
            return None
        jobs = self._conversations[job.conversation]
        jobs.popleft()
        if not jobs:
            del self._conversations[job.conversation]
        self._served.add(job.conversation)
        return job

    def wake(self) -> None:
        """Have ``get`` ask its ``pause`` again."""
        with self._changed:
            self._at_rest = False
            self._changed.notify_all()

    def wait_at_rest(self, timeout: float | None) -> bool:
        """Wait until no job and no idle work that may be done now is left; whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._at_rest or self.closed is not None, timeout)

    @property
    def is_urgent(self) -> bool:
        """Whether idle work has to end: a job came, or the queue was closed."""
        return bool(self._conversations) or self.closed is not None

    @property
    def ended(self) -> bool:
        return self.closed is not None and not self._conversations

    def waiting(self) -> list[Job]:
        with self._changed:
            return [job for jobs in self._conversations.values() for job in jobs if _waits(job)]

    def __len__(self) -> int:
        return len(self.waiting())

    def close(self, reason: str = "this LLM was closed") -> None:
        """Take no more jobs, for a reason; those that wait are still handed out."""
        with self._changed:
            self.closed = self.closed or reason
            self.wake()


def _waits(job: Job) -> bool:
    return job.state == "waiting" and not job.stopped()


Result = TypeVar("Result")

_ENDING_S = 10.0
"""How long the end of the program waits for the passes that are under way."""


class Worker:
    """The thread that owns an engine, and the queue in front of it.

    It keeps no reference to what submits the jobs, so an owner that is dropped can be collected.

    Attributes:
        batch: runs a job that has a ``request``, and others that come meanwhile; None runs it alone.
        turns: those of rounds and of steps of idle work; may be replaced by one that several workers share.
    """

    def __init__(self, max_waiting: int | None = None, idle: Callable[[], bool] | None = None) -> None:
        self.queue = FairQueue(max_waiting)
        self.idle = IdleWork(idle)
        self.running: list[Job] = []
        self.batch: Callable[[Job], None] | None = None
        self.turns = Turns()
        self._home = home()
        self._last: tuple[Callable[[], None], ...] = ()
        self._thread = self.queue.thread = threading.Thread(target=self._run, name="localspec", daemon=True)
        self._thread.start()
        _WORKERS.add(self)
        in_child(self, Worker._renounce)

    @property
    def n_running(self) -> int:
        return sum(job.running() for job in list(self.running))

    def call(self, function: Callable[[], Result], *, conversation: Hashable | None = None) -> Result:
        """Run a function on the thread, in its turn, and wait for what it returns; ``Closed``."""
        if threading.current_thread() is self._thread:
            return function()

        def closed(job: Job) -> None:
            raise Cancelled("the LLM was closed before its turn came")

        submit = partial(self.queue.put, bounded=False)
        job = Job(lambda job: function(), abandoned=closed, conversation=conversation, submit=submit)
        return job.outcome()  # type: ignore[no-any-return] # what the function returned

    def when_idle(self, task: IdleTask, *, priority: int = 0, after: float = 0.0) -> None:
        self.idle.add(task, priority, after=after)
        self.queue.wake()

    def idle_work_waits(self) -> None:
        """Have tasks looked at again; happens by itself after every job."""
        self.idle.renew()
        self.queue.wake()

    def close(self, *last: Callable[[], None], cancel: bool = False, wait: bool = True) -> None:
        """End the thread after what waits is done, and then what is in ``last``.

        ``cancel`` stops the running jobs and drops those that wait; ``wait`` is for the thread's end, except in that
        thread.
        """
        self._last = self._last or last
        self.queue.close()
        if cancel:
            for job in [*self.queue.waiting(), *self.running]:
                job.cancel()
        if wait and threading.current_thread() is not self._thread:
            while self._thread.is_alive():
                self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            job = self.queue.get(lambda: self.idle.pause(others_answer=self.turns.n_answering > 0))
            if job is not None:
                self.running.append(job)
                with answering(self._home), self.turns.answering():
                    run = Job.run if self.batch is None or job.request is None else self.batch
                    run(job)
                    self.running.clear()
                    del job  # at once: its waiter may drop what it holds
                self.idle.renew(after_job=True)
            elif self.queue.ended:
                break
            else:
                with self.turns.one():
                    self.idle.step(lambda: self.queue.is_urgent)
        idle, self.idle = self.idle, IdleWork(None)
        with ExitStack() as ending:  # each of them, whatever another raises
            for last in reversed(self._last):
                ending.callback(last)
            ending.callback(idle.drop)

    def _renounce(self) -> None:
        """In a forked child: refuse everything, and let nothing of it be freed."""
        self.queue = FairQueue()
        self.queue.close(REFUSAL)
        self.running = []
        _RENOUNCED.append((self, self.idle))
        self.idle = IdleWork(None)
        _WORKERS.discard(self)


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()
_RENOUNCED: list[object] = []
"""Kept, because with a worker and its tasks goes what they close at their end."""


def _end_all() -> None:
    """Stop every worker at its next round, and wait for them. What they own is left to the system."""
    workers = list(_WORKERS)
    for worker in workers:
        worker.close(cancel=True, wait=False)
    ends_at = time.monotonic() + _ENDING_S
    for worker in workers:
        worker._thread.join(max(0.0, ends_at - time.monotonic()))


at_end("workers", _end_all)
