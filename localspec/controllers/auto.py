"""Draft where it pays: lengths and sources chosen token by token from measured costs and calibrated acceptance.

Speculation is a renewal-reward problem. What drafting on is worth comes from ``stopping``; how likely draft tokens are
accepted from ``acceptance``; what passes cost from ``cost_model``. ``estimates`` puts the three together, ``auto_plan``
decides by them, and here they learn from every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache, partial

from localspec.controllers.acceptance import START, SourceAcceptance, leads_to
from localspec.controllers.cost_model import PassCost
from localspec.controllers.learned import TimeBudget
from localspec.controllers.stopping import NEVER, Estimates, Tables
from localspec.sampling.sampling import Row, SamplingParams, top_probability
from localspec.spec_decode.drafters.base import Branching, Controller, Plan
from localspec.spec_decode.drafters.names import CORPUS, EARLY_EXIT, HEAD, MTP, NGRAM, kind_of
from localspec.spec_decode.rounds import Draft, Round

# Whether a draft model should read what it has missed of a conversation: an investment, weighed before it is made.
#
# Reading a prompt of 50 tokens takes a draft model as long as the target takes for 3 to 5 tokens, and it is lost if
# the answer ends soon after or turns out hard to draft for. How long an answer will be nobody knows; what is known is
# how far it has come. It is taken to go on for twice as long again, so an early reading has to pay soon, and a later
# one may take its time. What is read now need not be read again, so the cost is not that of one round.
#
# The constants were chosen on recorded answers to the tuning prompts and to 27 short questions, with the costs of two
# machines (``benchmarks/replay_traces.py``): 4 to 7 of 832 whole answers are under 0.97 of plain there.

READING = 0.5
"""What a draft model has missed is more than a step if reading it takes this many plain tokens: an investment, which is
not counted as a draft's cost. A step after a draft of one's own takes two or three tokens, 0.1 to 0.3; with 0.25 or
1 the replay is the same."""

LONG_READING = 2.0
"""It is a long one, for which a draft model has to wait and to show more gain, from this many plain tokens on. With 0.5
(every reading) 9 instead of 5 whole answers of the replay are under 0.97 of plain, and with 4 as many."""

PATIENCE_TOKENS = 16
"""An answer must have come this far before a draft model reads the prompt: many are shorter, and how certain the
target is of its first tokens predicts, for nothing, how the draft will fare. With 24: 2 % slower on code and maths."""

OUTLOOK = 2
"""An answer is expected to go on for this many times what it has said. With 1 or 8 the replay differs by 1 %."""

LEAST_GAIN = 0.2
"""Share of a plain token's time that drafting must be expected to save of each. What is predicted from 16 tokens is not
more exact: with 0.15 two to four of 48 answers fell below 0.97 of plain, with 0.1 four to eight, to 0.86."""

STRETCH_TOKENS = 24
"""Tokens over which a short stretch, decoded without the draft model, has to pay for its reading. With 12 the replay
has 9 instead of 5 whole answers under 0.97 of plain; with 48 it is the same."""

BUSY_SCALE = 1.25
"""Where the target's passes take this many times what was calibrated, another program has the CPU. Without first pieces
the replay of a machine beside another program is 1.2 % slower, with 39 instead of 29 of 386 answers under 0.97."""

PROBE_TOKENS = 8
"""Tokens of a long reading that are read first on a machine that has become slower: with more in a pass a token is
cheaper, and with fewer the pass says less of the rest."""

GAIN_ROUNDS = 48
"""Rounds for which the gain of the other sources alone is taken as known."""


def prompt_pays(cost_ms: float, gain_ms: float, plain_ms: float, n_emitted: int, room: int) -> bool:
    """Whether a draft model should read a prompt, or another long stretch.

    Args:
        cost_ms: what reading takes.
        gain_ms: what drafting with the model is expected to save, per token.
        plain_ms: what a token of plain decoding takes.
        n_emitted: tokens of the answer so far.
        room: most tokens that it may still have.
    """
    if n_emitted < PATIENCE_TOKENS or gain_ms < LEAST_GAIN * plain_ms:
        return False
    return gain_ms * min(room, OUTLOOK * n_emitted) > cost_ms


class PrefillGate:
    """Weighs the readings of one answer."""

    def __init__(self, estimates: Estimates, budget: TimeBudget) -> None:
        self._estimates = estimates
        self._budget = budget
        self._gains: dict[str, tuple[float, int]] = {}

    def is_reading(self, source: str, n_tokens: int) -> bool:
        """Whether a pass over so many tokens is more than a step: a prompt, or a stretch that was decoded plainly."""
        return self._catch_up(source, n_tokens) > READING * self._estimates.times(1)

    def piece(self, source: str, n_tokens: int) -> int:
        """How many tokens of a reading to begin with, before it is weighed again.

        A long reading is decided on in advance, at a price that may be out of date: beside a program that takes 40 % of
        the CPUs a target pass took 2.2 times as long, one of the draft model 3.1. First pieces show today's price.
        """
        is_uncertain = self._estimates.times.scale > BUSY_SCALE and not self._estimates.draft_times[source].is_recent
        return min(n_tokens, PROBE_TOKENS) if is_uncertain else n_tokens

    def pays(self, source: str, n_tokens: int, room: int, round_index: int) -> bool:
        """Whether a draft model should decode the tokens that it has missed, to draft one more.

        Args:
            source: its name.
            n_tokens: what it has to decode; 1 is an ordinary step.
            room: most tokens that the answer may still have.
            round_index: counts the rounds of the answer.
        """
        estimates, n_emitted = self._estimates, self._budget.n_tokens
        cost, plain = self._catch_up(source, n_tokens), estimates.times(1)
        if cost <= 0:
            return True
        if cost > READING * plain and cost > self._budget.for_reading * estimates.ms_plain:
            return False
        is_long = cost > LONG_READING * plain
        if is_long and n_emitted < PATIENCE_TOKENS:
            return False
        gain = estimates.ms_plain / self._gain_without(source, round_index) - 1.0 / estimates.joined(source).rate
        if is_long:
            return prompt_pays(cost, gain, estimates.ms_plain, n_emitted, room)
        return gain * min(room, STRETCH_TOKENS) > cost

    def _catch_up(self, source: str, n_tokens: int) -> float:
        if n_tokens == 1:
            return 0.0
        times = self._estimates.draft_times[source]
        return times(n_tokens) - times(1)

    def _gain_without(self, source: str, round_index: int) -> float:
        """The rate with the other sources that are at hand, over that of plain decoding."""
        estimates = self._estimates
        if source in estimates.lagging:
            return estimates.at_hand.rate * estimates.ms_plain
        gain, until = self._gains.get(source, (1.0, 0))
        if round_index >= until:
            others = [each for each in estimates.acceptance if each != source and each not in estimates.lagging]
            # Kept as a ratio, so that a machine that slows down does not make it stale.
            gain, until = estimates.solve(*others).rate * estimates.ms_plain, round_index + GAIN_ROUNDS
            self._gains[source] = gain, until
        return gain


# A draft under way, token by token: what was sent and spent so far, and whether going on is worth it.

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
        """Whether one more draft token, were all rejected, costs no more than this share of what drafts may cost."""
        spent = self.ms_spent + step_ms + self.estimates.times(self._n + 2) - self._one_ms
        return spent <= share * self._most_ms


@lru_cache(maxsize=64)
def share_of(source: str) -> float:
    """Of what drafts may lose, what one of this source may."""
    return 1.0 if kind_of(source) == "model" else ONE_SHARE


# Why there is drafting or not, in sentences for people: a line for each drafter.

NAMES = {
    NGRAM: "Copying from the text",
    CORPUS: "Copying from your files",
    HEAD: "Head",
    EARLY_EXIT: "Early exit",
    MTP: "The model's own MTP layer",
    "model": "Draft model",
    "grammar": "Grammar",
}
"""What people read for a kind of drafter; another one is called as it is."""

GAIN = 1.001
"""A drafter that alone, and at its best, is not expected to be faster than plain decoding by this factor is off."""

LEAST_SHOWN = 0.005
"""A smaller share is 0 %."""


def explain(estimates: Estimates, needs: Mapping[str, float], may_cost: float, *, has_begun: bool) -> str:
    """The state of every source, a line each.

    Args:
        estimates: what is known.
        needs: by source, the acceptance rate at which its best fixed length equals plain decoding; 1 where none does.
        may_cost: what a draft may cost now, were all of it rejected [plain tokens].
        has_begun: whether the answer has any tokens yet, so that a draft model that lags behind was weighed.
    """
    states = {source: _state(estimates, source, needed, may_cost, has_begun) for source, needed in needs.items()}
    return "\n".join(f"{_name(source)}: {state}." for source, state in states.items())


def _name(source: str) -> str:
    kind = kind_of(source)
    return NAMES.get(kind, kind) + (f" {source.removeprefix(kind)}" if source != kind else "")


def _state(estimates: Estimates, source: str, needed: float, may_cost: float, has_begun: bool) -> str:
    """On or off, and why.

    Figures stand only beside a verdict that they lead to: each guess is decided on by itself, and the mean over all of
    them can lie on the other side.
    """
    runs_model, acceptance = source in estimates.draft_times, estimates.acceptance[source]
    if needed > NEVER:
        why = "too slow" if runs_model else "checking a guess costs more than it saves"
        return f"off, {why} on this machine"
    mean = acceptance.mean()
    average = f"; on average {_percent(mean)} are" if acceptance.has_drafted else ""
    shares = f" ({_percent(needed)} must be right{average})"
    if estimates.solve(source).rate * estimates.ms_plain <= GAIN:
        return "off, too few guesses are right in this text" + shares * (mean < needed)
    if has_begun and source in estimates.lagging:
        return "off for this answer so far, reading the prompt would cost more than it is expected to save"
    if share_of(source) * may_cost * estimates.ms_plain < _cheapest(estimates, source):
        return "off for now, a wrong guess would cost more than may be lost"
    if needed < LEAST_SHOWN:
        return "on, as measured a wrong guess costs next to nothing here"
    if mean >= needed:
        return "on" + shares
    return f"on, only where {'it is sure' if runs_model else 'a repeat is likely'}{shares}"


def _cheapest(estimates: Estimates, source: str) -> float:
    """What the shortest draft costs if it is rejected [ms]."""
    times = estimates.times
    return min(times(w) for w in range(2, estimates.max_draft + 2)) - times(1) + estimates.step_ms(source)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


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
