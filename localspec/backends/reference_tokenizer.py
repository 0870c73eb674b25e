"""Byte-level BPE in Python, as llama.cpp computes it, for the reference backend."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

from localspec.errors import UnsupportedModel
from localspec.model_files.vocab import byte_of_character

# Python's \s also has the separators 0x1C-0x1F, which are no white space to llama.cpp.
_S = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"


class PythonByteLevel:
    """Byte-level BPE over text without special tokens.

    Args:
        ids: token text, in GPT-2's letters for bytes -> id.
        merges: pairs of such texts with a space between, the first to be applied first.
        pre: the split's name.
        file_name: for errors.

    Raises:
        UnsupportedModel: an unknown split into words.
    """

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], pre: str, file_name: str) -> None:
        self._ids, self._pre = ids, pre
        self._ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        _patterns(pre)

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        tokens: list[int] = []
        for word in _split(text, self._pre):
            pieces = [_byte_symbols()[byte] for byte in word.encode()]
            if self._pre == "llama-bpe" and "".join(pieces) in self._ids:
                pieces = ["".join(pieces)]
            while len(pieces) > 1:
                ranked = [(self._ranks.get(pair, sys.maxsize), i) for i, pair in enumerate(pairwise(pieces))]
                rank, i = min(ranked)
                if rank == sys.maxsize:
                    break
                pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            for piece in pieces:
                token = self._ids.get(piece)
                tokens += [token] if token is not None else [self._ids[s] for s in piece if s in self._ids]
        return tokens


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
    runs = re.finditer(f"{initial}+", _initials())
    return "".join(f"\\U{run.start():08x}-\\U{run.end() - 1:08x}" for run in runs)


@cache
def _initials() -> str:
    """The first letter of every character's general category; one pass over Unicode takes a tenth of a second."""
    return "".join(category[0] for category in map(unicodedata.category, map(chr, range(sys.maxunicode + 1))))


@cache
def _byte_symbols() -> list[str]:
    """The character that stands for each byte."""
    character_of = {byte: character for character, byte in byte_of_character().items()}
    return [character_of[bytes([byte])] for byte in range(256)]
