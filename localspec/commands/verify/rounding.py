"""What rounding explains: how far the width of a pass moves logits on this engine and model, and what goes further.

The same text is decoded twice in contexts that never saw a rollback: token by token, and in passes of every width that
speculation uses. Both are right; what lies between them is rounding. From these deviations a bound is derived that a
healthy audit stays under:

* Above its 90 % quantile u a deviation is taken to have an exponential tail (the generic tail of a light-tailed law,
  Balkema and de Haan 1974; Pickands 1975), whose mean is estimated from the k values above u, and replaced by the upper
  end of its 95 % confidence interval.
* The bound is where that tail gives one crossing among all the rows the audit compares a probability of
  ``FALSE_ALARM``: u + mean * ln(k / n * n_tested / FALSE_ALARM); at least ``RESOLUTION``.

A row beyond the bound, or a token further under the argmax than the bound for that, is not a defect yet: the row is
computed again from nothing, in fresh contexts and passes of several widths, since some texts have rows that rounding
moves far. It is a defect where none of them moves half as far. Where the engine claims that width does not matter, the
bound is 0: equality to the bit is demanded, and any deviation is a defect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from localspec.backends.base import Model
from localspec.backends.trust import MAX_MEAN_KL
from localspec.commands.verify.plain import Deviation, prompt_cuts, wide_passes
from localspec.commands.verify.result import Defect, Observation

FALSE_ALARM = 0.01
"""Probability that a healthy audit has to compute a row again; under the tail assumption above."""

RESOLUTION = 1e-3
"""Deviation [logits] that a fast engine is never blamed for: where the rows that were looked at happened to be equal to
the bit, the next one need not be. It moves a probability by a thousandth."""

MIN_ROWS = 10
"""Fewer rows say nothing about a tail."""

MOST_RECHECKS = 3
"""So many rows that nothing explains, and there is no doubt left about the next suspicious one."""

WIDTHS = (2, 5, 9, 16)
"""Passes that a suspicious row is computed again in, one for each way of ``prompt_cuts``."""

EXPLAINED = 2.0
"""A row counts as explained if fresh contexts move it at least 1 / EXPLAINED as far."""


@dataclass(slots=True)
class WidthNoise:
    """Deviations between narrow and wide passes of healthy contexts.

    Attributes:
        exact: the engine claims that there are none.
        deviations: one for each row.
        widths: the widths that were used.
    """

    exact: bool
    deviations: list[Deviation] = field(default_factory=list)
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

    def bounds(self, n_tested: int) -> tuple[float, float] | None:
        """What rounding explains if ``n_tested`` rows are compared, in logits: of a row's deviation, and of the gap
        between an emitted token and the argmax. None: too few rows were measured."""
        if self.exact:
            return 0.0, 0.0
        if len(self.deviations) < MIN_ROWS:
            return None
        rms, swing = ([getattr(each, name) for each in self.deviations] for name in ("rms", "swing"))
        return max(RESOLUTION, tail_bound(rms, n_tested)), max(RESOLUTION, tail_bound(swing, n_tested))

    def figures(self, n_tested: int) -> dict[str, Any]:
        """``noise`` in ``result``."""
        rms = [each.rms for each in self.deviations]
        bound, gap_bound = self.bounds(n_tested) or (None, None)
        return {
            "rows": len(rms),
            "tested": n_tested,
            "widths": sorted(self.widths),
            "median": float(np.median(rms)) if rms else None,
            "largest": max(rms, default=None),
            "bound": bound,
            "gap_bound": gap_bound,
            "mean_kl": self.mean_kl,
            "mean_kl_limit": 0.0 if self.exact else MAX_MEAN_KL,
            "argmax_flips": sum(each.flips for each in self.deviations),
            "false_alarm": 0.0 if self.exact else FALSE_ALARM,
        }


def tail_bound(sample: Sequence[float], n_tested: int, false_alarm: float = FALSE_ALARM) -> float:
    """What the largest of ``n_tested`` further values stays under with probability 1 - ``false_alarm``.

    Of ``sample`` there are at least ``MIN_ROWS`` values; the module's docstring says what is assumed of their tail.
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


@dataclass(slots=True)
class Judge:
    """Tells ties from defects, given the target and the ``bounds`` of its ``WidthNoise``.

    Attributes:
        name: turns a token into words.
        branches: whether the contexts that are judged take branching drafts.
        ties: tokens that differ from plain decoding, where rounding explains it.
        defects: the first unexplained row of each prompt and way of drafting.
        n_rechecked, n_explained: suspicious rows that were computed again, and those that fresh contexts move as well.
    """

    model: Model
    bounds: tuple[float, float]
    name: Callable[[int], str]
    branches: bool = False
    ties: list[Observation] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)
    n_rechecked: int = 0
    n_explained: int = 0

    def judge(self, observations: Iterable[Observation]) -> None:
        """Judge those of all answers."""
        broken = set()
        for seen in observations:
            answer = seen.arm, seen.plain.name
            if answer in broken:
                continue
            bound, gap_bound = self.bounds
            if (seen.deviation.rms > bound or seen.gap > gap_bound) and not self._explained(seen):
                broken.add(answer)
                self.defects.append(self._defect(seen))
            elif seen.differs:
                self.ties.append(seen)

    def _explained(self, seen: Observation) -> bool:
        """Whether fresh contexts move the row as well: one for each of ``WIDTHS``, the prompt cut in as many ways."""
        if self.model.capabilities.batch_invariant or self.n_rechecked - self.n_explained >= MOST_RECHECKS:
            return False
        self.n_rechecked += 1
        rms, gap = self.bounds
        for width, lengths in zip(WIDTHS, prompt_cuts(len(seen.plain.prompt) - 1), strict=True):
            n_rows = seen.position + 1
            answer, branches = seen.plain, self.branches
            *_, last = wide_passes(self.model, answer, n_rows, lengths, repeat(width), lambda: False, branches=branches)
            rms, gap = max(rms, EXPLAINED * last[-1].rms), max(gap, EXPLAINED * last[-1].swing)
        explained = seen.deviation.rms <= rms and seen.gap <= gap
        self.n_explained += explained
        return explained

    def _defect(self, seen: Observation) -> Defect:
        (bound, gap_bound), position, rms = self.bounds, seen.position, seen.deviation.rms
        details: dict[str, Any] = {"deviation": rms, "bound": bound, "gap": seen.gap, "gap_bound": gap_bound}
        evidence = (
            f"the row computed for it lies {rms:.3g} logits from that of the same text in a fresh memory "
            f"(rounding explains {bound:.3g})"
        )
        if seen.differs:
            plain = seen.plain.rows[position].best
            details |= {"plain": plain, "said": seen.token}
            said = f"{self.name(seen.token)} is said where plain decoding says {self.name(plain)}, "
            said += f"{seen.gap:.3g} logits above it"
            # Of some answers of several at a time no rows are known.
            evidence = f"{said}; {evidence}" if rms else f"{said} (rounding bridges {gap_bound:.3g})"
        return Defect("row", seen.arm, seen.plain.name, position, evidence, details)
