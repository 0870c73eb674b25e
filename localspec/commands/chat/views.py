"""The ways of looking at an answer while it is made: tokens, lane, plain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TextIO

from localspec.commands.chat.ink import Ink, token_ink
from localspec.commands.chat.lane import lane_line
from localspec.commands.chat.status import Status
from localspec.commands.chat.typesetter import Segment, Typesetter
from localspec.spec_decode.rounds import Round, TokenKind
from localspec.terminal.text import terminal_size, visible

VIEWS = ("tokens", "lane", "plain")


class View(ABC):
    """Shows one answer: ``round`` for each round, then ``finish``."""

    @abstractmethod
    def wait(self, what: str) -> None:
        """Say what is going on before the first round."""

    @abstractmethod
    def round(self, round_: Round) -> None:
        """Show a round."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the answer, and nothing but the answer, on the screen."""


class TokensView(View):
    """Verified text in the colours of where it came from; rejected guesses in place, until the next round."""

    def __init__(self, file: TextIO, status: Status, *, colour: bool, guesses: bool = True) -> None:
        self._paper = Typesetter(file, colour=colour)
        self._status = status
        self._guesses = guesses
        self._pending: list[Segment] = []

    def wait(self, what: str) -> None:
        self._paper.tail([(what, Ink.NOTE)], "")
        self._paper.flush()

    def round(self, round_: Round) -> None:
        self._settle()
        segments: list[Segment] = [(span.text, self._ink(span.kind, span.source)) for span in round_.spans]
        tail: list[Segment] = []
        if self._guesses and round_.verdict.n_accepted < len(round_.draft) and not round_.finish_reason:
            rejected = "".join(round_.draft_texts[round_.verdict.n_accepted :])
            tail = [(rejected, Ink.REJECTED)]
            # What replaces a rejected guess stands behind it until the guess is gone.
            if segments and round_.spans[-1].kind == "recovered":
                self._pending = [segments.pop()]
        for text, ink in segments:
            self._paper.write(text, ink)
        if not round_.finish_reason:
            self._paper.tail(tail + self._pending, self._status.line())
        self._paper.flush()

    def finish(self) -> None:
        self._settle()
        self._paper.finish()

    def _settle(self) -> None:
        self._paper.write("")
        for text, ink in self._pending:
            self._paper.write(text, ink)
        self._pending = []

    def _ink(self, kind: TokenKind, source: str) -> Ink:
        return token_ink(kind, source) if self._guesses else Ink.TARGET


class LaneView(View):
    """One line a round: its proposals and their fate; then the text."""

    def __init__(self, file: TextIO, *, ansi: bool, colour: bool, unicode: bool) -> None:
        self._file = file
        self._ansi, self._colour, self._unicode = ansi, colour, unicode
        self._text: list[str] = []

    def wait(self, what: str) -> None:
        return

    def round(self, round_: Round) -> None:
        self._text.append(round_.text)
        if not round_.emitted:  # only the rest of the text
            return
        columns, _ = terminal_size()
        line = lane_line(round_, columns - 1, ansi=self._ansi, colour=self._colour, unicode=self._unicode)
        self._file.write(line + "\n")
        self._file.flush()

    def finish(self) -> None:
        text = visible("".join(self._text))
        self._file.write("\n" + text + ("" if text.endswith("\n") else "\n"))
        self._file.flush()


class TextView(View):
    """The text as it comes, for files, pipes and terminals that cannot move the cursor."""

    def __init__(self, file: TextIO, clean: Callable[[str], str] = visible) -> None:
        self._file = file
        self._clean = clean
        self._last = ""

    def wait(self, what: str) -> None:
        return

    def round(self, round_: Round) -> None:
        if text := round_.text:
            self._file.write(self._clean(text))
            self._file.flush()
            self._last = text

    def finish(self) -> None:
        if not self._last.endswith("\n"):
            self._file.write("\n")
        self._file.flush()
