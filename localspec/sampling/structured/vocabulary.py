"""A model's tokens in the form that grammars are matched on: built once per vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from localspec.errors import UsageError
from localspec.sampling.structured.compiler import compiled, library, reason
from localspec.sampling.structured.request import N_COMPILED

if TYPE_CHECKING:
    from localspec.model_files.vocab import Vocab


class GrammarVocabulary:
    """The token texts of a vocabulary, and grammars compiled for them.

    A token without a text (control tokens, padding) is never allowed, but that the ends of an answer are where the
    grammar is satisfied.

    Attributes:
        lengths: bytes of each token's text [n_tokens].
        ends: ids that end an answer.
    """

    def __init__(self, vocab: Vocab) -> None:
        texts = vocab.token_table()
        self.lengths: npt.NDArray[np.int64] = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        self.ends = frozenset(vocab.eog)
        llguidance = library()
        ends = sorted(self.ends)
        # Slices are sets of tokens whose masks are kept ready: those for the inside of JSON strings.
        self._tokenizer = llguidance.LLTokenizer(
            _Tokens(texts, ends[0] if ends else None),
            eos_token=ends or None,
            slices=llguidance.LLTokenizer.json_slices(),
        )
        self._compiled = lru_cache(N_COMPILED)(self._compile)

    def text(self, tokens: Sequence[int]) -> bytes:
        """What tokens add to the text."""
        return bytes(self._tokenizer.decode_bytes(list(tokens)))

    def matcher(self, grammar: str) -> Any:
        """A fresh ``LLMatcher`` at the beginning of a grammar.

        Raises:
            UsageError: the grammar does not compile, or no answer can begin in it.
        """
        return self._compiled(grammar).deep_copy()

    def _compile(self, grammar: str) -> Any:
        found = compiled(self._tokenizer, grammar)
        if found.is_error():
            raise UsageError(f"the grammar cannot be followed: {reason(found.get_error())}")
        first = found.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # a rule that is only itself again, or a schema that nothing fits
            raise UsageError(f"no answer can follow the schema or grammar, from its beginning on: {_why(first)}")
        return found


def _why(matcher: Any) -> str:
    """Why a matcher cannot go on."""
    text = reason(matcher.get_error())
    return "it refers to itself without end, or contradicts itself" if text == "NoExtensionBias" else text


class _Tokens:
    """What the library reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int | None) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        raise AssertionError("asked only for forced tokens, and forcing is off")


_known: WeakKeyDictionary[Vocab, GrammarVocabulary] = WeakKeyDictionary()


def vocabulary_of(vocab: Vocab) -> GrammarVocabulary:
    """The grammar vocabulary of a model's; made at the first call, in about a second for 152,000 tokens."""
    found = _known.get(vocab)
    if found is None:
        found = _known[vocab] = GrammarVocabulary(vocab)
    return found
