"""When to stop drafting: the value of going on, by dynamic programming.

A draft is built token by token, each costing a row of the target's pass and, from a draft model, a step. With n tokens
drafted that are all accepted with probability P, let V(n, P) be the tokens still to be gained by going on in the best
way, net of the time it takes, a millisecond being worth r tokens:

    sending a token of acceptance a:   P·a - r·(t(n + 2) - t(n + 1)) + V(n + 1, P·a)
    a step of a draft model:           S(n, P) = -r·d + mean over its confidences of max(0, that)
    V(n, P) = max(0, S(n, P)), or what a free token offers where there is one

t(w) is the time of a target pass over w tokens, d that of a draft step. The mean over confidences is what makes a step
an option: its token is looked at, and sent only if it is worth its row. V looks past steps and dips of t. The r that
makes a whole round worth nothing, 1 + V(0, 1) = r·t(1), is the best rate there is (Dinkelbach 1967), and it is found by
Newton's method from plain decoding's 1 / t(1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_COST = 3.5
"""V looks ahead as far as a pass costs this many times a one-token pass; copies are followed further. With 10 the
replay decides alike, and where there are 16 rows a solution takes twice as long."""

_GRID_STEP = 0.1
_N_GRID = 28
"""Probabilities that a draft is accepted so far are tabulated at exp(-0.1·i), down to 0.067."""

_REACH = np.exp(-_GRID_STEP * np.arange(_N_GRID))
_LINEAR = 1.0 / -math.expm1(-_GRID_STEP)
"""Between two of them V is taken as linear in the probability, which it is wherever one way of going on is best."""


@dataclass(frozen=True, slots=True)
class Prospects:
    """What the draft tokens of one source will look like.

    Attributes:
        shares: probability of each confidence bin for the next token [n_bins].
        acceptance: expected acceptance in each bin [n_bins].
        step_ms: time of a step; 0 where no model runs.
    """

    shares: Floats
    acceptance: Floats
    step_ms: float


class Continuation:
    """V and S for one cost curve and the prospects of the sources.

    Args:
        rows_ms: t(1) … t(N + 1) of the target, our own time per round included [N + 1].
        models: draft models, each a way to buy a token.
        free: a source of tokens that cost nothing, or None.
        rate: a rate that is close already [tokens/ms], as from an earlier solution; None looks for it.

    Attributes:
        rate: what time is worth in the tables.
        best_rate: the rate one step of Newton's method further.
    """

    def __init__(
        self, rows_ms: Sequence[float], models: Sequence[Prospects], free: Prospects | None, rate: float | None = None
    ) -> None:
        self.rows_ms = rows_ms
        self._row = np.diff(np.asarray(rows_ms, dtype=np.float64))
        affordable = sum(1 for ms in rows_ms[1:] if ms <= MAX_COST * rows_ms[0])
        self._n_ahead = max(affordable, min(4, len(self._row)))
        self._models = [(m, _Shift(m.acceptance)) for m in models]
        self._free = (free, _Shift(free.acceptance)) if free is not None else None
        plain = 1.0 / rows_ms[0]
        self.rate = self.best_rate = max(plain, rate or 0.0)
        for _ in range(2 if rate else 6):
            self.rate = self.best_rate
            gain, round_ms = self._solve()
            self.best_rate = max(plain, self.rate + gain / round_ms)
            if abs(gain) < 0.02:
                break

    def _solve(self) -> tuple[float, float]:
        """Tabulate V and S for ``rate``.

        ``ms`` is the expected time of the best continuation, which is minus the derivative of V with respect to r.

        Returns:
            What a round is worth beyond its time [tokens], and the time it takes [ms].
        """
        n_rows, rate = self._n_ahead, self.rate
        self._value = np.zeros((n_rows + 1, _N_GRID))
        self._steps = np.full((len(self._models), n_rows + 1, _N_GRID), -np.inf)
        ms = np.zeros(_N_GRID)
        n_bins = len(self._free[0].shares) if self._free else 0
        run, run_ms = np.zeros((n_bins, _N_GRID)), np.zeros((n_bins, _N_GRID))
        for n in range(n_rows - 1, -1, -1):
            row = self._row[n]
            best, best_ms = np.zeros(_N_GRID), np.zeros(_N_GRID)
            for index, (model, shift) in enumerate(self._models):
                sent = shift.reached + shift.of(self._value[n + 1]) - rate * row
                step = model.shares @ np.maximum(sent, 0.0) - rate * model.step_ms
                step_ms = model.shares @ np.where(sent > 0, row + shift.of(ms), 0.0) + model.step_ms
                self._steps[index, n] = step
                best, best_ms = np.where(step > best, (step, step_ms), (best, best_ms))
            if self._free is not None:
                free, shift = self._free
                # A copy goes on as it began: the earlier text that it copies from goes on too.
                sent = shift.reached + shift.of(run) - rate * row
                run_ms = np.where(sent > best, row + shift.of(run_ms), best_ms)
                run = np.maximum(sent, best)
                best, best_ms = free.shares @ run, free.shares @ run_ms
            self._value[n], ms = best, best_ms
        return float(1.0 + self._value[0, 0] - rate * self.rows_ms[0]), float(self.rows_ms[0] + ms[0])

    @property
    def speedup(self) -> float:
        """The rate over that of plain decoding; it outlasts a change of the machine's speed."""
        return self.rate * self.rows_ms[0]

    def value(self, n: int, reach: float) -> float:
        """V: tokens to be gained after ``n`` draft tokens that are all accepted with probability ``reach``."""
        return self._at(self._value, n, reach)

    def step(self, n: int, reach: float, model: int = 0) -> float:
        """S: tokens to be gained by a step of a draft model, its confidence not yet known."""
        return self._at(self._steps[model], n, reach)

    def send(self, n: int, reach: float, acceptance: float) -> float:
        """Tokens to be gained by sending a draft token and going on in the best way."""
        if n >= len(self._row):
            return -math.inf
        reach *= acceptance
        return reach - self.rate * float(self._row[n]) + self.value(n + 1, reach)

    def copy(self, n: int, reach: float, acceptance: float, room: int) -> float:
        """Tokens to be gained by sending tokens that cost nothing, as long as it pays, each as likely accepted."""
        best, total = -math.inf, 0.0
        for m in range(n, min(n + room, len(self._row))):
            reach *= acceptance
            total += reach - self.rate * float(self._row[m])
            best = max(best, total + self.value(m + 1, reach))
            if reach < 0.02:
                break
        return best

    def _at(self, table: Floats, n: int, reach: float) -> float:
        if n >= self._n_ahead or reach <= 0.0:
            return 0.0
        row = table[n]
        at = -math.log(reach) / _GRID_STEP
        low = int(at)
        if low >= _N_GRID - 1:
            return float(row[-1])
        share = -math.expm1(_GRID_STEP * (low - at)) * _LINEAR
        return float(row[low] * (1.0 - share) + row[low + 1] * share)


class _Shift:
    """Looks tables up at P·a for every acceptance a and every tabulated P, which is a shift on a logarithmic grid."""

    def __init__(self, acceptance: Floats) -> None:
        acceptance = np.clip(acceptance, 1e-6, 1.0)
        at = np.minimum(np.arange(_N_GRID) - np.log(acceptance)[:, None] / _GRID_STEP, _N_GRID - 1.0)
        self._low = np.minimum(at.astype(np.int64), _N_GRID - 2)
        self._share = -np.expm1(_GRID_STEP * (self._low - at)) * _LINEAR
        self._own = self._low + _N_GRID * np.arange(len(acceptance))[:, None]
        self.reached: Floats = acceptance[:, None] * _REACH

    def of(self, table: Floats) -> Floats:
        """A table [grid], or each bin's own [n_bins, grid], looked up for every bin [n_bins, grid]."""
        at = self._low if table.ndim == 1 else self._own
        low = table.take(at)
        return np.asarray(low + self._share * (table.take(at + 1) - low))
