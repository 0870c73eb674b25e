"""Finding a vocabulary's special tokens in a text, as llama.cpp does: the longest first, each over the whole text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from localspec.model_files.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocab

NAMED = "\ufdd0"
"""Stands before the name of a control token where names and text are mixed, so that a text which spells the name is not
taken for the token. Unicode keeps this code point free for such uses; in a model's own text it becomes U+FFFD."""

# C's isspace: what a stripping token takes away behind it.
_BLANKS = " \t\n\v\f\r"
_NEVER_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


class SpecialTokens:
    """Cuts a text at its special tokens.

    User-defined tokens are always recognised; control tokens such as ``<|im_end|>`` only where asked for.

    Args:
        vocab: the vocabulary.
        ids: token text -> id.
        metadata: of the file: its name tells whether special tokens swallow the white space behind them (Phi-3).
    """

    def __init__(self, vocab: Vocab, ids: Mapping[str, int], metadata: Mapping[str, Any]) -> None:
        special = set(np.flatnonzero(np.isin(vocab.types, (CONTROL, USER_DEFINED, UNKNOWN))).tolist())
        special |= {ids[text] for text in vocab.special_texts if text in ids}
        texts = [(text, token) for token in sorted(special) if (text := vocab.token_text(token))]
        # A special token may be the beginning of another; lengths are counted in bytes there.
        texts.sort(key=lambda pair: -len(pair[0].encode()))
        self._all = texts
        self._always = [(text, token) for text, token in texts if not vocab.is_control(token)]
        name = str(metadata.get("general.name", "")).lower()
        self._strips = "phi-3" in name or "phi3" in name

    def cut(self, text: str, parse_special: bool) -> list[str | int]:
        """The text in order: pieces of text, none of them empty, and the ids of special tokens between them."""
        pieces: list[str | int] = [text] if text else []
        for special, token in self._all if parse_special else self._always:
            if special in text:
                pieces = [part for piece in pieces for part in self._cut_out(piece, special, token)]
        return pieces

    def _cut_out(self, piece: str | int, special: str, token: int) -> Iterator[str | int]:
        if isinstance(piece, int):
            yield piece
            return
        strips = self._strips and special not in _NEVER_STRIPPING
        for i, between in enumerate(_split(piece, special, strips)):
            if i:
                yield token
            if between:
                yield between


def _split(text: str, special: str, strips: bool) -> Sequence[str]:
    parts = text.split(special)
    return [parts[0], *(part.lstrip(_BLANKS) for part in parts[1:])] if strips else parts
