"""What is being done before the first answer, on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from localspec.terminal.text import clip, moves_cursor, on_one_line, terminal_size

INTERVAL = 0.1
"""Seconds between two updates of a line."""


class Progress:
    """One line that shows what is going on and is gone afterwards; where nobody watches, one line per remark.

    Attributes:
        live: whether someone watches: a terminal on which a line can be written again.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self.live = moves_cursor(self._file)
        self._shown = False
        self._what = ""
        self._said: set[str] = set()
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def report(self, what: str, fraction: float | None) -> None:
        """Say what is being done and, if it is known, how much of it is done (0 to 1)."""
        now = time.monotonic()
        if fraction is None and self._what.startswith(what):
            return  # "measuring", while "measuring what a pass of … costs" stands there
        self._what = what
        if not self.live:
            if what not in self._said and fraction is None:
                self._said.add(what)
                print(on_one_line(what), file=self._file, flush=True)
            return
        if now < self._next and fraction not in (None, 1.0):
            return
        self._next = now + INTERVAL
        columns, _ = terminal_size()
        share = f" {fraction:.0%}" if fraction is not None else ""
        line = clip(on_one_line(what), columns - 1 - len(share)) + share
        self._file.write(f"\r\x1b[K{line}")
        self._file.flush()
        self._shown = True

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._file.write("\r\x1b[K")
            self._file.flush()
            self._shown = False
