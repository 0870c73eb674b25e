"""When to stop drafting: the value of going on, by dynamic programming.

A draft is built token by token, each costing a row of the target's pass and, from a draft model, a step. With n
draft tokens proposed, all accepted with probability P, let V(n, P) be the tokens still to be gained by going on in the
best way, net of the time it takes, a millisecond being worth r tokens:

    go on with a token of acceptance a:   P·a - r·(t(n + 2) - t(n + 1)) + V(n + 1, P·a)
    a step of a draft model:              S(n, P) = -r·d + mean over its confidences of max(0, that)
    V(n, P) = max(0, S(n, P)), or what a free draft token offers where there is one

t(w) is the time of a target pass over w tokens, d that of a draft step; where one pass of a model guesses all of a
draft it is that of the first step, and the others take none. The mean over confidences is what makes a step an option:
its token is looked at, and sent only if it is worth its row. V looks past steps and dips of t, up to the longest draft.
What sure tokens lead to differs from what unsure ones do, so V is kept for each (see ``acceptance``).
The r that makes a whole round worth nothing, 1 + V(0, 1) = r·t(1), is the best rate there is (Dinkelbach 1967), and it
is found by Newton's method from plain decoding's 1 / t(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localspec.controllers.acceptance import EDGES, SourceAcceptance, leads_to
from localspec.controllers.cost_model import PassCost

Floats = npt.NDArray[np.float64]

MAX_COST = 3.5
"""V looks ahead as far as a pass costs this many times a one-token pass; copies are followed further."""

_GRID_STEP = 0.1
_N_GRID = 28
"""Probabilities that a draft is right so far are tabulated at exp(-0.1·i), down to 0.067."""

_REACH = np.exp(-_GRID_STEP * np.arange(_N_GRID))
_LINEAR = 1.0 / -math.expm1(-_GRID_STEP)
"""Between two of them V is taken as linear in the probability, which it is wherever one way of going on is best."""


@dataclass(frozen=True, slots=True)
class Prospects:
    """What guesses of one source will look like.

    Attributes:
        shares: probability of each confidence bin for the next draft token, by what it comes after (see ``acceptance``)
            [n_groups, n_bins].
        group: what a token in each bin leads to, as an index of ``shares`` [n_bins].
        acceptance: expected acceptance in each bin [n_bins].
        step_ms: time of a step; 0 where no model is needed.
        one_pass: whether the first step of a draft is the only one.
    """

    shares: Floats
    group: npt.NDArray[np.int64]
    acceptance: Floats
    step_ms: float
    one_pass: bool = False


class Continuation:
    """V and S for one cost curve and the prospects of the sources.

    Args:
        rows_ms: t(1) … t(N + 1) of the target, our own time per round included [N + 1].
        models: draft models, each a way to buy a draft token.
        free: a source of draft tokens that cost nothing, or None.
        rate: a rate that is close already [tokens/ms], as from an earlier solution; None looks for it.

    Attributes:
        rate: what time is worth in the tables.
        best_rate: the rate one step of Newton's method further.
    """

    def __init__(
        self, rows_ms: Sequence[float], models: Sequence[Prospects], free: Prospects | None, rate: float | None = None
    ) -> None:
        self.rows_ms = rows_ms
        self._row: list[float] = np.diff(np.asarray(rows_ms, dtype=np.float64)).tolist()
        affordable = sum(1 for ms in rows_ms[1:] if ms <= MAX_COST * rows_ms[0])
        self._n_ahead = max(affordable, min(4, len(self._row)))
        self._models = [(m, _Shift(m.acceptance)) for m in models]
        self._free = (free, _Shift(free.acceptance)) if free is not None else None
        plain = 1.0 / rows_ms[0]
        self.rate = self.best_rate = max(plain, rate or 0.0)
        for _ in range(2 if rate else 6):
            self.rate = self.best_rate
            gain = self._solve()
            self.best_rate = max(plain, self.rate + gain / self._round_ms())
            if abs(gain) < 0.02:
                break

    def _solve(self) -> float:
        """Tabulate V and S for ``rate``; returns what a round is worth beyond its time [tokens].

        ``_ms`` is the expected time of the best continuation, which is minus the derivative of V with respect to r.
        """
        n_rows, rate = self._n_ahead, self.rate
        n_groups = len(self._models[0][0].shares) if self._models else 1
        self._value = np.zeros((n_rows + 1, n_groups, _N_GRID))
        self._steps = np.full((len(self._models), n_rows + 1, n_groups, _N_GRID), -np.inf)
        ms = np.zeros((n_rows + 1, n_groups, _N_GRID))
        run = np.zeros((len(self._free[0].acceptance), _N_GRID)) if self._free else None
        run_ms = np.zeros_like(run) if run is not None else None
        for n in range(n_rows - 1, -1, -1):
            row = self._row[n]
            best, best_ms = np.zeros((n_groups, _N_GRID)), np.zeros((n_groups, _N_GRID))
            for index, (model, shift) in enumerate(self._models):
                onward, onward_ms = self._value[n + 1][model.group], ms[n + 1][model.group]
                sent = shift.reached + shift.of(onward) - rate * row
                good = sent > 0
                price = model.step_ms if n == 0 or not model.one_pass else 0.0
                step = model.shares @ np.where(good, sent, 0.0) - rate * price
                step_ms = model.shares @ np.where(good, row + shift.of(onward_ms), 0.0) + price
                self._steps[index, n] = step
                better = step > best
                best, best_ms = np.where(better, step, best), np.where(better, step_ms, best_ms)
            if self._free is not None and run is not None and run_ms is not None:
                free, shift = self._free
                # A copy goes on as it began: the earlier text that it copies from goes on too.
                sent = shift.reached + shift.of(run) - rate * row
                after, after_ms = best[free.group % n_groups], best_ms[free.group % n_groups]
                good = sent > after
                run_ms = np.where(good, row + shift.of(run_ms), after_ms)
                run = np.where(good, sent, after)
                chosen = sent > best[:, None]
                best_ms = np.einsum("b,gbp->gp", free.shares[0], np.where(chosen, run_ms, best_ms[:, None]))
                best = np.einsum("b,gbp->gp", free.shares[0], np.maximum(sent, best[:, None]))
            self._value[n], ms[n] = best, best_ms
        self._ms = ms
        self._looked_up = self._value.tolist(), self._steps.tolist()  # of lists single numbers are had faster
        return float(1.0 + self._value[0, 0, 0] - rate * self.rows_ms[0])

    def _round_ms(self) -> float:
        return float(self.rows_ms[0] + self._ms[0, 0, 0])

    def value(self, n: int, reach: float, after: int = 0) -> float:
        """V: tokens to be gained after ``n`` guesses that are all right with probability ``reach``.

        Args:
            after: what the next draft token comes after, an index of ``Prospects.shares``.
        """
        return _at(self._looked_up[0], n, reach, after)

    def step(self, n: int, reach: float, after: int = 0, model: int = 0) -> float:
        """S: tokens to be gained by a step of a draft model, its confidence not yet known."""
        return _at(self._looked_up[1][model], n, reach, after)

    def send(self, n: int, reach: float, acceptance: float, leads_to: int = 0) -> float:
        """Tokens to be gained by sending a guess and going on in the best way."""
        if n >= len(self._row):
            return -math.inf
        reach *= acceptance
        return reach - self.rate * self._row[n] + self.value(n + 1, reach, leads_to)

    def copy(self, n: int, reach: float, acceptance: float, room: int, leads_to: int = 0) -> float:
        """Tokens to be gained by sending guesses that cost nothing, as long as it pays, each as likely right."""
        best, total = -math.inf, 0.0
        for m in range(n, min(n + room, len(self._row))):
            reach *= acceptance
            total += reach - self.rate * self._row[m]
            best = max(best, total + self.value(m + 1, reach, leads_to))
            if reach < 0.02:
                break
        return best


def _at(table: Sequence[Sequence[Sequence[float]]], n: int, reach: float, after: int) -> float:
    """A table [n_rows + 1, n_groups, grid] after n draft tokens that are all right with probability ``reach``."""
    if n >= len(table) - 1 or reach <= 0.0:
        return 0.0
    groups = table[n]
    row = groups[after % len(groups)]
    at = -math.log(reach) / _GRID_STEP
    low = int(at)
    if low >= _N_GRID - 1:
        return row[-1]
    share = -math.expm1(_GRID_STEP * (low - at)) * _LINEAR
    return row[low] * (1.0 - share) + row[low + 1] * share


class _Shift:
    """Looks tables up at P·a for every acceptance a and every tabulated P, which is a shift on a logarithmic grid."""

    def __init__(self, acceptance: Floats) -> None:
        acceptance = np.clip(acceptance, 1e-6, 1.0)
        at = np.minimum(np.arange(_N_GRID) - np.log(acceptance)[:, None] / _GRID_STEP, _N_GRID - 1.0)
        low = np.minimum(at.astype(np.int64), _N_GRID - 2)
        self._share = -np.expm1(_GRID_STEP * (low - at)) * _LINEAR
        self._at = low + _N_GRID * np.arange(len(acceptance))[:, None]
        self.reached: Floats = acceptance[:, None] * _REACH

    def of(self, tables: Floats) -> Floats:
        """One table per bin [n_bins, grid], each looked up for its own bin."""
        low = tables.take(self._at)
        return np.asarray(low + self._share * (tables.take(self._at + 1) - low))


# The speed-up formula: what a draft of fixed length is worth if all its tokens are equally likely to be accepted.
#
# A draft of k tokens, each accepted with probability a given that those before it were, emits (1 - a^(k+1)) / (1 - a)
# tokens a round (Leviathan et al. 2023, equation 1) and takes t(k + 1) + k·d: t(w) is the target's time for a pass
# over w tokens, d that of a draft step. Plain decoding emits one token in t(1); the quotient is the speed-up.
# Leviathan et al. (theorem 3.8) take t(k + 1) for t(1), as on hardware with arithmetic to spare; here t is measured.
#
# Real draft tokens are neither independent nor equally likely to be accepted, so ``auto`` decides by ``stopping``. This
# formula compares models and engines before there is a text, and says in one number what acceptance rate is needed.

Times = Callable[[int], float]
"""t(w): tokens in a pass -> milliseconds."""


def with_block(times: Times, block_ms: float) -> Times:
    """t(w) of rounds whose draft comes from one pass, whatever its length; its tokens then take no time of their own.

    Args:
        times: the target's t(w).
        block_ms: time of that pass.
    """
    return lambda w: times(w) + block_ms * (w > 1)


def expected_tokens(acceptance: float, length: int) -> float:
    """Mean number of tokens that a round with a draft of this length emits."""
    if acceptance >= 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def round_time(length: int, times: Times, step_ms: float) -> float:
    """Time of a round with a draft of this length, in that of plain decoding's."""
    return (times(length + 1) + length * step_ms) / times(1)


def speedup(acceptance: float, length: int, times: Times, step_ms: float) -> float:
    """Predicted speed over plain decoding.

    Args:
        acceptance: probability that a draft token is accepted, those before it having been.
        length: tokens per draft; 0 is plain decoding.
        times: the target's t(w).
        step_ms: time of one draft token; 0 where no model runs.
    """
    return expected_tokens(acceptance, length) / round_time(length, times, step_ms)


def best_length(acceptance: float, lengths: Iterable[int], times: Times, step_ms: float) -> int:
    """The draft length with the largest predicted speed-up, of these."""
    return max(lengths, key=lambda length: speedup(acceptance, length, times, step_ms))


def best_speedup(acceptance: float, lengths: Iterable[int], times: Times, step_ms: float) -> float:
    """The largest predicted speed-up of these draft lengths."""
    return max(speedup(acceptance, length, times, step_ms) for length in lengths)


def break_even(length: int, times: Times, step_ms: float) -> float | None:
    """The acceptance rate at which drafting this many tokens equals plain decoding; None: 1 would not do."""
    needed = round_time(length, times, step_ms)
    if length + 1 <= needed:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):  # the number of tokens rises with the acceptance
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, length) > needed else (middle, high)
    return high


def lowest_break_even(lengths: Iterable[int], times: Times, step_ms: float) -> float:
    """The least acceptance rate that pays, at whichever of these lengths; 1 where none does."""
    shares = (break_even(length, times, step_ms) for length in lengths)
    return min((share for share in shares if share is not None), default=1.0)


# What is known of a pair: what passes cost, how likely draft tokens are accepted, and what follows from both.

NEVER = 0.995
"""Where a larger share of the draft tokens must be accepted, a draft model is unprofitable whatever the text."""

LENGTHS = range(1, 9)
"""Draft lengths of which the best counts for the break-even acceptance rate."""

_LEADS_TO = np.array([leads_to(low) for low in (0.0, *EDGES)])

Tables = tuple[Mapping[str, SourceAcceptance], Mapping[str, SourceAcceptance]]
"""By source, how likely its most probable tokens are accepted, and sampled ones."""


class Estimates:
    """Costs and acceptance, and the stopping problem with them; see ``stopping``.

    Attributes:
        times: the target's t(w) [ms].
        draft_times: by source, d(w) of drafters that run a model of their own [ms]; the others draft for nothing.
        acceptance: by source.
        sampled: the same for tokens that a draft model samples; ``acceptance`` is for its most probable ones.
            Both are those of what comes next: thinking, or the answer.
        max_draft: longest draft to consider.
        one_pass: of drafters that run a model, those of which one pass guesses all of a draft.
        ms_other: of a round, outside the models [ms].
        takes_samples: whether a draft token may be a sample, where that is accepted more often.
        unprofitable: draft models that would not even pay if they were always right; they are left out of everything.
        lagging: draft models that have to read for long first, the unprofitable ones included.
        hidden: by source, the share of its steps that is taken while the target verifies; see ``Controller.hide``.
    """

    def __init__(
        self,
        times: PassCost,
        draft_times: Mapping[str, PassCost],
        acceptance: Mapping[str, SourceAcceptance],
        sampled: Mapping[str, SourceAcceptance],
        max_draft: int,
        thinking: Tables | None = None,
        one_pass: Set[str] = frozenset(),
    ) -> None:
        self.times = times
        self.draft_times = draft_times
        self.acceptance = acceptance
        self.sampled = sampled
        answer: Tables = acceptance, sampled
        self._parts = [answer] if thinking is None else [answer, thinking]
        self.max_draft = max_draft
        self.one_pass = one_pass
        self.ms_other = 0.3
        self.takes_samples = False
        self.hidden: Mapping[str, float] = {}
        self.unprofitable: Set[str] = frozenset()
        self.lagging: Set[str] = frozenset(draft_times)
        self.stale = True
        self._prospect: Continuation | None = None
        self._at_hand: Continuation | None = None
        self._joined: dict[str, Continuation] = {}

    def begin(self, *, takes_samples: bool) -> None:
        """A new answer begins."""
        self.takes_samples = takes_samples
        for times in (self.times, *self.draft_times.values()):
            times.begin()
        self.enter(thinks=False)
        for tables, _ in self._parts:
            for acceptance in tables.values():
                acceptance.new_text()

    def enter(self, *, thinks: bool) -> bool:
        """What comes next is thinking, or the answer; returns whether other tables hold from here on."""
        acceptance, sampled = self._parts[-1 if thinks else 0]
        if acceptance is self.acceptance:
            return False
        self.acceptance, self.sampled, self.stale = acceptance, sampled, True
        return True

    @property
    def ms_plain(self) -> float:
        """Expected time of a round of plain decoding."""
        return self.times(1) + self.ms_other

    def step_ms(self, source: str) -> float:
        """Expected time of one draft token, or of all of a draft that a pass guesses, so far as the target waits."""
        if source not in self.draft_times:
            return 0.0
        return self.draft_times[source](1) * (1.0 - self.hidden.get(source, 0.0))

    @property
    def models(self) -> list[str]:
        """The draft models that are thought about."""
        return [source for source in self.draft_times if source not in self.unprofitable]

    def break_even(self, source: str) -> float:
        """The acceptance rate at which the best fixed draft length of this source only equals plain decoding."""
        step_ms = self.step_ms(source)

        def rounds(w: int) -> float:
            return self.times(w) + self.ms_other

        if source in self.one_pass:
            return lowest_break_even(LENGTHS, with_block(rounds, step_ms), 0.0)
        return lowest_break_even(LENGTHS, rounds, step_ms)

    def set_unprofitable(self, sources: Set[str]) -> None:
        if sources != self.unprofitable:
            self.unprofitable, self.stale = sources, True
            for source in sources:
                self.set_lagging(source, True)

    def set_lagging(self, source: str, lagging: bool) -> None:
        if (source in self.lagging) != lagging:
            self.lagging ^= {source}
            self._at_hand = None
            self._joined.clear()

    # -- the stopping problem --------------------------------------------------------------------------------------

    def solve(self, *sources: str, rate: float | None = None) -> Continuation:
        """The stopping problem with some sources only; ``rate`` as in ``Continuation``."""
        rows = [self.times(w) + self.ms_other for w in range(1, self.max_draft + 2)]
        models = [self._prospects(source) for source in self.draft_times if source in sources]
        free = [self._prospects(source) for source in sources if source not in self.draft_times]
        return Continuation(rows, models, free[0] if free else None, rate)

    def _prospects(self, source: str) -> Prospects:
        table = np.array(self.acceptance[source].table())
        if self.takes_samples and source in self.sampled:
            table = np.maximum(table, self.sampled[source].table())
        histograms = np.array(self.acceptance[source].histograms)
        return Prospects(histograms, _LEADS_TO, table, self.step_ms(source), source in self.one_pass)

    def solve_again(self) -> None:
        """Solve the stopping problem with what was learned since it was last solved."""
        self.stale = True
        self._refresh()

    @property
    def at_hand(self) -> Continuation:
        """The stopping problem as last solved, with every source that can draft at once: without lagging models."""
        if not self.lagging:
            return self.prospect
        if self._at_hand is None or self.stale:
            self._refresh()
        assert self._at_hand is not None
        return self._at_hand

    @property
    def prospect(self) -> Continuation:
        """The stopping problem as last solved, as if every draft model had read everything."""
        if self._prospect is None or self.stale:
            self._refresh()
        assert self._prospect is not None
        return self._prospect

    def joined(self, source: str) -> Continuation:
        """The stopping problem with what is at hand and this draft model, were it to read what it has missed.

        Of two that lag, what the other might gain is no reason for this one to read.
        """
        if source not in self.lagging:
            return self.at_hand
        if self.stale:
            self._refresh()
        if self.lagging - self.unprofitable == {source}:
            return self.prospect
        if source not in self._joined:
            able = [each for each in self.acceptance if each not in self.lagging or each == source]
            self._joined[source] = self.solve(*able)  # a rate without it is not close
        return self._joined[source]

    def rank(self, source: str) -> int:
        """Which of the models of ``joined`` this one is."""
        return [each for each in self.draft_times if each not in self.lagging or each == source].index(source)

    def _refresh(self) -> None:
        self._joined.clear()
        last, at_hand = self._prospect, self._at_hand
        profitable = [source for source in self.acceptance if source not in self.unprofitable]
        self._prospect = self.solve(*profitable, rate=last.best_rate if last else None)
        if self.lagging == self.unprofitable:
            self._at_hand = self._prospect
        else:
            able = [source for source in self.acceptance if source not in self.lagging]
            self._at_hand = self.solve(*able, rate=at_hand.best_rate if at_hand else None)
        self.stale = False
