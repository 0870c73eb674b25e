"""The reference backend's tokeniser, in Python: SentencePiece by scores and byte-level BPE, as llama.cpp reads them."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from localspec.backends.sentencepiece import SentencePiece
from localspec.backends.special_tokens import SpecialTokens
from localspec.errors import UnsupportedModel
from localspec.model_files.vocab import Vocab

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
        scores = [float(score) for score in metadata.get(key + "scores", np.zeros(len(tokens)))]
        self._sentencepiece = SentencePiece(self.ids, scores, vocab.unk)
        self._special = SpecialTokens(vocab, self.ids, metadata)
        self.ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(metadata.get(key + "merges", ()))}
        if self.is_bpe:
            _patterns(self.pre)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``."""
        text.encode()  # refuses lone surrogates
        ids = [self.bos] if add_special and self.bos is not None else []
        after_special = True
        for piece in self._special.cut(text, parse_special):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
            elif self.is_bpe:
                ids += self._bpe(piece)
            else:
                ids += self._sentencepiece.encode(" " + piece if self.add_space_prefix and after_special else piece)
                after_special = False
        if add_special and self.eos is not None:
            ids.append(self.eos)
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
