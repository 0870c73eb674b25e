"""Draft tokens that the grammar leaves no choice about: field names, punctuation, the rest of a literal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from localspec.backends.base import Context
from localspec.sampling.constraint import Constraint
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.ngram import HitRates
from localspec.spec_decode.rounds import DraftToken

# What is known of a draft token: no other is allowed; more forced text follows it; it ends the forced text with the
# quotation mark of a string; it ends it otherwise, often with a blank that belongs to the next word's token.
SURE, INSIDE, BEFORE_TEXT, LAST = range(4)

# Assumed acceptance of each kind, until the answer shows it: a prior counts as so many draft tokens, evidence as the
# last so many. Set by hand; nothing was tuned.
_PRIORS = (1.0, 0.97, 0.9, 0.5)
PRIOR_WEIGHT = 8.0
MEMORY = 60.0

_INSIDE_A_CHARACTER = bytes(range(0x80, 0xC0))

N_CONTEXT = 4  # tokens of the answer that forced text is cut into tokens with: what stands before it can decide how


class GrammarDrafter(Drafter):
    """Drafts the tokens of a text that the grammar forces; that costs no pass of a model.

    Where one token alone is allowed, it is right for certain. Mostly the forced text can be cut into tokens in
    several ways, and the model may choose: the draft is then the tokenizer's way. Like every draft it is checked, so it
    cannot change the law of the answer. How often such drafts were right is learned in this answer, on top of a prior.

    The decoder keeps ``constraint`` where the draft stands; ``tokenize`` reads no special tokens.
    """

    info = DrafterInfo("grammar")

    def __init__(self, constraint: Constraint, tokenize: Callable[[str], list[int]]) -> None:
        self.constraint = constraint
        self._tokenize = tokenize
        self._n_settled = 0
        self._drafted: dict[int, tuple[int, int]] = {}
        self._hits = HitRates(dict(enumerate(_PRIORS)), PRIOR_WEIGHT, MEMORY)

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._n_settled = len(tokens)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if plan.room <= 0 or not plan.more(self.info.source):
            return []
        constraint = self.constraint
        forced = constraint.forced_bytes()
        if not forced:
            plan.nothing(self.info.source)
            return []
        before = constraint.drafted
        drafted: list[DraftToken] = []
        for token in self._cut(forced)[: plan.room]:
            if not constraint.n_legal([token]):
                break
            n = int(constraint.vocabulary.lengths[token])
            kind = self._kind(forced[:n], forced[n:])
            forced = forced[n:]
            confidence = self._hits.rates[kind]
            expected = plan.keep(self.info.source, confidence)
            if expected is None:
                break
            self._drafted[len(tokens) + len(drafted)] = token, kind
            drafted.append(DraftToken(token, self.info.source, confidence, None, expected))
            constraint.advance(token)
        constraint.place(before)
        return drafted

    def _cut(self, forced: bytes) -> list[int]:
        """Forced text as tokens: as the tokenizer has it after the last tokens of the answer.

        Where it has a token that spans the border between the two, the draft begins with the longest token that fits.
        """
        lengths = self.constraint.vocabulary.lengths
        whole = self.constraint.text(N_CONTEXT).lstrip(_INSIDE_A_CHARACTER) + forced
        text = whole.decode("utf-8", "ignore")
        n_forced = len(forced) - (len(whole) - len(text.encode()))  # it may end in the middle of a character
        tokens = self._tokenize(text) if n_forced > 0 else []
        at, n = len(tokens), 0
        while at and n < n_forced:
            at -= 1
            n += int(lengths[tokens[at]])
        if tokens and n == n_forced:
            return tokens[at:]
        allowed = np.flatnonzero(self.constraint.allowed(len(lengths)))
        sizes = np.where(lengths[allowed] <= len(forced), lengths[allowed], 0)
        return [int(allowed[np.argmax(sizes)])] if sizes.any() else []

    def _kind(self, text: bytes, rest: bytes) -> int:
        """What is known of a draft token, the constraint standing before it; ``rest`` is the forced text after it."""
        if len(text) == 1 and self.constraint.n_allowed() == 1:  # of a longer one, the first byte would be allowed too
            return SURE
        if rest:
            return INSIDE
        return BEFORE_TEXT if text.endswith(b'"') else LAST

    def accept(self, emitted: Sequence[int]) -> None:
        for position, token in enumerate(emitted, self._n_settled):
            if position in self._drafted:
                drafted, kind = self._drafted[position]
                self._hits.learn(kind, drafted == token)
        self._n_settled += len(emitted)
        self._drafted.clear()
