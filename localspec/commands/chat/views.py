"""The ways of looking at an answer while it is made: tokens, rounds, plain; ``reading`` has a module of its own."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from localspec.commands.chat.status import status_line
from localspec.commands.chat.style import Style, token_style
from localspec.commands.chat.typesetter import Segment, Typesetter
from localspec.model_files.catalog import short_name
from localspec.spec_decode.drafters.names import CORPUS, NGRAM, RECYCLED
from localspec.spec_decode.rounds import Round, Span, SpecStats, TokenKind
from localspec.terminal.text import char_width, clip, on_one_line, terminal_size, visible, width

VIEWS = ("tokens", "reading", "rounds", "plain")
FORMER_VIEWS = {"lane": "rounds"}
"""Names that saved chats may have and people may type, and what they are called now."""


def guessing(drafters: Sequence[str], *, follows: bool = False) -> str:
    """Who guesses, in a sentence.

    Args:
        drafters: names of those in use.
        follows: whether it is not known yet if a draft model will.
    """
    free = {NGRAM: "from the text itself", RECYCLED: "from earlier passes"}
    ways = []
    for name in drafters:
        kind, _, path = name.partition(":")
        ways.append(free.get(name) or (f"from {path}" if kind == CORPUS else f"with {short_name(name)}"))
    who = f"Guessing {', '.join(ways)}" if ways else "Guessing is off"
    return who + ("; looking whether a draft model would help." if follows else ".")


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
        self, file: TextIO, stats: SpecStats, *, colour: bool, drafts: bool = True, folded: bool = False
    ) -> None:
        self._paper = Typesetter(file, colour=colour)
        self._stats = stats
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
            tail = [(f"thinking, {self._stats.thinking_tokens} tokens …", Style.NOTE)]
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
            self._paper.tail(tail + self._pending, status_line(self._stats.as_dict()))
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
    """A line a round: its draft tokens and their fate. Plain rounds in a row share a line, with their text.

    Args:
        file: where it is shown.
        stats: of the answer.
        ansi: whether the cursor can be moved: then the status is shown below, and a row of plain rounds as it grows.
        colour: whether colours may be used.
        unicode: False draws the marks in ASCII.
    """

    def __init__(self, file: TextIO, stats: SpecStats, *, ansi: bool, colour: bool, unicode: bool) -> None:
        self._file, self._stats, self._unicode = file, stats, unicode
        self._paper = Typesetter(file, colour=colour) if ansi else None
        self._plain: list[Round] = []

    def wait(self, what: str) -> None:
        if self._paper is not None:
            self._paper.tail([(what, Style.NOTE)], "")
            self._paper.flush()

    def round(self, round_: Round) -> None:
        if round_.draft or round_.verdict.kind == "forced":
            self._settle()
            self._print(round_parts(round_, unicode=self._unicode))
        elif round_.emitted:
            self._plain.append(round_)
        if self._paper is not None:
            columns, _ = terminal_size()
            under_way = rows_of(plain_parts(self._plain, unicode=self._unicode), columns - 1) if self._plain else [[]]
            self._paper.tail(under_way[-1], status_line(self._stats.as_dict()))
            self._paper.flush()

    def finish(self) -> None:
        self._settle()
        if self._paper is not None:
            self._paper.finish()

    def _settle(self) -> None:
        if self._plain:
            self._print(plain_parts(self._plain, unicode=self._unicode))
            self._plain = []

    def _print(self, parts: Sequence[Segment]) -> None:
        columns, _ = terminal_size()
        for row in rows_of(parts, columns - 1):
            if self._paper is None:
                self._file.write("".join(text for text, _ in row) + "\n")
                continue
            for text, style in row:
                self._paper.write(text, style)
            self._paper.write("\n")
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


def round_parts(round_: Round, *, unicode: bool = True) -> list[Segment]:
    """A round in a line: number, right of guessed, drafters, draft + verify time; then each guess and its fate.

    Args:
        round_: the round.
        unicode: False draws the marks in ASCII.
    """
    accepted_mark, rejected_mark, recovered_mark, bonus_mark, plain_mark = _MARKS[unicode]
    n_drafted, n_accepted = len(round_.draft), round_.verdict.n_accepted
    sources = "+".join(dict.fromkeys(token.source for token in round_.draft)) or "-"
    fate = f"{n_accepted}/{n_drafted}" if n_drafted else "plain"
    times = f"{round_.ms_draft:3.0f}+{round_.ms_verify:3.0f} ms"
    parts = [(f"{round_.index + 1:4d} {fate:>5} {clip(sources, 11):<11} {times}  ", Style.NOTE)]
    texts = round_.draft_texts or [""] * n_drafted
    starts = _branch_starts(round_)
    for token, text, accepted, is_start in zip(round_.draft, texts, round_.accepted, starts, strict=True):
        if is_start:
            parts.append((" |", Style.TARGET))
        if accepted:
            parts.append((accepted_mark + on_one_line(text), token_style("accepted", token.source)))
        else:
            parts.append((rejected_mark, Style.TARGET))
            parts.append((on_one_line(text), Style.REJECTED))
    own = [token for token in round_.emitted if token.kind != "accepted"]
    if own:
        mark = {"recovered": recovered_mark, "bonus": bonus_mark}.get(own[-1].kind, plain_mark)
        gap = " " if len(parts) > 1 else ""
        text = "".join(token.text for token in own)  # several where they were forced
        parts.append((f"{gap}{mark}{on_one_line(text) or 'end'}", Style.TARGET))
    elif round_.finish_reason:
        parts.append((" end", Style.NOTE))
    return parts


def plain_parts(rounds: Sequence[Round], *, unicode: bool = True) -> list[Segment]:
    """Plain rounds in a row in one line: their numbers, how many tokens, and the text of these."""
    if len(rounds) == 1:
        return round_parts(rounds[0], unicode=unicode)
    n_tokens = sum(len(round_.emitted) for round_ in rounds)
    text = "".join(token.text for round_ in rounds for token in round_.emitted)
    numbers = f"{rounds[0].index + 1:4d}-{rounds[-1].index + 1} plain, {n_tokens} tokens"
    return [(f"{numbers}  ", Style.NOTE), (on_one_line(text).replace("↵", "↵\n"), Style.TARGET)]


INDENT = 6
"""Cells before what does not fit into the first row of a round."""


def rows_of(parts: Sequence[Segment], columns: int) -> list[list[Segment]]:
    """Parts in rows of so many cells, broken at newlines and between words; all but the first are indented."""
    rows: list[list[Segment]] = [[]]
    used = 0

    def begin() -> int:
        rows.append([(" " * INDENT, Style.TARGET)])
        return INDENT

    for text, style in parts:
        for word in re.findall(r"[^ \n]*(?:\n| +|$)", text):
            if used > INDENT and used + width(word.rstrip()) > columns:
                used = begin()
            for char in word:
                if char == "\n" or used + char_width(char) > columns:
                    used = begin()
                if char != "\n":
                    rows[-1].append((char, style))
                    used += char_width(char)
    return rows[:-1] if len(rows[-1]) == 1 and len(rows) > 1 else rows
