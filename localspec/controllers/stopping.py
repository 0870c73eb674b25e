"""When to stop drafting: the value of going on, by dynamic programming.

A draft is built token by token, each costing a row of the target's pass and, from a draft model, a step. With n draft
tokens proposed, all accepted with probability P, let V(n, P) be the tokens still to be gained by going on in the best
way, net of the time it takes, a millisecond being worth r tokens:

    go on with a token of acceptance a:   P·a - r·(t(n + 2) - t(n + 1)) + V(n + 1, P·a)
    a step of a draft model:              S(n, P) = -r·d + mean over its confidences of max(0, that)
    V(n, P) = max(0, S(n, P)), or what a free draft token offers where there is one

t(w) is the time of a target pass over w tokens, d that of a draft step. Where one pass proposes all of a draft, the
first step takes it and the others nothing, or what one more row adds to it where it has a row for each token. The mean
over confidences makes a step an option: its token is sent only if it is worth its row. V looks past steps and dips of
t, up to the longest draft, and is kept apart for what sure and unsure tokens lead to (see ``acceptance``). The r that
makes a whole round worth nothing, 1 + V(0, 1) = r·t(1), is the best rate there is (Dinkelbach 1967), found by Newton's
method from plain decoding's 1 / t(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from localspec.controllers.acceptance import EDGES, Acceptance, leads_to
from localspec.controllers.cost_model import Costs

Floats = npt.NDArray[np.float64]

MAX_COST = 3.5  # V looks ahead as far as a pass costs this many times a one-token pass; copies are followed further

_GRID_STEP = 0.1
_N_GRID = 28  # Probabilities that a draft is right so far are tabulated at exp(-0.1·i), down to 0.067

_REACH = np.exp(-_GRID_STEP * np.arange(_N_GRID))
# Between two of them V is taken as linear in the probability, which it is wherever one way of going on is best.
_LINEAR = 1.0 / -math.expm1(-_GRID_STEP)


@dataclass(frozen=True, slots=True)
class Prospects:
    """What draft tokens of one source will look like: the share of each confidence bin by what the token follows
    [n_groups, n_bins], the group that a bin leads to, and its expected acceptance. With ``one_pass`` only the first
    step of a draft takes ``step_ms`` (0: no model), and a later one what ``row_ms`` says by the number of draft tokens
    before it, if anything."""

    shares: Floats
    group: npt.NDArray[np.int64]
    acceptance: Floats
    step_ms: float
    one_pass: bool = False
    row_ms: Sequence[float] = ()

    def price(self, n: int) -> float:
        """What the step after n draft tokens takes [ms]."""
        if n == 0 or not self.one_pass:
            return self.step_ms
        return self.row_ms[min(n, len(self.row_ms) - 1)] if self.row_ms else 0.0


class Continuation:
    """V and S for one cost curve and the prospects of the sources.

    ``rows_ms`` are t(1) … t(N + 1) of the target, our own time per round included [N + 1]; ``models`` the ways to buy a
    draft token; ``free`` a source of free ones, or None. ``rate`` is what time is worth in the tables [tokens/ms]; None
    looks for it, from an earlier solution it takes two steps of Newton's method. ``best_rate`` is one step further.
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
                price = model.price(n)
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
        """V: tokens to be gained after ``n`` draft tokens that are all right with probability ``reach``; ``after`` is
        what the next one follows, an index of ``Prospects.shares``."""
        return _at(self._looked_up[0], n, reach, after)

    def step(self, n: int, reach: float, after: int = 0, model: int = 0) -> float:
        """S: tokens to be gained by a step of a draft model, its confidence not yet known."""
        return _at(self._looked_up[1][model], n, reach, after)

    def send(self, n: int, reach: float, acceptance: float, leads_to: int = 0) -> float:
        if n >= len(self._row):
            return -math.inf
        reach *= acceptance
        return reach - self.rate * self._row[n] + self.value(n + 1, reach, leads_to)

    def copy(self, n: int, reach: float, acceptance: float, room: int, leads_to: int = 0) -> float:
        """Tokens to be gained by sending free draft tokens, as long as it pays, each as likely right."""
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
        low = tables.take(self._at)
        return np.asarray(low + self._share * (tables.take(self._at + 1) - low))


# The speed-up formula: what a draft of fixed length is worth if all its tokens are equally likely to be accepted.
# A draft of k tokens, each accepted with probability a given that those before it were, emits (1 - a^(k+1)) / (1 - a)
# tokens a round (Leviathan et al. 2023, equation 1) and takes t(k + 1) + k·d; plain decoding emits one token in t(1).
# The paper (theorem 3.8) takes t(k + 1) for t(1); here t is measured. ``auto`` decides by the stopping problem; this
# formula compares models and engines before there is a text.

Times = Callable[[int], float]  # t(w): tokens in a pass -> milliseconds


def with_block(times: Times, block_ms: Times) -> Times:
    """t(w) with the pass before it that drafts w - 1 tokens at once, whose time ``block_ms`` gives by their number."""
    return lambda w: times(w) + (block_ms(w - 1) if w > 1 else 0.0)


def expected_tokens(acceptance: float, length: int) -> float:
    if acceptance >= 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def round_time(length: int, times: Times, step_ms: float) -> float:
    return (times(length + 1) + length * step_ms) / times(1)


def speedup(acceptance: float, length: int, times: Times, step_ms: float) -> float:
    """Predicted speed over plain decoding, of drafts of ``length`` tokens (0: plain) that take ``step_ms`` each (0: no
    model)."""
    return expected_tokens(acceptance, length) / round_time(length, times, step_ms)


def best_length(acceptance: float, lengths: Iterable[int], times: Times, step_ms: float) -> int:
    return max(lengths, key=lambda length: speedup(acceptance, length, times, step_ms))


def best_speedup(acceptance: float, lengths: Iterable[int], times: Times, step_ms: float) -> float:
    return max(speedup(acceptance, length, times, step_ms) for length in lengths)


def break_even(length: int, times: Times, step_ms: float) -> float | None:
    """The acceptance rate at which drafting this many tokens equals plain decoding; None: not even 1 does."""
    needed = round_time(length, times, step_ms)
    if length + 1 <= needed:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):  # the number of tokens rises with the acceptance
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, length) > needed else (middle, high)
    return high


def lowest_break_even(lengths: Iterable[int], times: Times, step_ms: float) -> float:
    shares = (break_even(length, times, step_ms) for length in lengths)
    return min((share for share in shares if share is not None), default=1.0)


# The stopping problem of a pair, solved again as its costs and acceptance are learned.

NEVER = 0.995  # A draft model that breaks even only above this acceptance rate is unprofitable whatever the text
LENGTHS = range(1, 9)  # Fixed draft lengths among which the break-even acceptance rate is the least

_LEADS_TO = np.array([leads_to(low) for low in (0.0, *EDGES)])


class Stopping:
    """Solutions of the stopping problem for the sources of one answer, for drafts of up to ``max_draft`` tokens.

    Attributes:
        unprofitable: draft models that would not pay if they were always right; left out of everything.
        lagging: draft models that have to read much first, the unprofitable ones included.
        stale: whether something was learned since it was solved.
    """

    def __init__(self, costs: Costs, acceptance: Acceptance, max_draft: int) -> None:
        self.costs = costs
        self.acceptance = acceptance
        self.max_draft = max_draft
        self.unprofitable: Set[str] = frozenset()
        self.lagging: Set[str] = frozenset(costs.draft_times)
        self.stale = True
        self._prospect: Continuation | None = None
        self._current: Continuation | None = None

    @property
    def models(self) -> list[str]:
        return [source for source in self.costs.draft_times if source not in self.unprofitable]

    def break_even(self, source: str) -> float:
        costs, step_ms = self.costs, self.costs.step_ms(source)

        def rounds(w: int) -> float:
            return costs.times(w) + costs.ms_other

        if source in costs.one_pass:
            return lowest_break_even(LENGTHS, with_block(rounds, lambda n: costs.step_ms(source, n)), 0.0)
        return lowest_break_even(LENGTHS, rounds, step_ms)

    def gain_over_copies(self, source: str, n_prompt: int, n_answer: int) -> float:
        """How many times as fast as with the drafters that cost nothing alone an answer is with this one too, its
        reading of the prompt included; as passes cost now, and as draft tokens are accepted on the whole."""
        copies = [each for each in self.acceptance if each not in self.costs.draft_times]
        ms = 1.0 / self.solve(*copies, source).rate + self.costs.draft_times[source](n_prompt) / n_answer
        return 1.0 / (self.solve(*copies).rate * ms)

    def set_unprofitable(self, sources: Set[str]) -> None:
        if sources != self.unprofitable:
            self.unprofitable, self.stale = sources, True
            for source in sources:
                self.set_lagging(source, True)

    def set_lagging(self, source: str, lagging: bool) -> None:
        if (source in self.lagging) != lagging:
            self.lagging ^= {source}
            self._current = None

    def solve(self, *sources: str, rate: float | None = None) -> Continuation:
        """The stopping problem with some sources only; ``rate`` as in ``Continuation``."""
        costs = self.costs
        rows = [costs.times(w) + costs.ms_other for w in range(1, self.max_draft + 2)]
        models = [self._prospects(source) for source in costs.draft_times if source in sources]
        free = [self._prospects(source) for source in sources if source not in costs.draft_times]
        return Continuation(rows, models, free[0] if free else None, rate)

    def _prospects(self, source: str) -> Prospects:
        histograms = np.array(self.acceptance[source].histograms)
        table, costs = self.acceptance.table(source), self.costs
        row_ms: list[float] = []
        if source in costs.rows_of_draft:
            passes = [costs.step_ms(source, n) for n in range(1, self.max_draft + 1)]
            row_ms = [0.0, *(max(0.0, wider - ms) for ms, wider in pairwise(passes))]
        return Prospects(histograms, _LEADS_TO, table, costs.step_ms(source), source in costs.one_pass, row_ms)

    def n_steps(self, source: str, n: int, reach: float, after: int, room: int) -> int:
        """How many draft tokens a pass should make whose width is chosen before any confidence is known: as many as
        are worth a step each, those before being as likely right as they are on average.

        Args:
            source: makes a draft by one pass with a row for each token.
            n, reach, after: of the draft so far, see ``Continuation.value``.
            room: most tokens that it may make.
        """
        continuation, rank, prospects = self.joined(source), self.rank(source), self._prospects(source)
        acceptance = prospects.shares @ prospects.acceptance
        count = 0
        while count < room and (not count or continuation.step(n + count, reach, after, rank) > 0):
            average = float(acceptance[after % len(acceptance)])
            reach, after, count = reach * average, leads_to(average), count + 1
        return count

    def refresh(self) -> None:
        """Solve again with what was learned."""
        last, current = self._prospect, self._current
        profitable = [source for source in self.acceptance if source not in self.unprofitable]
        self._prospect = self.solve(*profitable, rate=last.best_rate if last else None)
        if self.lagging == self.unprofitable:
            self._current = self._prospect
        else:
            able = [source for source in self.acceptance if source not in self.lagging]
            self._current = self.solve(*able, rate=current.best_rate if current else None)
        self.stale = False

    @property
    def current(self) -> Continuation:
        """The solution for every source that can draft now: without lagging models."""
        if not self.lagging:
            return self.prospect
        if self._current is None or self.stale:
            self.refresh()
        assert self._current is not None
        return self._current

    @property
    def prospect(self) -> Continuation:
        """The solution as if every draft model had read everything."""
        if self._prospect is None or self.stale:
            self.refresh()
        assert self._prospect is not None
        return self._prospect

    def joined(self, source: str) -> Continuation:
        """The solution by which to decide on a step of this draft model: where it has much to read, as if all had."""
        return self.prospect if source in self.lagging else self.current

    def rank(self, source: str) -> int:
        """Its place among the models of ``joined``."""
        lagging = self.unprofitable if source in self.lagging else self.lagging
        return [each for each in self.costs.draft_times if each not in lagging].index(source)
