"""Markdown as lines for a terminal: parsed by markdown-it, drawn by rich, block by block."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, TableElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

# What a model writes is text to be read: HTML, definitions of links, addresses of images would be dropped from it, so
# they stay as they are; a block then means the same wherever the text around it ends.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_PARSER.disable(["reference", "image", "autolink"])

_MATHS = re.compile(r"\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$", re.DOTALL)


def _maths(state: StateInline, silent: bool) -> bool:
    """A rule of the parser: formulas are left as they were written."""
    found = _MATHS.match(state.src, state.pos)
    if found is None:
        return False
    if not silent:
        state.push("text", "", 0).content = found[0]
    state.pos = found.end()
    return True


_PARSER.inline.ruler.before("escape", "maths", _maths)

_CODE = ("fence", "code_block")

_STYLES = Theme({
    "markdown.code": "bold cyan",
    "markdown.code_block": "none",
    "markdown.h1": "bold underline",
    "markdown.h2": "bold underline",
    "markdown.h3": "bold",
    "markdown.h4": "bold",
    "markdown.block_quote": "italic",
    "markdown.item.bullet": "bold",
    "markdown.item.number": "bold",
    "markdown.table.header": "bold",
    "markdown.table.border": "dim",
})  # fmt: skip
"""rich's own has black and yellow boxes, which suit one kind of background only."""


def blocks(text: str) -> list[str]:
    """The parts of a text that are rendered each by itself: paragraphs, lists, tables, code blocks, headings."""
    lines = text.split("\n")
    starts = [token.map[0] for token in _PARSER.parse(text) if token.map and token.level == 0 and token.nesting >= 0]
    return ["\n".join(lines[start:end]) for start, end in pairwise([*starts, len(lines)])]


def code_blocks(text: str) -> list[str]:
    """The code in a text, in order."""
    return [token.content for token in _PARSER.parse(text) if token.type in _CODE]


def open_code(block: str) -> int | None:
    """How many complete lines of code there are so far in a block that is fenced code; None if it is something else."""
    tokens = _PARSER.parse(block)
    if not tokens or tokens[0].type != "fence":
        return None
    return tokens[0].content.count("\n")


@dataclass(frozen=True, slots=True)
class MarkdownLines:
    """Draws blocks for a terminal.

    Attributes:
        colour: whether colours may be used.
        unicode: whether lines can be drawn.
    """

    colour: bool = True
    unicode: bool = True

    def render(self, block: str, columns: int, n_code: int = 0, lines: tuple[int, int | None] = (0, None)) -> list[str]:
        """A block as lines of at most so many cells, with escape sequences for styles only.

        Args:
            block: of text in which nothing acts on a terminal.
            columns: most cells of a line.
            n_code: how many code blocks there were before it; they are numbered.
            lines: of a fenced block, the lines of code that are drawn, the second number not included; from a line
                other than the first on there is no title.
        """
        rows = self._console(columns).render_lines(_Document(block, n_code, lines, self.unicode), pad=False)
        drawn = [self._ansi(row) for row in rows]
        while drawn and not drawn[0]:
            del drawn[0]
        while drawn and not drawn[-1]:
            del drawn[-1]
        return drawn

    def prose(self, text: str, columns: int) -> list[str]:
        """A text that is no Markdown as lines of at most so many cells."""
        return [line.plain.rstrip() for line in Text(text).wrap(self._console(columns), columns)] if text else []

    def _console(self, columns: int) -> Console:
        return Console(
            file=io.StringIO(),
            width=max(columns, 8),  # rich cannot draw a table in less
            force_terminal=True,
            color_system="standard",
            theme=_STYLES,
            highlight=False,
            emoji=False,
            safe_box=not self.unicode,
            legacy_windows=False,
        )

    def _ansi(self, row: Iterable[Segment]) -> str:
        segments = list(row if self.colour else Segment.remove_color(row))
        while segments and not segments[-1].text.strip():  # what fills the row: nothing to copy, nothing to wrap
            segments.pop()
        segments[-1:] = [Segment(each.text.rstrip(), each.style) for each in segments[-1:]]
        system = ColorSystem.STANDARD
        return "".join(each.style.render(each.text, color_system=system) if each.style else each.text
                       for each in segments)  # fmt: skip


class _LeftHeading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _NumberedCode(CodeBlock):
    """Code under a line with its number, which ``/copy`` takes, and its language."""

    def __init__(self, markdown: _Document, language: str) -> None:
        super().__init__(language or "text", "ansi_dark")
        markdown.n_code += 1
        rule = "──" if markdown.unicode else "--"
        self._title = f"{rule} {markdown.n_code} {language}".rstrip() + f" {rule}"
        self._lines = markdown.lines

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> CodeBlock:
        assert isinstance(markdown, _Document)
        return cls(markdown, (token.info or "").strip().partition(" ")[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, last = self._lines
        if first == 0:
            yield Text(self._title, "dim", no_wrap=True, overflow="ellipsis")
        code = self.text.plain.removesuffix("\n")
        if code.count("\n") >= first:
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default",
                         line_range=(first + 1, last))  # fmt: skip


class _FoldedTable(TableElement):
    """A table whose cells are as high as they must be, rather than cut off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column in table.columns:
                column.overflow = "fold"
            yield table


class _Document(Markdown):
    elements = Markdown.elements | {
        "table_open": _FoldedTable,
        "heading_open": _LeftHeading,
        "fence": _NumberedCode,
        "code_block": _NumberedCode,
    }

    def __init__(self, text: str, n_code: int, lines: tuple[int, int | None], unicode: bool) -> None:
        super().__init__("", hyperlinks=False)  # an address is shown, and not hidden behind a word
        self.parsed = _PARSER.parse(text)
        self.n_code, self.lines, self.unicode = n_code, lines, unicode


def whole(text: str, columns: int, drawer: MarkdownLines) -> Iterator[str]:
    """All lines of a text, with an empty one between two blocks."""
    n_code = 0
    for i, block in enumerate(blocks(text)):
        if i:
            yield ""
        yield from drawer.render(block, columns, n_code)
        n_code += len(code_blocks(block))
