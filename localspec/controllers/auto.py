"""Draft where it pays: lengths and sources chosen token by token from measured costs and calibrated acceptance.

Speculation is a renewal-reward problem. The controller knows three things: what passes cost (``cost_model.Costs``), how
likely draft tokens are accepted (``acceptance.Acceptance``), and what going on is worth (``stopping.Stopping``).
``AutoPlan`` decides by them, ``AutoController`` lets them learn from every round. "The replay" in a comment is
``benchmarks/replay_traces.py``; ``benchmarks/results/priors.md`` has its figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from functools import partial

from localspec.controllers.acceptance import START, Acceptance, SourceAcceptance, leads_to
from localspec.controllers.cost_model import Costs, PassCost, row_ms
from localspec.controllers.learned import TimeBudget
from localspec.controllers.stopping import NEVER, Stopping
from localspec.sampling.sampling import Row, SamplingParams, top_probability
from localspec.spec_decode.drafters.base import NO_SHARES, Branching, Controller, Plan, Shares
from localspec.spec_decode.drafters.names import kind_of, shown
from localspec.spec_decode.rounds import Draft, Round

# Whether a draft model should read what it has missed of a conversation: an investment.
# Reading a prompt of 50 tokens takes a draft model as long as the target takes for 1 to 5 tokens, and is lost if the
# answer ends soon or turns out hard to draft for. ``TimeBudget.for_reading`` bounds what may be lost; the constants
# were chosen in the replay.

READING = 0.5  # Plain tokens' time from which reading what was missed is an investment rather than the cost of a step

# Tokens over which a reading has to pay, as an answer may end soon after: three for each step of the draft model that a
# plain token's time has room for, within bounds. Where steps are cheap what drafting saves is surer.
HORIZON, LONGEST_HORIZON, TOKENS_A_STEP = 24, 48, 3.0

# Share of a plain token's time that drafting must be expected to save for a reading of any length to begin: a smaller
# gain is within the error of what a few tokens predict, so that it has to pay within ``HORIZON``.
CLEAR_GAIN = 0.3

# From this many times the calibrated time of the target's passes on, another program has the CPU. That may slow a draft
# model more, so that no reading of more plain tokens' time than ``SLOW_READING`` is begun.
SLOW_SCALE = 1.25
SLOW_READING = 8.0

GAIN_ROUNDS = 48  # Rounds for which the gain of the other sources alone is taken as known


def reading_pays(cost_ms: float, gain_ms: float, plain_ms: float, step_ms: float, room: int) -> bool:
    """Whether a reading pays, by what drafting saves and plain decoding takes per token, what a step of the draft model
    takes, and the tokens that the answer may still have."""
    horizon = min(LONGEST_HORIZON, max(HORIZON, TOKENS_A_STEP * plain_ms / step_ms))
    return gain_ms * room > cost_ms and gain_ms > min(cost_ms / horizon, CLEAR_GAIN * plain_ms)


class PrefillGate:
    """Weighs the readings of one answer."""

    def __init__(self, costs: Costs, stopping: Stopping, budget: TimeBudget) -> None:
        self._costs = costs
        self._stopping = stopping
        self._budget = budget
        self._gains: dict[str, tuple[float, int]] = {}

    def is_reading(self, source: str, n_tokens: int) -> bool:
        return self._catch_up(source, n_tokens) > READING * self._costs.times(1)

    def pays(self, source: str, n_tokens: int, room: int, round_index: int) -> bool:
        """Whether a draft model should decode the ``n_tokens`` that it has missed, to draft one more; 1 is an ordinary
        step."""
        costs = self._costs
        cost, plain = self._catch_up(source, n_tokens), costs.times(1)
        if cost <= 0:
            return True
        may_cost = self._budget.for_carried_reading if source in costs.passes else self._budget.for_reading
        if costs.times.scale > SLOW_SCALE:
            may_cost = min(may_cost, SLOW_READING)
        if cost > READING * plain and cost > may_cost * costs.ms_plain:
            return False
        gain = costs.ms_plain / self._gain_without(source, round_index) - 1.0 / self._stopping.joined(source).rate
        return reading_pays(cost, gain, costs.ms_plain, costs.draft_times[source](1), room)

    def _catch_up(self, source: str, n_tokens: int) -> float:
        if n_tokens == 1:
            return 0.0
        times = self._costs.draft_times[source]
        return times(n_tokens) - times(1)

    def _gain_without(self, source: str, round_index: int) -> float:
        """The rate with the other sources that can draft now, over that of plain decoding."""
        stopping, ms_plain = self._stopping, self._costs.ms_plain
        if source in stopping.lagging:
            return stopping.current.rate * ms_plain
        gain, until = self._gains.get(source, (1.0, 0))
        if round_index >= until:
            others = [each for each in stopping.acceptance if each != source and each not in stopping.lagging]
            # Kept as a ratio, so that a machine that slows down does not make it stale.
            gain, until = stopping.solve(*others).rate * ms_plain, round_index + GAIN_ROUNDS
            self._gains[source] = gain, until
        return gain


# The draft of one round, token by token.

# Share of the time budget that one draft of copies or of a head may lose. A copied run is right or wrong as a whole,
# and a wrong one must leave something for the next; a draft model was weighed before it read the prompt.
ONE_SHARE = 0.5

LEAST_PIECE = 8  # Least tokens that a draft model reads in a round, where it may not read all at once


class AutoPlan(Plan, Branching):
    """Draft while it pays: a step of a draft model if it is worth its time, a token if it is worth its row.

    ``ms_spent`` and ``ms_invested`` are the time that draft models took for steps and for readings, ``stepped`` their
    sources; ``lessons`` are called once the round is over, and no decision of this plan depends on them.
    """

    gives_way = True

    def __init__(self, stopping: Stopping, budget: TimeBudget, gate: PrefillGate, room: int, index: int) -> None:
        self.costs, self.acceptance, self.stopping = stopping.costs, stopping.acceptance, stopping
        super().__init__(min(room, stopping.max_draft))
        self.ms_spent = self.ms_invested = 0.0
        self.stepped: set[str] = set()
        self.lessons: list[Callable[[], None]] = []
        self._gate = gate
        # What holds until the round is over: asked for twice for every draft token.
        self._one_ms = self.costs.times(1)
        self._most_ms = budget.for_drafts * (self._one_ms + self.costs.ms_other)
        self._answer_room = room
        self._index = index
        self._n = 0  # tokens drafted
        self._reach = 1.0  # probability that all of them are accepted
        self._after = START
        self._last_source = ""
        self._is_reading = False

    def branching(self) -> Branching | None:
        costs = self.stopping.costs
        return self if self.stopping.prospect.rate * row_ms(costs.times) < MAX_ROW else None

    # -- what drafters ask -----------------------------------------------------------------------------------------

    def more(self, source: str, pending: int = 0, held: float | None = None) -> int:
        if self.room <= 0 or pending == 0:  # where looking costs nothing, keep() decides with the confidence known
            return int(self.room > 0)
        self._is_reading = pending > 1 and self._gate.is_reading(source, pending)
        if not self._step_pays(source, pending, held):
            return 0
        if not self._is_reading:
            return pending
        n, times = pending, self.costs.draft_times[source]
        while n > LEAST_PIECE and times(n) > self.costs.times.ms_reading:
            n = max(LEAST_PIECE, n - max(1, n // 8))
        return n

    def width(self, source: str) -> int:
        return max(1, self.stopping.n_steps(source, self._n, self._reach, self._after, self.room))

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        acceptance = self.acceptance[source]
        if source in self.costs.draft_times:
            self.lessons.append(partial(acceptance.notice, confidence, self._after))
        elif self._last_source != source:  # of a copy only the first token counts
            self.lessons.append(partial(acceptance.notice, confidence))
        expected = (self.acceptance.sampled[source] if sampled else acceptance).expected(confidence)
        after = leads_to(confidence)
        if self.room <= 0 or not self._row_pays(source, expected, after):
            return None
        self.room -= 1
        self._n += 1
        self._reach *= expected
        self._after, self._last_source = after, source
        return expected

    def branch(self, draft: Draft, parent: int, source: str, confidence: float) -> float | None:
        rivals = draft.children(parent)
        acceptance = self.acceptance[source]
        expected = acceptance.sibling(confidence) if rivals else acceptance.expected(confidence)
        expected *= max(0.0, 1.0 - sum(float(draft[rival].expected) for rival in rivals))
        reach: float = math.prod((draft[i].expected for i in draft.path(parent)), start=expected)
        times, n = self.costs.times, len(draft)
        worth = reach - self.stopping.prospect.rate * (times(n + 2) - times(n + 1))
        if self.room <= 0 or worth <= 0 or not self._affords(0.0, 1.0, self._n):
            return None
        self.room -= 1
        self._n += 1
        return expected

    # -- what drafters report --------------------------------------------------------------------------------------

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        # At most what was expected: the rest is the machine's doing. If it stays so slow, the times say so from the
        # next piece of a reading on, or the next round.
        times = self.costs.draft_times[source]
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
            self.acceptance[source].notice(0.0)

    # -- deciding --------------------------------------------------------------------------------------------------

    def _step_pays(self, source: str, pending: int, held: float | None) -> bool:
        """Whether a step of a draft model is worth its time, its confidence not yet known."""
        costs, stopping = self.costs, self.stopping
        n, reach, after = self._n, self._reach, self._after
        if held is not None:
            n, reach, after = n + 1, reach * self.acceptance[source].expected(held), leads_to(held)
        if source in stopping.unprofitable:
            return False
        if self._is_reading and self.ms_invested and costs.times.ms_reading < math.inf:
            stopping.set_lagging(source, True)  # the rest is read in later rounds
            return False
        if pending > 1 and not self._gate.pays(source, pending, self._answer_room, self._index):
            stopping.set_lagging(source, True)
            return False
        if not self._affords(costs.draft_times[source](1 if self._is_reading else pending), share_of(source), n):
            return False
        continuation = stopping.joined(source)
        worth = continuation.step(n, reach, after, stopping.rank(source))
        if n and source in costs.one_pass:  # behind others' tokens its pass is still to be taken
            worth -= continuation.rate * costs.step_ms(source)
        if worth <= 0:
            return False
        stopping.set_lagging(source, False)
        return True

    def _row_pays(self, source: str, expected: float, after: int) -> bool:
        """Whether a draft token, already made, is worth a row of the target's pass, or leads to rows that are.

        A free one is passed over where a step of a draft model is worth more.
        """
        costs, stopping = self.costs, self.stopping
        runs_model = source in costs.draft_times
        if not self._affords(0.0, share_of(source), self._n):
            return False
        if runs_model:
            return stopping.joined(source).send(self._n, self._reach, expected, after) > 0
        continuation = stopping.current
        worth = continuation.copy(self._n, self._reach, expected, self.room, after)
        models = range(len(costs.draft_times) - len(stopping.lagging))
        steps = (continuation.step(self._n, self._reach, self._after, model) for model in models)
        return worth > 0 and all(worth >= step for step in steps)

    def _affords(self, step_ms: float, share: float, n: int) -> bool:
        """Whether one more draft token after n, were all rejected, costs no more than this share of what drafts may
        cost."""
        spent = self.ms_spent + step_ms + self.costs.times(n + 2) - self._one_ms
        return spent <= share * self._most_ms


def share_of(source: str) -> float:
    return 1.0 if kind_of(source) == "model" else ONE_SHARE


# Why there is drafting or not, in sentences for people: a line for each drafter.

# A drafter that alone, and at its best, is not expected to be faster than plain decoding by this factor is off.
GAIN = 1.001

LEAST_SHOWN = 0.005  # A smaller share is 0 %


def explain(stopping: Stopping, needs: Mapping[str, float], may_cost: float, *, has_begun: bool) -> str:
    """The state of every source, a line each.

    ``needs`` are acceptance rates at which the best fixed length equals plain decoding, ``may_cost`` what a draft may
    cost now, were all of it rejected [plain tokens], ``has_begun`` whether lagging draft models were weighed.
    """
    states = {source: _state(stopping, source, needed, may_cost, has_begun) for source, needed in needs.items()}
    names = {source: shown(source) for source in states}
    return "\n".join(f"{names[each][0].upper()}{names[each][1:]}: {state}." for each, state in states.items())


def _state(stopping: Stopping, source: str, needed: float, may_cost: float, has_begun: bool) -> str:
    """On or off, and why. Figures are shown only with a verdict that they lead to: each token is decided on by itself,
    and the mean over all of them can lie on the other side."""
    costs, acceptance = stopping.costs, stopping.acceptance[source]
    runs_model = source in costs.draft_times
    if needed > NEVER:
        why = "too slow" if runs_model else "checking a guess costs more than it saves"
        return f"off, {why} on this machine"
    mean = acceptance.mean()
    average = f"; on average {_percent(mean)} are" if acceptance.has_drafted else ""
    shares = f" ({_percent(needed)} must be right{average})"
    if stopping.solve(source).rate * costs.ms_plain <= GAIN:
        return "off, too few guesses are right in this text" + shares * (mean < needed)
    if has_begun and source in stopping.lagging:
        return "off for this answer so far, reading the prompt would cost more than it is expected to save"
    if share_of(source) * may_cost * costs.ms_plain < _cheapest(stopping, source):
        return "off for now, a wrong guess would cost more than may be lost"
    if needed < LEAST_SHOWN:
        return "on, as measured a wrong guess costs next to nothing here"
    if mean >= needed:
        return "on" + shares
    return f"on, only where {'it is sure' if runs_model else 'a repeat is likely'}{shares}"


def _cheapest(stopping: Stopping, source: str) -> float:
    costs, times = stopping.costs, stopping.costs.times
    return min(times(w) for w in range(2, stopping.max_draft + 2)) - times(1) + costs.step_ms(source)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


MAX_DRAFT = 16  # Longest draft that ``auto`` considers
SOLVE_EVERY = 16  # Rounds between two solutions of the stopping problem; one takes about a millisecond

# Tokens' worth of time per row of the target's pass from which no draft branches: a second token for a place is seldom
# right.
MAX_ROW = 0.4

# Cost of a row, as a share of a pass over one token, from which no context is made for drafts that branch where such a
# context computes other passes differently (``benchmarks/branching.py``).
FLAT_ROW = 0.1

PLAIN_EVERY = 12
# Where drafting is expected to gain less than this, every ``PLAIN_EVERY``-th round is plain: only passes over one token
# show what plain decoding takes, and that another program has ended.
LITTLE = 1.25

EXPLAIN_EVERY = 32  # Rounds between two explanations, which solve the problem for each source alone

# Tokens for which the target's certainty is looked at every round, then every other: looking takes time too.
WATCHED_TOKENS = 32


class AutoController(Controller):
    """Chooses the length of every draft.

    It drafts only where that is expected to pay, and what it may lose where it is wrong is bounded by a budget that
    outlives the answer (``TimeBudget``). A round is charged at most what was expected of it. A draft model that was
    given up is tried again: without new evidence its estimates drift back to what is typical, and it catches up once
    the text it has missed is worth reading.

    Args:
        times, draft_times, one_pass, rows_of_draft, passes: see ``Costs``.
        acceptance, sampled: see ``Acceptance``; kept by the caller, as is ``budget``.
        max_draft: longest draft to consider.
        predicted: whether the answer is likely to repeat a text that came with the request.
        params: the request's; None is greedy.
    """

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
        one_pass: Set[str] = frozenset(),
        rows_of_draft: Set[str] = frozenset(),
        passes: Shares = NO_SHARES,
        params: SamplingParams | None = None,
    ) -> None:
        self.costs = Costs(times, draft_times, one_pass, rows_of_draft, passes)
        self.acceptance = Acceptance(acceptance, sampled or {})
        self.stopping = Stopping(self.costs, self.acceptance, max_draft)
        self.time_budget = budget or TimeBudget()
        self.predicted = predicted
        self._gate = PrefillGate(self.costs, self.stopping, self.time_budget)
        self._plan: AutoPlan | None = None
        self._n_rounds = 0
        self._params = params or SamplingParams()
        self._certainty: float | None = None
        self._at_work: set[str] = set()
        self._stepped: set[str] = set()  # sources whose model took a step in the last round
        self._lessons: list[Callable[[], None]] = []
        self._lost: set[str] = set()
        self._reason = ""

    def _begin(self) -> None:
        """The answer begins, with its first plan: a controller that only explains changes nothing."""
        self.time_budget.begin(predicted=self.predicted)
        for times in self.costs.all_times:
            times.begin()
        self.acceptance.begin(takes_samples=not self._params.greedy and self._params.seed is None)

    def may_use(self, source: str) -> bool:
        return source not in self.stopping.unprofitable

    def plan(self, room: int, n_past: int, *, hidden: Shares = NO_SHARES, lost: Set[str] = frozenset()) -> Plan:
        if not self._n_rounds:
            self._begin()
        self.costs.hidden = hidden
        if lost - self._lost:
            self._lost |= lost
            self._find_the_unprofitable()
        self._n_rounds += 1
        for times in self.costs.all_times:
            times.n_past = n_past
        if self._wants_plain():
            room = 0
        self._plan = AutoPlan(self.stopping, self.time_budget, self._gate, room, self._n_rounds)
        return self._plan

    def _wants_plain(self) -> bool:
        if self.predicted or self.costs.times.n_since_one < PLAIN_EVERY:
            return False
        return self.stopping.current.rate * self.costs.ms_plain < LITTLE

    def _certainty_of(self, row: Row | None) -> float | None:
        # A draft model that is at work shows by itself how it does here.
        wanted = any(source not in self._at_work for source in self.stopping.models)
        due = self.time_budget.n_tokens < WATCHED_TOKENS or self._n_rounds % 2
        return None if row is None or not (wanted and due) else top_probability(row, self._params.temperature or 1.0)

    def observe(self, round_: Round, row: Row | None = None) -> None:
        """Book what a round saved or lost against plain decoding. The pass is charged as expected, not as it went: a
        machine that is slow now is slow for plain decoding too."""
        self._certainty = self._certainty_of(row)
        plan, self._plan = self._plan, None
        spent, invested = (plan.ms_spent, plan.ms_invested) if plan else (0.0, 0.0)
        self._stepped, self._lessons = (plan.stepped, plan.lessons) if plan else (set(), [])
        costs, n_tokens = self.costs, len(round_.emitted)
        round_.ms_verify_expected = costs.times(len(round_.draft) + 1)
        ms = round_.ms_verify_expected + costs.ms_other + spent + invested
        saved = n_tokens - ms / costs.ms_plain
        self.time_budget.book(n_tokens, saved, invested / costs.ms_plain)

    def learn(self, round_: Round) -> None:
        self._at_work = {token.source for token in round_.draft}
        for learn in self._lessons:
            learn()
        self.acceptance.observe(round_.draft, round_.verdict.accepted)
        self._learn_costs(round_)
        if self._n_rounds % EXPLAIN_EVERY == 1:
            self._reason = self._explained(self._find_the_unprofitable(), has_begun=True)
        round_.reason = self._reason
        if self._n_rounds % SOLVE_EVERY == 0:
            self.stopping.refresh()

    def explain(self) -> str:
        return self._explained(self._needs(), has_begun=self.time_budget.n_tokens > 0)

    def _explained(self, needs: dict[str, float], *, has_begun: bool) -> str:
        return explain(self.stopping, needs, self.time_budget.for_drafts, has_begun=has_begun)

    def _learn_costs(self, round_: Round) -> None:
        costs = self.costs
        before = costs.times.scale
        costs.times.observe(len(round_.draft) + 1, round_.ms_verify)
        for source, times in costs.draft_times.items():
            if source not in self._at_work:
                # What slows the target's passes slows those of a draft model that is not running too.
                times.slow_down(costs.times.scale / before)
                if source not in self._stepped and source not in self.stopping.unprofitable:
                    self.acceptance[source].idle(len(round_.emitted), self._certainties(round_))

    def _certainties(self, round_: Round) -> list[float]:
        if self._certainty is None:
            return []
        n_copied = min(len(round_.emitted), round_.verdict.n_accepted)
        return [1.0] * n_copied + [self._certainty] * (len(round_.emitted) - n_copied)

    def _needs(self) -> dict[str, float]:
        return {source: self.stopping.break_even(source) for source in self.acceptance}

    def _find_the_unprofitable(self) -> dict[str, float]:
        """Leave out draft models that would not pay if they were always right, as passes cost now; returns
        ``_needs``."""
        needs = self._needs()
        never = {source for source in self.costs.draft_times if needs[source] > NEVER}
        self.stopping.set_unprofitable(frozenset(self._lost | never))
        return needs
