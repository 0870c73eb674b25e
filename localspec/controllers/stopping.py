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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
