"""Reports on a terminal or in a pipe, as Markdown and as HTML; files that results go to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text as Styled

from localspec.errors import LocalspecError, UsageError
from localspec.report.model import Facts, Figure, Findings, KeyFigures, Part, Report, Status, Table, Text
from localspec.report.svg import asset, policy, render
from localspec.system.files import write_atomically
from localspec.system.terminal import clip, moves_cursor, on_one_line, width

NARROWEST, WIDEST = 40, 110
PIPED = 80  # columns without a terminal
_SHORTEST_NAME = 14  # columns that a table's names keep; the last column is left out first

_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "info": ("·", "-", "dim"),
    "note": ("!", "!", "yellow"),
    "fail": ("✗", "XX", "bold red"),
}
"""Status -> mark, its ASCII form, style."""

_STYLES = {"strong": "bold", "muted": "dim", "note": "yellow", "bad": "red"}

_PLAIN = {
    "✓": "ok", "✗": "XX", "·": "-", "→": "->", "×": "x", "…": "...", "−": "-", "–": "-", "±": "+-", "₀": "0",
    "│": "|", "█": "#", "░": ".", "⁹": "9", "≤": "<=", "≥": ">=",
}  # fmt: skip


class Screen:
    """Prints reports, or parts of one, 80 columns wide or more."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        terminal = moves_cursor(self._file)
        self._encoding = self._file.encoding or "utf-8"
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
        match part:
            case Text(style="small"):
                pass
            case Text(text, style):
                self._prose(f"! {text}" if style == "note" else text, style)
            case Facts(facts):
                for name, value in facts.items():
                    self._prose(f"{name}: {value}", "muted")
            case KeyFigures(figures):
                for each in figures:
                    self._prose(each.text, "strong")
            case Findings():
                self._findings(part)
            case Table():
                self._table(part)
        self._file.flush()

    def sentence(self, text: str) -> None:
        """A first or last word: wrapped on a terminal, one line in a pipe, for scripts."""
        self._heading(text, soft_wrap=not self._console.is_terminal)

    def _heading(self, title: str, *, soft_wrap: bool = False) -> None:
        if self._sections:
            self._console.print()
        self._sections += 1
        self._console.print(self._text(title, "strong"), soft_wrap=soft_wrap)

    def _findings(self, part: Findings) -> None:
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

    def _table(self, part: Table) -> None:
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

    def _prose(self, text: str, style: str) -> None:
        self._print(Padding(self._text(text, style), (0, 0, 0, 2)))

    def _print(self, renderable: Any) -> None:
        with self._console.capture() as capture:
            self._console.print(renderable)
        for line in capture.get().splitlines():  # columns are filled up with spaces, unwanted in a pipe
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


# Reports as Markdown, aligned to read well as plain text.


def markdown(report: Report) -> str:
    sections = [f"# localspec {report.command}: {on_one_line(report.title)}"]
    for part in report.parts:
        if isinstance(part, Figure):
            continue
        if part.title:
            sections.append(f"## {on_one_line(part.title)}")
        match part:
            case Text(text, style):
                text = on_one_line(text)
                sections.append({"strong": f"**{text}**", "note": f"> {text}"}.get(style, text))
            case Facts(facts):
                sections.append(_list(f"{name}: {value}" for name, value in facts.items()))
            case KeyFigures(figures):
                sections.append(_list(each.text for each in figures))
            case Findings():
                after = [f"; {row.advice}" if row.advice else "" for row in part.rows]
                told = zip(part.rows, after, strict=True)
                sections.append(_list(f"{row.name} ({row.status}): {row.text}{advice}" for row, advice in told))
            case Table():
                sections.append(table(part.head, part.rows, part.left))
                sections += [on_one_line(part.note)] if part.note else []
    return "\n\n".join(sections) + "\n"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {on_one_line(item)}" for item in items)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first ``left`` columns are aligned left, the others right."""
    cells = [[on_one_line(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(width, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = []
        for i, (cell, wide) in enumerate(zip(row, widths, strict=True)):
            space = " " * (wide - width(cell))
            padded.append(cell + space if i < left else space + cell)
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (wide - 1) + (":" if i >= left else "-") for i, wide in enumerate(widths)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


# Reports as one HTML page without scripts or outside resources. All text is escaped, and the page's content security
# policy holds even if some were not.


def html(report: Report) -> str:
    style = "".join(map(asset, ("palette.css", "plot.css", "page.css")))
    groups: list[list[Part]] = []  # each part, and with a figure those that stand next to it
    for part in report.parts:
        if groups and _is_small(groups[-1][0]) and _is_small(part) and not part.title:
            groups[-1].append(part)
        else:
            groups.append([part])
    return render("page.html", {"report": report, "groups": groups, "style": style, "policy": policy([style])})


def _is_small(part: Part) -> bool:
    return isinstance(part, Figure) and not part.wide and not part.summary


# Files that results go to: checked before anything takes time, written whole or not at all.

STREAM = "-"  # standard input or output


def checked_output(name: str, *, force: bool, otherwise: str = "") -> Path:
    """A file that a result may go to; ``UsageError``: it is a folder, there is none for it, or it would be replaced
    (``otherwise`` is what else to do then)."""
    path = Path(name)
    if not name or path.is_dir():
        raise UsageError(f"{name or 'an empty name'} is a folder or not a file name")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file; {STREAM} stands for standard output")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; use --force to overwrite it{otherwise}")
    return path


def write_output(path: Path, text: str) -> None:
    """Write a file that this user alone can read; ``LocalspecError``: the disk refuses."""
    try:
        with write_atomically(path, private=True) as file:
            file.write(text.encode())
    except OSError as error:
        raise LocalspecError(f"cannot write {path}: {error.strerror or error}") from None
