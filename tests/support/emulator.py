"""A terminal emulator that shows what was written to a file."""

from __future__ import annotations

import io

import pyte

from localspec.commands.chat.screen import ChatScreen


class Emulator:
    """``written`` is what the last update wrote; ``columns`` and ``rows`` may change while it is used."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.screen = pyte.HistoryScreen(columns, rows, history=5000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.file, self.written = io.StringIO(), ""

    def size(self) -> tuple[int, int]:
        return self.columns, self.rows

    def resize(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.screen.resize(rows, columns)

    def chat_screen(self, *, colour: bool = True, folded: bool = False) -> ChatScreen:
        screen = ChatScreen(self.file)
        screen.ansi, screen.unicode, screen.colour, screen.folded = True, True, colour, folded
        screen.size = self.size
        return screen

    def feed(self, text: str) -> None:
        self._stream.feed(text)

    def update(self) -> list[str]:
        """The lines on the screen, those that scrolled off it too."""
        self.written = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        self.feed(self.written)
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        return [line.rstrip() for line in above + self.screen.display]

    def text(self) -> str:
        return "\n".join(self.update()).rstrip()
