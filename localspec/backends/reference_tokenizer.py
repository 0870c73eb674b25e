"""The reference backend's tokeniser, in Python: SentencePiece by scores and byte-level BPE, as llama.cpp reads them."""

from __future__ import annotations

import heapq
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from localspec.errors import UnsupportedModel
from localspec.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocab

_SPACE = "▁"

# Python's \s also has the separators 0x1C-0x1F, which are no white space to llama.cpp.
_S = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"


class Tokenizer:
    """Text -> token ids.

    Args:
        metadata: the ``tokenizer.*`` keys of a GGUF file.
        vocab: the vocabulary of the same file.

    Raises:
        UnsupportedModel: another kind of tokeniser, or an unknown split into words.
    """

    def __init__(self, metadata: Mapping[str, Any], vocab: Vocab) -> None:
        if vocab.kind not in ("llama", "gpt2"):
            raise UnsupportedModel(
                f"the reference backend has no tokeniser of kind {vocab.kind!r}; use another --backend"
            )
        key = "tokenizer.ggml."
        tokens: list[str] = list(metadata[key + "tokens"])
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.is_bpe = vocab.kind == "gpt2"
        self.pre = vocab.pre or "default"
        self.bos = vocab.bos if vocab.add_bos else None
        self.eos = vocab.eos if metadata.get(key + "add_eos_token") else None
        self.add_space_prefix = not self.is_bpe and bool(metadata.get(key + "add_space_prefix", True))
        self.scores = [float(score) for score in metadata.get(key + "scores", np.zeros(len(tokens)))]
        self.ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(metadata.get(key + "merges", ()))}
        # The longest first: a special token may be the beginning of another.
        by_length = sorted((i for i in range(len(tokens)) if tokens[i]), key=lambda i: -len(tokens[i]))
        self._always = [tokens[i] for i in by_length if vocab.types[i] == USER_DEFINED]
        self._special = [tokens[i] for i in by_length if vocab.types[i] in (USER_DEFINED, CONTROL, UNKNOWN)]
        if self.is_bpe:
            _patterns(self.pre)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``."""
        ids = [self.bos] if add_special and self.bos is not None else []
        after_special = True
        for piece, token in _partition(text, self._special if parse_special else self._always):
            if token:
                ids.append(self.ids[piece])
                after_special = True
            elif self.is_bpe:
                ids += self._bpe(piece)
            else:
                if self.add_space_prefix and after_special:
                    piece = " " + piece
                ids += self._sentencepiece(piece.replace(" ", _SPACE))
                after_special = False
        if add_special and self.eos is not None:
            ids.append(self.eos)
        return ids

    def _sentencepiece(self, text: str) -> list[int]:
        """Join the neighbours that make the best-scored token, until none do; bytes for what has no token."""
        pieces: list[str | None] = list(text)
        after = list(range(1, len(text) + 1))
        before = list(range(-1, len(text) - 1))
        queue: list[tuple[float, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(pieces):
                joined = f"{pieces[left]}{pieces[right]}"
                token = self.ids.get(joined)
                if token is not None:
                    heapq.heappush(queue, (-self.scores[token], left, joined))

        for i in range(len(pieces) - 1):
            offer(i, i + 1)
        while queue:
            _, left, joined = heapq.heappop(queue)
            right = after[left]
            # An offer is stale when one of its halves has been joined to something else since.
            if pieces[left] is None or right >= len(pieces) or f"{pieces[left]}{pieces[right]}" != joined:
                continue
            pieces[left], pieces[right] = joined, None
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        ids: list[int] = []
        for piece in pieces:
            if piece is None:
                continue
            token = self.ids.get(piece)
            ids += [token] if token is not None else [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return ids

    def _bpe(self, text: str) -> list[int]:
        symbols = _byte_symbols()
        ids: list[int] = []
        for word in _split(text, self.pre):
            pieces = [symbols[byte] for byte in word.encode()]
            if self.pre == "llama-bpe" and "".join(pieces) in self.ids:
                pieces = ["".join(pieces)]
            while len(pieces) > 1:
                ranked = [(self.ranks.get(pair, sys.maxsize), i) for i, pair in enumerate(pairwise(pieces))]
                rank, i = min(ranked)
                if rank == sys.maxsize:
                    break
                pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            for piece in pieces:
                token = self.ids.get(piece)
                ids += [token] if token is not None else [self.ids[s] for s in piece if s in self.ids]
        return ids


def _partition(text: str, special: Sequence[str]) -> list[tuple[str, bool]]:
    """The text in order, cut into (piece, whether it is one of the special tokens); earlier tokens cut first."""
    pieces = [(text, False)] if text else []
    for token in special:
        if token in text:
            pieces = [part for piece in pieces for part in ([piece] if piece[1] else _cut_out(piece[0], token))]
    return pieces


def _cut_out(text: str, token: str) -> Iterator[tuple[str, bool]]:
    for i, between in enumerate(text.split(token)):
        if i:
            yield token, True
        if between:
            yield between, False


def _split(text: str, pre: str) -> list[str]:
    """Cut a text into the words that merges stay within: each expression cuts what the one before left in one piece."""
    words = [text]
    for pattern in _patterns(pre):
        words = [piece for word in words for piece in _cut(word, pattern)]
    return words


def _cut(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    start = 0
    for match in pattern.finditer(text):
        if match.start() > start:
            yield text[start : match.start()]
        if match.group():
            yield match.group()
        start = match.end()
    if start < len(text):
        yield text[start:]


@cache
def _patterns(pre: str) -> list[re.Pattern[str]]:
    """The split of a ``tokenizer.ggml.pre``.

    Raises:
        UnsupportedModel: a split that is not known here.
    """
    letter, number, mark = _category("L"), _category("N"), _category("P")
    gpt2 = f"{_CONTRACTIONS}| ?[{letter}]+| ?[{number}]+| ?[^{_S}{letter}{number}]+|[{_S}]+(?![^{_S}])|[{_S}]+"
    qwen = (
        f"(?i:{_CONTRACTIONS})|[^\r\n{letter}{number}]?[{letter}]+|[{number}]| ?[^{_S}{letter}{number}]+[\r\n]*"
        f"|[{_S}]*[\r\n]+|[{_S}]+(?![^{_S}])|[{_S}]+"
    )
    known = {
        "gpt-2": [gpt2],
        "default": [rf"[{mark}$+<=>^~|]+", gpt2, f"[{number}]+", "[0-9][0-9][0-9]"],
        "smollm": [f"[{number}]", gpt2],
        "qwen2": [qwen],
        "llama-bpe": [qwen.replace(f"|[{number}]|", f"|[{number}]{{1,3}}|")],
    }
    if pre not in known:
        raise UnsupportedModel(
            f"the reference backend does not know the word split {pre!r} of this file; use another --backend"
        )
    return [re.compile(pattern) for pattern in known[pre]]


@cache
def _category(initial: str) -> str:
    """The inside of a character class with all of Unicode's general categories L*, N* or P*."""
    ranges: list[list[int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] == initial:
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


@cache
def _byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where printable, else one from U+0100 on."""
    symbols, n_shifted = [], 0
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        symbols.append(chr(byte if printable else 0x100 + n_shifted))
        n_shifted += not printable
    return symbols
