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
from dataclasses import dataclass, field

from localspec.acceptance import N_BINS, SourceAcceptance, estimate_prior, model_prior
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
    """Draft up to a number of tokens, whatever they cost."""

    room: int

    def more(self, source: str, pending: int = 0) -> bool:
        return self.room > 0

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        pass

    def keep(self, source: str, confidence: float) -> float | None:
        if self.room <= 0:
            return None
        self.room -= 1
        return confidence


class FixedController(Controller):
    """Always drafts the same number of tokens; 0 is plain decoding.

    Args:
        length: tokens per draft.
        times: the target's t(w), corrected by what is observed.
    """

    def __init__(self, length: int, times: PassTimes | None = None) -> None:
        if not 0 <= length <= MAX_FIXED_DRAFT:
            raise UsageError(f"the draft length must be auto or 0..{MAX_FIXED_DRAFT}, not {length}")
        self.length = length
        self.times = times

    def plan(self, room: int, n_past: int) -> Plan:
        return FixedPlan(min(room, self.length))

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
    probing: bool = False
    n: int = 0
    reach: float = 1.0
    ms_spent: float = 0.0

    def more(self, source: str, pending: int = 0) -> bool:
        if self.room <= 0:
            return False
        if pending == 0:  # free to look: keep() decides with the confidence known
            return True
        return self.probing or self.controller.step_pays(self, source, pending)

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.ms_spent += ms
        self.controller.draft_times[source].observe(n_tokens, ms)

    def keep(self, source: str, confidence: float) -> float | None:
        acceptance = self.controller.sources[source]
        acceptance.notice(confidence)
        expected = acceptance.expected(confidence)
        if self.room <= 0 or not (self.probing or self.controller.row_pays(self, source, expected)):
            return None
        self.probing = False
        self.room -= 1
        self.n += 1
        self.reach *= expected
        return expected


@dataclass(slots=True)
class AutoController(Controller):
    """Chooses the length of every draft from measured costs and calibrated acceptance.

    Attributes:
        times: the target's t(w) [ms].
        draft_times: by source, d(w) of drafters that run a model of their own [ms]; the others guess for nothing.
        sources: by source, the acceptance model.
    """

    times: PassTimes
    draft_times: Mapping[str, PassTimes]
    sources: dict[str, SourceAcceptance] = field(default_factory=dict)
    ms_other: float = 0.3
    explore_share: float = 0.01
    _credit_ms: float = 0.0
    _recent_tokens: float = 0.0
    _recent_ms: float = 0.0
    _plan: AutoPlan | None = None

    def register(self, source: str) -> None:
        """Make a source of guesses known, with its prior."""
        prior = model_prior() if source in self.draft_times else estimate_prior()
        self.sources.setdefault(source, SourceAcceptance(prior))

    @property
    def rate(self) -> float:
        """The best rate known, in tokens per millisecond: what this conversation reaches, at least plain decoding."""
        plain = 1.0 / (self.times(1) + self.ms_other)
        if self._recent_ms <= 0:
            return plain
        return max(plain, self._recent_tokens / self._recent_ms)

    def plan(self, room: int, n_past: int) -> Plan:
        probing = self._credit_ms > 0 and bool(self.draft_times) and self._credit_ms > self._probe_cost()
        self._plan = AutoPlan(self, min(room, MAX_DRAFT), probing)
        return self._plan

    def _probe_cost(self) -> float:
        return self.times(2) - self.times(1) + min(times(1) for times in self.draft_times.values())

    def row_pays(self, plan: AutoPlan, source: str, expected: float) -> bool:
        """Whether a guess, already made, is worth a row of the target's pass (or leads to rows that are)."""
        base, gain, mean = self.times(plan.n + 1), 0.0, self.sources[source].mean()
        step = self._step_ms(source)
        chance = plan.reach * expected
        for ahead in range(1, min(plan.room, 8) + 1):
            gain += chance
            if gain > self.rate * (self.times(plan.n + 1 + ahead) - base + step * (ahead - 1)):
                return True
            chance *= mean
        return False

    def step_pays(self, plan: AutoPlan, source: str, pending: int) -> bool:
        """Whether a draft step is worth its time, its confidence not yet known.

        The step buys a choice: the guess is sent only where its confidence makes it pay. So its worth is the mean over
        the recent confidences of the positive part of what they would add.
        """
        acceptance, rate = self.sources[source], self.rate
        step = self._step_ms(source)
        first = self.draft_times[source](pending) if source in self.draft_times else 0.0
        mean = acceptance.mean()
        base = self.times(plan.n + 1)
        rows = [self.times(plan.n + 1 + ahead) - base for ahead in range(1, min(plan.room, 8) + 1)]
        worth = 0.0
        for index in range(N_BINS):
            share = acceptance.climate[index]
            if share < 1e-3:
                continue
            chance, gain, best = plan.reach * acceptance.expected_bin(index), 0.0, 0.0
            for ahead, cost in enumerate(rows):
                gain += chance
                best = max(best, gain - rate * (cost + step * ahead))
                chance *= mean
            worth += share * best
        return worth > rate * first

    def _step_ms(self, source: str) -> float:
        times = self.draft_times.get(source)
        return times(1) if times is not None else 0.0

    def update(self, round_: Round) -> None:
        for i, guess in enumerate(round_.draft):
            if i > round_.verdict.n_accepted:
                break
            self.sources[guess.source].observe(
                guess.prob if guess.dist is None else float(guess.dist.probs.max()), i < round_.verdict.n_accepted
            )
        self.times.observe(len(round_.draft) + 1, round_.ms_verify)
        ms = round_.ms_draft + round_.ms_verify + self.ms_other
        self._recent_tokens = self._recent_tokens * 0.95 + len(round_.emitted)
        self._recent_ms = self._recent_ms * 0.95 + ms
        self._credit_ms += ms * self.explore_share
        plan = self._plan
        if plan is not None and round_.ms_draft > 0.5 and not round_.draft:
            self._credit_ms -= plan.ms_spent
        round_.reason = self.explain()

    def explain(self) -> str:
        parts = []
        for source, acceptance in self.sources.items():
            mean = acceptance.mean()
            need = self.break_even(source)
            verdict = "pays" if mean > need else "does not pay"
            parts.append(f"{source} {verdict}: needs {need:.0%} acceptance to break even here, this text gives {mean:.0%}")
        return "; ".join(parts) or "drafting is off: there is no drafter"

    def break_even(self, source: str) -> float:
        """The acceptance per token at which the best draft length of this source gains nothing over plain decoding."""
        step, plain = self._step_ms(source), self.times(1) + self.ms_other
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            tokens, best = 1.0, 0.0
            chance = middle
            for k in range(1, 9):
                tokens += chance
                chance *= middle
                best = max(best, tokens / (self.times(k + 1) + self.ms_other + k * step))
            if best > 1.0 / plain:
                high = middle
            else:
                low = middle
        return high


