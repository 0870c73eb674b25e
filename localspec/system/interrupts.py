"""Ctrl-C during an answer: a request to stop, not an exception at a random place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_interrupt(stop: Callable[[], None], *, ended_too: bool = False) -> Iterator[None]:
    """Within the block the first Ctrl-C calls ``stop``; a second one raises ``KeyboardInterrupt`` as usual.

    Args:
        stop: called in the main thread, wherever it is.
        ended_too: likewise when the process is told to end, or its terminal is closed and that is not ignored (nohup):
            a long job without a terminal would die without a word.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers: list[int] = [signal.SIGINT]
    if ended_too:
        known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        numbers += [number for number in known if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        stop()

    for number in numbers:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


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
