"""Where the chat is shown, and what that place can do."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from localspec.commands.chat.status import AnswerStatus
from localspec.commands.chat.style import Painter, Style
from localspec.commands.chat.views import RoundsView, TextView, TokensView, View
from localspec.spec_decode.drafters.names import EARLY_EXIT, HEAD
from localspec.terminal.text import moves_cursor, terminal_size, visible


class ChatScreen:
    """Standard output and standard error as they are.

    Args:
        plain: standard input is no terminal: only answers go to standard output, without escape sequences.

    Attributes:
        interactive: whether a person types the questions.
        terminal: whether the person sees standard output.
        ansi: whether the cursor can be moved: a terminal that is not dumb.
        colour: whether colours are welcome (``NO_COLOR`` is not set).
        unicode: whether marks such as ✓ can be shown.
    """

    def __init__(self, file: TextIO | None = None, errors: TextIO | None = None, *, plain: bool = False) -> None:
        self.file = file or sys.stdout
        self.errors = errors or sys.stderr
        self.interactive = not plain
        self.terminal = self.file.isatty() and not plain
        self.ansi = self.terminal and moves_cursor(self.file)
        self.colour = self.ansi and not os.environ.get("NO_COLOR")
        self.paint = Painter(self.ansi, self.colour)
        self.unicode = (self.file.encoding or "").lower().replace("-", "") in ("utf8", "utf16")

    # -- lines ---------------------------------------------------------------------------------------------------

    def line(self, text: str = "", style: Style = Style.TARGET) -> None:
        """Print a line of our own."""
        print(self.paint(visible(text), style), file=self.file, flush=True)

    def prose(self, text: str, style: Style = Style.TARGET) -> None:
        """Print sentences, wrapped between words on a terminal."""
        columns, _ = terminal_size()
        for line in textwrap.wrap(visible(text), columns) if self.terminal else [visible(text)]:
            self.line(line, style)

    def note(self, text: str) -> None:
        """Print a remark; without a terminal it goes to standard error."""
        if self.terminal:
            self.prose(text, Style.NOTE)
        else:
            print(visible(text), file=self.errors, flush=True)

    def error(self, text: str) -> None:
        """Print an error in one line."""
        self.file.flush()
        line = "localspec: " + " ".join(visible(text).split())
        paint = Painter(self.ansi and self.errors.isatty(), self.colour)
        print(paint(line, Style.ERROR), file=self.errors, flush=True)

    def print(self, renderable: Any) -> None:
        """Print a rich table or panel."""
        from rich.console import Console

        columns, _ = terminal_size()
        console = Console(
            file=self.file,
            width=columns if self.terminal else 80,
            force_terminal=self.ansi,
            no_color=not self.colour,
            highlight=False,
            markup=False,
            emoji=False,
            safe_box=not self.unicode,
        )
        console.print(renderable)

    def legend(self, drafters: Sequence[str]) -> str:
        """How the kinds of text are told apart here, in one line.

        Args:
            drafters: names of those in use.
        """
        if not self.ansi:
            return "guesses are shown by /view rounds; this terminal cannot take text back"
        bold, line, both = "bold", "underlined", "bold, underlined"
        if self.colour:
            bold, line, both = f"green, {bold}", f"cyan, {line}", "magenta"
        has_head = any(name.partition(":")[0] in (HEAD, EARLY_EXIT) for name in drafters)
        return " · ".join(
            (
                self.paint(f"draft's ({bold})", Style.MODEL),
                *([self.paint(f"head's ({both})", Style.STATES)] if has_head else []),
                self.paint(f"n-gram's ({line})", Style.NGRAM),
                "target's own",
                self.paint("rejected", Style.REJECTED),
            )
        )

    # -- answers -------------------------------------------------------------------------------------------------

    def view(self, name: str, status: AnswerStatus) -> View:
        """A fresh view for an answer."""
        if name == "rounds":
            return RoundsView(self.file, self.paint, unicode=self.unicode)
        if self.ansi:
            return TokensView(self.file, status, colour=self.colour, drafts=name == "tokens")
        return TextView(self.file, visible if self.file.isatty() else str)


@contextmanager
def no_echo() -> Iterator[None]:
    """While an answer streams, what is typed must not be printed into it; the next prompt gets it."""
    try:
        import termios

        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
    except (ImportError, OSError, ValueError, termios.error):
        yield
        return
    quiet = list(before)
    quiet[3] = quiet[3] & ~termios.ECHO | termios.NOFLSH  # and Ctrl-C does not throw it away
    termios.tcsetattr(handle, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSANOW, before)
