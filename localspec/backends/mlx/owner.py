"""The one thread that computes with MLX.

MLX's streams belong to threads: what one thread has begun another cannot always finish. So every call into it, of all
models of the process, is made by one thread of our own, and callers on any thread wait for it. The handing over costs
some 30 microseconds a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")


class OwnerThread:
    """Runs functions one after the other on a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="localspec-mlx", initializer=self._remember)
        self._ident: int | None = None

    def _remember(self) -> None:
        self._ident = threading.get_ident()

    def run(self, function: Callable[[], T]) -> T:
        """The function's result, or its exception.

        Ctrl-C reaches the caller at once; the function still ends, and whatever is asked for next comes after it.
        """
        if threading.get_ident() == self._ident:
            return function()
        return self._pool.submit(function).result()


@cache
def owner() -> OwnerThread:
    """The process's one."""
    return OwnerThread()
