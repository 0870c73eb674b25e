"""Streams text onto a terminal with a *tail* after it: text that is erased again before anything else is written.

The tail is how a rejected draft token can be seen where it was proposed and yet never become part of the text. It needs
six sequences that every terminal since the VT100 has: index, cursor up and down, save and restore cursor, erase below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TextIO

from localspec.commands.chat.style import Painter, Style
from localspec.terminal.text import char_width, clip, on_one_line, terminal_size, visible, width, width_is_certain

Segment = tuple[str, Style]

_RESET, _INDEX, _SAVE, _RESTORE, _ERASE_BELOW = "\x1b[0m", "\x1bD", "\x1b7", "\x1b8", "\x1b[J"
TAIL_LINES = 2


class Typesetter:
    """Writes one answer.

    Prose is wrapped between words at the edge of the screen: a word is printed when it is complete, and is part of the
    tail until then, so nothing that was printed is ever moved. Code blocks, tables and indented lines are left to the
    terminal, so that copying them gives back the text.

    Args:
        file: the terminal.
        colour: whether colours may be used; attributes such as bold always are.
        size: columns and lines, asked at every flush, as windows change.
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
        self._word: list[Segment] = []  # characters of a word that may go on
        self._word_cells = 0
        self._is_long = False  # whether a word that takes more than a row goes on, which the terminal breaks
        self._line = ""
        self._fenced = False
        self._certain = True
        self._on_fresh_row = False
        self._has_tail = False

    # -- text that stays -----------------------------------------------------------------------------------------

    def write(self, text: str, style: Style = Style.TARGET) -> None:
        """Add text for good; it appears with the next ``flush``, a word that may go on with the next ``tail``."""
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
        """Add a character to the word that it belongs to; where there are no words, print it."""
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
        """Print the word that was held back, on the next row if it does not fit into this one."""
        word, self._word = self._word, []
        self._make_room()
        self._word_cells, self._is_long = 0, False
        for char, style in word:
            self._print(char, style)

    def _make_room(self) -> None:
        """Begin a row if the word that is held back does not fit into this one."""
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
        """Whether the current line is prose."""
        return not (self._fenced or self._line.startswith(("```", "~~~", "|", "    ", "\t")))

    def _leave_edge(self) -> None:
        """Printing in the last cell leaves the cursor waiting at the edge, where saving it is not portable."""
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

    def tail(self, segments: Iterable[Segment], status: str) -> None:
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
        shown: list[Segment] = []
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
        """Ask for the size. What was printed is the terminal's; a row that has become too long is ended."""
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
        """Put everything on the screen, in one write."""
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
