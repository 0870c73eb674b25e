"""Waiting for what has to happen, instead of for some time; and holding an engine until it has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from localspec import LLM

PATIENCE = 240.0
"""Seconds until something that has to happen counts as missing: less than a test may take. No speed is tested."""


def wait_until(condition: Callable[[], Any], what: str = "") -> None:
    """Until something is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it never came true: {what or condition}"
        time.sleep(0.002)


class Clock:
    """Stands in for the module ``time`` in a module under test: the real one, but a test may put it forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def forward(self, seconds: float) -> None:
        self._ahead += seconds


class Brake:
    """Stops an engine between two passes of its target, so that a test decides what happens in the middle of an answer.

    It gives way when it is released, or when the request has been told to stop: how many passes there were then shows
    whether the engine heeded that. ``after`` passes are let through, the reading of the prompt included.
    """

    def __init__(self, llm: LLM, after: int = 5) -> None:
        self.n_passes = 0  # of the target so far
        self._llm, self._after = llm, after
        self._reached, self._released = threading.Event(), threading.Event()

    def __enter__(self) -> Brake:
        pair = self._llm.inspect()
        self._running, state = pair.worker.running, pair.state
        self._memory: Any = state.context if state.batch is None else state.batch  # of several requests at a time
        self._decode = self._memory._decode
        self._memory._decode = self._held
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
        del self._memory._decode

    def _held(self, *fed: Any) -> Any:
        self.n_passes += 1
        if self.n_passes > self._after and not self._released.is_set():
            self._reached.set()
            jobs = list(self._running)
            wait_until(
                lambda: self._released.is_set() or any(job.cancelled_by is not None for job in jobs) or not jobs,
                "released",
            )
        return self._decode(*fed)

    def wait(self) -> None:
        """Until the engine stands."""
        assert self._reached.wait(PATIENCE), "the engine never came so far"

    def release(self) -> None:
        """Let the engine go on to the end."""
        self._released.set()


@contextmanager
def held(llm: LLM) -> Iterator[None]:
    """What is asked within it begins at its end."""
    started, go = threading.Event(), threading.Event()

    def hold(pair: Any) -> None:
        started.set()
        go.wait(PATIENCE)

    thread = threading.Thread(target=lambda: llm.run(hold))
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield
    finally:
        go.set()
        thread.join()
