"""Medians with exact intervals.

The unit is the question: its value is the median over its repeats, whose noise it contains (Davison & Hinkley 1997,
section 3.8), a table's the median over its questions. An interval lies between the k-th smallest and k-th largest
value; it covers the median of any distribution with exactly the sign test's probability. The range of n values covers
it with 1 - 2^(1-n), so 95 % takes six questions; with fewer the interval is the range, and says its level.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LEVEL = 0.95
FEWEST = 6  # questions that a 95 % interval takes; see ``range_level``
Values = Mapping[str, Sequence[float]]  # by question, the value of each repeat


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over questions, and its interval."""

    median: float
    low: float | None  # None where there is but one question
    high: float | None
    level: float | None  # probability of covering the true median
    n: int  # questions

    @property
    def is_firm(self) -> bool:
        """Whether the interval is a 95 % one."""
        return self.level is not None and self.level >= LEVEL

    def against_one(self, level: float = LEVEL) -> Literal[1, 0, -1] | None:
        """1 or -1: the whole interval lies over or under 1; 0: it covers 1; None: it has not this level."""
        if self.low is None or self.high is None or self.level is None or self.level < level:
            return None
        return 1 if self.low > 1 else -1 if self.high < 1 else 0

    @property
    def half_width(self) -> float:
        """Relative to the median; infinite without an interval."""
        if self.low is None or self.high is None or not self.median:
            return math.inf
        return (self.high - self.low) / 2 / abs(self.median)


def middle(values: Values) -> float:
    """Median over questions of medians over repeats; NaN of nothing."""
    return statistics.median(_medians(values)) if values else math.nan


def range_level(n: int) -> float:
    """Probability that the range of n values covers the median of their population."""
    return 1.0 - 2.0 ** (1 - n) if n > 1 else 0.0


def estimate(values: Values, level: float = LEVEL) -> Estimate | None:
    """Median and interval at ``level``; None of nothing."""
    medians = _medians(values)
    if len(medians) < 2:
        return Estimate(medians[0], None, None, None, 1) if medians else None
    low, high = order_statistics(medians, level)
    return Estimate(statistics.median(medians), low, high, min(level, range_level(len(medians))), len(medians))


def order_statistics(values: Sequence[float], level: float) -> tuple[float, float]:
    """Narrowest interval between order statistics that covers the median with this probability, else the range."""
    n, below, k = len(values), 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2**n  # P(fewer than k + 1 of n values lie under the median)
        if 2 * below > 1.0 - level + 1e-12:
            break
        k += 1
    ordered, k = sorted(values), max(1, k)
    return ordered[k - 1], ordered[n - k]


def estimate_quotient(over: Values, under: Values, level: float = LEVEL) -> Estimate | None:
    """Quotient of the medians of two groups of questions; as each median's interval errs with half of the probability,
    its interval holds at least its level."""
    if not over or not under:
        return None
    median, n = middle(over) / middle(under), min(len(over), len(under))
    if range_level(n) < (1 + level) / 2:
        return Estimate(median, None, None, None, n)
    low, high = order_statistics(_medians(over), (1 + level) / 2)
    least, most = order_statistics(_medians(under), (1 + level) / 2)
    return Estimate(median, low / most, high / least, level, n)


def _medians(values: Values) -> list[float]:
    return [statistics.median(each) for each in values.values()]
