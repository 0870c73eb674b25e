"""Findings on a terminal or in a pipe: headings, marked rows, tables; 80 columns wide or more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from localspec.terminal.text import clip, on_one_line

Status = Literal["ok", "info", "note", "fail"]
"""``info`` is a fact that is neither good nor bad; ``note``: it works, but not as well as it could."""

NARROWEST, WIDEST = 40, 110
PIPED = 80
"""Columns where there is no terminal."""

_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "info": ("·", "-", "dim"),
    "note": ("!", "!", "yellow"),
    "fail": ("✗", "XX", "bold red"),
}
"""Status -> mark, the same in ASCII, style."""

# What a character becomes where it cannot be shown.
_PLAIN = {
    "✓": "ok", "✗": "XX", "·": "-", "→": "->", "×": "x", "…": "...", "−": "-", "–": "-", "±": "+-", "₀": "0",
    "│": "|", "⁹": "9", "≤": "<=", "≥": ">=",
}  # fmt: skip


class MarkedRow(Protocol):
    """One finding: a mark, a name, what was found, and under it what to do or to know."""

    @property
    def status(self) -> Status: ...
    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def advice(self) -> str | None: ...


class Sheet:
    """Prints section by section, as they become known.

    Args:
        file: standard output by default.
        label: columns for the names of marked rows.
    """

    def __init__(self, file: TextIO | None = None, label: int = 11) -> None:
        self._file = file or sys.stdout
        terminal = self._file.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._encoding = self._file.encoding or "utf-8"
        self.unicode = self._shows("▁█")
        self._console = Console(
            file=self._file,
            width=None if self._file.isatty() else PIPED,
            force_terminal=terminal,
            no_color=not terminal or bool(os.environ.get("NO_COLOR")),
            color_system="standard" if terminal else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._console.width = max(NARROWEST, min(WIDEST, self._console.width))
        self._sections = 0
        self._label = label

    def section(self, title: str, rows: Iterable[MarkedRow] = ()) -> None:
        """A heading and its rows."""
        if self._sections:
            self._console.print()
        self._sections += 1
        self._console.print(self._text(title, "bold"))
        self.rows(rows)

    def rows(self, rows: Iterable[MarkedRow]) -> None:
        """Rows: mark, name, what was found, and under it what to do."""
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2, no_wrap=True)
        table.add_column(width=self._label, no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            mark, plain, style = _MARKS[row.status]
            table.add_row(
                Text(mark if self._shows(mark) else plain, style=style, justify="right"),
                self._text(row.name),
                self._text(row.text),
            )
            if row.advice is not None:
                table.add_row("", "", self._text(f"→ {row.advice}", "" if row.status == "info" else style))
        if table.row_count:
            self._print(table)

    def prose(self, text: str, style: str = "", indent: int = 2) -> None:
        """Sentences, wrapped between words."""
        self._print(Padding(self._text(text, style), (0, 0, 0, indent)))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 20) -> None:
        """Figures, right-aligned, behind a column of names that are clipped to ``names`` columns."""
        table = Table.grid(padding=(0, 1))
        cells = [list(head), *(list(row) for row in rows)]
        table.add_column(width=min(names, max(len(row[0]) for row in cells)) + 2, no_wrap=True)
        for _ in head[1:]:
            table.add_column(justify="right", no_wrap=True, min_width=6)
        for i, row in enumerate(cells):
            style = "dim" if i == 0 else ""
            table.add_row(
                *(self._text(("  " if j == 0 else "") + clip(cell, names), style) for j, cell in enumerate(row))
            )
        self._print(table)

    def line(self, text: str) -> None:
        """A line as it is; what does not fit is cut."""
        self._console.print(self._text(text.rstrip()), no_wrap=True, overflow="crop", crop=True)

    # -- printing ------------------------------------------------------------------------------------------------

    def _print(self, renderable: Any) -> None:
        with self._console.capture() as capture:
            self._console.print(renderable)
        for line in capture.get().splitlines():  # columns are filled up with spaces, which nobody wants in a pipe
            self._file.write(line.rstrip() + "\n")
        self._file.flush()

    def _text(self, text: str, style: str = "") -> Text:
        # Names come from files and the command line: nothing in them may act on the terminal.
        return Text("".join(c if self._shows(c) else _PLAIN.get(c, "?") for c in on_one_line(text)), style=style)

    def _shows(self, text: str) -> bool:
        try:
            text.encode(self._encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True
