"""Text -> tokens from what a GGUF says about its tokenizer, for engines that bring none; equal to llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from localspec.backends.sentencepiece import SentencePiece
from localspec.backends.special_tokens import SpecialTokens
from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.vocab import Vocab


class Words(Protocol):
    """Tokens of a text without special tokens."""

    def encode(self, text: str) -> list[int]: ...


ByteLevelMaker = Callable[[Mapping[str, int], list[str], str, str], Words]
"""Makes byte-level BPE of: token text -> id; merges; the name of the split into words; the file's, for errors."""


class Tokenizer:
    """The tokenizer of one file.

    Args:
        file: the open file; not needed afterwards.
        vocab: its vocabulary.
        byte_level: makes what splits and merges the words of byte-level BPE.

    Raises:
        UnsupportedModel: another kind of tokenizer, or a split into words that is not known.
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
        self._special = SpecialTokens(vocab, ids, file.metadata)
        self._add_space_prefix = vocab.kind == "llama" and bool(get("add_space_prefix", True))
        self._words: Words
        if vocab.kind == "gpt2":
            self._words = byte_level(ids, list(get("merges", ())), vocab.pre or "default", file.path.name)
        else:
            scores = np.asarray(get("scores", np.zeros(len(ids))), dtype=np.float32)
            self._words = SentencePiece(ids, scores.tolist(), vocab.unk)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``."""
        tokens = [self._bos] if add_special and self._bos is not None else []
        after_special = True
        for piece in self._special.cut(text, parse_special):
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
