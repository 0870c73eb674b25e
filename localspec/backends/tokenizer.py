"""Text -> tokens from what a GGUF says about its tokenizer, for engines that bring none; equal to llama.cpp's."""

from __future__ import annotations

import heapq
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocab, byte_of_character

NAMED = "\ufdd0"
"""Stands before the name of a control token where names and text are mixed, so that a text which spells the name is not
taken for the token. Unicode keeps it free for such uses; in a model's own text it becomes U+FFFD."""

# C's isspace: what a stripping token takes away behind it.
_BLANKS = " \t\n\v\f\r"
_NEVER_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


# -- SentencePiece's BPE -----------------------------------------------------------------------------------------------

SPACE = "▁"

_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_CROSSES = re.compile(f"[^{SPACE}\0]{SPACE}")
_CACHED_WORDS = 1 << 14


class SentencePiece:
    """Joins neighbours into the best-scored token, until none do, the leftmost pair first among equal scores.

    A table of ranked merges (what the ``tokenizers`` package takes) cannot say that. ``unknown`` stands for a character
    that a vocabulary without byte tokens cannot spell; None leaves it out.
    """

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], unknown: int | None = None) -> None:
        self._ids = ids
        self._scores = scores
        self._unknown = unknown
        # Where no token has a space behind another character, no merge crosses the beginning of a word, so words can
        # be looked at one by one and remembered.
        self._by_word = _CROSSES.search("\0".join(ids)) is None
        self._encode_word = lru_cache(_CACHED_WORDS)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without special tokens; bytes stand for what has no token."""
        text = text.replace(" ", SPACE)
        if not self._by_word:
            return list(self._merge(text))
        return [token for word in _WORD.findall(text) for token in self._encode_word(word)]

    def _merge(self, text: str) -> tuple[int, ...]:
        pieces: list[str] = list(text)
        after = list(range(1, len(text) + 1))
        before = list(range(-1, len(text) - 1))
        queue: list[tuple[float, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(pieces):
                joined = pieces[left] + pieces[right]
                token = self._ids.get(joined)
                if token is not None:
                    heapq.heappush(queue, (-self._scores[token], left, joined))

        for i in range(len(pieces) - 1):
            offer(i, i + 1)
        while queue:
            _, left, joined = heapq.heappop(queue)
            right = after[left]
            # An offer is stale when one of its halves has been joined to something else since.
            if not pieces[left] or right >= len(pieces) or pieces[left] + pieces[right] != joined:
                continue
            pieces[left], pieces[right] = joined, ""
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return tuple(token for piece in pieces if piece for token in self._tokens_of(piece))

    def _tokens_of(self, piece: str) -> Iterator[int]:
        token = self._ids.get(piece)
        if token is not None:
            yield token
            return
        as_bytes = [self._ids.get(f"<0x{byte:02X}>") for byte in piece.encode()]
        if None not in as_bytes:
            yield from (byte for byte in as_bytes if byte is not None)
        elif self._unknown is not None:
            yield self._unknown


class Words(Protocol):
    """Encodes text without special tokens."""

    def encode(self, text: str) -> list[int]: ...


ByteLevelMaker = Callable[[Mapping[str, int], list[str], str, str], Words]
"""Makes byte-level BPE of: token text, in GPT-2's letters for bytes -> id; merges, pairs of such texts with a space
between, the first to be applied first; the name of the split into words; the file's name, for errors."""


class Tokenizer:
    """The tokenizer of one file, which is not needed afterwards.

    Raises:
        UnsupportedModel: another kind of tokenizer, or a split into words that ``byte_level`` does not know.
    """

    def __init__(self, file: GGUFFile, vocab: Vocab, byte_level: ByteLevelMaker) -> None:
        if vocab.kind not in ("llama", "gpt2", "none"):
            raise UnsupportedModel(
                f"{file.path.name} has a tokenizer of the kind {vocab.kind!r}, which is not supported; "
                "use --backend llama-cpp"
            )

        def get(key: str, default: Any = None) -> Any:
            return file.metadata.get(f"tokenizer.ggml.{key}", default)

        ids = {text or f"[EMPTY_{i}]": i for i, text in enumerate(get("tokens", ()))}
        self._bos = vocab.bos if vocab.add_bos else None
        self._eos = vocab.eos if get("add_eos_token") else None
        special = set(np.flatnonzero(np.isin(vocab.types, (CONTROL, USER_DEFINED, UNKNOWN))).tolist())
        special |= {ids[text] for text in vocab.special_texts if text in ids}
        texts = [(text, token) for token in sorted(special) if (text := vocab.token_text(token))]
        # A special token may be the beginning of another; lengths are counted in bytes there.
        texts.sort(key=lambda pair: -len(pair[0].encode()))
        self._special = texts
        self._always_special = [(text, token) for text, token in texts if not vocab.is_control(token)]
        name = str(file.metadata.get("general.name", "")).lower()
        self._strips = "phi-3" in name or "phi3" in name  # whether special tokens swallow the white space behind them
        self._add_space_prefix = vocab.kind == "llama" and bool(get("add_space_prefix", True))
        self._words: Words
        if vocab.kind == "gpt2":
            self._words = byte_level(ids, list(get("merges", ())), vocab.pre or "default", file.path.name)
        else:
            scores = np.asarray(get("scores", np.zeros(len(ids))), dtype=np.float32)
            self._words = SentencePiece(ids, scores.tolist(), vocab.unk)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``."""
        # Cut as llama.cpp does: the longest token first, each over the whole text. User-defined ones are always
        # recognised, control tokens such as ``<|im_end|>`` only where asked for.
        pieces: list[str | int] = [text] if text else []
        for special, token in self._special if parse_special else self._always_special:
            if special in text:
                pieces = [part for piece in pieces for part in self._cut_out(piece, special, token)]
        tokens = [self._bos] if add_special and self._bos is not None else []
        after_special = True
        for piece in pieces:
            if isinstance(piece, int):
                tokens.append(piece)
                after_special = True
            else:
                prefix = " " if self._add_space_prefix and after_special else ""
                tokens += self._words.encode(prefix + piece)
                after_special = False
        if add_special and self._eos is not None:
            tokens.append(self._eos)
        return tokens

    def _cut_out(self, piece: str | int, special: str, token: int) -> Iterator[str | int]:
        """A piece of text, or an id, with a special token's id in the place of its text; no piece is empty."""
        if isinstance(piece, int):
            yield piece
            return
        strips = self._strips and special not in _NEVER_STRIPPING
        for i, between in enumerate(piece.split(special)):
            if i:
                yield token
            if text := between.lstrip(_BLANKS) if i and strips else between:
                yield text


# -- byte-level BPE in Python, for the reference backend ---------------------------------------------------------------

# Python's \s also has the separators 0x1C-0x1F, which are no white space to llama.cpp.
_S = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"


class PythonByteLevel:
    """Byte-level BPE over text without special tokens; see ``ByteLevelMaker``.

    Raises:
        UnsupportedModel: an unknown split into words.
    """

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], pre: str, file_name: str) -> None:
        self._ids, self._pre = ids, pre
        self._ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        self._patterns = _patterns(pre)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        words = [text]  # which merges stay within
        for pattern in self._patterns:
            words = [part for word in words for part in pattern.split(word) if part]
        for word in words:
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


@cache
def _patterns(pre: str) -> list[re.Pattern[str]]:
    """The expressions of a split; each cuts what the ones before left in one piece."""
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
    return [re.compile(f"({pattern})") for pattern in known[pre]]


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
    character_of = {byte: character for character, byte in byte_of_character().items()}
    return [character_of[bytes([byte])] for byte in range(256)]
