"""The place of an answer in its grammar: one constraint per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from localspec.backends.base import shared_prefix
from localspec.errors import EngineError, UsageError
from localspec.sampling.grammar import N_COMPILED, compiled, grammar_of, library, reason

if TYPE_CHECKING:
    from localspec.model_files.vocab import Vocab
    from localspec.sampling.sampling import Ids, Row, SamplingParams


class GrammarVocabulary:
    """The token texts of a vocabulary, and grammars compiled for them; ``lengths`` are bytes [n_tokens].

    A token without a text is never allowed, except the ``ends`` of an answer where the grammar is satisfied.
    """

    def __init__(self, vocab: Vocab) -> None:
        texts = list(map(vocab.token_bytes, range(vocab.n_tokens)))
        self.lengths: npt.NDArray[np.int64] = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        self.ends = frozenset(vocab.eog)
        llguidance, ends = library(), sorted(self.ends)
        # Slices are sets of tokens whose masks are kept ready: those for the inside of JSON strings.
        self._tokenizer = llguidance.LLTokenizer(
            _Tokens(texts, ends[0] if ends else None),
            eos_token=ends or None,
            slices=llguidance.LLTokenizer.json_slices(),
        )
        self._compiled = lru_cache(N_COMPILED)(self._compile)

    def text(self, tokens: Sequence[int]) -> bytes:
        return bytes(self._tokenizer.decode_bytes(list(tokens)))

    def matcher(self, grammar: str) -> Any:
        """A fresh ``LLMatcher``; ``UsageError``: the grammar does not compile, or no answer can begin in it."""
        return self._compiled(grammar).deep_copy()

    def _compile(self, grammar: str) -> Any:
        found = compiled(self._tokenizer, grammar)
        if found.is_error():
            raise UsageError(f"the grammar cannot be followed: {reason(found.get_error())}")
        first = found.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # a rule that is only itself again, or a schema that nothing fits
            why = reason(first.get_error())
            why = "it refers to itself without end, or contradicts itself" if why == "NoExtensionBias" else why
            raise UsageError(f"no answer can follow the schema or grammar, from its beginning on: {why}")
        return found


class _Tokens:
    """The part of a tokenizer that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int | None) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        raise AssertionError("asked only for forced tokens, and forcing is off")


# Making one takes about a second for 152,000 tokens.
_known: WeakKeyDictionary[Vocab, GrammarVocabulary] = WeakKeyDictionary()

Mask = npt.NDArray[np.bool_]


def constraint_for(params: SamplingParams, vocab: Vocab) -> Constraint | None:
    """The constraint of a request on a model's tokens; None where its answer is free.

    Raises:
        UsageError: the grammar cannot be followed.
        EngineUnavailable: the library that matches grammars is not installed.
    """
    grammar = grammar_of(params.response_format, params.grammar)
    if grammar is None:
        return None
    if vocab not in _known:
        _known[vocab] = GrammarVocabulary(vocab)
    return Constraint(_known[vocab], grammar)


class Constraint:
    """A place in a grammar (in llguidance's notation, see ``grammar_of``): after the settled tokens of the answer, then
    some draft tokens."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str) -> None:
        self.vocabulary = vocabulary
        self._matcher: Any = vocabulary.matcher(grammar)
        self._tokens: list[int] = []
        self._n_settled = 0

    # -- where it stands -----------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and nothing can follow it."""
        return bool(self._matcher.is_stopped())

    @property
    def drafted(self) -> list[int]:
        return self._tokens[self._n_settled :]

    def text(self, n_tokens: int) -> bytes:
        return self.vocabulary.text(self._tokens[-n_tokens:])

    def advance(self, token: int) -> None:
        """Go one draft token further; ``EngineError``: the grammar forbids it."""
        if not self._matcher.consume_token(token):
            self._check()
            raise EngineError(f"token {token} breaks the grammar: {reason(self._matcher.get_error())}")
        self._tokens.append(token)

    def place(self, draft: Sequence[int]) -> None:
        """Move to the place after the settled tokens and these draft tokens."""
        here = self.drafted
        n = shared_prefix(here, draft)
        if n < len(here):
            self._matcher.rollback(len(here) - n)
            self._check()
            del self._tokens[self._n_settled + n :]
        for token in draft[n:]:
            self.advance(token)

    def settle(self, token: int) -> bool:
        """The answer goes on with this token; draft tokens are forgotten. Returns ``complete``."""
        self.place([token])
        self._n_settled += 1
        return self.complete

    # -- what it allows ------------------------------------------------------------------------------------------

    def n_legal(self, draft: Sequence[int]) -> int:
        """How many of these tokens, from the first, the grammar allows here."""
        if self.complete:
            return int(bool(draft) and draft[0] in self.vocabulary.ends)
        n_known = len(self.vocabulary.lengths)  # a model's logits may be wider
        known = takewhile(lambda token: 0 <= token < n_known, draft)
        n = int(self._matcher.validate_tokens(list(known)))
        self._check()
        return n

    def allowed(self, n_vocab: int) -> Mask:
        """Which tokens may come next [n_vocab]; ``UsageError``: none may, or the library's limits are reached."""
        if self.complete:
            mask = np.zeros(n_vocab, dtype=np.bool_)
            mask[[end for end in self.vocabulary.ends if end < n_vocab]] = True
            return mask
        bits = self._matcher.compute_bitmask()
        self._check()
        n_known = min(len(self.vocabulary.lengths), n_vocab)
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=n_known, bitorder="little").view(np.bool_)
        return mask if n_known == n_vocab else np.concatenate([mask, np.zeros(n_vocab - n_known, dtype=np.bool_)])

    def n_allowed(self) -> int:
        return int(np.count_nonzero(self.allowed(len(self.vocabulary.lengths))))

    def masked(self, row: Row, ids: Ids | None = None) -> Row:
        """A copy of a row of logits [n] with -inf for what is forbidden here; ``ids`` are its tokens, increasing, None
        is 0, 1, 2, …"""
        mask = self.allowed(len(row)) if ids is None else self.allowed(int(ids[-1]) + 1)[ids]
        if 2 * np.count_nonzero(mask) > len(mask):
            row = row.copy()
            row[np.flatnonzero(~mask)] = -np.inf
            return row
        at = np.flatnonzero(mask)
        few: Row = np.full(len(row), -np.inf, dtype=np.float32)
        few[at] = row[at]
        return few

    def forced_bytes(self) -> bytes:
        """What the text must go on with here, whatever the tokens; often nothing."""
        forced = b"" if self.complete else bytes(self._matcher.compute_ff_bytes())
        self._check()
        return forced

    def rows(self, logits: npt.NDArray[np.float32], draft: Sequence[int], params: SamplingParams) -> MaskedRows:
        return MaskedRows(self, logits, draft, params.greedy and not params.edits_logits)

    def _check(self) -> None:
        if self._matcher.is_error() and "doesn't satisfy the grammar" not in self._matcher.get_error():
            why = reason(self._matcher.get_error())
            raise UsageError(f"the schema or grammar asks for too much, this answer cannot go on within it: {why}")


@dataclass(slots=True)
class MaskedRows:
    """The target's rows over a draft of k tokens [k + 1, n_vocab], each masked by the grammar when it is read.

    With ``best_decides`` a row whose best token is allowed stays unmasked: a mask could not change the choice.
    """

    constraint: Constraint
    logits: npt.NDArray[np.float32]
    draft: Sequence[int]
    best_decides: bool

    def __getitem__(self, index: int) -> Row:
        row: Row = self.logits[index]
        self.constraint.place(self.draft[:index])
        if self.best_decides and self.constraint.n_legal([int(np.argmax(row))]):
            return row
        return self.constraint.masked(row)
