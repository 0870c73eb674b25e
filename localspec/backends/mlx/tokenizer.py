"""Byte-level BPE by the ``tokenizers`` package, given the file's vocabulary, merges and split.

No other file of the model is needed, nor the packages that usually assemble such a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from localspec.backends.mlx.word_split import IGNORES_MERGES, word_split
from localspec.model_files.vocab import byte_of_character


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
