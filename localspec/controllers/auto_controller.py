"""Draft where it pays: lengths and sources chosen token by token from measured costs and calibrated acceptance.

Speculation is a renewal-reward problem. What drafting on is worth comes from ``stopping``; how likely guesses are right
from ``acceptance``; what passes cost from ``cost_model``. Here the three meet: a guess is sent if that is worth its row
of the target's pass, a step of a draft model is taken if that is worth its time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from localspec.controllers.acceptance import EDGES, SourceAcceptance, leads_to
from localspec.controllers.auto_plan import AutoPlan
from localspec.controllers.break_even import lowest_break_even
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.explainer import NEVER, reason
from localspec.controllers.prefill_gate import PATIENCE_TOKENS, prompt_pays, stretch_pays
from localspec.controllers.stopping import Continuation, Prospects
from localspec.controllers.time_budget import TimeBudget
from localspec.sampling.sampling import Row, SamplingParams, top_probability
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.drafters.base import Plan
from localspec.spec_decode.rounds import Round

MAX_DRAFT = 16
"""Longest draft that ``auto`` considers."""

READING = 0.5
"""What a draft model has missed is more than a step if reading it takes this many plain tokens: an investment, which is
not counted as a draft's cost. A step after a draft of one's own takes two or three tokens, 0.1 to 0.3."""

LONG_READING = 2.0
"""It is a long one, for which a draft model has to wait and to show more gain, from this many plain tokens on."""

BUSY_SCALE = 1.25
"""Where the target's passes take this many times what was calibrated, another program has the CPU."""

_LEADS_TO = np.array([leads_to(low) for low in (0.0, *EDGES)])


class AutoController(Controller):
    """Chooses the length of every draft.

    Two things keep it from being slower than plain decoding. It drafts only where that is expected to pay; and what it
    may lose where it is wrong is bounded by a budget that outlives the answer (see ``time_budget``). A round is charged
    at most what was expected of it: that a machine stalls is not the drafting's fault.

    A draft model that was given up is tried again: without new evidence its estimates drift back to what is typical,
    and when the text it has missed is worth reading on those terms (see ``prefill_gate``), and the budget covers it, it
    catches up. What it would have guessed for that text is then compared with what was said.

    Args:
        times: the target's t(w) [ms].
        draft_times: by source, d(w) of drafters that run a model of their own [ms]; the others guess for nothing.
        sources: by source, the acceptance model; kept by the caller, so that it outlives a request.
        sampled: the same for guesses that a draft model samples; ``sources`` is for its most probable tokens.
        max_draft: longest draft to consider.
        budget: what may be lost; kept by the caller too.
        predicted: whether the answer is likely to repeat a text that came with the request.
    """

    COPY_STAKE = 0.5
    """Of what drafts may lose, what one draft of copies may: a copied run is right or wrong as a whole, and one that is
    wrong must leave something to try the next with."""

    SOLVE_EVERY = 16
    """Rounds between two solutions of the stopping problem; one takes about a millisecond."""

    EXPLAIN_EVERY = 32
    """Rounds between two explanations, which solve the problem for each source alone."""

    WATCHED_TOKENS = 32
    """For so many tokens the target's certainty is looked at every round, then every other: looking takes time too."""

    def __init__(
        self,
        times: PassTimes,
        draft_times: Mapping[str, PassTimes],
        sources: Mapping[str, SourceAcceptance],
        sampled: Mapping[str, SourceAcceptance] | None = None,
        max_draft: int = MAX_DRAFT,
        budget: TimeBudget | None = None,
        *,
        predicted: bool = False,
    ) -> None:
        self.times = times
        self.max_draft = max_draft
        self.draft_times = draft_times
        self.sources = sources
        self.sampled = sampled or {}
        self._has_fresh_noise = False
        self._temperature = 1.0
        self._certainty: float | None = None
        self.ms_other = 0.3
        self.stale = True
        self.time_budget = budget or TimeBudget()
        self.predicted = predicted
        self._at_work: set[str] = set()
        self._emitted = 0
        self._behind: set[str] = set(draft_times)
        self._unprofitable: set[str] = set()
        self._lost: set[str] = set()
        self._room = 0
        self._ms_draft = self._ms_invested = 0.0
        self._continuation: Continuation | None = None
        self._at_hand: Continuation | None = None
        self._without_gain = 1.0
        self._without_until = 0
        self._age = 0
        self._reason = ""

    def may_use(self, source: str) -> bool:
        return source not in self._unprofitable

    def begin(self, params: SamplingParams, n_prompt: int) -> None:
        self._temperature = params.temperature or 1.0
        self._has_fresh_noise = not params.greedy and params.seed is None
        self.time_budget.begin(predicted=self.predicted)
        self.times.begin()
        for times in self.draft_times.values():
            times.begin()
        for source in self.sources.values():
            source.new_text()

    # -- what time is worth --------------------------------------------------------------------------------------

    @property
    def ms_plain(self) -> float:
        """Expected time of a round of plain decoding."""
        return self.times(1) + self.ms_other

    def solve(self, *sources: str, rate: float | None = None) -> Continuation:
        """The stopping problem with some sources only; ``rate`` as in ``Continuation``."""
        rows = [self.times(w) + self.ms_other for w in range(1, self.max_draft + 2)]
        models = [self._prospects(s, self.draft_times[s](1)) for s in self.draft_times if s in sources]
        free = [self._prospects(s, 0.0) for s in sources if s not in self.draft_times]
        return Continuation(rows, models, free[0] if free else None, rate)

    @property
    def _models(self) -> list[str]:
        """The draft models that are thought about: not those that would not even pay if they were always right."""
        return [source for source in self.draft_times if source not in self._unprofitable]

    def _prospects(self, source: str, step_ms: float) -> Prospects:
        table = np.array(self.sources[source].table())
        if self._has_fresh_noise and source in self.sampled:
            table = np.maximum(table, self.sampled[source].table())
        return Prospects(np.array(self.sources[source].climates), _LEADS_TO, table, step_ms)

    @property
    def continuation(self) -> Continuation:
        """The stopping problem as last solved, with every source that can guess at once.

        A draft model that would have to read for long first is none of them; see ``prospect``.
        """
        if not self._behind:
            return self.prospect
        if self._at_hand is None or self.stale:
            self._refresh()
        assert self._at_hand is not None
        return self._at_hand

    @property
    def prospect(self) -> Continuation:
        """The stopping problem as last solved, as if every draft model had read everything."""
        if self._continuation is None or self.stale:
            self._refresh()
        assert self._continuation is not None
        return self._continuation

    def _refresh(self) -> None:
        last, at_hand = self._continuation, self._at_hand
        profitable = [source for source in self.sources if source not in self._unprofitable]
        self._continuation = self.solve(*profitable, rate=last.best_rate if last else None)
        if self._behind == self._unprofitable:
            self._at_hand = self._continuation
        else:
            able = [source for source in self.sources if source not in self._behind]
            self._at_hand = self.solve(*able, rate=at_hand.best_rate if at_hand else None)
        self.stale = False

    # -- deciding ------------------------------------------------------------------------------------------------

    def plan(self, room: int, n_past: int) -> Plan:
        self._age += 1
        self.times.n_past = n_past
        for times in self.draft_times.values():
            times.n_past = n_past
        if self._age % self.SOLVE_EVERY == 1:
            self.stale = True
        self._room = room
        return AutoPlan(self, min(room, self.max_draft))

    def row_pays(self, plan: AutoPlan, source: str, expected: float, after: int) -> bool:
        """Whether a guess, already made, is worth a row of the target's pass (or leads to rows that are).

        A guess that cost nothing also stands in the way of a better one: it is passed over where a step of a draft
        model is worth more.
        """
        runs_model = source in self.draft_times
        if not self._affords(plan, 0.0, 1.0 if runs_model else self.COPY_STAKE):
            return False
        if runs_model:
            return self.prospect.send(plan.n, plan.reach, expected, after) > 0
        continuation = self.continuation
        worth = continuation.copy(plan.n, plan.reach, expected, plan.room, after)
        models = range(len(self.draft_times) - len(self._behind))  # who is unprofitable is left behind
        return worth > 0 and all(worth >= continuation.step(plan.n, plan.reach, plan.after, model) for model in models)

    def step_pays(self, plan: AutoPlan, source: str, pending: int) -> bool:
        """Whether a draft step is worth its time, its confidence not yet known."""
        if source in self._unprofitable:
            return False
        times = self.draft_times[source]
        catch_up = times(pending) - times(1)
        if catch_up > 0 and not self._worth_reading(catch_up):
            self._set_behind(source, True)
            return False
        if not self._affords(plan, times(1 if self.is_reading(source, pending) else pending), 1.0):
            return False
        if self.prospect.step(plan.n, plan.reach, plan.after, self._models.index(source)) <= 0:
            return False
        self._set_behind(source, False)
        return True

    def is_reading(self, source: str, n_tokens: int) -> bool:
        """Whether a pass over so many tokens is more than a step: a prompt, or a stretch that was decoded plainly."""
        times = self.draft_times[source]
        return times(n_tokens) - times(1) > READING * self.times(1)

    def _affords(self, plan: AutoPlan, step_ms: float, share: float) -> bool:
        """Whether one more guess, were the draft in vain, costs no more than this share of what drafts may cost.

        A wider pass can be shorter, so the widths after the next are looked at too.
        """
        left = share * self.time_budget.for_drafts * self.ms_plain - plan.ms_spent - step_ms + self.times(1)
        return any(self.times(plan.n + 1 + k) <= left for k in range(1, plan.room + 1))

    def _set_behind(self, source: str, behind: bool) -> None:
        if (source in self._behind) != behind:
            self._behind ^= {source}
            self._at_hand = None

    def _worth_reading(self, catch_up: float) -> bool:
        """Whether a draft model should read what it has missed [ms], given what it is expected to save afterwards.

        What is read now need not be read again, so the cost is not this round's alone.
        """
        plain = self.times(1)
        if catch_up > READING * plain and catch_up > self.time_budget.for_reading * self.ms_plain:
            return False
        if catch_up > LONG_READING * plain and self._emitted < PATIENCE_TOKENS:
            return False
        gain = self.ms_plain / self._gain_without_reading() - 1.0 / self.prospect.rate
        if catch_up <= LONG_READING * plain:
            return stretch_pays(catch_up, gain, self._room)
        return prompt_pays(catch_up, gain, self.ms_plain, self._emitted, self._room)

    def _gain_without_reading(self) -> float:
        """The rate with the sources that are at hand, or with free ones if all are, over that of plain decoding."""
        if self._behind:
            return self.continuation.rate * self.ms_plain
        if self._age >= self._without_until:
            free = [each for each in self.sources if each not in self.draft_times]
            # Kept as a ratio, so that a machine that slows down does not make it stale.
            self._without_gain = self.solve(*free).rate * self.ms_plain
            self._without_until = self._age + 3 * self.SOLVE_EVERY
        return self._without_gain

    def _find_the_unprofitable(self, needs: Mapping[str, float]) -> None:
        """Do not think about draft models that would not pay if they were always right, as long as passes cost this."""
        unprofitable = self._lost | {source for source in self.draft_times if needs[source] > NEVER}
        if unprofitable != self._unprofitable:
            self._unprofitable, self.stale = unprofitable, True
            for source in unprofitable:
                self._set_behind(source, True)

    def lose(self, source: str) -> None:
        self._lost.add(source)
        self._find_the_unprofitable(self._needs())

    # -- learning ------------------------------------------------------------------------------------------------

    def is_uncertain_of(self, source: str) -> bool:
        """Whether the machine is slower than calibrated, and no passes of this answer show what that does to a model.

        Beside a program that takes 40 % of the CPUs a target pass took 2.2 times as long, one of the draft model 3.1.
        """
        return self.times.scale > BUSY_SCALE and not self.draft_times[source].is_recent

    def charge(self, source: str, n_tokens: int, ms: float, *, is_investment: bool) -> float:
        """A pass of a draft model took so long; returns what of it is charged [ms]: at most what was expected.

        The rest is the machine's doing. If it stays so slow, ``times`` says so from the second pass on.
        """
        times = self.draft_times[source]
        charged = min(ms, times(n_tokens))
        self._ms_draft += charged
        if is_investment:
            self._ms_invested += charged
        times.observe(n_tokens, ms)
        return charged

    def watch(self, row: Row) -> None:
        # A draft model that is at work shows by itself how it does here.
        wanted = any(source not in self._at_work for source in self._models)
        due = self._emitted < self.WATCHED_TOKENS or self._age % 2
        self._certainty = top_probability(row, self._temperature) if wanted and due else None

    def update(self, round_: Round) -> None:
        drafted = set()
        for i, guess in enumerate(round_.draft):
            drafted.add(guess.source)
            if i > round_.verdict.n_accepted:
                break
            table, confidence = self.sources, guess.prob
            if guess.dist is not None:
                table, confidence = self.sampled, float(guess.dist.probs.max())
            table[guess.source].observe(confidence, i < round_.verdict.n_accepted)
        round_.ms_verify_expected = self.times(len(round_.draft) + 1)
        self._account(round_)
        before = self.times.scale
        self.times.observe(len(round_.draft) + 1, round_.ms_verify)
        for source, times in self.draft_times.items():
            if source not in drafted:
                # What slows the target's passes slows those of a draft model that is not running too.
                times.scale *= self.times.scale / before
                if round_.ms_draft < 0.5 * times(1) and source not in self._unprofitable:
                    self.sources[source].idle(len(round_.emitted), self._certainties(round_))
        self._at_work = drafted
        self._emitted += len(round_.emitted)
        if self._age % self.EXPLAIN_EVERY == 1:
            needs = self._needs()
            self._find_the_unprofitable(needs)
            self._reason = self._explain(needs)
        round_.reason = self._reason

    def _certainties(self, round_: Round) -> list[float]:
        """How certain the target was of the tokens of a round; what was copied, and rightly, counts as certain."""
        if self._certainty is None:
            return []
        n_copied = min(len(round_.emitted), round_.verdict.n_accepted)
        return [1.0] * n_copied + [self._certainty] * (len(round_.emitted) - n_copied)

    def _account(self, round_: Round) -> None:
        """Book what a round saved or lost against plain decoding.

        The pass is charged as expected, not as it went: a machine that is slow now is slow for plain decoding too, and
        what a width really costs shows in ``times`` from the next round on.
        """
        n_tokens, plain = len(round_.emitted), self.ms_plain
        pass_ms = self.times(len(round_.draft) + 1) + self.ms_other
        saved = n_tokens - (pass_ms + self._ms_draft) / plain
        self.time_budget.book(n_tokens, saved, self._ms_invested / plain)
        self._ms_draft = self._ms_invested = 0.0

    # -- explaining ----------------------------------------------------------------------------------------------

    def explain(self) -> str:
        return self._explain(self._needs())

    def _explain(self, needs: Mapping[str, float]) -> str:
        return "; ".join(self._explain_source(source, need) for source, need in needs.items())

    def _explain_source(self, source: str, need: float) -> str:
        gains = need <= NEVER and self.solve(source).rate * self.ms_plain > 1.001
        is_behind = source in self._behind and self._emitted > 0
        return reason(source, need, self.sources[source].mean(), gains=gains, is_lagging=is_behind)

    def _needs(self) -> dict[str, float]:
        return {source: self.break_even(source) for source in self.sources}

    def break_even(self, source: str) -> float:
        """The acceptance per token at which the best fixed draft length of this source only equals plain decoding."""
        step = self.draft_times[source](1) if source in self.draft_times else 0.0
        return lowest_break_even(range(1, 9), lambda w: self.times(w) + self.ms_other, step)
