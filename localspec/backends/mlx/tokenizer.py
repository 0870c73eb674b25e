"""Text -> tokens from what a GGUF says about its tokenizer; equal to llama.cpp's, token for token.

Byte-level BPE is run by the ``tokenizers`` package, given the file's vocabulary, merges and split; no other file of the
model is needed, nor the packages that usually assemble such a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from localspec.backends.mlx.word_split import IGNORES_MERGES, word_split
from localspec.backends.sentencepiece import SentencePiece
from localspec.backends.special_tokens import SpecialTokens
from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.vocab import Vocab, byte_of_character


class Tokenizer:
    """The tokenizer of one file.

    Args:
        file: the open file; not needed afterwards.
        vocab: its vocabulary.

    Raises:
        UnsupportedModel: another kind of tokenizer, or a split into words that is not known.
    """

    def __init__(self, file: GGUFFile, vocab: Vocab) -> None:
        if vocab.kind not in ("llama", "gpt2"):
            raise UnsupportedModel(
                f"{file.path.name} has a tokenizer of the kind {vocab.kind!r}, which the MLX backend does not read; "
                "use --backend llama-cpp"
            )
        metadata, key = file.metadata, "tokenizer.ggml."
        ids = {text or f"[EMPTY_{i}]": i for i, text in enumerate(metadata[key + "tokens"])}
        self._bos = vocab.bos if vocab.add_bos else None
        self._eos = vocab.eos if metadata.get(key + "add_eos_token") else None
        self._special = SpecialTokens(vocab, ids, metadata)
        self._words: ByteLevel | SentencePiece
        if vocab.kind == "gpt2":
            self._add_space_prefix = False
            self._words = ByteLevel(ids, metadata.get(key + "merges", ()), vocab.pre, file.path.name)
        else:
            self._add_space_prefix = bool(metadata.get(key + "add_space_prefix", True))
            scores = np.asarray(metadata.get(key + "scores", np.zeros(len(ids))), dtype=np.float32)
            self._words = SentencePiece(ids, scores.tolist(), vocab.unk)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``.

        Raises:
            UnicodeEncodeError: the text holds a lone surrogate.
        """
        text.encode()
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


class ByteLevel:
    """Byte-level BPE over text without special tokens.

    Args:
        ids: token text, in GPT-2's letters for bytes -> id.
        merges: pairs of such texts with a space between, the first to be applied first.
        pre: the split's name.
        file_name: for errors.
    """

    def __init__(self, ids: Mapping[str, int], merges: Iterable[str], pre: str, file_name: str) -> None:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in word_split(pre, file_name)]
        pairs = dict.fromkeys(_pair(merge) for merge in merges if " " in merge[1:])
        # The package wants a token for every byte and every merge. llama.cpp does without: what a merge without a token
        # leaves is looked up letter by letter, and what has no token is dropped.
        vocab, self._n_tokens = dict(ids), len(ids)
        self._spelled: dict[int, list[int]] = {}
        for text in (*byte_of_character(), *(left + right for left, right in pairs)):
            if text not in vocab:
                vocab[text] = token = len(vocab)
                self._spelled[token] = [ids[c] for c in text if c in ids and c.isascii()]
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(pairs), ignore_merges=pre in IGNORES_MERGES))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._spelled and max(tokens, default=0) >= self._n_tokens:
            return [each for token in tokens for each in self._spelled.get(token, (token,))]
        return tokens


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]
