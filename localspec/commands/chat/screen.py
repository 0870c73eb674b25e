"""Where the chat is shown, and what that place can do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain, repeat
from typing import Any, TextIO

from localspec.commands.chat.style import Painter, Style
from localspec.commands.chat.typesetter import Typesetter
from localspec.commands.chat.views import RoundsView, TextView, TokensView, View
from localspec.spec_decode.drafters.names import CORPUS, FROM_STATES, NGRAM, RECYCLED
from localspec.spec_decode.rounds import SpecStats
from localspec.terminal.text import moves_cursor, terminal_size, visible, wrapped


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
        """Print lines of our own, on a terminal wrapped between words."""
        columns, _ = terminal_size()
        for line in wrapped(visible(text), columns) if self.terminal else [visible(text)]:
            print(self.paint(line, style), file=self.file, flush=True)

    def note(self, text: str) -> None:
        """Print a remark; without a terminal it goes to standard error."""
        if self.terminal:
            self.line(text, Style.NOTE)
        else:
            print(visible(text), file=self.errors, flush=True)

    def error(self, text: str) -> None:
        """Print an error in one line, on a terminal wrapped between words."""
        self.file.flush()
        line = "localspec: " + " ".join(visible(text).split())
        paint = Painter(self.ansi and self.errors.isatty(), self.colour)
        columns, _ = terminal_size()
        for row in wrapped(line, columns) if self.errors.isatty() else [line]:
            print(paint(row, Style.ERROR), file=self.errors, flush=True)

    def question(self, text: str) -> None:
        """Show what was asked, as it was typed: behind a mark, further lines behind another."""
        columns, _ = terminal_size()
        for mark, line in zip(chain(["> "], repeat(". ")), visible(text).split("\n"), strict=False):
            first, *rest = wrapped(mark + line, columns)
            print(self.paint(first[: len(mark)], Style.PROMPT) + first[len(mark) :], *rest, sep="\n", file=self.file)
        self.file.flush()

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

    def legend(self, drafters: Sequence[str], *, follows: bool = False) -> str:
        """What the looks of a text mean here, wrapped between the kinds; empty where nothing is guessed.

        Args:
            drafters: names of those in use.
            follows: whether a head or a draft model may still come.
        """
        kinds = {name.partition(":")[0] for name in drafters}
        if not (kinds or follows):
            return ""
        if not self.ansi:
            return "guesses are shown by /view rounds; this terminal cannot take text back"
        models = kinds - {NGRAM, RECYCLED, CORPUS, *FROM_STATES}
        looks = [
            ("guessed by draft model", Style.MODEL, follows or models),
            ("by head", Style.STATES, kinds & set(FROM_STATES)),
            ("copied", Style.NGRAM, kinds & {NGRAM, RECYCLED}),
            ("from your files", Style.CORPUS, CORPUS in kinds),
            ("wrong guess", Style.REJECTED, True),
            ("the model's own", Style.TARGET, True),
        ]
        columns, _ = terminal_size()
        rows, used = [""], 0
        for text, style, is_in_use in looks:
            if not is_in_use:
                continue
            gap = " · " if used else ""
            if used and used + len(gap) + len(text) > columns:
                rows.append("")
                gap, used = "", 0
            rows[-1] += gap + self.paint(text, style)
            used += len(gap) + len(text)
        return "\n".join(rows)

    # -- answers -------------------------------------------------------------------------------------------------

    def answer(self, text: str, view: str) -> None:
        """Show an answer that is there already."""
        if not self.ansi:
            self.line(text)
        elif view == "reading":
            from localspec.commands.chat.markdown import MarkdownLines, whole

            columns, _ = terminal_size()
            lines = whole(visible(text), columns - 1, MarkdownLines(self.colour, self.unicode))
            print(*lines, sep="\n", file=self.file, flush=True)
        else:
            paper = Typesetter(self.file, colour=self.colour)
            paper.write(text)
            paper.finish()

    def view(self, name: str, stats: SpecStats) -> View:
        """A fresh view for an answer."""
        if name == "rounds":
            return RoundsView(self.file, stats, ansi=self.ansi, colour=self.colour, unicode=self.unicode)
        if self.ansi and name == "reading":
            from localspec.commands.chat.reading import ReadingView

            return ReadingView(self.file, stats, colour=self.colour, unicode=self.unicode, folded=self.folded)
        if self.ansi:
            return TokensView(self.file, stats, colour=self.colour, drafts=name == "tokens", folded=self.folded)
        return TextView(self.file, visible if self.file.isatty() else str)

    # -- the keyboard --------------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Within the block what is typed while the program is busy waits for the next prompt, unseen.

        A text that is pasted stays one: the terminal is told to mark it as such.

        Yields:
            What begins this: until it is called, lines are read and echoed as usual.
        """
        begun = not self.ansi
        with ExitStack() as stack:

            def begin() -> None:
                nonlocal begun
                if not begun:
                    begun = True
                    stack.enter_context(_keyboard(echo=False, lines=False))

            self.mark_pastes()
            try:
                yield begin
            except BaseException:
                forget_typed()  # else the shell would run it
                raise
            finally:
                self.mark_pastes(False)

    def mark_pastes(self, on: bool = True) -> None:
        """Have the terminal mark what is pasted, or no longer."""
        if self.ansi:
            self.file.write(f"\x1b[?2004{'h' if on else 'l'}")
            self.file.flush()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While another program has the terminal, it is as such programs expect it."""
        self.mark_pastes(False)
        try:
            with _keyboard(echo=True, lines=True):
                yield
        finally:
            self.mark_pastes()


def no_echo() -> AbstractContextManager[None]:
    """While an answer streams, what is typed must not be printed into it; the next prompt gets it."""
    return _keyboard(echo=False)


@contextmanager
def _keyboard(*, echo: bool, lines: bool | None = None) -> Iterator[None]:
    """Whether the terminal echoes what is typed and hands it over line by line (None: as it does now)."""
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
    changed = [*before[:6], list(before[6])]
    local = before[3]
    # Without an echo Ctrl-C does not throw away what was typed either.
    local = local & ~termios.NOFLSH | termios.ECHO if echo else local & ~termios.ECHO | termios.NOFLSH
    if lines is not None:
        local = local | termios.ICANON if lines else local & ~termios.ICANON
    changed[3] = local
    if not local & termios.ICANON:
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    termios.tcsetattr(handle, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSANOW, before)


def forget_typed() -> None:
    """Drop what was typed and not read."""
    with suppress(ImportError, OSError, ValueError):
        import termios

        with suppress(termios.error):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
