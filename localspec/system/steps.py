"""Long work in steps: a generator that yields after every pass of a model, or about so much, and returns a result.

A command takes all steps at once; in idle time they are taken one at a time, see ``runtime.preparation``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def exhaust(steps: Steps[T], tick: Callable[[], None] = lambda: None) -> T:
    """Take all steps and return the result.

    Args:
        steps: the work.
        tick: called between steps; whatever it raises ends the work.
    """
    try:
        while True:
            next(steps)
            tick()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
