"""Medians with exact intervals.

The unit is the question. A question's value is the median over its repeats, a table's the median over its questions.
Only questions count towards an interval: the noise between repeats is in their values already (Davison & Hinkley 1997,
section 3.8). So intervals say what to expect of questions like these, not only of these.

An interval lies between two order statistics, the k-th smallest and the k-th largest value. It covers the median of
whatever distribution the values are drawn from with a probability that is known exactly: the sign test's. Of few
questions no interval can promise 95 %: the median lies between the smallest and the largest of n values with
probability 1 - 2^(1-n) only, which passes 95 % at six. With fewer, the interval is the whole range, and says for how
much it is good.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
FEWEST = 6
"""Questions that an interval of this level takes; see ``range_level``."""

Values = Mapping[str, Sequence[float]]
"""By question, what was measured in each repeat."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and how sure it is.

    Attributes:
        median: over the questions, of each question's median over its repeats.
        low, high: the interval; None where there is but one question.
        level: probability with which such an interval covers the true median; under 0.95 with fewer than 6 questions.
        n: questions.
    """

    median: float
    low: float | None
    high: float | None
    level: float | None
    n: int

    @property
    def is_firm(self) -> bool:
        """Whether the interval is a 95 % one."""
        return self.level is not None and self.level >= LEVEL

    @property
    def half_width(self) -> float:
        """Half the interval, relative to the median; infinite where there is none."""
        if self.low is None or self.high is None or not self.median:
            return math.inf
        return (self.high - self.low) / 2 / abs(self.median)


def middle(values: Values) -> float:
    """Median over questions of the medians over repeats; NaN of nothing."""
    return statistics.median(_medians(values)) if values else math.nan


def range_level(n: int) -> float:
    """Probability that the median of a population lies within the range of n values drawn from it."""
    return 1.0 - 2.0 ** (1 - n) if n > 1 else 0.0


def estimate(values: Values, level: float = LEVEL) -> Estimate | None:
    """Median and interval; None of nothing.

    Args:
        values: by question, one number for each repeat; none empty.
        level: what the interval should promise.
    """
    medians = _medians(values)
    if len(medians) < 2:
        return Estimate(medians[0], None, None, None, 1) if medians else None
    low, high = order_statistics(medians, level)
    return Estimate(statistics.median(medians), low, high, min(level, range_level(len(medians))), len(medians))


def order_statistics(values: Sequence[float], level: float) -> tuple[float, float]:
    """The narrowest interval between the k-th smallest and the k-th largest value that covers the median of any
    distribution with at least this probability; the range where none does."""
    n, below, k = len(values), 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2**n  # P(fewer than k + 1 of n values lie under the median)
        if 2 * below > 1.0 - level + 1e-12:
            break
        k += 1
    ordered, k = sorted(values), max(1, k)
    return ordered[k - 1], ordered[n - k]


def estimate_quotient(over: Values, under: Values, level: float = LEVEL) -> Estimate | None:
    """How much larger the median of one group is than that of another, measured on other questions.

    Each median's interval may err with half of the probability, so the quotient's promises at least its level.
    """
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
