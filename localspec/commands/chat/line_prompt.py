"""Asking for a line where the terminal can only print."""

from __future__ import annotations

import sys
from typing import TextIO

from localspec.terminal.stdin import decode


class PlainPrompt:
    """Reads from standard input as it is; the prompt goes to a file that is not the answer's."""

    had_text = False

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def ask(self) -> str:
        """The next message; a backslash at the end of a line continues it.

        Raises:
            EOFError: the input has ended.
        """
        lines: list[str] = []
        while True:
            print(". " if lines else "> ", end="", file=self._file, flush=True)
            try:
                data = sys.stdin.buffer.readline()
            except KeyboardInterrupt:
                print(file=self._file, flush=True)
                raise
            if not data:
                raise EOFError
            line = decode(data, "the line").rstrip("\r\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
