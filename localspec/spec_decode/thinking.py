"""What a model thinks before it answers, told apart from the answer while both are being written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from localspec.backends.special_tokens import NAMED
from localspec.spec_decode.held_text import HeldText, Matcher, joined
from localspec.spec_decode.rounds import Part, Span


class ThinkingMarks(Protocol):
    """How a chat format marks thinking; names of control tokens are written after ``NAMED``."""

    @property
    def opening(self) -> Sequence[str]:
        """What begins a block: at the beginning of the answer only, or anywhere if it begins with a control token."""

    @property
    def closing(self) -> Sequence[str]:
        """What ends a block."""

    @property
    def dropped(self) -> Sequence[str]:
        """What belongs to the format of an answer, and is not shown."""

    @property
    def names(self) -> Mapping[int, str]:
        """The control tokens among these, by token id."""

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that end a block whose budget is spent."""


class ThinkingReader:
    """Reads the text of an answer and says which part of it each piece is.

    What may still become a mark waits, however it is cut into tokens, and so do blanks before one: those around a block
    belong to its marks. Text that only began like a mark is given back.

    Args:
        marks: how the model marks thinking.
        inside: whether the prompt has opened a block.
        over: whether the prompt has closed one; no other is looked for.
        budget: tokens that a block may have until it is closed; None is any number.

    Attributes:
        inside: whether a block is open.
        n_tokens: how many tokens were thinking.
    """

    def __init__(
        self, marks: ThinkingMarks, *, inside: bool = False, over: bool = False, budget: int | None = None
    ) -> None:
        self.names = marks.names
        self.budget = inf if budget is None else budget
        self.inside = inside
        self.n_tokens = 0
        self._forced = list(marks.forced)
        self._closing = [Matcher(text) for text in marks.closing]
        self._dropped = [Matcher(text) for text in marks.dropped]
        anywhere = [text.startswith(NAMED) for text in marks.opening]
        self._openers = frozenset(
            token
            for token, name in marks.names.items()
            for text, is_so in zip(marks.opening, anywhere, strict=True)
            if is_so and name in text
        )
        matchers = [Matcher(text) for text in marks.opening]
        self._anywhere = [each for each, is_so in zip(matchers, anywhere, strict=True) if is_so]
        self._at_start = [each for each, is_so in zip(matchers, anywhere, strict=True) if not is_so]
        self._held = HeldText()
        self._fresh = not (inside or over)  # no text of the answer has come that a block could not follow
        self._skips_blanks = inside

    # -- the budget ----------------------------------------------------------------------------------------------

    def count(self) -> bool:
        """A token comes, its text is read next; whether it is thinking."""
        self.n_tokens += self.inside
        return self.inside

    @property
    def room(self) -> float:
        """How many draft tokens may be verified at a time, so that the budget is not overrun."""
        left = max(0.0, self.budget - self.n_tokens)
        if self.inside:
            return max(0.0, left - 1)
        may_open = self._fresh or any(matcher.matched for matcher in self._anywhere)
        return left if may_open else inf

    @property
    def draft_ends(self) -> frozenset[int]:
        """Tokens that a draft ends with, so that what follows the opening of a block is drafted within its budget."""
        return self._openers if self.budget < inf else frozenset()

    @property
    def spent(self) -> bool:
        """Whether the block has to be closed now. A mark that has half come is waited for."""
        return self.inside and self.n_tokens >= self.budget and not self._longest

    @property
    def forced(self) -> list[int]:
        """Tokens that close the block, where that has to be done now; else none."""
        return self._forced if self.spent else []

    # -- the text ------------------------------------------------------------------------------------------------

    @property
    def _part(self) -> Part:
        return "thinking" if self.inside else "answer"

    @property
    def _watched(self) -> list[Matcher]:
        if self.inside:
            return self._closing
        return [*self._dropped, *self._anywhere, *(self._at_start if self._fresh else ())]

    @property
    def _longest(self) -> int:
        """Characters at the end of what was read that may be the beginning of a mark."""
        return max((matcher.matched for matcher in self._watched), default=0)

    def read(self, span: Span) -> list[Span]:
        """Go on with a piece of text; returns what is certain now, each piece with its part."""
        at = self._held.n_read
        self._held.add(span)
        spans: list[Span] = []
        for character in span.text:
            at += 1
            spans += self._step(character, at)
        spans += self._held.release(self._held.n_read - self._n_uncertain(at), self._part)
        return _shown(spans)

    def finish(self) -> list[Span]:
        """The answer is over: what waited is no mark."""
        if self.inside:  # blanks at the end of a block that was cut short
            text = self._held.text
            solid = self._held.n_released + len(text.rstrip())
            spans = [*self._held.release(solid, "thinking"), *self._held.release(self._held.n_read, "mark")]
        else:
            spans = self._held.release(self._held.n_read)
        return _shown(spans)

    def _step(self, character: str, at: int) -> list[Span]:
        """Look at the character before position ``at``."""
        if self._skips_blanks and character.isspace() and not self._longest:
            return self._held.release(at, "mark")
        for matcher in self._watched:
            if matcher.step(character):
                return self._pass(matcher, at)
        self._skips_blanks = self._skips_blanks and self._longest > 0
        if self._fresh and self._text_before(at - self._longest).strip():
            self._fresh = False
        return []

    def _pass(self, mark: Matcher, at: int) -> list[Span]:
        """A mark is complete: what was before it, itself, and what it changes."""
        before = self._text_before(at - mark.size)
        blank = len(before) - len(before.rstrip()) if self.inside or mark in self._at_start else 0
        spans = self._held.release(at - mark.size - blank, self._part) + self._held.release(at, "mark")
        was_inside, self.inside = self.inside, mark in self._anywhere or mark in self._at_start
        self._fresh = not self.inside and bool(self._anywhere or (self._fresh and not was_inside))
        self._skips_blanks = True
        for matcher in (*self._closing, *self._dropped, *self._anywhere, *self._at_start):
            matcher.matched = 0
        return spans

    def _text_before(self, position: int) -> str:
        return self._held.text[: max(0, position - self._held.n_released)]

    def _n_uncertain(self, at: int) -> int:
        """How many of the last characters wait."""
        certain = self._text_before(at - self._longest)
        if self.inside:
            return self._longest + len(certain) - len(certain.rstrip())
        return self._longest if certain.strip() or not self._fresh else self._longest + len(certain)


def _shown(spans: Sequence[Span]) -> list[Span]:
    """Without what stands before the names of control tokens."""
    return joined([replace(span, text=span.text.replace(NAMED, "")) for span in spans])
