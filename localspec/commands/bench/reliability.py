"""How well predicted acceptances are calibrated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Bin:
    """Draft tokens of about the same predicted acceptance."""

    low: float
    high: float  # predictions in [low, high), the last bin up to 1
    n: int
    predicted: float  # the mean
    observed: float  # the share that was accepted
    observed_low: float  # 95 % Wilson interval of that share, draft tokens taken as independent
    observed_high: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predicted against observed acceptance."""

    n: int  # draft tokens that the target judged: all before them in their draft were accepted
    expected_calibration_error: float  # mean of |predicted - observed| of their bin (Guo et al. 2017)
    bins: list[Bin]  # those of ten that have draft tokens


def reliability(judged: Iterable[tuple[float, bool]], n_bins: int = 10) -> Reliability | None:
    """How well predicted acceptances agree with what the target did; None of no draft tokens."""
    pairs = np.array([(predicted, float(accepted)) for predicted, accepted in judged])
    if not len(pairs):
        return None
    index = np.clip((pairs[:, 0] * n_bins).astype(int), 0, n_bins - 1)
    bins, error = [], 0.0
    for each in np.unique(index):
        here = pairs[index == each]
        predicted, observed = map(float, here.mean(axis=0))
        error += abs(predicted - observed) * len(here)
        low, high = wilson(int(here[:, 1].sum()), len(here))
        bins.append(Bin(float(each / n_bins), float((each + 1) / n_bins), len(here), predicted, observed, low, high))
    return Reliability(len(pairs), error / len(pairs), bins)


def wilson(hits: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not n:
        return 0.0, 1.0
    share, factor = hits / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / factor
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / factor
    return max(0.0, centre - half), min(1.0, centre + half)
