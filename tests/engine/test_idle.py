"""Idle work: done while nothing waits, in order of priority, and given up at once for whatever comes."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Generator, Iterator

import pytest

from localspec import LLM, SamplingParams
from localspec.engine import worker as worker_module
from localspec.engine.worker import ASK_AGAIN_S, IdleTask, IdleWork, Job, Stopped, Worker, on_mains
from localspec.errors import Cancelled, EngineError
from tests.conftest import TinyFiles
from tests.support.waiting import Clock, wait_until

SOON = 30.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(idle=lambda: True)
    yield worker
    worker.close(cancel=True)


def steps(n: int, log: list[str], name: str = "step") -> IdleTask:

    def task(stopped: Stopped) -> Generator[None, None, None]:
        for _ in range(n):
            log.append(name)
            yield

    return task


class Holding:
    """A task whose one step goes on until it is told to stop."""

    def __init__(self) -> None:
        self.entered, self.left = threading.Event(), threading.Event()
        self.times = 0

    def __call__(self, stopped: Stopped) -> Generator[None, None, None]:
        self.times += 1
        self.entered.set()
        while not stopped():
            self.left.wait(0.001)
        self.left.set()
        raise Cancelled("stopped")
        yield


def test_priorities(worker: Worker) -> None:
    log: list[str] = []

    def add() -> None:  # on the thread, so that both are there before either is asked
        worker.when_idle(steps(2, log, "late"), priority=5)
        worker.when_idle(steps(2, log, "early"), priority=1)

    worker.call(add)
    assert worker.queue.wait_at_rest(SOON)
    assert log == ["early", "early", "late", "late"]


def test_a_job_stops_a_step_and_the_step_is_taken_up_again(worker: Worker) -> None:
    holding = Holding()
    worker.when_idle(holding)
    assert holding.entered.wait(SOON)
    holding.entered.clear()
    assert not worker.running  # idle work is nobody's request
    assert len(worker.queue) == 0
    assert worker.call(lambda: "answer") == "answer"
    assert holding.left.is_set()
    assert holding.entered.wait(SOON)  # it has more to do, and nothing waits
    assert holding.times == 2


def test_a_cancelled_job_takes_nothing_from_idle_work(worker: Worker) -> None:
    log: list[str] = []
    worker.when_idle(steps(50, log))
    for _ in range(20):
        job = Job(lambda job: None, lambda item: None)
        worker.queue.put(job)
        job.cancel()
    assert worker.queue.wait_at_rest(SOON)
    assert log == ["step"] * 50


def test_tasks_are_asked_again_after_every_job_and_when_told(worker: Worker) -> None:
    asked: list[int] = []

    def task(stopped: Stopped) -> Generator[bool, None, None]:
        while True:
            asked.append(len(asked))
            if len(asked) == 1:
                worker.idle_work_waits()
            yield False

    worker.when_idle(task)
    assert worker.queue.wait_at_rest(SOON)
    assert len(asked) == 2
    worker.call(lambda: None)
    assert worker.queue.wait_at_rest(SOON)
    assert len(asked) == 3
    worker.idle_work_waits()
    assert worker.queue.wait_at_rest(SOON)
    assert len(asked) == 4


@pytest.mark.parametrize("error", [EngineError("no room"), ValueError("a defect"), Cancelled("by nobody")])
def test_a_task_that_fails_is_dropped_and_harms_nothing(
    worker: Worker, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def task(stopped: Stopped) -> Generator[None, None, None]:
        asked.append(1)
        raise error
        yield

    with caplog.at_level(logging.DEBUG, "localspec"):
        worker.when_idle(task)
        assert worker.queue.wait_at_rest(SOON)
        assert worker.call(lambda: "answer") == "answer"
        assert worker.queue.wait_at_rest(SOON)
    assert asked == [1]
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_closing_stops_a_step_and_waits_for_jobs_only() -> None:
    worker, holding, ended = Worker(idle=lambda: True), Holding(), threading.Event()
    worker.when_idle(holding)
    assert holding.entered.wait(SOON)
    log: list[str] = []
    job = Job(lambda job: log.append("job"), lambda item: None)
    worker.queue.put(job)
    worker.close(ended.set)
    assert ended.is_set()
    assert log == ["job"]
    assert worker.queue.wait_at_rest(SOON)
    held = weakref.ref(holding)
    del holding
    gc.collect()
    assert held() is None


def test_work_that_was_dropped_frees_what_it_holds_and_work_that_is_not_due_waits() -> None:
    idle, log = IdleWork(lambda: True), list[str]()
    kept: list[Generator[None, None, None]] = []  # as by another thread

    def holding(stopped: Stopped) -> Generator[None, None, None]:
        def hold() -> Generator[None, None, None]:
            try:
                yield
                idle.drop(3)  # it goes on
                log.append("at work")
            finally:
                idle.renew()  # nothing is locked
                log.append("freed")

        kept.append(hold())
        return kept[-1]

    idle.add(holding, 3)
    idle.step(lambda: False)
    idle.step(lambda: False)
    assert log == ["at work", "freed"]
    log.clear()
    idle.add(holding, 3)
    idle.step(lambda: False)
    idle.add(steps(2, log, "late"), 1, after=60.0)
    idle.add(steps(2, log, "now"), 2)
    idle.drop(3)
    for _ in range(4):
        idle.step(lambda: False)
    idle.renew()
    idle.step(lambda: False)
    assert log == ["freed", "now", "now"]
    assert idle.pause() == (None, True)


@pytest.mark.parametrize(("told", "allowed"), [(True, False), (False, True), (None, True)])
def test_the_battery_is_asked_about_now_and_then(
    monkeypatch: pytest.MonkeyPatch, told: bool | None, allowed: bool
) -> None:
    asked, log, clock = list[int](), list[str](), Clock()

    def on_battery() -> bool | None:
        asked.append(1)
        return told

    monkeypatch.setattr(worker_module, "on_battery", on_battery)
    monkeypatch.setattr(worker_module, "time", clock)
    idle = IdleWork(on_mains)
    idle.add(steps(9, log))
    for n in (3, 6):
        for _ in range(3):
            idle.step(lambda: False)
        assert (len(log), len(asked)) == (n * allowed, n // 3)
        assert idle.pause()[1] is not allowed
        clock.forward(ASK_AGAIN_S)


def test_a_dropped_llm_with_idle_work_is_collected(tiny: TinyFiles) -> None:
    llm = LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=256)
    llm.generate("x", SamplingParams(max_tokens=2))
    holding = Holding()
    llm.inspect().worker.when_idle(holding)
    assert holding.entered.wait(SOON)
    thread, context, alive = llm.run(lambda pair: threading.current_thread()), llm.inspect().context, weakref.ref(llm)
    del llm

    def collected() -> bool:
        gc.collect()  # not at the first time, where the worker is just putting the last request away
        return alive() is None

    wait_until(collected)
    thread.join(SOON)
    assert not thread.is_alive()
    assert context.closed
