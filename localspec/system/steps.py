"""Long work in steps: a generator that yields after about every pass of a model, and returns a result. A command takes
all steps at once; idle time takes one at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def exhaust(steps: Steps[T], tick: Callable[[], object] = lambda: None) -> T:
    """Take all steps and return the result; ``tick`` is called between them, and what it raises ends the work."""
    try:
        while True:
            next(steps)
            tick()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
