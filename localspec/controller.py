"""How much to draft, from whom: speculation as a renewal-reward problem.

Tokens per second is (expected tokens of a round) / (expected time of a round). With r the best rate known, a round is
worth extending exactly when it adds more tokens than r times the time it adds (Dinkelbach's transformation). With
t(w) the time of a target pass over w tokens, d the time of a draft step and a_i the probability that the i-th guess is
accepted given that all before it were, a guess is sent while a_1·…·a_(i+1) > r·(t(i+2) − t(i+1)), and a draft step is
paid for while what it is expected to add covers d as well, looking far enough ahead to see over a step or a dip in t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from localspec.acceptance import SourceAcceptance, estimate_prior, model_prior
from localspec.cost_model import PassTimes
from localspec.drafters.base import Plan
from localspec.errors import UsageError
from localspec.rounds import Round
from localspec.sampling import SamplingParams

MAX_DRAFT = 16
"""Longest draft that ``auto`` considers."""

MAX_FIXED_DRAFT = 64


class Controller(ABC):
    """Decides, round by round, how far to draft; learns from every round."""

    def begin(self, params: SamplingParams, n_prompt: int) -> None:  # noqa: B027 - optional hook
        """A new request starts."""

    @abstractmethod
    def plan(self, room: int, n_past: int) -> Plan:
        """The permission to draft in the next round.

        Args:
            room: most tokens that can be drafted within the token budget and the context.
            n_past: tokens in the target's memory.
        """

    @abstractmethod
    def update(self, round_: Round) -> None:
        """Learn from a finished round, and note in it why it drafted as it did."""

    @abstractmethod
    def explain(self) -> str:
        """One sentence: why the runtime is or is not drafting."""


@dataclass(slots=True)
class FixedPlan:
    """Draft up to a number of tokens, whatever they cost.

    Attributes:
        floor: confidence under which a guess that cost nothing gives way to a draft model's.
    """

    room: int
    floor: float = 0.0

    def more(self, source: str, pending: int = 0) -> bool:
        return self.room > 0

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        pass

    def keep(self, source: str, confidence: float) -> float | None:
        if self.room <= 0 or (source == "ngram" and confidence < self.floor):
            return None
        self.room -= 1
        return confidence


class FixedController(Controller):
    """Always drafts the same number of tokens; 0 is plain decoding.

    Args:
        length: tokens per draft.
        times: the target's t(w), corrected by what is observed.
        has_model: whether a draft model is there to guess where an n-gram is unsure.
    """

    def __init__(self, length: int, times: PassTimes | None = None, *, has_model: bool = False) -> None:
        if not 0 <= length <= MAX_FIXED_DRAFT:
            raise UsageError(f"the draft length must be auto or 0..{MAX_FIXED_DRAFT}, not {length}")
        self.length = length
        self.times = times
        self.floor = 0.7 if has_model else 0.0

    def plan(self, room: int, n_past: int) -> Plan:
        return FixedPlan(min(room, self.length), self.floor)

    def update(self, round_: Round) -> None:
        if self.times is not None:
            self.times.observe(len(round_.draft) + 1, round_.ms_verify)
        round_.reason = self.explain()

    def explain(self) -> str:
        if self.length == 0:
            return "drafting is off: plain decoding was asked for"
        return f"drafting {self.length} tokens a round, as asked; 'auto' would weigh their cost"


@dataclass(slots=True)
class AutoPlan:
    """Draft while it pays; see the module's docstring."""

    controller: AutoController
    room: int
    n: int = 0
    reach: float = 1.0
    ms_spent: float = 0.0

    def more(self, source: str, pending: int = 0) -> bool:
        # Where looking costs nothing, keep() decides with the confidence known.
        return self.room > 0 and (pending == 0 or self.controller.step_pays(self, source, pending))

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.ms_spent += ms
        self.controller.draft_times[source].observe(n_tokens, ms)

    def keep(self, source: str, confidence: float) -> float | None:
        acceptance = self.controller.sources[source]
        acceptance.notice(confidence)
        expected = acceptance.expected(confidence)
        if self.room <= 0 or not self.controller.row_pays(self, source, expected):
            return None
        self.room -= 1
        self.n += 1
        self.reach *= expected
        return expected


class AutoController(Controller):
    """Chooses the length of every draft from measured costs and calibrated acceptance.

    Two things keep it from ever being slower than plain decoding. It drafts only where that is expected to pay; and it
    keeps a ledger of the time saved so far against plain decoding, and never risks more than what is in it, a small
    grant and one percent of the time gone by. So even text that is made to deceive it cannot cost more.

    Args:
        times: the target's t(w) [ms].
        draft_times: by source, d(w) of drafters that run a model of their own [ms]; the others guess for nothing.
        sources: by source, the acceptance model; kept by the caller, so that it outlives a request.
    """

    EXPLORE_SHARE = 0.01
    GRANT_TOKENS = 2.0
    SAVED_CAP_TOKENS = 40.0
    HORIZON_TOKENS = 256
    PATIENCE_TOKENS = 8
    """An answer must have come this far before a draft model reads the prompt: many are shorter."""

    def __init__(
        self, times: PassTimes, draft_times: Mapping[str, PassTimes], sources: dict[str, SourceAcceptance] | None = None
    ) -> None:
        self.times = times
        self.draft_times = draft_times
        self.sources: dict[str, SourceAcceptance] = {} if sources is None else sources
        self.ms_other = 0.3
        self._saved = self.GRANT_TOKENS * times(1)
        self._invested = False
        self._emitted = 0
        self._declined: set[str] = set()
        self._budget = self.HORIZON_TOKENS
        self._policies: dict[str, ThresholdPolicy] = {}
        self._age = 0
        self._reason = ""

    def begin(self, params: SamplingParams, n_prompt: int) -> None:
        for source in self.draft_times:
            self.sources[source].new_text()

    def register(self, source: str) -> None:
        """Make a source of guesses known, with its prior."""
        prior = model_prior() if source in self.draft_times else estimate_prior()
        self.sources.setdefault(source, SourceAcceptance(prior))

    @property
    def ms_plain(self) -> float:
        """Expected time of a round of plain decoding."""
        return self.times(1) + self.ms_other

    def policy(self, source: str) -> ThresholdPolicy:
        """The best way known of drafting with one source alone."""
        if source not in self._policies:
            step = self.draft_times[source](1) if source in self.draft_times else 0.0
            self._policies[source] = best_threshold_policy(self.times, step, self.sources[source], self.ms_other)
        return self._policies[source]

    @property
    def rate(self) -> float:
        """The best rate known, tokens per millisecond: what time is worth. At least plain decoding."""
        return max(1.0 / self.ms_plain, *(self.policy(source).rate for source in self.draft_times), 0.0)

    def plan(self, room: int, n_past: int) -> Plan:
        self._age += 1
        if self._age % 4 == 1:
            self._policies.clear()
        self._budget = room
        return AutoPlan(self, min(room, MAX_DRAFT))

    def row_pays(self, plan: AutoPlan, source: str, expected: float) -> bool:
        """Whether a guess, already made, is worth a row of the target's pass (or leads to rows that are).

        A guess that cost nothing also stands in the way of a better one: it is passed over where a step of a draft
        model is worth more.
        """
        if plan.ms_spent + self.times(plan.n + 2) - self.times(1) > self._saved:
            return False
        worth = self._worth(plan, plan.reach * expected, source)
        if worth <= 0:
            return False
        return source in self.draft_times or all(worth >= self._step_worth(plan, other) for other in self.draft_times)

    def step_pays(self, plan: AutoPlan, source: str, pending: int) -> bool:
        """Whether a draft step is worth its time, its confidence not yet known."""
        times = self.draft_times[source]
        catch_up = times(pending) - times(1)
        if catch_up > 2 * self.times(1):  # an investment: a prompt, or a stretch that was decoded plainly
            gain = self.ms_plain - 1.0 / self.policy(source).rate
            affordable = catch_up < self._saved or not self._invested
            soon = self._emitted < self.PATIENCE_TOKENS
            if soon or not affordable or gain * min(self._budget, self.HORIZON_TOKENS) < catch_up:
                self._declined.add(source)
                return False
            self._declined.discard(source)
            if not self._invested:  # one a request is forgiven: it is the price of having a draft at all
                self._invested = True
                self._saved += catch_up
            catch_up = 0.0
        elif plan.ms_spent + times(pending) + self.times(plan.n + 2) - self.times(1) > self._saved:
            return False
        return self._step_worth(plan, source) > self.rate * catch_up

    def _step_worth(self, plan: AutoPlan, source: str) -> float:
        """Tokens gained, net of time at ``rate``, by one step of a draft model.

        The step buys a choice: the guess is sent only where its confidence makes it pay. So it is worth the mean, over
        the recent confidences, of the positive part of what they would add, less the step's time.
        """
        acceptance, worth = self.sources[source], 0.0
        for index, share in enumerate(acceptance.climate):
            if share > 1e-3:
                worth += share * max(0.0, self._worth(plan, plan.reach * acceptance.expected_bin(index), source))
        return worth - self.rate * self.draft_times[source](1)

    def _worth(self, plan: AutoPlan, chance: float, source: str) -> float:
        """Tokens gained, net of time at ``rate``, by sending the next guess and going on as the best policy would.

        ``chance`` is the probability that it and all before it are accepted.
        """
        n, rate, times = plan.n, self.rate, self.times
        first = best = chance - rate * (times(n + 2) - times(n + 1))
        for policy in {id(p): p for p in (self.policy(source), *map(self.policy, self.draft_times))}.values():
            total, reached, probability = first, chance, 1.0
            for ahead in range(1, min(plan.room - 1, 8) + 1):
                reached *= policy.accepted
                row = times(n + 2 + ahead) - times(n + 1 + ahead)
                total += probability * (policy.sent * reached - rate * (policy.step_ms + policy.sent * row))
                probability *= policy.sent
                best = max(best, total)
        return best

    def update(self, round_: Round) -> None:
        for i, guess in enumerate(round_.draft):
            if i > round_.verdict.n_accepted:
                break
            confidence = guess.prob if guess.dist is None else float(guess.dist.probs.max())
            self.sources[guess.source].observe(confidence, i < round_.verdict.n_accepted)
        self.times.observe(len(round_.draft) + 1, round_.ms_verify)
        self._emitted += len(round_.emitted)
        ms = round_.ms_draft + round_.ms_verify + self.ms_other
        self._saved += len(round_.emitted) * self.ms_plain - ms + self.EXPLORE_SHARE * ms
        self._saved = min(self._saved, self.SAVED_CAP_TOKENS * self.times(1))
        if self._age % 8 == 1:  # a sentence costs a quarter of a millisecond
            self._reason = self.explain()
        round_.reason = self._reason

    def explain(self) -> str:
        if not self.sources:
            return "drafting is off: there is no drafter"
        return "; ".join(self._explain_source(source) for source in self.sources)

    def _explain_source(self, source: str) -> str:
        mean, need, policy = self.sources[source].mean(), self.break_even(source), self.policy(source)
        if need > 0.995:
            return f"not drafting with {source}: here even guesses that are always right cost more than they save"
        if source in self._declined:
            return f"not drafting with {source}: reading the text so far would cost more than it is expected to save"
        if policy.rate * self.ms_plain > 1:
            return f"drafting with {source}: {need:.0%} acceptance breaks even here, this text gives {mean:.0%}"
        return f"not drafting with {source}: needs {need:.0%} acceptance to break even here, this text gives {mean:.0%}"

    def break_even(self, source: str) -> float:
        """The acceptance per token at which the best fixed draft length of this source only equals plain decoding."""
        step = self.draft_times[source](1) if source in self.draft_times else 0.0
        low, high = 0.0, 1.0
        for _ in range(12):
            middle = (low + high) / 2
            gains = any(
                (1 - middle ** (k + 1)) / (1 - middle) * self.ms_plain > self.times(k + 1) + self.ms_other + k * step
                for k in range(1, 9)
            )
            low, high = (low, middle) if gains else (middle, high)
        return high


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """Draft up to ``length`` tokens, stopping at the first whose confidence falls below a bin.

    Attributes:
        rate: tokens per millisecond it is expected to reach.
        length: longest draft.
        sent: probability that a guess passes the threshold.
        accepted: expected acceptance of a guess that passes.
        step_ms: time of a draft step.
    """

    rate: float
    length: int
    sent: float
    accepted: float
    step_ms: float


def best_threshold_policy(
    times: PassTimes, step_ms: float, acceptance: SourceAcceptance, ms_other: float
) -> ThresholdPolicy:
    """The threshold policy with the best expected rate, confidences drawn independently from the recent climate.

    With s the probability that a guess is sent and a the acceptance of those that are, a round with at most k guesses
    emits 1 + sum_i (s·a)^i tokens and takes sum_m P(m)·t(m + 1) + d·(steps), m being geometric with ratio s.
    """
    by_bin = sorted(((acceptance.expected_bin(i), share) for i, share in enumerate(acceptance.climate)), reverse=True)
    rows = [times(w) + ms_other for w in range(1, MAX_DRAFT + 2)]
    best = ThresholdPolicy(1.0 / rows[0], 0, 0.0, 0.0, step_ms)
    sent = mass = 0.0
    for expected, share in by_bin:
        sent += share
        mass += share * expected
        if sent < 1e-6:
            continue
        s, a = min(1.0, sent), mass / sent
        tokens, ms, survive = 1.0, 0.0, 1.0  # ms so far: of rounds that ended before length k
        for k in range(1, MAX_DRAFT + 1):
            ms += survive * step_ms
            ms_ended = ms + survive * (1 - s) * rows[k - 1]
            survive *= s
            tokens += survive * a**k
            rate = tokens / (ms_ended + survive * rows[k])
            if rate > best.rate:
                best = ThresholdPolicy(rate, k, s, a, step_ms)
            ms = ms_ended
            if survive * a**k < 1e-3:
                break
    return best if best.length else ThresholdPolicy(best.rate, 0, *_typical(acceptance), step_ms)


def _typical(acceptance: SourceAcceptance) -> tuple[float, float]:
    """Share and acceptance of the guesses more likely right than wrong: what continuing would meet."""
    good = [(share, acceptance.expected_bin(i)) for i, share in enumerate(acceptance.climate)]
    good = [(share, expected) for share, expected in good if expected > 0.5]
    sent = sum(share for share, _ in good)
    return (sent, sum(share * expected for share, expected in good) / sent) if sent > 1e-6 else (0.0, 0.0)
