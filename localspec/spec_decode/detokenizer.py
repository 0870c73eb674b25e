"""Text out of tokens: characters assembled from bytes, stop strings watched for. Text into tokens: ``templates``."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from localspec.spec_decode.rounds import Span, TokenKind


class TokenBytes(Protocol):
    """What is needed of a vocabulary here."""

    def token_bytes(self, token: int, /) -> bytes:
        """What the token adds to the text."""


class Detokenizer:
    """Token ids -> text, one at a time.

    A character whose bytes are spread over several tokens comes with the last of them. Bytes that cannot be, or
    become, UTF-8 are U+FFFD, as ``bytes.decode(errors="replace")`` has it for the whole.
    """

    def __init__(self, vocab: TokenBytes) -> None:
        self._vocab = vocab
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._vocab.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if a character was never completed, else nothing."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class TextAssembler:
    """Verified tokens -> text that may be shown.

    The answer ends where a stop string first begins in it, however the text was cut into tokens. So text that may still
    become a stop string is held back, and nothing that was released is ever withdrawn. Every character keeps the kind
    and source of the token that completed it.

    Args:
        vocab: the target's vocabulary.
        stop: non-empty strings.

    Attributes:
        stopped: a stop string is complete (and none that began earlier can be): nothing more will be released.
        token_text: what the last token added to the text, held back or not.
    """

    def __init__(self, vocab: TokenBytes, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(vocab)
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._held: deque[Span] = deque()
        self._n_read = 0
        self._n_released = 0
        self._found: int | None = None
        self._last: tuple[TokenKind, str] = ("plain", "target")
        self.stopped = False
        self.token_text = ""

    def push(self, token: int, kind: TokenKind, source: str) -> list[Span]:
        """Add a settled token; returns the text that became safe to show."""
        self.token_text = self._detokenizer.push(token)
        self._last = kind, source
        return self._read(self.token_text)

    def finish(self) -> list[Span]:
        """The answer ended otherwise: returns the text still held back. Safe to call after a stop, and twice.

        A stop string that was complete, and waited only for a longer one, ends it after all: see ``stopped``.
        """
        spans = self._read(self._detokenizer.flush())
        if not self.stopped:
            end = self._n_read if self._found is None else self._found
            self.stopped = self._found is not None
            spans = _joined([*spans, *self._release(end)])
        self._held.clear()
        return spans

    def _read(self, text: str) -> list[Span]:
        if self.stopped or not text:
            return []
        self._held.append(Span(text, *self._last))
        if not self._matchers:
            self._n_read += len(text)
            return self._release(self._n_read)
        open_from = self._n_read
        for character in text:
            self._n_read += 1
            for matcher in self._matchers:
                if matcher.step(character):
                    start = self._n_read - matcher.size
                    self._found = start if self._found is None else min(start, self._found)
            open_from = self._n_read - max(matcher.matched for matcher in self._matchers)
            # A longer stop string that began earlier may still complete; only then is its beginning the end.
            if self._found is not None and self._found <= open_from:
                self.stopped = True
                return self._release(self._found)
        return self._release(open_from)

    def _release(self, end: int) -> list[Span]:
        """Take the held text up to position ``end`` of the whole."""
        spans: list[Span] = []
        while self._held and self._n_released < end:
            span = self._held.popleft()
            n = end - self._n_released
            if len(span.text) > n:
                self._held.appendleft(Span(span.text[n:], span.kind, span.source))
                span = Span(span.text[:n], span.kind, span.source)
            self._n_released += len(span.text)
            spans.append(span)
        return _joined(spans)


class _Matcher:
    """Finds one string in a stream of characters in linear time (Knuth, Morris and Pratt).

    ``matched`` is the length of the longest end of what was read that is a beginning of the string.
    """

    __slots__ = ("_back", "_text", "matched", "size")

    def __init__(self, text: str) -> None:
        self._text = text
        self.size = len(text)
        self.matched = 0
        self._back = [0] * (self.size + 1)
        k = 0
        for i in range(1, self.size):
            while k and text[i] != text[k]:
                k = self._back[k]
            k += text[i] == text[k]
            self._back[i + 1] = k

    def step(self, character: str) -> bool:
        """Read one character; whether it completes the string."""
        k = self.matched
        if k == self.size:
            k = self._back[k]
        while k and self._text[k] != character:
            k = self._back[k]
        self.matched = k + (self._text[k] == character)
        return self.matched == self.size


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of the same kind and source as one."""
    joined: list[Span] = []
    for span in spans:
        if joined and (joined[-1].kind, joined[-1].source) == (span.kind, span.source):
            joined[-1] = Span(joined[-1].text + span.text, span.kind, span.source)
        else:
            joined.append(span)
    return joined
