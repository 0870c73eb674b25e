"""Where an answer stands in its grammar: one constraint per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import shared_prefix
from localspec.errors import EngineError, UsageError
from localspec.sampling.structured.compiler import reason
from localspec.sampling.structured.request import grammar_of
from localspec.sampling.structured.vocabulary import GrammarVocabulary, vocabulary_of

if TYPE_CHECKING:
    from localspec.model_files.vocab import Vocab
    from localspec.sampling.sampling import Ids, Row, SamplingParams

Mask = npt.NDArray[np.bool_]


def constraint_for(params: SamplingParams, vocab: Vocab) -> Constraint | None:
    """The constraint of a request on a model's tokens; None where its answer is free.

    Raises:
        UsageError: the grammar cannot be followed.
        EngineUnavailable: the library that matches grammars is not installed.
    """
    grammar = grammar_of(params.response_format, params.grammar)
    return None if grammar is None else Constraint(vocabulary_of(vocab), grammar)


class Constraint:
    """A place in a grammar: after the settled tokens of the answer, and then some draft tokens.

    Args:
        vocabulary: the tokens.
        grammar: in the library's notation, see ``request.grammar_of``.
    """

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
        """The draft tokens it stands behind."""
        return self._tokens[self._n_settled :]

    def text(self, n_tokens: int) -> bytes:
        """The text of the last tokens, draft tokens included."""
        return self.vocabulary.text(self._tokens[-n_tokens:])

    def advance(self, token: int) -> None:
        """Go one draft token further.

        Raises:
            EngineError: the grammar forbids it, which the drafter has to look at before.
        """
        if not self._matcher.consume_token(token):
            self._check()
            raise EngineError(f"token {token} breaks the grammar: {reason(self._matcher.get_error())}")
        self._tokens.append(token)

    def place(self, draft: Sequence[int]) -> None:
        """Stand behind the settled tokens and these draft tokens, from wherever it stood."""
        here = self.drafted
        n = shared_prefix(here, draft)
        if n < len(here):
            self._back(len(here) - n)
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
        """Which tokens may come next [n_vocab].

        Raises:
            UsageError: none may, or finding out takes more than the library's limits grant.
        """
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
        """How many tokens may come next."""
        return int(np.count_nonzero(self.allowed(len(self.vocabulary.lengths))))

    def masked(self, row: Row, behind: int = 0, ids: Ids | None = None) -> Row:
        """A copy of a row of logits with -inf for what is forbidden.

        Args:
            row: logits [n].
            behind: how many tokens before this place the row belongs to; its token is the first of them.
            ids: the tokens that the logits belong to, increasing [n]; None is 0, 1, 2, …
        """
        n_vocab = len(row) if ids is None else int(ids[-1]) + 1
        if behind:
            self._back(behind)
            try:
                mask = self.allowed(n_vocab)
            finally:
                self._matcher.consume_tokens(self._tokens[-behind:])
        else:
            mask = self.allowed(n_vocab)
        if ids is not None:
            mask = mask[ids]
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
        """The rows of a pass over a draft, masked."""
        return MaskedRows(self, logits, draft, params.greedy and not params.edits_logits)

    def _back(self, n: int) -> None:
        self._matcher.rollback(n)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error() and "doesn't satisfy the grammar" not in self._matcher.get_error():
            why = reason(self._matcher.get_error())
            raise UsageError(f"the schema or grammar asks for too much, this answer cannot go on within it: {why}")


@dataclass(slots=True)
class MaskedRows:
    """The target's rows over a draft, each masked by what the grammar allows there, when it is looked at.

    Attributes:
        constraint: standing anywhere in the draft.
        logits: [k + 1, n_vocab].
        draft: the k draft tokens; row i comes after the first i of them.
        best_decides: a row whose best token is allowed is left as it is: a mask could not change the choice.
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
