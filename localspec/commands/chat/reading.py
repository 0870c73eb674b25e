"""The reading view: an answer's Markdown is rendered as it comes.

Blocks that are complete are printed for good. The last one, which the next token may still change, is drawn again and
again in a *region* at the end, no higher than the screen, with the status line below it. Between updates the cursor
rests at the region's first cell, so an update is one write that starts there: nothing is erased before its successor is
known, and nothing above it moves. What is thought before an answer is text, dim, of which lines that are complete are
printed; folded, only that something is thought is shown, and not for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from localspec.commands.chat.markdown import MarkdownLines, blocks, code_blocks, open_code
from localspec.commands.chat.status import status_line
from localspec.commands.chat.style import Painter, Style
from localspec.commands.chat.views import View
from localspec.spec_decode.rounds import Round, SpecStats
from localspec.terminal.text import clip, terminal_size, visible

_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""In the region a line that comes out wider than it was counted, as joined emoji may, must not become two."""

MIN_LINES = 4
"""On a lower screen there is no region: blocks appear when they are complete."""

PAUSE = 4.0
"""After drawing, so many times what it took nothing is drawn again: the engine gets at least this share of a core."""


class ReadingView(View):
    """Shows an answer as rendered Markdown.

    Args:
        file: the terminal.
        stats: of the answer; the status is shown below it.
        colour: whether colours may be used.
        unicode: whether lines can be drawn.
        folded: whether what is thought is left out.
        size: columns and lines, asked at every update, as windows change.
    """

    def __init__(
        self,
        file: TextIO,
        stats: SpecStats,
        *,
        colour: bool,
        unicode: bool,
        folded: bool = False,
        size: Callable[[], tuple[int, int]] = terminal_size,
    ) -> None:
        self._file = file
        self._stats = stats
        self._draw = MarkdownLines(colour, unicode)
        self._paint = Painter(ansi=True, colour=colour)
        self._folded = folded
        self._size = size
        self._thought = ""  # what is not printed of it
        self._thinks = False
        self._text = ""  # from the open block on
        self._n_code = 0  # code blocks before it
        self._n_printed = 0  # lines of code of it that are printed for good
        self._between = False  # whether an empty line comes before it
        self._next = 0.0

    def wait(self, what: str) -> None:
        self._update([], [self._paint(what, Style.NOTE)])

    def round(self, round_: Round) -> None:
        self._thought += "" if self._folded else visible(round_.thinking)
        self._thinks = any(token.thinking for token in round_.emitted[-1:])
        self._text += visible(round_.text)
        now = time.monotonic()
        if now < self._next or round_.finish_reason:
            return
        self._update(*self._drawn())
        self._next = now + (1 + PAUSE) * (time.monotonic() - now)

    def finish(self) -> None:
        columns, _ = self._size()
        lines = self._thoughts(columns, end=True)
        for block in blocks(self._text):
            lines += self._complete(block, columns)
        self._write([*(f"{line}{_ERASE_LINE}\r\n" for line in lines), _ERASE_BELOW, _SHOW_CURSOR])

    # -- what there is to see ------------------------------------------------------------------------------------

    def _drawn(self) -> tuple[list[str], list[str]]:
        """Lines to print for good, and those of the region."""
        columns, height = self._size()
        printed = self._thoughts(columns, end=bool(self._text.strip()))
        # Only by whole lines can it be told what the next token cannot change: "2" may become an item of a list.
        end = self._text.rfind("\n") + 1
        *complete, last = blocks(self._text[:end]) or [""]
        for block in complete:
            printed += self._complete(block, columns)
        self._text = last + self._text[end:]
        room = max(height - 2, 0)  # without the status, and what is printed for good above it
        region = self._region(columns)
        n_lines = open_code(last) if len(region) > room else None
        if n_lines is not None and n_lines - room // 2 > self._n_printed:
            printed += self._part(last, columns, n_lines - room // 2)
            region = self._region(columns)
        return printed, region[max(len(region) - room, 0) :]

    def _region(self, columns: int) -> list[str]:
        lines = self._dim(self._thought.rstrip("\n"), columns)
        if self._folded and self._thinks:
            lines.append(self._paint(f"thinking, {self._stats.thinking_tokens} tokens …", Style.NOTE))
        for i, block in enumerate(blocks(self._text)):  # several where the last line is not whole
            between = self._between if i == 0 and not self._n_printed else i > 0
            lines += [""] * between
            lines += self._draw.render(block, columns - 1, self._n_code, (self._n_printed if i == 0 else 0, None))
        return lines

    def _thoughts(self, columns: int, *, end: bool) -> list[str]:
        """The lines of thinking that are complete, all of them at its end, to be printed for good."""
        text = self._thought.rstrip("\n")  # there may be more after the newlines, or the answer
        n_whole = len(text) if end else text.rfind("\n") + 1
        lines = self._dim(text[:n_whole].removesuffix("\n"), columns)
        self._thought = self._thought[n_whole:] * (not end)
        self._between = self._between or bool(lines)
        return lines

    def _dim(self, text: str, columns: int) -> list[str]:
        text = text if self._between else text.lstrip("\n")
        return [self._paint(line, Style.THINKING) for line in self._draw.prose(text, columns - 1)]

    def _complete(self, block: str, columns: int) -> list[str]:
        """The lines of a block that are not printed yet; the next block begins."""
        lines = [""] * (self._between and not self._n_printed)
        lines += self._draw.render(block, columns - 1, self._n_code, (self._n_printed, None))
        self._n_code += len(code_blocks(block))
        self._n_printed, self._between = 0, True
        return lines

    def _part(self, block: str, columns: int, end: int) -> list[str]:
        """The lines of a block's code before a line, to be printed for good."""
        lines = [""] * (self._between and not self._n_printed)
        lines += self._draw.render(block, columns - 1, self._n_code, (self._n_printed, end))
        self._n_printed = end
        return lines

    # -- the terminal --------------------------------------------------------------------------------------------

    def _update(self, printed: Sequence[str], region: Sequence[str]) -> None:
        columns, height = self._size()
        out = [_HIDE_CURSOR, *(f"{line}{_ERASE_LINE}\r\n" for line in printed)]
        if height >= MIN_LINES:
            status = self._paint(clip(status_line(self._stats.as_dict()), columns - 1), Style.NOTE)
            rows = [*region, status]
            out += [_NO_WRAP, "\r\n".join(f"{row}{_ERASE_LINE}" for row in rows), _ERASE_BELOW, _WRAP]
            out.append(f"\r\x1b[{len(rows) - 1}A" if len(rows) > 1 else "\r")
        else:
            out.append(_ERASE_BELOW)
        self._write(out)

    def _write(self, parts: Sequence[str]) -> None:
        self._file.write("".join(parts))
        self._file.flush()
