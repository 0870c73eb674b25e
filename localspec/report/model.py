"""A report as data, rendered for a terminal, as Markdown or as a web page.

A part with a title begins a section. Texts are untrusted: each renderer makes them harmless for its target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from localspec.report.svg import Drawing


Status = Literal["ok", "info", "note", "fail"]
"""``info``: neither good nor bad. ``note``: it works, but not as well as it could."""

TextStyle = Literal["", "strong", "note", "muted", "small"]
"""``note``: must not be missed. ``small``: how figures were measured, left out on a terminal."""

RowStyle = Literal["strong", "bad"]  # ``bad``: not as it should be


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    style: TextStyle = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    facts: Mapping[str, str]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of a checklist."""

    status: Status  # how it is
    name: str  # what was looked at
    text: str  # what was found
    advice: str | None = None  # what to do about it, or to know


@dataclass(frozen=True, slots=True)
class Findings:
    title: str
    rows: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A figure to see first; a terminal and Markdown show its ``text`` only."""

    name: str
    figure: str
    text: str
    status: Status = "info"


@dataclass(frozen=True, slots=True)
class KeyFigures:
    figures: Sequence[KeyFigure]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of words and figures.

    Attributes:
        head: the columns' names, the most important first: a terminal leaves out the last ones if it is too narrow.
    """

    title: str  # of the section
    head: Sequence[str]
    rows: Sequence[Sequence[str]]  # as many cells as ``head`` has
    note: str = ""  # under the table
    left: int = 1  # columns of words, which come first; the others hold figures
    styles: Mapping[int, RowStyle] = field(default_factory=dict)  # of rows, by index


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, on pages only."""

    title: str  # of the section; figures that follow without one stand side by side with it
    draw: Callable[[], Drawing]  # makes the plot, when a page is rendered
    caption: str = ""  # what it shows
    summary: str = ""  # folds it away behind these words
    wide: bool = False  # as wide as the page


Part = Text | Facts | Findings | KeyFigures | Table | Figure


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of a command, in reading order."""

    command: str
    title: str
    parts: Sequence[Part]
