"""How much work a function is, counted in lines of Python that it takes: no load of the machine changes that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def n_steps(function: Callable[[], Any]) -> int:
    """Lines that a call runs, and calls that it makes."""
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return steps
