"""Text for a terminal: made harmless, measured in cells, wrapped; progress lines; standard input."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from functools import lru_cache
from typing import Self, TextIO

from localspec.errors import UsageError

# Control characters become their Unicode pictures, C1 controls (a lone 0x9b starts an escape sequence too) and the
# characters that reorder a line become a replacement character. Newline and tab stay.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32)}
_VISIBLE[0x7F] = "␡"
_VISIBLE |= dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_VISIBLE |= {0x2028: "\n", 0x2029: "\n"}
del _VISIBLE[ord("\n")], _VISIBLE[ord("\t")]


def terminal_size() -> tuple[int, int]:
    size = shutil.get_terminal_size((80, 24))
    return max(2, size.columns), max(1, size.lines)


def moves_cursor(file: TextIO) -> bool:
    """Whether a file is a terminal on which the cursor can be moved."""
    if not file.isatty():
        return False
    if sys.platform != "win32":
        return os.environ.get("TERM", "") not in ("dumb", "unknown", "")
    # A console of Windows has to be told to act on escape sequences; before Windows 10 it cannot. Other terminals do.
    import ctypes
    import msvcrt

    mode = ctypes.c_ulong()
    try:
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(file.fileno()))
    except (OSError, ValueError):
        return False
    if not ctypes.windll.kernel32.GetConsoleMode(handle, ctypes.byref(mode)):
        return True
    return bool(ctypes.windll.kernel32.SetConsoleMode(handle, mode.value | 4))  # ENABLE_VIRTUAL_TERMINAL_PROCESSING


def visible(text: str) -> str:
    """The text with every character that could steer a terminal shown as a symbol; newline and tab are kept."""
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def on_one_line(text: str) -> str:
    """``visible``, with newlines and tabs shown as symbols as well."""
    return visible(text).replace("\n", "↵").replace("\t", "⇥")


@lru_cache(maxsize=8192)
def char_width(char: str) -> int:
    """Cells a character takes: 0 for combining marks, 2 for wide ones."""
    if " " <= char < "\u0300":
        return 1
    from wcwidth import wcwidth

    return max(0, wcwidth(char))


def width(text: str) -> int:
    """Cells a text takes. Terminals may draw joined emoji narrower, never wider."""
    return len(text) if text.isascii() else sum(map(char_width, text))


def clip(text: str, cells: int) -> str:
    """The text, cut with an ellipsis if it takes more than so many cells."""
    if width(text) <= cells:
        return text
    kept, used = [], 1
    for char in text:
        used += char_width(char)
        if used > cells:
            break
        kept.append(char)
    return "".join(kept) + "…" if cells > 0 else ""


def wrapped(text: str, columns: int) -> list[str]:
    """Lines of at most so many cells, broken between words; a longer word stays whole."""
    lines = []
    for line in text.split("\n"):
        row = ""
        for word in re.findall(r" *[^ ]+| +$", line):
            if row.strip() and width(row + word) > columns:
                lines.append(row)
                word = word.lstrip()
                row = ""
            row += word
        lines.append(row)
    return lines


INTERVAL = 0.1  # Seconds between two updates of a line


class Progress:
    """One line of progress that is gone afterwards; without a terminal (``live``), one line per remark."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self.live = moves_cursor(self._file)
        self._shown = False
        self._what = ""
        self._said: set[str] = set()
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
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
                # In one write: after a Ctrl-C between two, "interrupted" would stand on this line.
                self._file.write(f"{on_one_line(what)}\n")
                self._file.flush()
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
        if self._shown:
            self._file.write("\r\x1b[K")
            self._file.flush()
            self._shown = False


def decode(data: bytes, where: str) -> str:
    """Bytes as text without byte order mark; ``UsageError``: not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise UsageError(
            f"{where} is not valid UTF-8: byte 0x{byte:02x} at offset {error.start}; convert it first (iconv)"
        ) from None


def read_all() -> str:
    """All of standard input, without the newline that ends it; ``UsageError``: not UTF-8."""
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        key = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
        print(f"type the prompt, end it with {key} on a line of its own", file=sys.stderr, flush=True)
    text = decode(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")
