"""The audit's own drafters: one that sees every pass and never drafts, and three that draft to be rejected."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from localspec.backends.base import Context, FloatArray, Forward
from localspec.sampling.sampling import Distribution
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.spec_decode.rounds import DraftToken


class Recorder(Drafter):
    """Keeps the rows [k + 1, n_vocab] of the target's last pass over k draft tokens, and drafts nothing.

    Asked before the others, it also has their proposer note what is drawn for them.
    """

    source = "recorder"

    def __init__(self) -> None:
        self.rows: FloatArray = np.empty((0, 0), dtype=np.float32)
        self._proposer: Proposer | None = None

    def process(self, tokens: Sequence[int], forward: Forward | None) -> None:
        if forward is not None:
            self.rows = forward.logits.copy()

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if proposer is not self._proposer:
            self._proposer, proposer.drawn = proposer, []
        return []

    def drawn(self) -> list[tuple[int, Distribution]]:
        """The samples that were drawn since this was asked last, with their laws."""
        if self._proposer is None or self._proposer.drawn is None:
            return []
        found = list(self._proposer.drawn)
        self._proposer.drawn.clear()
        return found


class Adversary(Drafter):
    """Drafts so that acceptance ends wherever it wants: along a known answer for a while, then an error.

    Round by round the number of right tokens runs through 0 to ``reach``, so a rejection falls on every position of a
    draft, and drafts of all widths are sent. An error is the second best token, with the answer going on behind it as
    if it had been right (what a lenient check would accept), or all is random from there; every third draft has no
    error.

    Args:
        n_vocab: random tokens are drawn from these ids.
        reach: longest draft.
    """

    source = "adversary"

    def __init__(self, n_vocab: int, reach: int) -> None:
        self._rng = random.Random(1)
        self._n_vocab, self._reach = n_vocab, reach
        # A step that shares no factor with the number of positions visits each of them once in a cycle, and near
        # 0.62 n it spreads them.
        n = reach + 1
        step = next(step for step in range(max(1, int(n * 0.618)), 2 * n + 2) if gcd(step, n) == 1)
        self._n_right = [turn * step % n for turn in range(n)]
        self._round = 0
        self._drafted = False
        self.know([], [], [])

    def know(self, prompt: Sequence[int], answer: Sequence[int], second_best: Sequence[int]) -> None:
        """The answer that is going to be given, and at each place of it the token that came second; without an answer,
        earlier text stands in."""
        self._n_prompt, self._answer, self._second_best = len(prompt), list(answer), list(second_best)

    def begin(self, tokens: Sequence[int]) -> None:
        self._drafted = False

    def accept(self, emitted: Sequence[int]) -> None:
        self._drafted = False

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if self._drafted:  # one draft a round, as long as it was meant to be
            return []
        self._drafted = True
        draft: list[DraftToken] = []
        for token in self._tokens(tokens):
            if not plan.more(self.source) or plan.keep(self.source, 1.0) is None:
                break
            draft.append(DraftToken(token, self.source, 1.0))
        return draft

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        turn, self._round = self._round, self._round + 1
        at = len(tokens) - self._n_prompt
        known = self._answer[at:] if self._answer else list(tokens[-self._reach :])
        n_right = min(self._n_right[turn % len(self._n_right)], len(known))
        draft, kind = known[:n_right], turn % 3
        if kind == 0:
            return draft
        if kind == 1 and at + n_right < len(self._second_best):
            draft += [self._second_best[at + n_right], *known[n_right + 1 :]]
        return draft[: self._reach] + [self._rng.randrange(self._n_vocab) for _ in range(self._reach - len(draft))]


class Beside(Adversary):
    """The adversary's drafts beside those of others, where drafts branch."""

    source = "beside"
    copies = True


class NearMisses(Adversary):
    """Drafts at every place of a known answer the token that came second there, and then what follows the right one.

    No token is ever right, so each of them is one more chance for a lenient check to let it pass: at every gap between
    best and second best that the answer has.
    """

    source = "near misses"

    def __init__(self, n_vocab: int, reach: int = 2) -> None:
        super().__init__(n_vocab, reach)

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        at = len(tokens) - self._n_prompt
        return [*self._second_best[at : at + 1], *self._answer[at + 1 :]][: self._reach]


class Openers(Drafter):
    """Drafts that a thinking block opens at once, and again behind that: where its budget is spent, nothing that
    verification accepts behind the mark may be part of the answer."""

    source = "openers"

    def __init__(self, mark: Sequence[int], reach: int) -> None:
        self._draft = (list(mark) * reach)[:reach]
        self._drafted = False

    def begin(self, tokens: Sequence[int]) -> None:
        self._drafted = False

    def accept(self, emitted: Sequence[int]) -> None:
        self._drafted = False

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        draft: list[DraftToken] = []
        for token in [] if self._drafted else self._draft:
            if not plan.more(self.source) or plan.keep(self.source, 1.0) is None:
                break
            draft.append(DraftToken(token, self.source, 1.0))
        self._drafted = True
        return draft


class HeatedDrafter(Drafter):
    """A drafter of the pair at twice the temperature: its samples are honest about their law and often rejected.

    A good draft's law is so near to the target's that breaking the rule of acceptance hardly shows; this one's is not.

    Args:
        drafter: one that runs a model; a clone of it drafts.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter.clone(drafter.context)
        self._drafter.source = self.source = f"hot {drafter.source}"
        self.context, self.taps = drafter.context, drafter.taps
        self._proposer: Proposer | None = None

    def attach(self, target: Context) -> None:
        self._drafter.attach(target)

    def begin(self, tokens: Sequence[int]) -> None:
        self._drafter.begin(tokens)

    def process(self, tokens: Sequence[int], forward: Forward) -> None:
        self._drafter.process(tokens, forward)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if proposer is not self._proposer:
            hot = replace(proposer.params, temperature=2 * proposer.params.temperature)
            # It counts its own samples: no other drafter may sample in such a request.
            self._proposer, self._hot = proposer, Proposer(hot, proposer.noise)
            self._hot.drawn = proposer.drawn
        return self._drafter.draft(tokens, plan, self._hot)

    def drafted(self) -> None:
        self._drafter.drafted()

    def accept(self, emitted: Sequence[int]) -> None:
        self._drafter.accept(emitted)
