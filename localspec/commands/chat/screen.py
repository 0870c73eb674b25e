"""Where the chat is shown, and what that place can do."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from localspec.commands.chat.status import AnswerStatus
from localspec.commands.chat.style import Painter, Style
from localspec.commands.chat.views import RoundsView, TextView, TokensView, View
from localspec.spec_decode.drafters.names import FROM_STATES, is_corpus
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
        folded: whether what is thought before an answer is left out.
    """

    def __init__(self, file: TextIO | None = None, errors: TextIO | None = None, *, plain: bool = False) -> None:
        self.file = file or sys.stdout
        self.errors = errors or sys.stderr
        self.interactive = not plain
        self.terminal = self.file.isatty() and not plain
        self.ansi = self.terminal and moves_cursor(self.file)
        self.colour = self.ansi and not os.environ.get("NO_COLOR")
        self.paint = Painter(self.ansi, self.colour)
        self.folded = False
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
        bold, line, both, slant = "bold", "underlined", "bold, underlined", "italic, underlined"
        if self.colour:
            bold, line, both, slant = f"green, {bold}", f"cyan, {line}", "magenta", "yellow"
        has_head = any(name.partition(":")[0] in FROM_STATES for name in drafters)
        return " · ".join(
            (
                self.paint(f"draft's ({bold})", Style.MODEL),
                *([self.paint(f"head's ({both})", Style.STATES)] if has_head else []),
                self.paint(f"n-gram's ({line})", Style.NGRAM),
                *([self.paint(f"your files' ({slant})", Style.CORPUS)] if any(map(is_corpus, drafters)) else []),
                "target's own",
                self.paint("rejected", Style.REJECTED),
            )
        )

    # -- answers -------------------------------------------------------------------------------------------------

    def answer(self, text: str, view: str) -> None:
        """Show an answer that is there already."""
        if not (self.ansi and view == "reading"):
            self.line(text)
            return
        from localspec.commands.chat.markdown import MarkdownLines, whole

        columns, _ = terminal_size()
        lines = whole(visible(text), columns - 1, MarkdownLines(self.colour, self.unicode))
        print(*lines, sep="\n", file=self.file, flush=True)

    def view(self, name: str, status: AnswerStatus) -> View:
        """A fresh view for an answer."""
        if name == "rounds":
            return RoundsView(self.file, self.paint, unicode=self.unicode)
        if self.ansi and name == "reading":
            from localspec.commands.chat.reading import ReadingView

            return ReadingView(self.file, status, colour=self.colour, unicode=self.unicode, folded=self.folded)
        if self.ansi:
            return TokensView(self.file, status, colour=self.colour, drafts=name == "tokens", folded=self.folded)
        return TextView(self.file, visible if self.file.isatty() else str)


def no_echo() -> AbstractContextManager[None]:
    """While an answer streams, what is typed must not be printed into it; the next prompt gets it."""
    return _echo(on=False)


def with_echo() -> AbstractContextManager[None]:
    """While another program has the terminal, it is as such programs expect it."""
    return _echo(on=True)


@contextmanager
def _echo(*, on: bool) -> Iterator[None]:
    try:
        import termios
    except ImportError:  # Windows; prompt_toolkit reads the keys there, and shows them itself
        yield
        return
    try:
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
    except (OSError, ValueError, termios.error):
        yield
        return
    changed = list(before)
    if on:
        changed[3] = changed[3] & ~termios.NOFLSH | termios.ECHO
    else:
        changed[3] = changed[3] & ~termios.ECHO | termios.NOFLSH  # and Ctrl-C does not throw it away
    termios.tcsetattr(handle, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSANOW, before)
