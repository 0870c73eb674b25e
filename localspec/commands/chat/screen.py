"""Where the chat is shown, and what that place can do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain, repeat
from typing import Any, TextIO

from localspec.commands.chat.typesetter import (
    Paper,
    Style,
    StyledText,
    Typesetter,
    blocks,
    code_blocks,
    open_code,
    token_style,
)
from localspec.commands.options import called, joined
from localspec.heads import FROM_STATES
from localspec.spec_decode.drafters.names import CORPUS, NGRAM
from localspec.spec_decode.rounds import Round, Span, SpecStats
from localspec.system.terminal import clip, moves_cursor, on_one_line, visible, wrapped


def status_line(stats: Mapping[str, Any]) -> str:
    """Speed, estimated speed-up and accepted guesses of an answer's ``SpecStats``; empty of no tokens."""
    if not stats["completion_tokens"]:
        return ""
    parts = [f"{stats['tokens_per_second']:.1f} tok/s"]
    if not stats["num_draft_tokens"]:
        return " · ".join([*parts, "nothing guessed (plain decoding)"])
    parts += [f"×{faster:.1f}"] if (faster := stats["estimated_speedup"]) else []
    return " · ".join([*parts, f"{stats['num_accepted_tokens']:,} of {stats['num_draft_tokens']:,} guesses right"])


# Views of an answer while it is made; ``ReadingView`` is below.

VIEWS = ("tokens", "reading", "rounds", "plain")


def guessing(drafters: Sequence[str], follows: str = "") -> str:
    """Which drafters are in use, in a sentence, and what brings another one (``LateDraft.status``)."""
    who = f"Guessing by {joined([called(name) for name in drafters])}" if drafters else "Guessing is off"
    return f"{who}; {follows}." if follows else f"{who}."


class TokensView:
    """Text coloured by source; rejected draft tokens in place until the next round; thinking dim, or counted.

    ``drafts``: whether sources and rejected tokens are shown.
    """

    def __init__(self, screen: ChatScreen, stats: SpecStats, *, drafts: bool = True) -> None:
        self._paper = Typesetter(screen)
        self._stats = stats
        self._drafts = drafts
        self._folded = screen.folded
        self._thinks = False
        self._pending: list[StyledText] = []

    def round(self, round_: Round) -> None:
        self._settle()
        segments = [segment for span in round_.spans for segment in self._shown(span)]
        tail: list[StyledText] = []
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

    def finish(self) -> None:
        self._settle()
        self._paper.finish()

    def _settle(self) -> None:
        for text, style in self._pending:
            self._paper.write(text, style)
        self._pending = []

    def _shown(self, span: Span) -> Iterator[StyledText]:
        if span.part == "thinking" and not self._folded:
            self._thinks = True
            yield span.text, Style.THINKING
        elif span.part == "answer":
            if self._thinks:
                yield "\n\n", Style.TARGET
                self._thinks = False
            yield span.text, token_style(span.kind, span.source) if self._drafts else Style.TARGET


INDENT = 6  # cells before further rows of a round


class RoundsView:
    """A line a round: its draft tokens and their fate; plain rounds in a row share a line with their text."""

    def __init__(self, screen: ChatScreen, stats: SpecStats) -> None:
        self._screen, self._stats = screen, stats
        self._plain: list[Round] = []

    def round(self, round_: Round) -> None:
        printed: list[str] = []
        if round_.draft or round_.verdict.kind == "forced":
            printed = self._rows(self._plain) + self._rows([round_])
            self._plain = []
        elif round_.emitted:
            self._plain.append(round_)
        growing = self._rows(self._plain)[-1:] if self._screen.ansi else []
        self._screen.update(printed, growing or [""], status_line(self._stats.as_dict()))

    def finish(self) -> None:
        self._screen.end(self._rows(self._plain))

    def _rows(self, rounds: Sequence[Round]) -> list[str]:
        return self._screen.rows(plain_parts(rounds, unicode=self._screen.unicode), INDENT) if rounds else []


class TextView:
    """The text as it comes, for files, pipes and terminals that cannot move the cursor."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._clean = visible if file.isatty() else str
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
    """Remark on an answer of thoughts alone; empty for others."""
    if not n_thinking or text.strip():
        return ""
    return f"no answer came after {n_thinking} token{'s' * (n_thinking > 1)} of thinking"


_MARKS = {True: ("✓", "✗", "→", "+", "·"), False: ("+", "-", ">", "*", ".")}


def _branch_starts(round_: Round) -> list[bool]:
    """For each draft token, whether it does not continue the one before."""
    return [parent != i - 1 for i, parent in enumerate(round_.draft.parents)]


def round_parts(round_: Round, *, unicode: bool = True) -> list[StyledText]:
    """A round in a line: number, accepted of drafted, drafters, draft + verify time; each draft token and its fate."""
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


def plain_parts(rounds: Sequence[Round], *, unicode: bool = True) -> list[StyledText]:
    """Plain rounds in a row in one line: numbers, tokens and text."""
    if len(rounds) == 1:
        return round_parts(rounds[0], unicode=unicode)
    n_tokens = sum(len(round_.emitted) for round_ in rounds)
    text = "".join(token.text for round_ in rounds for token in round_.emitted)
    numbers = f"{rounds[0].index + 1:4d}-{rounds[-1].index + 1} plain, {n_tokens} tokens"
    return [(f"{numbers}  ", Style.NOTE), (on_one_line(text).replace("↵", "↵\n").rstrip("\n"), Style.TARGET)]


class ChatScreen(Paper):
    """Standard output and standard error.

    ``plain``: standard input is no terminal; only answers go to standard output, without escape sequences.
    """

    def __init__(self, file: TextIO | None = None, errors: TextIO | None = None, *, plain: bool = False) -> None:
        file = file or sys.stdout
        self.errors = errors or sys.stderr
        self.interactive = not plain  # a person types the questions
        self.terminal = file.isatty() and not plain  # a person sees standard output
        ansi = self.terminal and moves_cursor(file)  # the cursor can be moved
        super().__init__(file, ansi=ansi, colour=ansi and not os.environ.get("NO_COLOR"))
        self.folded = False  # thinking is left out

    # -- lines ---------------------------------------------------------------------------------------------------

    def line(self, text: str = "", style: Style = Style.TARGET) -> None:
        """Print lines of our own, wrapped on a terminal."""
        for line in wrapped(visible(text), self.columns) if self.terminal else [visible(text)]:
            print(self.paint(line, style), file=self.file, flush=True)

    def note(self, text: str) -> None:
        """Print a remark, without a terminal to standard error."""
        if self.terminal:
            self.line(text, Style.NOTE)
        else:
            print(visible(text), file=self.errors, flush=True)

    def error(self, text: str) -> None:
        """Print an error in one line, wrapped on a terminal."""
        self.file.flush()
        line = "localspec: " + " ".join(visible(text).split())
        rows = [self.paint(row, Style.ERROR) for row in wrapped(line, self.columns)]
        print(*rows if self.errors.isatty() else [line], sep="\n", file=self.errors, flush=True)

    def question(self, text: str) -> None:
        """Show a question as it was typed, with a mark before each line."""
        for mark, line in zip(chain(["> "], repeat(". ")), visible(text).split("\n"), strict=False):
            first, *rest = wrapped(mark + line, self.columns)
            print(self.paint(first[: len(mark)], Style.PROMPT) + first[len(mark) :], *rest, sep="\n", file=self.file)
        self.file.flush()

    def legend(self, drafters: Sequence[str], follows: str = "") -> None:
        """Say what text styles mean here; nothing if nothing is guessed."""
        kinds = {name.partition(":")[0] for name in drafters}
        if not (kinds or follows):
            return
        if not self.ansi:
            print("guesses are shown by /view rounds; this terminal cannot take text back", file=self.file)
            return
        models = kinds - {NGRAM, CORPUS, *FROM_STATES}
        looks = [
            ("guessed by draft model", Style.MODEL, bool(follows or models)),
            ("by head", Style.STATES, bool(kinds & set(FROM_STATES))),
            ("copied", Style.NGRAM, NGRAM in kinds),
            ("from your files", Style.CORPUS, CORPUS in kinds),
            ("wrong guess", Style.REJECTED, True),
            ("the model's own", Style.TARGET, True),
        ]
        row: list[StyledText] = []
        for text, style, is_in_use in looks:
            if is_in_use:
                each = [(" · ", Style.TARGET), (text, style)] if row else [(text, style)]
                if row and sum(len(part) for part, _ in row + each) > self.columns:
                    print(self.painted(row), file=self.file)
                    row, each = [], each[1:]
                row += each
        print(self.painted(row), file=self.file)

    # -- answers -------------------------------------------------------------------------------------------------

    def answer(self, text: str, view: str) -> None:
        """Show a finished answer."""
        if not self.ansi:
            self.line(text)
        elif view == "reading":
            print(*self.whole(visible(text)), sep="\n", file=self.file, flush=True)
        else:
            paper = Typesetter(self)
            paper.write(text)
            paper.finish()

    def view(self, name: str, stats: SpecStats) -> View:
        """A new view for an answer."""
        if name == "rounds":
            return RoundsView(self, stats)
        if not self.ansi:
            return TextView(self.file)
        return ReadingView(self, stats) if name == "reading" else TokensView(self, stats, drafts=name == "tokens")

    def wait(self, what: str) -> None:
        """Say what happens before an answer's first round, where that can be taken back."""
        self.update([], [self.paint(what, Style.NOTE)], "")

    # -- the keyboard --------------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Within the block, typed keys wait unseen for the next prompt, and pastes are marked as such.

        Yields what begins this; until it is called, lines are read and echoed as usual.
        """
        holding = not self.ansi
        with ExitStack() as stack:

            def begin() -> None:
                nonlocal holding
                if not holding:
                    holding = True
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
        """Switch bracketed paste on or off."""
        if self.ansi:
            self.file.write(f"\x1b[?2004{'h' if on else 'l'}")
            self.file.flush()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Usual terminal settings while another program has the terminal."""
        self.mark_pastes(False)
        try:
            with _keyboard(echo=True, lines=True):
                yield
        finally:
            self.mark_pastes()


def no_echo() -> AbstractContextManager[None]:
    """No echo of typed keys into an answer; the next prompt gets them."""
    return _keyboard(echo=False)


@contextmanager
def _keyboard(*, echo: bool, lines: bool | None = None) -> Iterator[None]:
    """Set the terminal's echo and line mode (None: unchanged) within the block."""
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
    """Drop keys that were typed and not read."""
    with suppress(ImportError, OSError, ValueError):
        import termios

        with suppress(termios.error):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


# The reading view renders an answer's Markdown as it comes. Complete blocks are printed for good; the last one is
# redrawn. Thinking is dim text, printed line by line, or counted if folded.

PAUSE = 4.0  # pause after drawing in multiples of its duration: leaves the engine this share of a core


class ReadingView:
    """Shows an answer as rendered Markdown."""

    def __init__(self, screen: ChatScreen, stats: SpecStats) -> None:
        self._screen, self._stats = screen, stats
        self._thought = ""  # what is not printed of it
        self._thinks = False
        self._text = ""  # from the open block on
        self._n_code = 0  # code blocks before it
        self._n_printed = 0  # lines of code of it that are printed for good
        self._between = False  # whether an empty line comes before it
        self._next = 0.0

    def round(self, round_: Round) -> None:
        self._thought += "" if self._screen.folded else visible(round_.thinking)
        self._thinks = any(token.thinking for token in round_.emitted[-1:])
        self._text += visible(round_.text)
        now = time.monotonic()
        if now < self._next or round_.finish_reason:
            return
        self._screen.update(*self._drawn(), status_line(self._stats.as_dict()))
        self._next = now + (1 + PAUSE) * (time.monotonic() - now)

    def finish(self) -> None:
        lines = self._thoughts(end=True)
        for block in blocks(self._text):
            lines += self._complete(block)
        self._screen.end(lines)

    # -- what there is to see ------------------------------------------------------------------------------------

    def _drawn(self) -> tuple[list[str], list[str]]:
        """Lines to print for good, and those of the region."""
        _, height = self._screen.size()
        printed = self._thoughts(end=bool(self._text.strip()))
        # Only by whole lines can it be told what the next token cannot change: "2" may become an item of a list.
        end = self._text.rfind("\n") + 1
        *complete, last = blocks(self._text[:end]) or [""]
        for block in complete:
            printed += self._complete(block)
        self._text = last + self._text[end:]
        room = max(height - 2, 0)  # without the status, and what is printed for good above it
        region = self._changing()
        n_lines = open_code(last) if len(region) > room else None
        if n_lines is not None and n_lines - room // 2 > self._n_printed:
            printed += self._part(last, n_lines - room // 2)
            region = self._changing()
        return printed, region[max(len(region) - room, 0) :]

    def _changing(self) -> list[str]:
        lines = self._dim(self._thought.rstrip("\n"))
        if self._screen.folded and self._thinks:
            lines.append(self._screen.paint(f"thinking, {self._stats.thinking_tokens} tokens …", Style.NOTE))
        for i, block in enumerate(blocks(self._text)):  # several where the last line is not whole
            between = self._between if i == 0 and not self._n_printed else i > 0
            lines += [""] * between
            lines += self._screen.markdown(block, self._n_code, (self._n_printed if i == 0 else 0, None))
        return lines

    def _thoughts(self, *, end: bool) -> list[str]:
        """Complete lines of thinking, or all at its end, to be printed for good."""
        text = self._thought.rstrip("\n")  # there may be more after the newlines, or the answer
        n_whole = len(text) if end else text.rfind("\n") + 1
        lines = self._dim(text[:n_whole].removesuffix("\n"))
        self._thought = self._thought[n_whole:] * (not end)
        self._between = self._between or bool(lines)
        return lines

    def _dim(self, text: str) -> list[str]:
        text = text if self._between else text.lstrip("\n")
        return self._screen.rows([(text, Style.THINKING)]) if text else []

    def _complete(self, block: str) -> list[str]:
        """Lines of a block that are not printed yet; the next block begins."""
        lines = self._part(block, None)
        self._n_code += len(code_blocks(block))
        self._n_printed, self._between = 0, True
        return lines

    def _part(self, block: str, end: int | None) -> list[str]:
        """Lines of a code block before ``end``, to be printed for good."""
        lines = [""] * (self._between and not self._n_printed)
        lines += self._screen.markdown(block, self._n_code, (self._n_printed, end))
        self._n_printed = end or 0
        return lines


View = TokensView | RoundsView | TextView | ReadingView
