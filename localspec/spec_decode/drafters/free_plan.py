"""A plan that weighs nothing, which others change in what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SURE_COPY = 0.7
"""Confidence of a copy under which a draft model is asked instead, where nothing is weighed."""


@dataclass(slots=True)
class FreePlan:
    """Drafters are asked in the order in which they were loaded, and what they have is taken while there is room."""

    room: int

    def order(self, sources: Sequence[str]) -> Sequence[str]:
        return sources

    def more(self, source: str, pending: int = 0) -> bool:
        return self.room > 0

    def piece(self, source: str, pending: int) -> int:
        return pending

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        pass

    def samples(self, source: str, confidence: float) -> bool:
        return True

    def nothing(self, source: str) -> None:
        pass

    def counterfactual(self, source: str, confidence: float, right: bool) -> None:
        pass

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        if self.room <= 0:
            return None
        self.room -= 1
        return confidence
