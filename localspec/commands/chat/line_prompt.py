"""Asking for a line where the terminal can only print."""

from __future__ import annotations

import sys
from typing import TextIO

from localspec.terminal.stdin import decode

QUOTES = '"""'
"""Stand before and behind a message of several lines."""


def is_open(text: str) -> bool:
    """Whether a message began with quotes that were not closed yet."""
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def unquoted(text: str) -> str:
    """A message without the quotes around it; with them it is no command, which a space in front says."""
    if is_open(text) or not text.strip().startswith(QUOTES):
        return text
    return " " + text.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


class PlainPrompt:
    """Reads from standard input as it is; the prompt goes to a file that is not the answer's."""

    had_text = False

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def ask(self, text: str = "") -> str:
        """The next message; a backslash at the end of a line continues it, and so do quotes until they are closed.

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
            going_on = line.endswith("\\")
            lines.append(line[:-1] if going_on else line)
            if not going_on and not is_open("\n".join(lines)):
                return unquoted("\n".join(lines))
