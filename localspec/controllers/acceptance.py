"""How likely a guess is accepted: the drafters' own confidences, calibrated online against what the target did."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Upper ends of the confidence bins; the last bin reaches to 1."""

N_BINS = len(EDGES) + 1
_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))


SURE = 0.9
"""From this confidence on a guess counts as sure; sure guesses come in runs."""

PRIOR_CERTAINTIES = 8.0
"""Tokens that the usual climate counts for, against those of the text."""

PRIOR_GUESSES = 12.0
"""Guesses that the climate a text begins with counts for, against those made on it."""

START, AFTER_SURE, AFTER_UNSURE = range(3)
"""What a guess comes after: the target's own token, a sure guess of the same draft, an unsure one."""

Climate = tuple[float, ...]

# Shares of confidence bins before anything is known of a text. Draft models: a mean near 0.75, from several pairs;
# after a sure guess three of four are sure again (27 answers of Qwen2.5-Coder 1.5B, drafted by its 0.5B).
_MODEL_START = (0.01, 0.02, 0.03, 0.05, 0.06, 0.07, 0.07, 0.08, 0.12, 0.09, 0.14, 0.26)
_MODEL_AFTER_SURE = (0.01, 0.01, 0.02, 0.02, 0.03, 0.04, 0.04, 0.05, 0.07, 0.08, 0.18, 0.45)
_MODEL_AFTER_UNSURE = (0.01, 0.03, 0.06, 0.07, 0.08, 0.08, 0.08, 0.08, 0.13, 0.09, 0.12, 0.17)
MODEL_CLIMATES: tuple[Climate, ...] = (_MODEL_START, _MODEL_AFTER_SURE, _MODEL_AFTER_UNSURE)

# Guesses copied from the text: the same answers. "Nothing to copy" counts as no confidence. A copy goes on as it began,
# so only its first guess is counted.
COPY_CLIMATE: Climate = (0.40, 0.13, 0.12, 0.09, 0.06, 0.06, 0.05, 0.05, 0.02, 0.01, 0.01, 0.0)
COPY_CLIMATES: tuple[Climate, ...] = (COPY_CLIMATE,) * 3

CERTAINTY_EDGES = (0.3, 0.6, 0.85, 0.95, 0.99)
"""Upper ends of the bins of the target's certainty: its own probability for its most probable token."""

# Confidence of a draft model where the target was this certain: the same answers, one row for each bin. Over them, the
# mean acceptance that the certainty of the first 24 tokens foretells has a correlation of 0.79 with that of the whole
# answer; that of the draft's own first 24 guesses, which cost their time, has 0.81.
_MODEL_WHERE_CERTAIN = (
    (0.06, 0.21, 0.28, 0.14, 0.14, 0.06, 0.04, 0.03, 0.01, 0.01, 0.01, 0.01),
    (0.01, 0.07, 0.13, 0.16, 0.15, 0.14, 0.12, 0.09, 0.07, 0.03, 0.02, 0.01),
    (0.00, 0.02, 0.05, 0.09, 0.15, 0.14, 0.14, 0.13, 0.15, 0.07, 0.04, 0.02),
    (0.00, 0.01, 0.03, 0.06, 0.06, 0.12, 0.11, 0.13, 0.18, 0.15, 0.13, 0.02),
    (0.00, 0.01, 0.01, 0.01, 0.02, 0.05, 0.06, 0.07, 0.16, 0.15, 0.29, 0.17),
    (0.00, 0.00, 0.00, 0.00, 0.00, 0.01, 0.01, 0.01, 0.02, 0.03, 0.12, 0.80),
)


def bin_of(confidence: float) -> int:
    """Index of the confidence bin [0, N_BINS)."""
    return bisect_right(EDGES, confidence)


def leads_to(confidence: float) -> int:
    """What the next guess of the draft comes after, if this one is sent."""
    return AFTER_SURE if confidence >= SURE else AFTER_UNSURE


class SourceAcceptance:
    """Calibration of one drafter.

    Each confidence bin holds a Beta estimate of P(accepted | confidence, all guesses before it accepted), starting
    from a prior worth ``prior_weight`` observations; evidence fades, so that a change of topic shows within tens of
    guesses. A climate is the recent distribution of confidences: what the next guess will look like, not yet made;
    there is one for each thing that a guess can come after.

    Args:
        prior: expected acceptance by bin before any evidence.
        typical: climates before any evidence, by ``START``, ``AFTER_SURE``, ``AFTER_UNSURE``.
    """

    def __init__(
        self,
        prior: tuple[float, ...],
        typical: tuple[Climate, ...] = MODEL_CLIMATES,
        *,
        prior_weight: float = 6.0,
        memory: float = 80.0,
        climate_memory: float = 32.0,
        idle_memory: float = 200.0,
        certainty_memory: float = 48.0,
    ) -> None:
        self.prior = prior
        self.usual = typical
        self.typical = [list(climate) for climate in typical]
        self.prior_weight = prior_weight
        self.memory = memory
        self.climate_memory = climate_memory
        self.idle_memory = idle_memory
        self.certainty_memory = certainty_memory
        self._n_certainties = PRIOR_CERTAINTIES
        self._has_guessed = False
        self._n_noticed = [PRIOR_GUESSES] * len(self.usual)
        self.climates = [list(climate) for climate in typical]
        self.hits = [0.0] * N_BINS
        self.seen = [0.0] * N_BINS

    def expected(self, confidence: float) -> float:
        """Calibrated probability of acceptance of a guess with this confidence."""
        return self.expected_bin(bin_of(confidence))

    def expected_bin(self, index: int) -> float:
        return (self.hits[index] + self.prior_weight * self.prior[index]) / (self.seen[index] + self.prior_weight)

    def table(self) -> list[float]:
        """Calibrated probabilities of acceptance by bin."""
        return [self.expected_bin(index) for index in range(N_BINS)]

    def mean(self) -> float:
        """Expected acceptance of the next guess, its confidence not yet known."""
        return sum(share * self.expected_bin(i) for i, share in enumerate(self.climates[START]))

    def observe(self, confidence: float, accepted: float) -> None:
        """Record the fate of a guess that the target judged (all guesses before it having been accepted)."""
        index = bin_of(confidence)
        fade = 1.0 - 1.0 / self.memory
        self.hits[index] = self.hits[index] * fade + accepted
        self.seen[index] = self.seen[index] * fade + 1.0

    def idle(self, n_tokens: int, certainties: Sequence[float] = ()) -> None:
        """Tokens went by without a guess: what was learned fades, and the climate drifts to what the text foretells.

        A small model is unsure where a large one is. So how certain the target was of its tokens, which costs nothing
        to know, foretells how a draft model would fare; what is foretold stands in for the typical climate.

        Args:
            n_tokens: how many.
            certainties: the target's probability for its most probable token, for each of them, if that is known.
        """
        fade = (1.0 - 1.0 / self.idle_memory) ** n_tokens
        self.hits = [hits * fade for hits in self.hits]
        self.seen = [seen * fade for seen in self.seen]
        for certainty in certainties:
            self._n_certainties = min(self._n_certainties + 1, self.certainty_memory)
            there = _MODEL_WHERE_CERTAIN[bisect_right(CERTAINTY_EDGES, certainty)]
            start = self.typical[START]
            start[:] = [share + (new - share) / self._n_certainties for share, new in zip(start, there, strict=True)]
        for after in (AFTER_SURE, AFTER_UNSURE):
            climate = [
                now * there / start
                for now, there, start in zip(self.typical[START], self.usual[after], self.usual[START], strict=True)
            ]
            self.typical[after] = [share / sum(climate) for share in climate]
        if not certainties:
            self._drift(fade)
        else:  # and at once, where of this text nothing else is known
            self._drift((1.0 - 1.0 / self.climate_memory) ** n_tokens if self._has_guessed else 0.0)

    def new_text(self) -> None:
        """A new answer begins: its climate is expected to be like the last one's, and a little like the usual one."""
        self.typical = [list(climate) for climate in self.usual]
        self._n_certainties = PRIOR_CERTAINTIES
        self._has_guessed = False
        self._n_noticed = [PRIOR_GUESSES] * len(self.usual)
        self._drift(0.75)

    def _drift(self, keep: float) -> None:
        for climate, typical in zip(self.climates, self.typical, strict=True):
            climate[:] = [keep * old + (1.0 - keep) * usual for old, usual in zip(climate, typical, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {"hits": self.hits, "seen": self.seen, "climates": self.climates}

    def restore(self, stored: Any) -> None:
        """Start from what another run learned, at half its weight; anything that is not that is ignored."""
        try:
            hits, seen = [float(x) for x in stored["hits"]], [float(x) for x in stored["seen"]]
            climates = [[float(x) for x in climate] for climate in stored["climates"]]
        except (TypeError, KeyError, ValueError):
            return
        sane = all(0 <= hit <= n <= 1e4 for hit, n in zip(hits, seen, strict=False)) and all(
            abs(sum(climate) - 1) < 0.05 and min(climate) >= 0 and len(climate) == N_BINS for climate in climates
        )
        if sane and len(hits) == len(seen) == N_BINS and len(climates) == len(self.typical):
            self.hits, self.seen = [hit / 2 for hit in hits], [n / 2 for n in seen]
            self.climates = climates
            self._drift(0.5)

    def notice(self, confidence: float, after: int = START) -> None:
        """Record the confidence of a guess, sent to the target or not."""
        self._has_guessed = True
        n = self._n_noticed[after] = min(self._n_noticed[after] + 1, self.climate_memory)
        fade = 1.0 - 1.0 / n
        climate = self.climates[after]
        climate[:] = [share * fade for share in climate]
        climate[bin_of(confidence)] += 1.0 - fade


# Acceptance by confidence bin before any evidence, measured on 27 answers of Qwen2.5-Coder 1.5B drafted by its 0.5B
# (benchmarks/record_traces.py on the tuning prompts), and smoothed. Greedily a model's probability is a fair estimate.
# At a temperature (0.8, top-k 40) its most probable token is right with the target's probability for it, which is less;
# a sample is accepted with probability sum(min(p, q)), which is more where both are flat.
_GREEDY = (0.10, 0.19, 0.29, 0.39, 0.49, 0.59, 0.68, 0.77, 0.86, 0.93, 0.97, 0.99)
_MOST_PROBABLE = (0.05, 0.10, 0.17, 0.25, 0.34, 0.42, 0.49, 0.57, 0.67, 0.78, 0.91, 0.985)
_SAMPLE = (0.30, 0.34, 0.38, 0.43, 0.49, 0.54, 0.58, 0.64, 0.71, 0.79, 0.92, 0.985)


def model_prior(*, greedy: bool = True, sampled: bool = False) -> tuple[float, ...]:
    """For a draft model, by the probability of its most probable token."""
    if greedy:
        return _GREEDY
    return _SAMPLE if sampled else _MOST_PROBABLE


def estimate_prior() -> tuple[float, ...]:
    """For drafters that report a calibrated estimate already; no confidence at all is no guess."""
    return (0.03, *_CENTRES[1:])
