"""Text that waits until it is known what it is, and the search for strings in a stream of characters."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from localspec.spec_decode.rounds import Part, Span


class HeldText:
    """Spans that came and were not released yet; positions count the characters of the whole.

    Attributes:
        n_released: characters released so far.
        n_read: characters that came so far.
    """

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self.n_released = self.n_read = 0

    @property
    def text(self) -> str:
        """What waits."""
        return "".join(span.text for span in self._spans)

    def add(self, span: Span) -> None:
        self._spans.append(span)
        self.n_read += len(span.text)

    def release(self, end: int, part: Part = "answer") -> list[Span]:
        """Take what waits up to a position, as this part of what the model says."""
        spans: list[Span] = []
        while self._spans and self.n_released < end:
            span = self._spans.popleft()
            n = end - self.n_released
            if len(span.text) > n:
                self._spans.appendleft(replace(span, text=span.text[n:]))
                span = replace(span, text=span.text[:n])
            self.n_released += len(span.text)
            spans.append(span if span.part == part else replace(span, part=part))
        return joined(spans)

    def clear(self) -> None:
        self._spans.clear()
        self.n_released = self.n_read


class Matcher:
    """Finds one string in a stream of characters in linear time (Knuth, Morris and Pratt).

    ``matched`` is the length of the longest end of what was read that is a beginning of the string.
    """

    __slots__ = ("_back", "_text", "matched", "size")

    def __init__(self, text: str) -> None:
        self._text = text
        self.size = len(text)
        self.matched = 0
        self._back = _back(text)

    def step(self, character: str) -> bool:
        """Read one character; whether it completes the string."""
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
    """Neighbours of the same kind, source and part as one."""
    found: list[Span] = []
    for span in spans:
        if found and replace(found[-1], text=span.text) == span:
            found[-1] = replace(span, text=found[-1].text + span.text)
        elif span.text:
            found.append(span)
    return found
