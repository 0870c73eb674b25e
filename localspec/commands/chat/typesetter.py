"""Sets an answer for a terminal while it comes: styles, wrapping, Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import groupby, pairwise
from typing import TextIO

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, TableElement
from rich.segment import Segment
from rich.style import Style as RichStyle
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from localspec.heads import FROM_STATES
from localspec.spec_decode.drafters.names import CORPUS, NGRAM, kind_of
from localspec.spec_decode.rounds import TokenKind
from localspec.system.terminal import char_width, clip, on_one_line, terminal_size, visible, width

# Styles. Each differs in more than its colour.


class Style(Enum):
    """A kind of text, and the style of rich that it has."""

    TARGET = ""  # the target's own tokens
    MODEL = "bold green"  # accepted tokens of a draft model
    NGRAM = "underline cyan"  # accepted ones that n-grams copied from the text
    CORPUS = "italic underline yellow"  # accepted ones copied from the user's files
    STATES = "bold underline magenta"  # accepted ones of a head or of the target's first layers
    REJECTED = "strike bright_red"  # a red readable on dark and light
    NOTE = "dim"
    THINKING = "dim italic"
    HEAD = "bold"
    ERROR = "red"
    PROMPT = "bold blue"


def token_style(kind: TokenKind, source: str) -> Style:
    if kind != "accepted":
        return Style.TARGET
    states = dict.fromkeys(FROM_STATES, Style.STATES)
    return (states | {NGRAM: Style.NGRAM, CORPUS: Style.CORPUS}).get(kind_of(source), Style.MODEL)


StyledText = tuple[str, Style]
TAIL_LINES = 2
MIN_LINES = 4  # lower screens have the open row alone
_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""In the region, a line that comes out wider than counted (joined emoji) must not become two."""


class Paper:
    """A file that answers are set on, in styles as far as it takes them.

    What may still change is a region at the end that is drawn anew: lines that stay are printed above it, the status
    line is below. The cursor rests at its first cell, so an update is one write and nothing above moves. ``size`` is
    asked at every update, as windows change. Where the cursor cannot be moved (``ansi``) there are lines that stay.
    """

    def __init__(self, file: TextIO, *, ansi: bool, colour: bool) -> None:
        self.file, self.ansi, self.colour = file, ansi, colour
        self.size: Callable[[], tuple[int, int]] = terminal_size
        self.unicode = (file.encoding or "").lower().replace("-", "") in ("utf8", "utf16")

    @property
    def columns(self) -> int:
        return self.size()[0]

    def paint(self, text: str, style: Style) -> str:
        return self.painted([(text, style)])

    def painted(self, row: Iterable[StyledText]) -> str:
        runs = groupby(row, key=lambda each: each[1])
        return self._rendered(
            Segment("".join(text for text, _ in run), RichStyle.parse(style.value)) for style, run in runs
        )

    def _rendered(self, segments: Iterable[Segment]) -> str:
        plain = Segment.remove_color if self.ansi else Segment.strip_styles
        system = ColorSystem.STANDARD
        return "".join(each.style.render(each.text, color_system=system) if each.style else each.text
                       for each in (segments if self.colour else plain(segments)))  # fmt: skip

    def update(self, printed: Sequence[str], rows: Sequence[str], status: str) -> None:
        if not self.ansi:
            self._write("".join(f"{line}\n" for line in printed))
            return
        columns, height = self.size()
        out = [_HIDE_CURSOR, *(f"{_ERASE_LINE}{line}\r\n" for line in printed)]
        low = height < MIN_LINES
        shown = rows[-1:] if low else [*rows, self.paint(clip(status, columns - 1), Style.NOTE)]
        out += [_NO_WRAP, "\r\n".join(f"{_ERASE_LINE}{row}" for row in shown), _ERASE_BELOW, _WRAP, "\r"]
        if len(shown) > 1:
            out.append(f"\x1b[{len(shown) - 1}A")
        self._write("".join(out))

    def end(self, printed: Sequence[str]) -> None:
        """Print the last lines in place of the region."""
        if not self.ansi:
            self.update(printed, [], "")
            return
        lines = "".join(f"{_ERASE_LINE}{line}\r\n" for line in printed)
        self._write(f"{lines}{_ERASE_BELOW}{_SHOW_CURSOR}")

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()

    def rows(self, parts: Iterable[StyledText], indent: int = 0) -> list[str]:
        """Styled text as lines that leave the last cell free, broken between words; all but the first indented."""
        columns = self.columns - 1 - indent
        console, text = self.console(columns), Text.assemble(*((text, style.value) for text, style in parts))
        lines = [self._trimmed(line.render(console)) for line in text.wrap(console, max(columns, 1))]
        return [" " * (indent if i else 0) + line for i, line in enumerate(lines)]

    def markdown(self, block: str, n_code: int = 0, lines: tuple[int, int | None] = (0, None)) -> list[str]:
        """A block of Markdown as lines that leave the last cell free, with escape sequences for styles only.

        ``n_code`` is the number of code blocks before. ``lines`` selects lines of a code block (end excluded; None:
        all); the title comes with the first.
        """
        rows = self.console(self.columns - 1).render_lines(_Document(block, n_code, lines, self.unicode), pad=False)
        drawn = "\n".join(self._trimmed(row) for row in rows).strip("\n")
        return drawn.split("\n") if drawn else []

    def whole(self, text: str) -> Iterator[str]:
        """All lines of a text in Markdown, blocks separated by an empty one."""
        n_code = 0
        for i, block in enumerate(blocks(text)):
            if i:
                yield ""
            yield from self.markdown(block, n_code)
            n_code += len(code_blocks(block))

    def console(self, columns: int) -> Console:
        """A console of rich that prints here."""
        return Console(
            file=self.file,
            width=max(columns, 8),  # rich cannot draw a table in less
            force_terminal=self.ansi,
            color_system="standard" if self.ansi else None,
            no_color=not self.colour,
            theme=_STYLES,
            highlight=False,
            markup=False,
            emoji=False,
            safe_box=not self.unicode,
            legacy_windows=False,
        )

    def _trimmed(self, row: Iterable[Segment]) -> str:
        """A row without what fills it, in which there is nothing to copy or to wrap."""
        segments = list(row)
        while segments and not segments[-1].text.strip():
            segments.pop()
        segments[-1:] = [Segment(each.text.rstrip(), each.style) for each in segments[-1:]]
        return self._rendered(segments)


class Typesetter:
    """Sets the text of one answer in rows.

    Prose is wrapped between words. Code, tables, indented lines and words longer than a row are left to the terminal,
    so that they can be copied.
    """

    def __init__(self, paper: Paper) -> None:
        self._paper = paper
        self._open: list[StyledText] = []  # characters that are not printed for good
        self._column = 0  # cells from the beginning of the line
        self._goes_on = False  # whether rows of the open line are printed
        self._fenced = False

    def write(self, text: str, style: Style = Style.TARGET) -> None:
        """Add text that stays; it appears with the next ``tail``."""
        for char in visible(text):
            cells = 8 - self._column % 8 if char == "\t" else char_width(char)
            self._column = 0 if char == "\n" else self._column + cells
            self._open += [(" ", style)] * cells if char == "\t" else [(char, style)]

    def tail(self, segments: Iterable[StyledText], status: str) -> None:
        """Show the text, segments after it and a status line below, until the next update."""
        columns, height = self._paper.size()
        printed = self._complete(columns)
        shown = list(self._open)
        room = TAIL_LINES * columns - _last_column(shown, columns) - 1
        for text, style in segments if height >= MIN_LINES else ():
            flat = clip(on_one_line(text), room)
            shown += [(char, style) for char in flat]
            room -= width(flat)
        rows: list[list[StyledText]] = [[]]
        for each in shown:
            if _cells([*rows[-1], each]) > columns:
                rows.append([])
            rows[-1].append(each)
        self._paper.update(printed, [self._painted(row, columns) for row in rows[-max(1, height - 2) :]], status)

    def finish(self) -> None:
        """Print all text and end the last line."""
        columns, _ = self._paper.size()
        printed = self._complete(columns)
        self._paper.end([*printed, self._painted(self._open, columns)] if self._open else printed)
        self._open = []

    def _complete(self, columns: int) -> list[str]:
        """Take the rows that no further text can change."""
        lines: list[list[StyledText]] = [[]]
        for each in self._open:
            if each[0] == "\n":
                lines.append([])
            else:
                lines[-1].append(each)
        done: list[list[StyledText]] = []
        for i, line in enumerate(lines, 1):
            start = "".join(char for char, _ in line)
            as_it_is = self._fenced or start.startswith(("```", "~~~", "|", "    "))
            rows = [line] if as_it_is and not self._goes_on else _wrapped(line, columns, self._goes_on)
            done += rows
            self._goes_on |= len(rows) > 1
            if i == len(lines):
                self._open = done.pop()
            elif self._goes_on and not rows[-1]:
                done.pop()  # the line ended with its last row
            else:
                self._fenced ^= start.lstrip().startswith(("```", "~~~"))
            self._goes_on &= i == len(lines)
        return [self._painted(row, columns) for row in done]

    def _painted(self, row: Sequence[StyledText], columns: int) -> str:
        """A row; where the terminal breaks it, what stands in the cells that stay free is erased."""
        shown, column, rest = list[StyledText](), 0, ""
        for char, style in row:
            cells = char_width(char)
            if column + cells > columns:  # a wide character leaves the last cell free
                shown += [(_ERASE_LINE, style)] * (column < columns)
                column, rest = 0, _ERASE_LINE
            column += cells
            shown.append((char, style))
        return self._paper.painted(shown) + (rest if column < columns else "")


def _cells(row: Iterable[StyledText]) -> int:
    return sum(char_width(char) for char, _ in row)


def _last_column(row: Iterable[StyledText], columns: int) -> int:
    """Cells in the last row of a row that the terminal breaks."""
    column = 0
    for cells in (char_width(char) for char, _ in row):
        column = cells if column + cells > columns else column + cells
    return column


def _wrapped(line: Sequence[StyledText], columns: int, goes_on: bool) -> list[list[StyledText]]:
    """A line in rows, broken at spaces and at wide characters; a row that begins with a longer word is longer."""
    rows: list[list[StyledText]] = [[]]
    used = 0
    # Words of narrow characters in a row, wide characters and spaces.
    for kind, group in groupby(line, key=lambda each: each[0] != " " and char_width(each[0]) < 2):
        run = list(group)
        for word in [run] if kind else [[each] for each in run]:
            cells = _cells(word)
            if used and used + cells > columns:
                rows.append([])
                used = 0
            if word[0][0] == " " and not used and (goes_on or len(rows) > 1):
                continue  # the line break stands for it
            rows[-1] += word
            used = (used + cells - 1) % columns + 1
    return rows


# Markdown: parsed by markdown-it, drawn by rich, block by block.

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
