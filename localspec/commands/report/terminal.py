"""Reports on a terminal or in a pipe, 80 columns wide or more; part by part, as they become known."""

from __future__ import annotations

import os
import sys
from functools import singledispatchmethod
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text as Styled

from localspec.commands.report.model import (
    Facts,
    Figure,
    Findings,
    KeyFigures,
    Lines,
    Part,
    Report,
    Status,
    Table,
    Text,
)
from localspec.terminal.text import clip, moves_cursor, on_one_line, width

NARROWEST, WIDEST = 40, 110
PIPED = 80
"""Columns where there is no terminal."""

_SHORTEST_NAME = 14
"""Columns that a table's names keep; before they get fewer, its last column is left out."""

_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "info": ("·", "-", "dim"),
    "note": ("!", "!", "yellow"),
    "fail": ("✗", "XX", "bold red"),
}
"""Status -> mark, the same in ASCII, style."""

_STYLES = {"strong": "bold", "muted": "dim", "note": "yellow", "bad": "red"}

# What a character becomes where it cannot be shown.
_PLAIN = {
    "✓": "ok", "✗": "XX", "·": "-", "→": "->", "×": "x", "…": "...", "−": "-", "–": "-", "±": "+-", "₀": "0",
    "│": "|", "⁹": "9", "≤": "<=", "≥": ">=",
}  # fmt: skip


class Screen:
    """Prints reports, or parts of one.

    Args:
        file: standard output by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        terminal = moves_cursor(self._file)
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

    @property
    def width(self) -> int:
        """Columns."""
        return self._console.width

    def report(self, report: Report) -> None:
        """All of a report but its figures."""
        self._heading(report.title)
        for part in report.parts:
            self.show(part)

    def show(self, part: Part) -> None:
        """A part, under its title."""
        if isinstance(part, Figure):
            return
        if part.title:
            self._heading(part.title)
        self._body(part)
        self._file.flush()

    def sentence(self, text: str) -> None:
        """A first or last word: on a terminal wrapped, in a pipe one line, for scripts."""
        if self._sections:
            self._console.print()
        self._sections += 1
        self._console.print(self._text(text, "strong"), soft_wrap=not self._console.is_terminal)

    def _heading(self, title: str) -> None:
        if self._sections:
            self._console.print()
        self._sections += 1
        self._console.print(self._text(title, "strong"))

    @singledispatchmethod
    def _body(self, part: Part) -> None:
        raise NotImplementedError(type(part))

    @_body.register
    def _(self, part: Text) -> None:
        if part.style != "small":
            self._prose(("! " if part.style == "note" else "") + part.text, part.style)

    @_body.register
    def _(self, part: Lines) -> None:
        for line in part.lines:
            self._console.print(self._text(line.rstrip()), no_wrap=True, overflow="crop", crop=True)

    @_body.register
    def _(self, part: Facts) -> None:
        for name, value in part.facts.items():
            self._prose(f"{name}: {value}", "muted")

    @_body.register
    def _(self, part: KeyFigures) -> None:
        for each in part.figures:
            self._prose(each.text, "strong")

    @_body.register
    def _(self, part: Findings) -> None:
        grid = Grid.grid(padding=(0, 1))
        grid.add_column(width=2, no_wrap=True)
        grid.add_column(width=max([11, *(width(row.name) for row in part.rows)]), no_wrap=True)
        grid.add_column(overflow="fold")
        for row in part.rows:
            mark, plain, style = _MARKS[row.status]
            shown = Styled(mark if self._shows(mark) else plain, style=style, justify="right")
            grid.add_row(shown, self._text(row.name), self._text(row.text))
            if row.advice is not None:
                grid.add_row("", "", self._text(f"→ {row.advice}", "" if row.status == "info" else style))
        if part.rows:
            self._print(grid)

    @_body.register
    def _(self, part: Table) -> None:
        rows = [part.head, *part.rows]
        widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
        room = self._console.width - 2
        while len(widths) > 1 and sum(widths[1:]) + len(widths) - 1 + min(_SHORTEST_NAME, widths[0]) > room:
            widths.pop()
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= room else 1
        widths[0] = min(widths[0], room - sum(widths[1:]) - gap * (len(widths) - 1))
        grid = Grid.grid(padding=(0, gap, 0, 0))
        for i, columns in enumerate(widths):
            grid.add_column(width=columns, justify="left" if i < part.left else "right", no_wrap=True)
        for i, row in enumerate(rows):
            style = "muted" if i == 0 else part.styles.get(i - 1, "")
            grid.add_row(*(self._text(clip(cell, wide), style) for cell, wide in zip(row, widths, strict=False)))
        self._print(Padding(grid, (0, 0, 0, 2)))
        if left_out := part.head[len(widths) :]:
            self._prose(clip(f"no room for: {', '.join(left_out)}", room), "muted")
        if part.note:
            self._prose(part.note, "muted")

    # -- printing ------------------------------------------------------------------------------------------------

    def _prose(self, text: str, style: str) -> None:
        """Sentences, wrapped between words."""
        self._print(Padding(self._text(text, style), (0, 0, 0, 2)))

    def _print(self, renderable: Any) -> None:
        with self._console.capture() as capture:
            self._console.print(renderable)
        for line in capture.get().splitlines():  # columns are filled up with spaces, which nobody wants in a pipe
            self._file.write(line.rstrip() + "\n")

    def _text(self, text: str, style: str = "") -> Styled:
        # Names come from files and the command line: nothing in them may act on the terminal.
        shown = "".join(c if self._shows(c) else _PLAIN.get(c, "?") for c in on_one_line(text))
        return Styled(shown, style=_STYLES.get(style, style))

    def _shows(self, text: str) -> bool:
        try:
            text.encode(self._encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True
