"""The one thread that computes with MLX.

MLX's streams belong to threads: what one thread has begun another cannot always finish. So every call into it, of all
models of the process, is made by one thread of our own, and callers on any thread wait for it. The handing over costs
some 30 microseconds a pass.

The streams must also be gone before the process is: MLX aborts it otherwise, one time in three here, after all is said
and done ("terminate called without an active exception"). So the thread ends just before the program, and clears up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

import mlx.core as mx

from localspec.errors import Closed
from localspec.system.ending import at_end
from localspec.system.forking import in_child

T = TypeVar("T")

_PATIENCE_S = 30.0
"""How long the end of the program waits for the pass that is under way."""


class OwnerThread:
    """Runs functions one after the other on a thread of its own, until the program ends."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._handing_in = threading.Lock()
        self._ended = ""
        # A daemon, or the interpreter would wait for it before it runs what is registered to end it.
        self._thread = threading.Thread(target=self._work, name="localspec-mlx", daemon=True)
        self._thread.start()
        at_end("engines", self.end)
        in_child(self, OwnerThread._renounce)

    def run(self, function: Callable[[], T]) -> T:
        """The function's result, or its exception.

        Ctrl-C reaches the caller at once; the function still ends, and whatever is asked for next comes after it.

        Raises:
            Closed: the program is ending, or is a child forked after MLX was used.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        with self._handing_in:
            if self._ended:
                raise Closed(self._ended)
            self._waiting.put((function, future))
        return future.result()

    def end(self) -> None:
        """Finish what was handed in, and free MLX's streams. Nothing runs here afterwards."""
        with self._handing_in:
            if not self._ended:
                self._ended = "MLX cannot be used any more: the program is ending"
                self._waiting.put(None)
        self._thread.join(_PATIENCE_S)

    def _renounce(self) -> None:
        """In a forked child: the thread, and what MLX itself runs, are the parent's."""
        self._handing_in = threading.Lock()
        self._ended = (
            "MLX was used before this process was forked, and cannot be used in the child; start a new process instead"
        )

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del item, function, future  # or the arrays of the last pass live until the next
        mx.clear_streams()


@cache
def owner() -> OwnerThread:
    """The process's one."""
    return OwnerThread()
