"""A text in the tokens of one vocabulary, followed in those of another: for a draft model of any vocabulary.

The two vocabularies meet in bytes. ``CarriedText.follow`` gives the draft model's tokens for the target's text;
``continuation`` gives the target's tokens for what the draft model says next. Only the changed end of a text is
tokenized again (Timor et al. 2025, arXiv:2502.05202, algorithm 2, tokenize all of it).
"""

from __future__ import annotations

from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import cache

from localspec.backends.base import shared_prefix
from localspec.model_files.vocab import Vocab

MARK = 0xFF
"""Stands for a special token among the bytes of a text: UTF-8 never has this byte."""

MAX_BACK = 64
"""Bytes before a change that are tokenized again at most: a merge can reach over the border, but seldom a word."""

Tokenize = Callable[[str], Sequence[int]]


class Side:
    """One vocabulary of the two: bytes to tokens that stand for exactly these bytes.

    Args:
        vocab: the vocabulary.
        tokenize: its tokenizer, which adds no special tokens and reads none.
    """

    def __init__(self, vocab: Vocab, tokenize: Tokenize) -> None:
        self.vocab, self.tokenize = vocab, tokenize
        self.bytes_of = cache(vocab.token_bytes)  # asked some forty times a round

    def tokens_of(self, text: bytes) -> list[int] | None:
        """Tokens whose bytes are ``text``, which is whole characters; None where the vocabulary has none."""
        try:
            decoded = text.decode()
        except UnicodeDecodeError:
            return None
        for anchor in ("", "\n"):  # behind an anchor no space is put in front of the text, as SentencePiece does
            tokens, prefix = self.tokenize(anchor + decoded), anchor.encode()
            for skip in (0,) if not anchor else range(1, 4):
                if self.spelled(tokens[:skip]).lstrip(b" ") == prefix and self.spelled(tokens[skip:]) == text:
                    return list(tokens[skip:])
        return None

    def spelled(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens."""
        return b"".join(map(self.bytes_of, tokens))


def partners(source: Vocab, other: Vocab) -> dict[int, int]:
    """The special tokens of one vocabulary that another has too: by name, ends of a turn also by what they mean."""
    named = {other.token_text(token): token for token in other.marks}
    found = {token: named[name] for token in source.marks if (name := source.token_text(token)) in named}
    meant = ((source.bos, other.bos), (source.eot, other.eot), (source.eos, other.eos))
    for again in (False, True):  # first to those that are no other's partner by name
        for mine, its in meant:
            if mine is not None and its is not None and (again or its not in found.values()):
                found.setdefault(mine, its)
    return found


class CarriedText:
    """What a draft model has to read for a text in the target's tokens, and what the draft model's tokens mean there.

    Args:
        target: vocabulary and tokenizer of the text.
        draft: those of the draft model.

    Attributes:
        pending: bytes at the end of the text that are not yet a whole character, and in no token of the draft model.
            Nothing can be drafted behind them: a token that begins with the rest of a character is no text of its own.
    """

    def __init__(self, target: Side, draft: Side) -> None:
        self._target, self._draft = target, draft
        self._to_draft = partners(target.vocab, draft.vocab)
        self._to_target = partners(draft.vocab, target.vocab)
        self._tokens: list[int] = []  # the target's
        self._offsets: list[int] = []  # bytes of the text up to and with each of them
        self._text = bytearray()
        self._ids: list[int] = []  # the draft model's
        self._ends: list[int] = []  # bytes of the text up to and with each of them
        self.pending = b""

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's tokens [n] for a text; those that the text before began with too are the same.

        Args:
            tokens: the target's, from the beginning of the text.
        """
        kept = shared_prefix(self._tokens, tokens)
        if kept == len(tokens) == len(self._tokens):
            return self._ids
        self._cut(kept)
        for token in tokens[kept:]:
            self._text += self._bytes_of(token)
            self._offsets.append(len(self._text))
        self._tokens += tokens[kept:]
        self._tokenize_end()
        return self._ids

    def continuation(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
        """The target's tokens for what the draft model says after the text, which ends with a whole character.

        Args:
            drafted: the draft model's tokens [n] after those of ``follow``.

        Returns:
            Each token of the target, and how many of ``drafted`` it takes, counted from the first. Half a character at
            the end is left out, and so is all behind a token that cannot be carried over.
        """
        spelled, ends, special = bytearray(), list[int](), list[tuple[int, int]]()
        for at, token in enumerate(drafted):
            piece = self._draft.bytes_of(token)
            if not piece:
                special = [(self._to_target[token], at + 1)] if token in self._to_target else []
                break
            spelled += piece
            ends.append(len(spelled))
        whole = spelled[: len(spelled) - len(_half_character(spelled))]
        tokens = self._target.tokens_of(bytes(whole)) if whole else []
        if tokens is None:
            return []
        found, offset = list[tuple[int, int]](), 0
        for token in tokens:
            offset += len(self._target.bytes_of(token))
            found.append((token, bisect_right(ends, offset - 1) + 1))
        return found + special if len(whole) == len(spelled) else found

    def _bytes_of(self, token: int) -> bytes:
        piece = self._target.bytes_of(token)
        if piece:
            return piece.replace(bytes([MARK]), b"?")  # it is no character anyway
        return bytes([MARK]) if token in self._to_draft else b""

    def _cut(self, n: int) -> None:
        """Forget the text behind its first n tokens."""
        del self._tokens[n:], self._offsets[n:]
        del self._text[self._offsets[-1] if self._offsets else 0 :]
        n_ids = bisect_right(self._ends, len(self._text))
        del self._ids[n_ids:], self._ends[n_ids:]

    def _tokenize_end(self) -> None:
        """Tokenize what no token of the draft model stands for, and the end of what has one."""
        self._step_back()
        at = self._ends[-1] if self._ends else 0
        if not at and self._draft.vocab.add_bos and self._draft.vocab.bos is not None:
            self._ids, self._ends = [self._draft.vocab.bos], [0]
        self.pending = _half_character(self._text[at:])
        end = len(self._text) - len(self.pending)
        while at < end:
            if self._text[at] == MARK:
                token = self._to_draft[self._tokens[bisect_right(self._offsets, at)]]
                at += 1
                if not (self._ids == [token] and self._ends == [0]):  # the beginning of a text, which both have
                    self._ids.append(token)
                    self._ends.append(at)
                continue
            mark = self._text.find(MARK, at, end)
            at = self._add(at, end if mark < 0 else mark)

    def _step_back(self) -> None:
        """Drop the last tokens of the draft model as far as to one that begins a word, where words are cut anyway."""
        behind = len(self._text)
        while self._ends and self._ends[-1] > behind - MAX_BACK:
            if self._ends[-1] and self._text[self._ends[-1] - 1] == MARK:
                return
            self._ids.pop()
            end = self._ends.pop()
            begins = self._ends[-1] if self._ends else 0
            # It may be that it is but one byte of a character.
            if begins < end and self._text[begins] in b" \n" and self._text[begins : begins + 2].strip():
                return

    def _add(self, start: int, end: int) -> int:
        """Tokenize a stretch of text without special tokens; returns its end."""
        text = bytes(self._text[start:end])
        ids = self._draft.tokens_of(text)
        if ids is not None:
            for token in ids:
                start += len(self._draft.bytes_of(token))
                self._ends.append(start)
        else:  # no characters, or a ▁ of its own, which SentencePiece reads as a space: the tokens stand for all of it
            ids = list(self._draft.tokenize(text.decode("utf-8", "replace")))
            self._ends += [end] * len(ids)
        self._ids += ids
        return end


def _half_character(text: bytes | bytearray) -> bytes:
    """The end of a text that is the beginning of a character in UTF-8, and not all of it."""
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(text[-3:]))
    return decoder.getstate()[0]
