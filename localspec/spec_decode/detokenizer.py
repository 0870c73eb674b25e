"""Text out of tokens: characters assembled from bytes, stop strings watched for. Text into tokens: ``templates``."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from localspec.backends.special_tokens import NAMED
from localspec.spec_decode.held_text import HeldText, Matcher, joined
from localspec.spec_decode.rounds import Span, TokenKind
from localspec.spec_decode.thinking import ThinkingReader

_SIGNS = "".join(map(chr, range(0xFDD1, 0xFDF0)))
"""Stand for control tokens where stop strings are looked for. Unicode keeps these code points free for such uses; in a
model's own text they become U+FFFD."""


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
    and source of the token that completed it. Thinking is told apart before: stop strings are of the answer.

    Args:
        vocab: the target's vocabulary.
        stop: non-empty strings.
        thinking: tells thinking and answer apart; None: all text is the answer.
        named: control tokens, by name: in stop strings the name means the token, as well as a text that spells it.

    Attributes:
        stopped: a stop string is complete (and none that began earlier can be): nothing more will be released.
        token_text: what the last token added to the text, held back or not.
        token_thinks: whether the last token belongs to a thinking block, its marks included.
    """

    def __init__(
        self,
        vocab: TokenBytes,
        stop: Sequence[str] = (),
        thinking: ThinkingReader | None = None,
        named: Mapping[str, int] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(vocab)
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
        self.stopped = False
        self.token_text = ""
        self.token_thinks = False

    def push(self, token: int, kind: TokenKind, source: str) -> list[Span]:
        """Add a settled token; returns the text that became safe to show."""
        self._last = kind, source
        name = None if self.thinking is None else self.thinking.names.get(token)
        sign = self._signs.get(token, "") if name is None else ""
        text = self._detokenizer.flush() if name or sign else self._detokenizer.push(token)
        if self._signs:
            text = text.translate(self._not_signs)
        if self.thinking is None:
            self.token_text = text
            return self._read(Span(text + sign, kind, source))
        was_inside = self.thinking.count()
        text = text.replace(NAMED, "\ufffd") + (name or "")
        self.token_text = text.replace(NAMED, "")
        text += sign
        parts = self.thinking.read(Span(text, kind, source))
        self.token_thinks = was_inside or self.thinking.inside
        return self._of_parts(parts)

    def finish(self) -> list[Span]:
        """The answer ended otherwise: returns the text still held back. Safe to call after a stop, and twice.

        A stop string that was complete, and waited only for a longer one, ends it after all: see ``stopped``.
        """
        last = Span(self._detokenizer.flush(), *self._last)
        if self.thinking is None:
            spans = self._read(last)
        else:
            spans = self._of_parts([*self.thinking.read(last), *self.thinking.finish()])
        if not self.stopped:
            end = self._held.n_read if self._found is None else self._found
            self.stopped = self._found is not None
            spans = joined([*spans, *self._released(end)])
        self._held.clear()
        return spans

    def _of_parts(self, parts: Sequence[Span]) -> list[Span]:
        """Watch for stop strings in what is the answer; the rest stays as it is."""
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
        """Without what stands for control tokens."""
        return text.translate(dict.fromkeys(self._not_signs)) if self._signs else text
