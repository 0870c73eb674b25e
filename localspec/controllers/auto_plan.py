"""A draft under way, token by token: what was sent and spent so far, and whether going on is worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from localspec.controllers.acceptance import START, leads_to
from localspec.controllers.estimates import Estimates
from localspec.controllers.prefill_gate import PrefillGate
from localspec.controllers.time_budget import TimeBudget
from localspec.spec_decode.draft import Draft
from localspec.spec_decode.drafters.names import kind_of

ONE_SHARE = 0.5
"""Of what drafts may lose, what one draft may that was not weighed before: a copied run is right or wrong as a whole,
and one that is wrong must leave something to try the next with. With all of it the replay is the same, and a short
answer of 40 tokens that repeats a predicted text all but its first words 1.07 instead of 1.7 times as fast as plain
decoding. A head that may lose all of it leaves nothing for copies: with the costs of machine A 7.7 instead of 4.6 of
100 ends of answers are under 0.97 of plain (25 answers to the tuning questions). A draft model has been weighed before
it read the prompt."""

LEAST_PIECE = 8
"""Tokens that a draft model reads in a round at least, where it may not read all at once."""


class AutoPlan:
    """Draft while it pays: a step of a draft model if it is worth its time, a token if it is worth its row.

    Attributes:
        room: tokens that may still be drafted.
        ms_spent: time that draft models took for their steps.
        ms_invested: time that they took for readings.
        stepped: sources of which a model took a step or read.
        lessons: what its steps teach, to be called once the round is over: nothing that this plan decides by.
    """

    def __init__(self, estimates: Estimates, budget: TimeBudget, gate: PrefillGate, room: int, index: int) -> None:
        self.estimates = estimates
        self.room = min(room, estimates.max_draft)
        self.ms_spent = self.ms_invested = 0.0
        self.stepped: set[str] = set()
        self.lessons: list[Callable[[], None]] = []
        self._gate = gate
        # What holds until the round is over: asked for twice for every draft token.
        self._one_ms = estimates.times(1)
        self._most_ms = budget.for_drafts * (self._one_ms + estimates.ms_other)
        self._pass_ms: dict[int, float] = {}
        self._answer_room = room
        self._index = index
        self._n = 0  # tokens drafted
        self._reach = 1.0  # probability that all of them are accepted
        self._after = START
        self._last_source = ""
        self._is_reading = False
        self._last_counterfactual = START

    # -- what drafters ask -----------------------------------------------------------------------------------------

    def order(self, sources: Sequence[str]) -> Sequence[str]:
        """What costs nothing first, then models by what a step of each is worth, as if all had read everything.

        One that has not is asked all the same: whether it should read is weighed then (see ``prefill_gate``).
        """
        models = self.estimates.models
        if len(models) < 2:
            return sources
        prospect = self.estimates.prospect
        worth = {model: prospect.step(self._n, self._reach, self._after, i) for i, model in enumerate(models)}
        return sorted(sources, key=lambda source: -worth.get(source, math.inf))

    def more(self, source: str, pending: int = 0) -> bool:
        if self.room <= 0 or pending == 0:  # where looking costs nothing, keep() decides with the confidence known
            return self.room > 0
        self._is_reading = pending > 1 and self._gate.is_reading(source, pending)
        return self._step_pays(source, pending)

    def piece(self, source: str, pending: int) -> int:
        if not self._is_reading:
            return pending
        n, times = self._gate.piece(source, pending), self.estimates.draft_times[source]
        while n > LEAST_PIECE and times(n) > self.estimates.times.ms_beside:
            n = max(LEAST_PIECE, n - max(1, n // 8))
        return n

    def samples(self, source: str, confidence: float) -> bool:
        sampled, most_probable = self.estimates.sampled[source], self.estimates.acceptance[source]
        return sampled.expected(confidence) > most_probable.expected(confidence)

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        acceptance = self.estimates.acceptance[source]
        if source in self.estimates.draft_times:
            self.lessons.append(partial(acceptance.notice, confidence, self._after))
        elif self._last_source != source:  # of a copy only the first token counts
            self.lessons.append(partial(acceptance.notice, confidence))
        expected = (self.estimates.sampled[source] if sampled else acceptance).expected(confidence)
        after = leads_to(confidence)
        if self.room <= 0 or not self._row_pays(source, expected, after):
            return None
        self.room -= 1
        self._n += 1
        self._reach *= expected
        self._after, self._last_source = after, source
        return expected

    def beside(self, draft: Draft, parent: int, source: str, confidence: float) -> float | None:
        """Whether a token beside those of a drafted chain, or behind such a one, is worth a row; see ``Branching``."""
        rivals = draft.children(parent)
        acceptance = self.estimates.acceptance[source]
        expected = acceptance.beside(confidence) if rivals else acceptance.expected(confidence)
        expected *= max(0.0, 1.0 - sum(float(draft[rival].expected) for rival in rivals))
        reach: float = math.prod((draft[i].expected for i in draft.path(parent)), start=expected)
        times, n = self.estimates.times, len(draft)
        worth = reach - self.estimates.prospect.rate * (times(n + 2) - times(n + 1))
        if self.room <= 0 or worth <= 0 or not self._affords(0.0, 1.0):
            return None
        self.room -= 1
        self._n += 1
        return expected

    # -- what drafters report --------------------------------------------------------------------------------------

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        # At most what was expected: the rest is the machine's doing. If it stays so slow, the times say so from the
        # next piece of a reading on, or the next round.
        times = self.estimates.draft_times[source]
        charged = min(ms, times(n_tokens))
        if self._is_reading:
            self.ms_invested += charged
            times.observe(n_tokens, ms)
        else:
            self.ms_spent += charged
            self.lessons.append(partial(times.observe, n_tokens, ms))
        self.stepped.add(source)

    def nothing(self, source: str) -> None:
        if self._last_source != source:
            self.estimates.acceptance[source].notice(0.0)

    def counterfactual(self, source: str, confidence: float, right: bool) -> None:
        acceptance = self.estimates.acceptance[source]
        acceptance.notice(confidence)
        if self._last_counterfactual != START:
            acceptance.notice(confidence, self._last_counterfactual)
        self._last_counterfactual = leads_to(confidence) if right else START
        acceptance.observe(confidence, right)
        self.estimates.stale = True

    # -- deciding --------------------------------------------------------------------------------------------------

    def _step_pays(self, source: str, pending: int) -> bool:
        """Whether a step of a draft model is worth its time, its confidence not yet known."""
        estimates = self.estimates
        if source in estimates.unprofitable:
            return False
        if self._is_reading and self.ms_invested and estimates.times.ms_beside < math.inf:
            estimates.set_lagging(source, True)  # the rest is read in later rounds
            return False
        if pending > 1 and not self._gate.pays(source, pending, self._answer_room, self._index):
            estimates.set_lagging(source, True)
            return False
        if not self._affords(estimates.draft_times[source](1 if self._is_reading else pending), share_of(source)):
            return False
        continuation = estimates.joined(source)
        worth = continuation.step(self._n, self._reach, self._after, estimates.rank(source))
        if self._n and source in estimates.one_pass:  # behind others' tokens its pass is still to be taken
            worth -= continuation.rate * estimates.step_ms(source)
        if worth <= 0:
            return False
        estimates.set_lagging(source, False)
        return True

    def _row_pays(self, source: str, expected: float, after: int) -> bool:
        """Whether a draft token, already made, is worth a row of the target's pass, or leads to rows that are.

        One that cost nothing also stands in the way of a better one: it is passed over where a step of a draft model is
        worth more.
        """
        estimates = self.estimates
        runs_model = source in estimates.draft_times
        if not self._affords(0.0, share_of(source)):
            return False
        if runs_model:
            return estimates.joined(source).send(self._n, self._reach, expected, after) > 0
        continuation = estimates.at_hand
        worth = continuation.copy(self._n, self._reach, expected, self.room, after)
        models = range(len(estimates.draft_times) - len(estimates.lagging))
        steps = (continuation.step(self._n, self._reach, self._after, model) for model in models)
        return worth > 0 and all(worth >= step for step in steps)

    def _affords(self, step_ms: float, share: float) -> bool:
        """Whether one more draft token, were the draft in vain, costs no more than this share of what drafts may cost.

        A wider pass can be shorter, so the widths after the next are looked at too.
        """
        left = share * self._most_ms - self.ms_spent - step_ms + self._one_ms
        known = self._pass_ms
        for width in range(self._n + 2, self._n + 2 + self.room):  # left at the first as a rule
            ms = known.get(width)
            if ms is None:
                ms = known[width] = self.estimates.times(width)
            if ms <= left:
                return True
        return False


@lru_cache(maxsize=64)
def share_of(source: str) -> float:
    """Of what drafts may lose, what one of this source may."""
    return 1.0 if kind_of(source) == "model" else ONE_SHARE
