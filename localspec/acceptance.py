"""How likely a guess is accepted: the drafters' own confidences, calibrated online against what the target did."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Upper ends of the confidence bins; the last bin reaches to 1."""

N_BINS = len(EDGES) + 1
_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))


TYPICAL_CLIMATE = (0.01, 0.02, 0.03, 0.05, 0.06, 0.07, 0.07, 0.08, 0.12, 0.09, 0.14, 0.26)
"""Share of a draft model's guesses by confidence bin before anything is known of the text: a mean near 0.75."""


def bin_of(confidence: float) -> int:
    """Index of the confidence bin [0, N_BINS)."""
    return bisect_right(EDGES, confidence)


@dataclass(slots=True)
class SourceAcceptance:
    """Calibration of one drafter.

    Each confidence bin holds a Beta estimate of P(accepted | confidence, all guesses before it accepted), starting
    from a prior worth ``prior_weight`` observations; evidence fades, so that a change of topic shows within tens of
    guesses. ``climate`` is the recent distribution of confidences: what the next guess will look like, not yet made.

    Attributes:
        prior: expected acceptance by bin before any evidence.
    """

    prior: tuple[float, ...]
    climate: list[float] = field(default_factory=lambda: list(TYPICAL_CLIMATE))
    prior_weight: float = 6.0
    memory: float = 80.0
    climate_memory: float = 32.0
    hits: list[float] = field(default_factory=lambda: [0.0] * N_BINS)
    seen: list[float] = field(default_factory=lambda: [0.0] * N_BINS)

    def expected(self, confidence: float) -> float:
        """Calibrated probability of acceptance of a guess with this confidence."""
        return self.expected_bin(bin_of(confidence))

    def expected_bin(self, index: int) -> float:
        return (self.hits[index] + self.prior_weight * self.prior[index]) / (self.seen[index] + self.prior_weight)

    def mean(self) -> float:
        """Expected acceptance of the next guess, its confidence not yet known."""
        return sum(share * self.expected_bin(i) for i, share in enumerate(self.climate))

    def observe(self, confidence: float, accepted: bool) -> None:
        """Record the fate of a guess that the target judged (all guesses before it having been accepted)."""
        index = bin_of(confidence)
        fade = 1.0 - 1.0 / self.memory
        self.hits[index] = self.hits[index] * fade + accepted
        self.seen[index] = self.seen[index] * fade + 1.0

    def new_text(self) -> None:
        """A new answer begins: its climate is expected to be like the last one's, and a little like the typical one."""
        self.climate = [0.75 * old + 0.25 * typical for old, typical in zip(self.climate, TYPICAL_CLIMATE, strict=True)]

    def notice(self, confidence: float) -> None:
        """Record the confidence of a guess, sent to the target or not."""
        fade = 1.0 - 1.0 / self.climate_memory
        self.climate = [share * fade for share in self.climate]
        self.climate[bin_of(confidence)] += 1.0 - fade


def model_prior() -> tuple[float, ...]:
    """A draft model's probability is a fair but slightly modest estimate of agreement with its target."""
    return tuple(0.04 + 0.94 * centre for centre in _CENTRES)


def estimate_prior() -> tuple[float, ...]:
    """For drafters that report a calibrated estimate already."""
    return _CENTRES
