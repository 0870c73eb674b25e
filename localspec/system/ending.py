"""What has to end before the interpreter does, and in which order.

A thread that is inside of a C++ library while the interpreter or that library is taken down aborts the process
("terminate called without an active exception"), after all is said and done. So the threads that ask engines are ended
first, then the threads of the engines. ``atexit`` alone runs what was registered last first, which is the engines.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Literal

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
