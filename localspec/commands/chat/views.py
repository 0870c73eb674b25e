"""The ways of looking at an answer while it is made: tokens, rounds, plain; ``reading`` has a module of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TextIO

from localspec.commands.chat.status import AnswerStatus
from localspec.commands.chat.style import Painter, Style, token_style
from localspec.commands.chat.typesetter import Segment, Typesetter
from localspec.spec_decode.rounds import Round, Span, TokenKind
from localspec.terminal.text import clip, on_one_line, terminal_size, visible, width

VIEWS = ("tokens", "reading", "rounds", "plain")
FORMER_VIEWS = {"lane": "rounds"}
"""Names that saved chats may have and people may type, and what they are called now."""


class View(ABC):
    """Shows one answer: ``round`` for each round, then ``finish``."""

    def wait(self, what: str) -> None:  # noqa: B027 # most views have no place for it
        """Say what is going on before the first round."""

    @abstractmethod
    def round(self, round_: Round) -> None:
        """Show a round."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the answer, and nothing but the answer, on the screen."""


class TokensView(View):
    """Verified text in the colours of where it came from; rejected draft tokens in place, until the next round.

    What is thought before an answer is dim; folded, only that something is thought is shown, and not for long.
    """

    def __init__(
        self, file: TextIO, status: AnswerStatus, *, colour: bool, drafts: bool = True, folded: bool = False
    ) -> None:
        self._paper = Typesetter(file, colour=colour)
        self._status = status
        self._drafts = drafts
        self._folded = folded
        self._thinks = False
        self._pending: list[Segment] = []

    def wait(self, what: str) -> None:
        self._paper.tail([(what, Style.NOTE)], "")
        self._paper.flush()

    def round(self, round_: Round) -> None:
        self._settle()
        segments = [segment for span in round_.spans for segment in self._shown(span)]
        tail: list[Segment] = []
        thinks = round_.emitted[-1].thinking if round_.emitted else False
        if self._folded and thinks:
            tail = [(f"thinking, {self._status.stats.thinking_tokens} tokens …", Style.NOTE)]
        elif self._drafts and round_.verdict.n_accepted < len(round_.draft) and not round_.finish_reason:
            fates = zip(round_.draft_texts, round_.accepted, _branch_starts(round_), strict=False)
            rejected = [(" | " if starts else "") + text for text, accepted, starts in fates if not accepted]
            tail = [("".join(rejected).removeprefix(" | "), Style.REJECTED)]
            # The token that replaces a rejected one stands behind it until that is gone.
            if segments and round_.spans[-1].kind == "recovered" and round_.spans[-1].part == "answer":
                self._pending = [segments.pop()]
        for text, style in segments:
            self._paper.write(text, style)
        if not round_.finish_reason:
            self._paper.tail(tail + self._pending, self._status.line())
        self._paper.flush()

    def finish(self) -> None:
        self._settle()
        self._paper.finish()

    def _settle(self) -> None:
        self._paper.write("")
        for text, style in self._pending:
            self._paper.write(text, style)
        self._pending = []

    def _shown(self, span: Span) -> Iterator[Segment]:
        if span.part == "thinking" and not self._folded:
            self._thinks = True
            yield span.text, Style.THINKING
        elif span.part == "answer":
            if self._thinks:
                yield "\n\n", Style.TARGET
                self._thinks = False
            yield span.text, self._style(span.kind, span.source)

    def _style(self, kind: TokenKind, source: str) -> Style:
        return token_style(kind, source) if self._drafts else Style.TARGET


class RoundsView(View):
    """One line a round: its draft tokens and their fate; then the text."""

    def __init__(self, file: TextIO, paint: Painter, *, unicode: bool) -> None:
        self._file, self._paint, self._unicode = file, paint, unicode
        self._text: list[str] = []

    def round(self, round_: Round) -> None:
        self._text.append(round_.text)
        if not round_.emitted:  # only the rest of the text
            return
        columns, _ = terminal_size()
        self._file.write(round_line(round_, columns - 1, self._paint, unicode=self._unicode) + "\n")
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

    def round(self, round_: Round) -> None:
        if text := round_.text:
            self._file.write(self._clean(text))
            self._file.flush()
            self._last = text

    def finish(self) -> None:
        if not self._last.endswith("\n"):
            self._file.write("\n")
        self._file.flush()


def only_thought(text: str, n_thinking: int) -> str:
    """What to say of an answer that has nothing but thoughts; empty where it has more, or nothing at all."""
    if not n_thinking or text.strip():
        return ""
    return f"no answer came after {n_thinking} token{'s' * (n_thinking > 1)} of thinking"


_MARKS = {True: ("✓", "✗", "→", "+", "·"), False: ("+", "-", ">", "*", ".")}


def _branch_starts(round_: Round) -> list[bool]:
    """For each draft token whether a branch begins with it, which does not go on from the one before."""
    return [parent != i - 1 for i, parent in enumerate(round_.draft.parents)]


def round_line(round_: Round, columns: int, paint: Painter, *, unicode: bool = True) -> str:
    """One line for a round: number, accepted of drafted, drafters, draft + verify time, each draft token and its fate.

    Args:
        round_: the round.
        columns: cells the line may take.
        paint: puts texts in a style; the marks say the same without.
        unicode: False draws the marks in ASCII.
    """
    accepted_mark, rejected_mark, recovered_mark, bonus_mark, plain_mark = _MARKS[unicode]
    n_drafted, n_accepted = len(round_.draft), round_.verdict.n_accepted
    sources = "+".join(dict.fromkeys(token.source for token in round_.draft)) or "-"
    fate = f"{n_accepted}/{n_drafted}" if n_drafted else "plain"
    times = f"{round_.ms_draft:3.0f}+{round_.ms_verify:3.0f} ms"
    head = f"{round_.index + 1:4d} {fate:>5} {clip(sources, 11):<11} {times}  "
    pieces: list[tuple[str, Style]] = []
    texts = round_.draft_texts or [""] * n_drafted
    starts = _branch_starts(round_)
    for token, text, accepted, is_start in zip(round_.draft, texts, round_.accepted, starts, strict=True):
        if is_start:
            pieces.append((" |", Style.TARGET))
        if accepted:
            pieces.append((accepted_mark + on_one_line(text), token_style("accepted", token.source)))
        else:
            pieces.append((rejected_mark, Style.TARGET))
            pieces.append((on_one_line(text), Style.REJECTED))
    own = [token for token in round_.emitted if token.kind != "accepted"]
    if own:
        mark = {"recovered": recovered_mark, "bonus": bonus_mark}.get(own[-1].kind, plain_mark)
        gap = " " if pieces else ""
        pieces.append((f"{gap}{mark}{on_one_line(own[-1].text) or 'end'}", Style.TARGET))
    elif round_.finish_reason:
        pieces.append((" end", Style.NOTE))
    line, used = [paint(head, Style.NOTE)], width(head)
    for text, style in pieces:
        shown = clip(text, columns - used)
        used += width(shown)
        line.append(paint(shown, style))
        if shown != text:
            break
    return "".join(line)
