"""How far the width of a pass moves the logits on this engine and model, and the bounds that follow.

The same text is decoded twice in memories that never saw a rollback: token by token, and in passes of every width that
speculation uses. Both are right; what lies between them is rounding. From these deviations a bound is derived that a
healthy audit stays under:

* Above its 90 % quantile u a deviation is taken to have an exponential tail (the generic tail of a light-tailed law,
  Balkema and de Haan 1974; Pickands 1975), whose mean is estimated from the k values above u, and replaced by the upper
  end of its 95 % confidence interval.
* The bound is where that tail gives one crossing among all the rows the audit compares a probability of
  ``FALSE_ALARM``: u + mean * ln(k / n * n_tested / FALSE_ALARM); at least ``RESOLUTION``.

A row that crosses it is not a defect yet: it is computed again from nothing at several widths, and only what none of
those explains counts (see ``judgement``). Where the engine claims that width does not matter, the bound is 0 and
equality to the bit is demanded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.backends.trust import MAX_MEAN_KL
from localspec.commands.verify.rows import Deviation

FALSE_ALARM = 0.01
"""Probability that a healthy audit has to look at a row twice; under the tail assumption above."""

RESOLUTION = 1e-3
"""Deviation [logits] that a fast engine is never blamed for: where the rows that were looked at happened to be equal to
the bit, the next one need not be. It moves a probability by a thousandth."""

MIN_ROWS = 10
"""Fewer rows say nothing about a tail."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What rounding explains.

    Attributes:
        rms: of a row's deviation, in logits.
        gap: of the distance of a chosen token from the argmax, in logits.
    """

    rms: float
    gap: float


@dataclass(slots=True)
class WidthNoise:
    """Deviations between narrow and wide passes of healthy memories.

    Attributes:
        exact: the engine claims that there are none.
        deviations: one for each row.
        n_flips: rows whose argmax differed.
        widths: the widths that were used.
    """

    exact: bool
    deviations: list[Deviation] = field(default_factory=list)
    n_flips: int = 0
    widths: set[int] = field(default_factory=set)

    @property
    def mean_kl(self) -> float:
        """Mean divergence over the rows, in nats."""
        return float(np.mean([each.kl for each in self.deviations])) if self.deviations else 0.0

    @property
    def contradicts_itself(self) -> bool:
        """Wide passes compute something else than narrow ones: a wrong kernel, not rounding."""
        if self.exact:
            return any(each.rms > 0 for each in self.deviations)
        return not self.mean_kl <= MAX_MEAN_KL

    def bounds(self, n_tested: int) -> Bounds:
        """The bounds for an audit that compares ``n_tested`` rows."""
        if self.exact:
            return Bounds(0.0, 0.0)
        rms, gap = ([getattr(each, name) for each in self.deviations] for name in ("rms", "swing"))
        return Bounds(max(RESOLUTION, tail_bound(rms, n_tested)), max(RESOLUTION, tail_bound(gap, n_tested)))

    def as_dict(self, n_tested: int) -> dict[str, Any]:
        """For the report."""
        rms = [each.rms for each in self.deviations]
        enough = self.exact or len(rms) >= MIN_ROWS
        bounds = self.bounds(n_tested) if enough else None
        return {
            "rows": len(rms),
            "widths": sorted(self.widths),
            "median": float(np.median(rms)) if rms else None,
            "largest": max(rms, default=None),
            "bound": bounds.rms if bounds else None,
            "gap_bound": bounds.gap if bounds else None,
            "mean_kl": self.mean_kl,
            "mean_kl_limit": 0.0 if self.exact else MAX_MEAN_KL,
            "argmax_flips": self.n_flips,
            "false_alarm": 0.0 if self.exact else FALSE_ALARM,
        }


def tail_bound(sample: Sequence[float], n_tested: int, false_alarm: float = FALSE_ALARM) -> float:
    """What the largest of ``n_tested`` further values stays under with probability 1 - ``false_alarm``.

    Args:
        sample: at least ``MIN_ROWS`` values; see the module's docstring for what is assumed of their tail.
        n_tested: how many more will be looked at.
        false_alarm: the probability that one of them is larger.
    """
    ordered = np.sort(np.asarray(sample, dtype=np.float64))
    n = len(ordered)
    k = max(5, n // 10)
    threshold = float(ordered[n - k - 1])
    # The sum of k exponential excesses over their mean is half a chi-square of 2k degrees of freedom.
    mean = float((ordered[n - k :] - threshold).mean()) * 2 * k / _chi_square_low(2 * k)
    share = k / n * max(1, n_tested) / false_alarm
    return max(float(ordered[-1]), threshold + mean * max(0.0, math.log(share)))


def _chi_square_low(degrees: int) -> float:
    """The 5 % quantile of the chi-square law (Wilson and Hilferty 1931; within 1 % from 10 degrees on)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread - 1.6449 * math.sqrt(spread)) ** 3
