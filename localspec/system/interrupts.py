"""Ctrl-C during an answer: a request to stop, not an exception at a random place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block the first Ctrl-C calls ``stop``; a second one raises ``KeyboardInterrupt`` as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_left_to_others() -> Iterator[None]:
    """Within the block Ctrl-C does nothing here: it is for the program in front, which gets it too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler, and not SIG_IGN, which the other program would inherit.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
