"""Drafts copied from earlier text: the n-gram drafter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy

from localspec.backends.base import Context, shared_prefix
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.spec_decode.drafters.hit_rates import HitRates
from localspec.spec_decode.drafters.names import NGRAM
from localspec.spec_decode.drafters.suffix_automaton import SuffixAutomaton
from localspec.spec_decode.rounds import DraftToken

# Lower ends of the ranges of match lengths, and how often a continuation was right for each on 59,000 tokens of code
# and prose (Qwen2.5 tokens): seen once; seen several times, always the same; in at least half of the cases; in fewer.
_LENGTHS = (1, 2, 3, 4, 5, 6, 9, 13, 21)
_SHARES = (
    (0.20, 0.28, 0.38, 0.48, 0.54, 0.65, 0.71, 0.79, 0.90),
    (0.58, 0.67, 0.75, 0.78, 0.85, 0.90, 0.92, 0.95, 0.96),
    (0.29, 0.30, 0.30, 0.32, 0.30, 0.35, 0.35, 0.35, 0.40),
    (0.12, 0.14, 0.15, 0.15, 0.16, 0.18, 0.18, 0.20, 0.20),
)
PRIORS = {(i, j): share for i, shares in enumerate(_SHARES) for j, share in enumerate(shares)}
PRIOR_WEIGHT = 12.0
MEMORY = 100.0
"""A prior counts as so many draft tokens, and the evidence as the last so many. Set by hand; nothing was tuned."""

LEAD = 16
"""Tokens of the prompt's end that are put in front of an expected text: what follows them is then its beginning, with a
match in the last range but one of ``_LENGTHS``."""

_BREAK = 1 << 40
"""Stands between an expected text and the prompt; no vocabulary has such a token."""


class NgramDrafter(Drafter):
    """Copies what followed the longest recent suffix when it occurred earlier, in prompt or conversation.

    The suffix automaton has the match at hand, so a token costs no search and no pass of a model (about 5 µs). Each
    carries an estimate of being right: how often those with such a match were, counted in this conversation on top of a
    prior. Every settled token is compared with the draft token for it, real or counterfactual; so the estimate is
    learned even while the controller does not draft.

    Args:
        min_match: shortest suffix, in tokens, that is worth looking up.
    """

    source = NGRAM
    copies = ranked = True

    def __init__(self, min_match: int = 1) -> None:
        self.min_match = max(1, min_match)
        self._automaton = SuffixAutomaton()
        self._tokens: list[int] = []
        self._expected: list[int] = []
        self._n_ahead = 0
        self._hits = HitRates(PRIORS, PRIOR_WEIGHT, MEMORY)

    def clone(self, context: Context | None) -> Drafter:
        clone = NgramDrafter(self.min_match)
        clone._hits = deepcopy(self._hits)
        return clone

    def expect(self, text: Sequence[int]) -> None:
        self._expected = list(text)  # read by `begin`, as if it had once followed the end of the prompt

    def begin(self, tokens: Sequence[int]) -> None:
        """Read a prompt. What it shares with what was read before stays; only the rest is undone and read."""
        ahead = [*tokens[-LEAD:], *self._expected, _BREAK] if self._expected else []
        self._n_ahead = len(ahead)
        tokens = [*ahead, *tokens]
        shared = shared_prefix(self._tokens, tokens)
        n_stale = len(self._tokens) - shared
        # Taking a token back costs about as much as adding it.
        if n_stale > self._automaton.n_undoable or n_stale > shared:
            self._automaton, self._tokens, shared = SuffixAutomaton(), [], 0
        else:
            for _ in range(n_stale):
                self._automaton.pop()
            del self._tokens[shared:]
        for token in tokens[shared:]:
            self._automaton.push(token)
        self._tokens = tokens

    def accept(self, emitted: Sequence[int]) -> None:
        """Read what was settled, and learn whether the draft token for each was, or would have been, right."""
        for token in emitted:
            found = self._automaton.continuation(*self._automaton.match())
            if found is not None and found[0] != _BREAK:
                self._hits.learn(kind_of_match(*found[1:]), found[0] == token)
            self._automaton.push(token)
            self._tokens.append(token)

    def confidence(self, tokens: Sequence[int]) -> float:
        found = self._automaton.continuation(*self._after(tokens))
        return 0.0 if found is None or found[0] == _BREAK else self._hits.rate(kind_of_match(*found[1:]))

    def _after(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The match of a text that goes on from the settled one."""
        state, length = self._automaton.match()
        for token in tokens[len(self._tokens) - self._n_ahead :]:
            state, length = self._automaton.step(state, length, token)
        return state, length

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        """Draft on from the end of ``tokens``; those after the settled ones are others' drafts of this round."""
        automaton = self._automaton
        state, length = self._after(tokens)
        draft: list[DraftToken] = []
        while plan.room > 0 and plan.more(self.source):
            found = automaton.continuation(state, length)
            if found is None or found[3] < self.min_match or found[0] == _BREAK:
                plan.nothing(self.source)
                break
            token = found[0]
            run = [*(each.id for each in draft), token]
            if proposer.n_legal(run) < len(run):
                plan.nothing(self.source)
                break
            confidence = self._hits.rate(kind_of_match(*found[1:]))
            expected = plan.keep(self.source, confidence)
            if expected is None:
                break
            draft.append(DraftToken(token, self.source, confidence, None, expected))
            state, length = automaton.step(state, length, token)
        return draft

    def close(self) -> None:
        self._automaton, self._tokens = SuffixAutomaton(), []
        self._n_ahead = 0


def kind_of_match(times: int, total: int, length: int) -> tuple[int, int]:
    """The cell of the table for a continuation seen ``times`` of ``total`` after a context of ``length`` tokens."""
    if total == 1:
        row = 0
    elif times == total:
        row = 1
    else:
        row = 2 if 2 * times >= total else 3
    return row, bisect_right(_LENGTHS, length) - 1
