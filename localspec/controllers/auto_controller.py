"""Draft where it pays: lengths and sources chosen token by token from measured costs and calibrated acceptance.

Speculation is a renewal-reward problem. What drafting on is worth comes from ``stopping``; how likely draft tokens are
accepted from ``acceptance``; what passes cost from ``cost_model``. ``estimates`` puts the three together, ``auto_plan``
decides by them, and here they learn from every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from localspec.controllers.acceptance import SourceAcceptance
from localspec.controllers.auto_plan import AutoPlan
from localspec.controllers.cost_model import PassCost
from localspec.controllers.estimates import NEVER, Estimates, Tables
from localspec.controllers.explainer import explain
from localspec.controllers.prefill_gate import PrefillGate
from localspec.controllers.time_budget import TimeBudget
from localspec.sampling.rows import Row, top_probability
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.drafters.base import Branching, Plan
from localspec.spec_decode.drafters.names import kind_of
from localspec.spec_decode.rounds import Round

MAX_DRAFT = 16
"""Longest draft that ``auto`` considers."""

SOLVE_EVERY = 16
"""Rounds between two solutions of the stopping problem; one takes about a millisecond. With 8 the replay is as fast and
a sixth more answers are under 0.97 of plain; with 32 it is 0.6 % slower."""

MAX_ROW = 0.4
"""Where a further row of the target's pass costs as much time as so many tokens are worth, no draft branches: a second
token for a place is right that often only where the first is a toss-up."""

FLAT_ROW = 0.1
"""Where a further row costs as large a share of a pass over one token, no context is made for drafts that branch, if
such a context computes other passes otherwise. Simulated (``benchmarks/branching.py``), branches gain 7 % at 0.1 where
a draft token costs 0.06 of a pass, and nothing where it costs 0.3; at 0.06 11 and 2 %."""

PLAIN_EVERY = 12
LITTLE = 1.25
"""Where drafting is expected to gain less than this, one round of so many is plain: what plain decoding takes shows in
passes over one token only, and a neighbour who leaves makes it faster unseen. Without, an answer of which every round
had a draft was a tenth slower than plain decoding, and was taken to be faster."""

EXPLAIN_EVERY = 32
"""Rounds between two explanations, which solve the problem for each source alone."""

WATCHED_TOKENS = 32
"""For so many tokens the target's certainty is looked at every round, then every other, as looking takes time too. The
replay is as fast with every other round from the beginning, with a tenth more answers under 0.97 of plain."""


def row_ms(times: PassCost) -> float:
    """What a further row of a pass over a few costs [ms]."""
    return (times(8) - times(2)) / 6


class AutoController(Controller):
    """Chooses the length of every draft.

    Two things keep it from being slower than plain decoding. It drafts only where that is expected to pay; and what it
    may lose where it is wrong is bounded by a budget that outlives the answer (see ``time_budget``). A round is charged
    at most what was expected of it: that a machine stalls is not the drafting's fault.

    A draft model that was given up is tried again: without new evidence its estimates drift back to what is typical,
    and when the text it has missed is worth reading on those terms (see ``prefill_gate``), and the budget covers it, it
    catches up. What it would have drafted for that text is then compared with what was emitted.

    Args:
        times: the target's t(w) [ms].
        draft_times: by source, d(w) of drafters that run a model of their own [ms]; the others draft for nothing.
        acceptance: by source, how likely its tokens are accepted; kept by the caller, so that it outlives a request.
        sampled: the same for tokens that a draft model samples; ``acceptance`` is for its most probable ones.
        max_draft: longest draft to consider.
        budget: what may be lost; kept by the caller too.
        predicted: whether the answer is likely to repeat a text that came with the request.
        thinking: ``acceptance`` and ``sampled`` while the model thinks: text of another kind, in which other draft
            tokens are right. None: as in the answer.
        one_pass: sources of which one pass of a model guesses all of a draft.
    """

    gives_way = True

    def __init__(
        self,
        times: PassCost,
        draft_times: Mapping[str, PassCost],
        acceptance: Mapping[str, SourceAcceptance],
        sampled: Mapping[str, SourceAcceptance] | None = None,
        max_draft: int = MAX_DRAFT,
        budget: TimeBudget | None = None,
        *,
        predicted: bool = False,
        thinking: Tables | None = None,
        one_pass: Set[str] = frozenset(),
    ) -> None:
        self.estimates = Estimates(times, draft_times, acceptance, sampled or {}, max_draft, thinking, one_pass)
        self.time_budget = budget or TimeBudget()
        self.predicted = predicted
        self._gate = PrefillGate(self.estimates, self.time_budget)
        self._plan: AutoPlan | None = None
        self._n_rounds = 0
        self._temperature = 1.0
        self._certainty: float | None = None
        self._at_work: set[str] = set()
        self._stepped: set[str] = set()  # sources of which a model took a step in the last round
        self._lessons: list[Callable[[], None]] = []
        self._lost: set[str] = set()
        self._reason = ""

    def begin(self, params: SamplingParams, n_prompt: int) -> None:
        self._temperature = params.temperature or 1.0
        reads_states = any(kind_of(source) != "model" for source in self.estimates.draft_times)
        self.time_budget.begin(predicted=self.predicted, reads_states=reads_states)
        self.estimates.begin(takes_samples=not params.greedy and params.seed is None)

    def enter(self, *, thinks: bool) -> None:
        if self.estimates.enter(thinks=thinks):
            self._gate = PrefillGate(self.estimates, self.time_budget)  # what it knows is of the text before

    def hide(self, shares: Mapping[str, float]) -> None:
        self.estimates.hidden = shares

    def may_use(self, source: str) -> bool:
        return source not in self.estimates.unprofitable

    def plan(self, room: int, n_past: int) -> Plan:
        self._n_rounds += 1
        for times in (self.estimates.times, *self.estimates.draft_times.values()):
            times.n_past = n_past
        if self._wants_plain():
            room = 0
        self._plan = AutoPlan(self.estimates, self.time_budget, self._gate, room, self._n_rounds)
        return self._plan

    def _wants_plain(self) -> bool:
        """Whether a plain round is due, to see what one takes; copies of a text that came with the request go first."""
        estimates = self.estimates
        if self.predicted or estimates.times.n_since_one < PLAIN_EVERY:
            return False
        return estimates.at_hand.rate * estimates.ms_plain < LITTLE

    def branching(self) -> Branching | None:
        estimates = self.estimates
        return self._plan if estimates.prospect.rate * row_ms(estimates.times) < MAX_ROW else None

    def watch(self, row: Row) -> None:
        # A draft model that is at work shows by itself how it does here.
        wanted = any(source not in self._at_work for source in self.estimates.models)
        due = self.time_budget.n_tokens < WATCHED_TOKENS or self._n_rounds % 2
        self._certainty = top_probability(row, self._temperature) if wanted and due else None

    def lose(self, source: str) -> None:
        self._lost.add(source)
        self._find_the_unprofitable()

    def book(self, round_: Round) -> None:
        """Book what a round saved or lost against plain decoding.

        The pass is charged as expected, not as it went: a machine that is slow now is slow for plain decoding too, and
        what a width really costs shows in the times once the controller has learned from the round.
        """
        plan, self._plan = self._plan, None
        spent, invested = (plan.ms_spent, plan.ms_invested) if plan else (0.0, 0.0)
        self._stepped, self._lessons = (plan.stepped, plan.lessons) if plan else (set(), [])
        estimates, n_tokens = self.estimates, len(round_.emitted)
        round_.ms_verify_expected = estimates.times(len(round_.draft) + 1)
        ms = round_.ms_verify_expected + estimates.ms_other + spent + invested
        saved = n_tokens - ms / estimates.ms_plain
        self.time_budget.book(n_tokens, saved, invested / estimates.ms_plain)

    def update(self, round_: Round) -> None:
        self._at_work = {token.source for token in round_.draft}
        for learn in self._lessons:
            learn()
        self._learn_acceptance(round_)
        self._learn_costs(round_)
        if self._n_rounds % EXPLAIN_EVERY == 1:
            self._reason = self._explained(self._find_the_unprofitable(), has_begun=True)
        round_.reason = self._reason
        if self._n_rounds % SOLVE_EVERY == 0:
            self.estimates.solve_again()

    def explain(self) -> str:
        return self._explained(self._needs(), has_begun=self.time_budget.n_tokens > 0)

    def _explained(self, needs: dict[str, float], *, has_begun: bool) -> str:
        return explain(self.estimates, needs, self.time_budget.for_drafts, has_begun=has_begun)

    def _learn_acceptance(self, round_: Round) -> None:
        draft, path = round_.draft, round_.verdict.accepted
        for at in (-1, *path):
            for nth, rival in enumerate(draft.children(at)):
                token, accepted = draft[rival], rival in path
                acceptance, confidence = self.estimates.acceptance, token.prob
                if nth:
                    acceptance[token.source].observe_beside(confidence, accepted)
                elif token.dist is not None:
                    self.estimates.sampled[token.source].observe(token.dist.top, accepted)
                else:
                    acceptance[token.source].observe(confidence, accepted)
                if accepted:
                    break

    def _learn_costs(self, round_: Round) -> None:
        estimates = self.estimates
        before = estimates.times.scale
        estimates.times.observe(len(round_.draft) + 1, round_.ms_verify)
        for source, times in estimates.draft_times.items():
            if source not in self._at_work:
                # What slows the target's passes slows those of a draft model that is not running too.
                times.slow_down(estimates.times.scale / before)
                if source not in self._stepped and source not in estimates.unprofitable:
                    estimates.acceptance[source].idle(len(round_.emitted), self._certainties(round_))

    def _certainties(self, round_: Round) -> list[float]:
        """How certain the target was of the tokens of a round; what was copied, and rightly, counts as certain."""
        if self._certainty is None:
            return []
        n_copied = min(len(round_.emitted), round_.verdict.n_accepted)
        return [1.0] * n_copied + [self._certainty] * (len(round_.emitted) - n_copied)

    def _needs(self) -> dict[str, float]:
        return {source: self.estimates.break_even(source) for source in self.estimates.acceptance}

    def _find_the_unprofitable(self) -> dict[str, float]:
        """Leave out draft models that would not pay if they were always right, as long as passes cost this.

        Returns:
            By source, the acceptance rate at which it breaks even.
        """
        needs = self._needs()
        never = {source for source in self.estimates.draft_times if needs[source] > NEVER}
        self.estimates.set_unprofitable(frozenset(self._lost | never))
        return needs
