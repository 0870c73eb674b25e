"""How often draft tokens of a kind were right: what drafters without probabilities of their own are confident by."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)


class HitRates(Generic[Kind]):
    """Shares of draft tokens that were right, by kind; old evidence fades, a prior stands in for missing evidence.

    Args:
        priors: the expected share of each kind.
        prior_weight: draft tokens that a prior counts as.
        memory: draft tokens that the evidence counts as in the long run.
    """

    def __init__(self, priors: Mapping[Kind, float], prior_weight: float, memory: float) -> None:
        self._fade = 1.0 - 1.0 / memory
        self._right = {kind: prior * prior_weight for kind, prior in priors.items()}
        self._total = dict.fromkeys(priors, prior_weight)

    def rate(self, kind: Kind) -> float:
        return self._right[kind] / self._total[kind]

    def learn(self, kind: Kind, right: bool) -> None:
        self._right[kind] = self._right[kind] * self._fade + right
        self._total[kind] = self._total[kind] * self._fade + 1.0
