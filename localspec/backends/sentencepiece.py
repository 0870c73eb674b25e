"""SentencePiece's BPE: neighbours are joined into the best-scored token, until none do.

Scores, not ranks of pairs, decide, and among equal scores the leftmost pair: a token that can be joined from two
different pairs has one score. A table of ranked merges (what the ``tokenizers`` package takes) cannot say that, and
splits runs of white space otherwise than llama.cpp does.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

SPACE = "▁"

_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_CROSSES = re.compile(f"[^{SPACE}\0]{SPACE}")
_CACHED_WORDS = 1 << 14


class SentencePiece:
    """Text without special tokens -> token ids.

    Args:
        ids: token text -> id.
        scores: of each id.
        unknown: stands for a character that a vocabulary without byte tokens cannot spell; None leaves it out.
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
        """Token ids; bytes stand for what has no token."""
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
