"""Text out of tokens: characters assembled from bytes, stop strings watched for. Text into tokens: ``templates``."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from math import inf
from operator import attrgetter, itemgetter
from typing import Protocol

from localspec.backends.tokenizer import NAMED
from localspec.spec_decode.rounds import Part, Span, TokenKind

# Text that waits until it is known what it is, and the search for strings in a stream of characters.


@dataclass(slots=True)
class HeldText:
    """Text that came and was not released yet; positions count the characters of the whole."""

    text: str = ""
    n_released: int = 0
    _of: list[tuple[TokenKind, str]] = field(default_factory=list)  # by character its kind and source

    @property
    def n_read(self) -> int:
        return self.n_released + len(self.text)

    def add(self, span: Span) -> None:
        self.text += span.text
        self._of += [(span.kind, span.source)] * len(span.text)

    def release(self, end: int, part: Part = "answer") -> list[Span]:
        n = max(0, end - self.n_released)
        runs = groupby(zip(self._of[:n], self.text[:n], strict=True), itemgetter(0))
        spans = [Span("".join(each for _, each in run), kind, source, part) for (kind, source), run in runs]
        self.n_released += n
        self.text, self._of = self.text[n:], self._of[n:]
        return spans


class Matcher:
    """Finds one string in a stream of characters in linear time (Knuth, Morris and Pratt); ``matched`` is the length of
    the longest end of what was read that is a beginning of the string."""

    __slots__ = ("_back", "_text", "matched", "size")

    def __init__(self, text: str) -> None:
        self._text = text
        self.size = len(text)
        self.matched = 0
        self._back = _back(text)

    def step(self, character: str) -> bool:
        k = self.matched
        if k == self.size:
            k = self._back[k]
        while k and self._text[k] != character:
            k = self._back[k]
        self.matched = k + (self._text[k] == character)
        return self.matched == self.size


@lru_cache(maxsize=256)
def _back(text: str) -> Sequence[int]:
    """By how much of the text has matched, what still matches if the next character does not."""
    back = array("i", bytes(4 * (len(text) + 1)))
    k = 0
    for i in range(1, len(text)):
        while k and text[i] != text[k]:
            k = back[k]
        k += text[i] == text[k]
        back[i + 1] = k
    return back


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans without empty ones, those in a row that differ in their text only as one."""
    runs = groupby((span for span in spans if span.text), attrgetter("kind", "source", "part"))
    return [Span("".join(span.text for span in run), *of) for of, run in runs]


# What a model thinks before it answers, told apart from the answer while both are being written.


class ThinkingMarks(Protocol):
    """How a chat format marks thinking; names of control tokens are written after ``NAMED``."""

    # What begins a block: at the beginning of the answer only, or anywhere if it begins with a control token.
    @property
    def opening(self) -> Sequence[str]: ...
    @property
    def closing(self) -> Sequence[str]: ...
    @property
    def dropped(self) -> Sequence[str]: ...  # belongs to the format of an answer, and is not shown
    @property
    def names(self) -> Mapping[int, str]: ...  # of the control tokens among these, by token id
    @property
    def forced(self) -> Sequence[int]: ...  # tokens that end a block whose budget is spent


class ThinkingReader:
    """Reads the text of an answer and says which part of it each piece is.

    What may still become a mark waits, however it is cut into tokens, and so do blanks before one: those around a block
    belong to its marks. ``inside``: whether a block is open, at first by the prompt; ``over``: whether the prompt has
    closed one, so that no other is looked for; ``budget``: tokens that a block may have until it is closed.
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

    @property
    def room(self) -> float:
        """Most draft tokens of a round, so that the budget is not overrun."""
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
    def forced(self) -> list[int]:
        """Tokens that close the block, where its budget is spent. A mark that has half come is waited for."""
        return self._forced if self.inside and self.n_tokens >= self.budget and not self._longest else []

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
        certain = self._text_before(at - self._longest)
        if self.inside:
            return self._longest + len(certain) - len(certain.rstrip())
        return self._longest if certain.strip() or not self._fresh else self._longest + len(certain)


def _shown(spans: Sequence[Span]) -> list[Span]:
    return joined([replace(span, text=span.text.replace(NAMED, "")) for span in spans])


# Stand for control tokens where stop strings are looked for. Unicode keeps these code points free for such uses; in a
# model's own text they become U+FFFD.
_SIGNS = "".join(map(chr, range(0xFDD1, 0xFDF0)))


class TokenBytes(Protocol):
    def token_bytes(self, token: int, /) -> bytes: ...


class TextAssembler:
    """Verified tokens -> text that may be shown.

    A character whose bytes are spread over several tokens comes with the last of them. Bytes that cannot be, or
    become, UTF-8 are U+FFFD, as ``bytes.decode(errors="replace")`` has it for the whole.

    The answer ends where a stop string first begins in it, however the text was cut into tokens. So text that may still
    become a stop string is held back, and nothing that was released is ever withdrawn. Every character keeps the kind
    and source of the token that completed it. Thinking is told apart before: stop strings are of the answer.

    Args:
        vocab: the target's vocabulary.
        stop: non-empty strings.
        thinking: tells thinking and answer apart; None: all text is the answer.
        named: control tokens, by name: in stop strings the name means the token, as well as a text that spells it.
    """

    def __init__(
        self,
        vocab: TokenBytes,
        stop: Sequence[str] = (),
        thinking: ThinkingReader | None = None,
        named: Mapping[str, int] | None = None,
    ) -> None:
        self._vocab = vocab
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.thinking = thinking
        self._signs: dict[int, str] = {}
        spelled = [(name, token) for name, token in (named or {}).items() if any(name in text for text in stop)]
        longest_first = sorted(spelled, key=lambda item: -len(item[0]))
        meant = list(stop)
        for (name, token), sign in zip(longest_first, _SIGNS, strict=False):
            self._signs[token] = sign
            meant = [text.replace(name, sign) for text in meant]
        self._not_signs = dict.fromkeys(map(ord, self._signs.values()), "\ufffd")
        self._matchers = [Matcher(text) for text in dict.fromkeys([*stop, *meant])]
        self._held = HeldText()
        self._found: int | None = None
        self._last: tuple[TokenKind, str] = ("plain", "target")
        self.stopped = False  # a stop string is complete, and none that began earlier can be: nothing more is released
        self.token_text = ""  # what the last token added, held back or not
        self.token_thinks = False  # whether that belongs to thinking

    def push(self, token: int, kind: TokenKind, source: str) -> list[Span]:
        """Add a settled token; returns the text that became safe to show."""
        self._last = kind, source
        name = None if self.thinking is None else self.thinking.names.get(token)
        sign = self._signs.get(token, "") if name is None else ""
        ends = bool(name or sign)  # half a character before a control token stays half
        text = self._decoder.decode(b"" if ends else self._vocab.token_bytes(token), ends)
        if self._signs:
            text = text.translate(self._not_signs)
        if self.thinking is None:
            self.token_text = text
            return self._read(Span(text + sign, kind, source))
        was_inside = self.thinking.inside
        self.thinking.n_tokens += was_inside
        text = text.replace(NAMED, "\ufffd") + (name or "")
        self.token_text = text.replace(NAMED, "")
        text += sign
        parts = self.thinking.read(Span(text, kind, source))
        self.token_thinks = was_inside or self.thinking.inside
        return self._of_parts(parts)

    def finish(self) -> list[Span]:
        """The answer ended otherwise: returns the text still held back. A stop string that was complete, and waited
        only for a longer one, ends it after all. Safe to call after a stop, and twice."""
        last = Span(self._decoder.decode(b"", True), *self._last)
        if self.thinking is None:
            spans = self._read(last)
        else:
            spans = self._of_parts([*self.thinking.read(last), *self.thinking.finish()])
        if self._matchers and not self.stopped:  # without any nothing is held
            end = self._held.n_read if self._found is None else self._found
            self.stopped = self._found is not None
            spans = joined([*spans, *self._released(end)])
        return spans

    def _of_parts(self, parts: Sequence[Span]) -> list[Span]:
        spans: list[Span] = []
        for span in parts:
            if span.part == "answer":
                spans += self._read(span)
            elif not self.stopped:
                if span.part == "thinking":  # no stop string reaches over a block
                    spans += self._released(self._held.n_read)
                spans.append(replace(span, text=self._shown(span.text)))
        return joined(spans)

    def _read(self, span: Span) -> list[Span]:
        if self.stopped or not span.text:
            return []
        if not self._matchers:  # nothing is ever held
            return [span]
        at = self._held.n_read
        self._held.add(span)
        open_from = at
        for character in span.text:
            at += 1
            for matcher in self._matchers:
                if matcher.step(character):
                    start = at - matcher.size
                    self._found = start if self._found is None else min(start, self._found)
            open_from = at - max(matcher.matched for matcher in self._matchers)
            # A longer stop string that began earlier may still complete; only then is its beginning the end.
            if self._found is not None and self._found <= open_from:
                self.stopped = True
                return self._released(self._found)
        return self._released(open_from)

    def _released(self, end: int) -> list[Span]:
        spans = self._held.release(end)
        return joined([replace(span, text=self._shown(span.text)) for span in spans]) if self._signs else spans

    def _shown(self, text: str) -> str:
        return text.translate(dict.fromkeys(self._not_signs)) if self._signs else text
