"""The audit's own drafters: one that sees every pass and never guesses, and three that guess to be refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from localspec.backends.base import Context, FloatArray, Forward
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.proposer import SamplingProposer
from localspec.spec_decode.rounds import DraftToken


class Recorder(Drafter):
    """Keeps the rows of the target's last pass. It takes part in every round and guesses nothing.

    Attributes:
        rows: [k + 1, n_vocab] of the last verification pass over k guesses.
    """

    source = "recorder"

    def __init__(self) -> None:
        self.rows: FloatArray = np.empty((0, 0), dtype=np.float32)

    def process(self, tokens: Sequence[int], forward: Forward | None) -> None:
        if forward is not None:
            self.rows = forward.logits.copy()

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        return []


class Adversary(Drafter):
    """Guesses so that acceptance ends wherever it wants: along a known text for a while, then an error.

    Round by round the number of right guesses runs through 0 to ``reach``, so a rejection falls on every position of a
    draft, and drafts of all widths are sent. An error is the second best token, with the text going on behind it as if
    it had been right (what a lenient check would accept), or all is random from there; every third draft has no error.

    Args:
        n_vocab: random guesses are drawn from these ids.
        reach: longest draft.
        seed: of the errors.

    Attributes:
        text: the answer that is known in advance, from the prompt on; without one, earlier text stands in.
    """

    source = "adversary"

    def __init__(self, n_vocab: int, reach: int, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._n_vocab = n_vocab
        self._reach = reach
        self._round = 0
        self._asked = False
        self.text: list[int] = []
        self._second_best: list[int] = []
        self._n_prompt = 0

    def know(self, prompt: Sequence[int], answer: Sequence[int], second_best: Sequence[int]) -> None:
        """The text that is going to be said, and at each place of it the token that nearly was."""
        self._n_prompt, self.text, self._second_best = len(prompt), list(answer), list(second_best)

    def begin(self, tokens: Sequence[int]) -> None:
        self._asked = False

    def accept(self, emitted: Sequence[int]) -> None:
        self._asked = False

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if self._asked:  # one draft a round, as long as it was meant to be
            return []
        self._asked = True
        guesses: list[DraftToken] = []
        for token in self._guesses(tokens):
            if not plan.more(self.source) or plan.keep(self.source, 1.0) is None:
                break
            guesses.append(DraftToken(token, self.source, 1.0))
        return guesses

    def _guesses(self, tokens: Sequence[int]) -> list[int]:
        turn, self._round = self._round, self._round + 1
        # A step that shares no factor with the number of positions visits each of them once in a cycle.
        n_right = turn * _coprime_step(self._reach + 1) % (self._reach + 1)
        at = len(tokens) - self._n_prompt
        known = self.text[at:] if self.text else list(tokens[-self._reach :])
        n_right = min(n_right, len(known))
        style = turn % 3
        if style == 0:
            return known[:n_right]
        draft = known[:n_right]
        if style == 1 and at + n_right < len(self._second_best):
            draft += [self._second_best[at + n_right], *known[n_right + 1 :]]
        return draft[: self._reach] + [self._rng.randrange(self._n_vocab) for _ in range(self._reach - len(draft))]


class NearMisses(Adversary):
    """Guesses at every place of a known text what nearly was said there, and then what follows the right token.

    No guess is ever right, so each of them is one more chance for a lenient check to let it pass: at every gap between
    best and second best that the text has.
    """

    source = "near misses"

    def __init__(self, n_vocab: int, reach: int = 2) -> None:
        super().__init__(n_vocab, reach)

    def _guesses(self, tokens: Sequence[int]) -> list[int]:
        at = len(tokens) - self._n_prompt
        return [*self._second_best[at : at + 1], *self.text[at + 1 :]][: self._reach]


class HotDraftModel(DraftModelDrafter):
    """The pair's draft model at twice the temperature: its guesses are honest about their law and often rejected.

    A good draft's law is so near to the target's that breaking the rule of acceptance hardly shows; this one's is not.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context, "hot model")
        self._request: Proposer | None = None

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if proposer is not self._request:
            hot = replace(proposer.params, temperature=2 * proposer.params.temperature)
            # It counts its own samples: nobody else may sample guesses in such a request.
            self._request, self._hot = proposer, SamplingProposer(hot, proposer.noise)
        return super().draft(tokens, plan, self._hot)


def _coprime_step(n: int) -> int:
    """A number near 0.62 n without a common factor with n, so that its multiples spread over all residues."""
    return next(step for step in range(max(1, int(n * 0.618)), 2 * n + 2) if gcd(step, n) == 1)
