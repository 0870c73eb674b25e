"""Reports as Markdown, aligned so that it reads well as plain text too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatch

from localspec.commands.report.model import Facts, Figure, Findings, KeyFigures, Lines, Part, Report, Table, Text
from localspec.terminal.text import on_one_line, width


def markdown(report: Report) -> str:
    """The report but its figures."""
    sections = [f"# localspec {report.command}: {on_one_line(report.title)}"]
    for part in report.parts:
        if isinstance(part, Figure):
            continue
        if part.title:
            sections.append(f"## {on_one_line(part.title)}")
        sections += _blocks(part)
    return "\n\n".join(sections) + "\n"


@singledispatch
def _blocks(part: Part) -> Iterator[str]:
    raise NotImplementedError(type(part))


@_blocks.register
def _(part: Text) -> Iterator[str]:
    text = on_one_line(part.text)
    yield {"strong": f"**{text}**", "note": f"> {text}"}.get(part.style, text)


@_blocks.register
def _(part: Lines) -> Iterator[str]:
    yield "\n".join(["```", *(on_one_line(line) for line in part.lines), "```"])


@_blocks.register
def _(part: Facts) -> Iterator[str]:
    yield "\n".join(f"- {name}: {on_one_line(value)}" for name, value in part.facts.items())


@_blocks.register
def _(part: Findings) -> Iterator[str]:
    yield "\n".join(
        f"- {on_one_line(row.name)} ({row.status}): {on_one_line(row.text)}"
        + (f"; {on_one_line(row.advice)}" if row.advice else "")
        for row in part.rows
    )


@_blocks.register
def _(part: KeyFigures) -> Iterator[str]:
    yield "\n".join(f"- {on_one_line(each.text)}" for each in part.figures)


@_blocks.register
def _(part: Table) -> Iterator[str]:
    yield table(part.head, part.rows, part.left)
    if part.note:
        yield on_one_line(part.note)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table, aligned as plain text too; the first columns to the left, the others to the right."""
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
