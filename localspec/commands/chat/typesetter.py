"""Streams text onto a terminal with a *tail*: text such as rejected draft tokens, erased before anything else is
written.

It takes six sequences of the VT100: index, cursor up and down, save and restore cursor, erase below.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TextIO

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

from localspec.heads import FROM_STATES
from localspec.spec_decode.drafters.names import CORPUS, NGRAM, RECYCLED, kind_of
from localspec.spec_decode.rounds import TokenKind
from localspec.system.terminal import char_width, clip, on_one_line, terminal_size, visible, width, width_is_certain

# Styles. Each differs in more than its colour.


class Style(Enum):
    """A kind of text: (attributes, colour) as SGR parameters."""

    TARGET = ("", "")
    """The target's own tokens."""
    MODEL = ("1", "32")
    """Accepted tokens of a draft model."""
    NGRAM = ("4", "36")
    """Accepted tokens copied from the text or recycled."""
    CORPUS = ("3;4", "33")
    """Accepted tokens copied from the user's files."""
    STATES = ("1;4", "35")
    """Accepted tokens of a head or of the target's first layers."""
    REJECTED = ("9", "91")
    """Struck through, in a red readable on dark and light."""
    NOTE = ("2", "")
    THINKING = ("2;3", "")
    HEAD = ("1", "")
    ERROR = ("", "31")
    PROMPT = ("1", "34")

    def sgr(self, colour: bool) -> str:
        attributes, hue = self.value
        codes = ";".join(code for code in (attributes, hue if colour else "") if code)
        return f"\x1b[{codes}m" if codes else ""


@dataclass(frozen=True, slots=True)
class Painter:
    """Puts texts in a style, as far as escape sequences and colours are allowed."""

    ansi: bool
    colour: bool

    def __call__(self, text: str, style: Style) -> str:
        start = style.sgr(self.colour) if self.ansi else ""
        return f"{start}{text}\x1b[0m" if start else text


def token_style(kind: TokenKind, source: str) -> Style:
    if kind != "accepted":
        return Style.TARGET
    free, states = dict.fromkeys((NGRAM, RECYCLED), Style.NGRAM), dict.fromkeys(FROM_STATES, Style.STATES)
    return (free | states | {CORPUS: Style.CORPUS}).get(kind_of(source), Style.MODEL)


StyledText = tuple[str, Style]
_RESET, _INDEX, _SAVE, _RESTORE, _ERASE_BELOW = "\x1b[0m", "\x1bD", "\x1b7", "\x1b8", "\x1b[J"
TAIL_LINES = 2


class Typesetter:
    """Writes one answer.

    Prose is wrapped between words: a word is in the tail until it is complete, so printed text never moves. Code,
    tables and indented lines are left to the terminal, so that they can be copied. ``size`` is asked at every flush.
    """

    def __init__(
        self, file: TextIO, *, colour: bool = True, size: Callable[[], tuple[int, int]] = terminal_size
    ) -> None:
        self._file = file
        self._colour = colour
        self._paint = Painter(ansi=True, colour=colour)
        self._size = size
        self._columns, self._lines = size()
        self._out: list[str] = []
        self._style = Style.TARGET
        self._column = 0
        self._word: list[StyledText] = []  # characters of a word that may go on
        self._word_cells = 0
        self._is_long = False  # whether a word that takes more than a row goes on, which the terminal breaks
        self._line = ""
        self._fenced = False
        self._certain = True
        self._on_fresh_row = False
        self._has_tail = False

    # -- text that stays -----------------------------------------------------------------------------------------

    def write(self, text: str, style: Style = Style.TARGET) -> None:
        """Add text for good; it appears with the next ``flush``, an open word with the next ``tail``."""
        self._drop_tail()
        for char in visible(text):
            if char == "\n":
                self._newline()
            elif char == "\t":
                self._line += char
                self._end_word()
                for _ in range(8 - self._column % 8):
                    self._put_space(style)
            elif char == " ":
                self._line += char
                self._end_word()
                self._put_space(style)
            else:
                self._line += char
                self._certain = self._certain and width_is_certain(char)
                self._put(char, style)

    def _put(self, char: str, style: Style) -> None:
        """Add a character to its word, or print it where words are not wrapped."""
        cells = char_width(char)
        fits = self._word_cells + cells <= self._columns
        if self._wraps and not self._is_long and fits and (cells == 1 or (cells == 0 and self._word)):
            self._word.append((char, style))
            self._word_cells += cells
            return
        is_long = self._is_long or not fits
        self._end_word()
        self._is_long = is_long
        self._print(char, style)

    def _end_word(self) -> None:
        """Print the word held back."""
        word, self._word = self._word, []
        self._make_room()
        self._word_cells, self._is_long = 0, False
        for char, style in word:
            self._print(char, style)

    def _make_room(self) -> None:
        """Begin a row if the word held back does not fit into this one."""
        if self._word_cells and self._column and self._column + self._word_cells > self._columns:
            self._begin_row()

    def _begin_row(self) -> None:
        self._set_style(Style.TARGET)
        self._out.append("\r\n")
        self._column = 0

    def _print(self, char: str, style: Style) -> None:
        cells = char_width(char)
        if self._column + cells > self._columns:
            if (self._wraps and not self._is_long) or not self._certain:
                self._begin_row()
            else:
                self._column = 0  # the terminal breaks the line, and knows that it is one line
        self._set_style(style)
        self._out.append(char)
        self._column += cells
        self._on_fresh_row = False

    def _put_space(self, style: Style) -> None:
        if self._wraps and (self._column >= self._columns or self._on_fresh_row):
            return  # the line break stands for it
        self._print(" ", style)

    def _newline(self) -> None:
        self._end_word()
        if self._line.lstrip().startswith(("```", "~~~")):
            self._fenced = not self._fenced
        if self._on_fresh_row:  # the line filled its row to the last cell and the cursor has moved on already
            self._on_fresh_row = False
        else:
            self._begin_row()
        self._line, self._column, self._certain = "", 0, True

    @property
    def _wraps(self) -> bool:
        return not (self._fenced or self._line.startswith(("```", "~~~", "|", "    ", "\t")))

    def _leave_edge(self) -> None:
        """Leave the last cell, where saving the cursor is not portable."""
        if self._wraps and not self._is_long:
            self._begin_row()
        else:
            self._out.append(" \r")  # the space makes the terminal wrap; what follows overwrites it
        self._column, self._on_fresh_row = 0, True

    def _set_style(self, style: Style) -> None:
        if style is not self._style:
            self._out.append((_RESET if self._style is not Style.TARGET else "") + style.sgr(self._colour))
            self._style = style

    # -- the tail ------------------------------------------------------------------------------------------------

    def tail(self, segments: Iterable[StyledText], status: str) -> None:
        """Show segments after the text and a status line below, until the next ``write``."""
        self._drop_tail()
        self._resize()
        if self._lines < TAIL_LINES + 2:
            return
        self._make_room()
        self._set_style(Style.TARGET)
        if self._column >= self._columns:
            self._leave_edge()
        room = TAIL_LINES * self._columns - self._column - 1
        shown: list[StyledText] = []
        used = 0
        for text, style in [*self._word, *segments]:
            flat = clip(on_one_line(text), room - used)
            used += width(flat)
            shown.append((flat, style))
            if used >= room:
                break
        down = 1 + (self._column + used) // self._columns
        self._out.append(_INDEX * down + f"\x1b[{down}A" + _SAVE)
        self._out += [self._paint(text, style) for text, style in shown]
        line = self._paint(clip(status, self._columns - 1), Style.NOTE)
        # Saved again, because in some terminals a restored position is used up.
        self._out.append(f"{_RESTORE}{_SAVE}\x1b[{down}B\r{line}{_RESTORE}")
        self._has_tail = True

    def _resize(self) -> None:
        """Ask for the size; a row that became too long is ended."""
        self._columns, self._lines = self._size()
        if self._column > self._columns:
            if self._wraps:
                self._begin_row()
            else:
                self._column = (self._column - 1) % self._columns + 1

    def _drop_tail(self) -> None:
        if self._has_tail:
            self._out.append(_ERASE_BELOW)
            self._has_tail = False

    def flush(self) -> None:
        self._set_style(Style.TARGET)
        if self._out:
            self._file.write("".join(self._out))
            self._out.clear()
        self._file.flush()

    def finish(self) -> None:
        """Erase the tail and end the last line."""
        self._drop_tail()
        self._resize()
        if self._column or self._line:
            self._newline()
        self.flush()


# Markdown as lines for a terminal: parsed by markdown-it, drawn by rich, block by block.

# What a model writes is text to be read: HTML, definitions of links, addresses of images would be dropped from it, so
# they stay as they are; a block then means the same wherever the text around it ends.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_PARSER.disable(["reference", "image", "autolink"])

_MATHS = re.compile(r"\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$", re.DOTALL)


def _maths(state: StateInline, silent: bool) -> bool:
    """Parser rule: formulas stay as written."""
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
"""rich's own boxes suit one kind of background only."""


def blocks(text: str) -> list[str]:
    """Parts of a text that are rendered separately: paragraphs, lists, tables, code blocks, headings."""
    lines = text.split("\n")
    starts = [token.map[0] for token in _PARSER.parse(text) if token.map and token.level == 0 and token.nesting >= 0]
    return ["\n".join(lines[start:end]) for start, end in pairwise([*starts, len(lines)])]


def code_blocks(text: str) -> list[str]:
    return [token.content for token in _PARSER.parse(text) if token.type in _CODE]


def open_code(block: str) -> int | None:
    """Complete lines of code in a fenced block so far; None for other blocks."""
    tokens = _PARSER.parse(block)
    if not tokens or tokens[0].type != "fence":
        return None
    return tokens[0].content.count("\n")


@dataclass(frozen=True, slots=True)
class MarkdownLines:
    """Draws blocks for a terminal."""

    colour: bool = True
    unicode: bool = True

    def render(self, block: str, columns: int, n_code: int = 0, lines: tuple[int, int | None] = (0, None)) -> list[str]:
        """A block as lines of at most ``columns`` cells, with escape sequences for styles only.

        ``n_code`` is the number of code blocks before. ``lines`` selects lines of a code block (end excluded; None:
        all); the title comes with the first.
        """
        rows = self._console(columns).render_lines(_Document(block, n_code, lines, self.unicode), pad=False)
        drawn = [self._ansi(row) for row in rows]
        while drawn and not drawn[0]:
            del drawn[0]
        while drawn and not drawn[-1]:
            del drawn[-1]
        return drawn

    def prose(self, text: str, columns: int) -> list[str]:
        """Plain text as lines."""
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
    """Code under a line with its number, for ``/copy``, and its language."""

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
    """A table that folds its cells."""

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
    """All lines of a text, blocks separated by an empty one."""
    n_code = 0
    for i, block in enumerate(blocks(text)):
        if i:
            yield ""
        yield from drawer.render(block, columns, n_code)
        n_code += len(code_blocks(block))
