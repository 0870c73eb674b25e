"""How likely a draft token is accepted: the drafters' own confidences, calibrated online against what the target did.

Also what the confidence of the next draft token will be, before it is made: a histogram of the recent ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp
from operator import mul
from typing import Any, NamedTuple

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Upper ends of the confidence bins; the last bin reaches to 1."""

N_BINS = len(EDGES) + 1

SURE = 0.9
"""From this confidence on a draft token counts as sure; sure ones come in runs."""

START, AFTER_SURE, AFTER_UNSURE = range(3)
"""What a draft token comes after: the target's own token, a sure token of the same draft, an unsure one."""

Histogram = tuple[float, ...]


CERTAINTY_EDGES = (0.3, 0.6, 0.85, 0.95, 0.99)
"""Upper ends of the bins of the target's certainty: its own probability for its most probable token."""

_MODEL_WHERE_CERTAIN: tuple[Histogram, ...] = (
    (0.06, 0.21, 0.28, 0.14, 0.14, 0.06, 0.04, 0.03, 0.01, 0.01, 0.01, 0.01),
    (0.01, 0.07, 0.13, 0.16, 0.15, 0.14, 0.12, 0.09, 0.07, 0.03, 0.02, 0.01),
    (0.00, 0.02, 0.05, 0.09, 0.15, 0.14, 0.14, 0.13, 0.15, 0.07, 0.04, 0.02),
    (0.00, 0.01, 0.03, 0.06, 0.06, 0.12, 0.11, 0.13, 0.18, 0.15, 0.13, 0.02),
    (0.00, 0.01, 0.01, 0.01, 0.02, 0.05, 0.06, 0.07, 0.16, 0.15, 0.29, 0.17),
    (0.00, 0.00, 0.00, 0.00, 0.00, 0.01, 0.01, 0.01, 0.02, 0.03, 0.12, 0.80),
)
"""Confidence of a draft model by the target's certainty at that place, in the same answers. The mean acceptance that
the certainty of the first 24 tokens predicts has a correlation of 0.79 with that of the whole answer; that of the
draft's own first 24 tokens, which cost their time, has 0.81."""

# How fast evidence replaces what was expected, in tokens. Chosen together on the replay; with a histogram's memory of
# 64 it differs by no more than with another seed.
PRIOR_WEIGHT = 6.0
MEMORY = 80.0
BESIDE = 0.7
"""Of what is expected of a draft token, what is expected of one beside another that was rejected. Set by hand; what is
observed takes its place."""
HISTOGRAM_PRIOR = 12.0
HISTOGRAM_MEMORY = 32.0
CERTAINTY_PRIOR = 8.0
CERTAINTY_MEMORY = 48.0
IDLE_MEMORY = 200.0
NEW_TEXT_KEPT = 0.75
"""Of the histograms of one answer, what is expected of the next; the rest is the prior's."""


class Prior(NamedTuple):
    """What is expected of a drafter before any evidence.

    Attributes:
        acceptance: probability of acceptance by confidence bin.
        histograms: shares of the confidence bins, by ``START``, ``AFTER_SURE``, ``AFTER_UNSURE``.
        where_certain: shares of the bins at a place where the target is as certain as ``CERTAINTY_EDGES`` say.
        drift: over how many tokens without a draft token the histograms of a text in which there were some drift to
            what the target's certainty predicts.
    """

    acceptance: tuple[float, ...]
    histograms: tuple[Histogram, ...]
    where_certain: tuple[Histogram, ...] = _MODEL_WHERE_CERTAIN
    drift: float = HISTOGRAM_MEMORY


# Measured on 27 answers of Qwen2.5-Coder 1.5B drafted by its 0.5B (benchmarks/record_traces.py on the tuning prompts),
# and smoothed. The histograms of draft models agree with the means of several other pairs, near 0.75.
_MODEL_HISTOGRAMS = (
    (0.01, 0.02, 0.03, 0.05, 0.06, 0.07, 0.07, 0.08, 0.12, 0.09, 0.14, 0.26),
    (0.01, 0.01, 0.02, 0.02, 0.03, 0.04, 0.04, 0.05, 0.07, 0.08, 0.18, 0.45),
    (0.01, 0.03, 0.06, 0.07, 0.08, 0.08, 0.08, 0.08, 0.13, 0.09, 0.12, 0.17),
)
# Greedily a model's probability is a fair estimate. At a temperature (0.8, top-k 40) its most probable token is right
# with the target's probability for it, which is less; a sample is accepted with probability sum(min(p, q)), which is
# more where both are flat.
GREEDY = Prior((0.10, 0.19, 0.29, 0.39, 0.49, 0.59, 0.68, 0.77, 0.86, 0.93, 0.97, 0.99), _MODEL_HISTOGRAMS)
MOST_PROBABLE = Prior((0.05, 0.10, 0.17, 0.25, 0.34, 0.42, 0.49, 0.57, 0.67, 0.78, 0.91, 0.985), _MODEL_HISTOGRAMS)
SAMPLE = Prior((0.30, 0.34, 0.38, 0.43, 0.49, 0.54, 0.58, 0.64, 0.71, 0.79, 0.92, 0.985), _MODEL_HISTOGRAMS)

# Measured on 25 answers of Qwen2.5-Coder 1.5B to the tuning questions, drafted by a head that had learned from 0.2
# million tokens (benchmarks/draft_acceptance.py --histograms; at temperature 0.8 benchmarks/record_traces.py --head),
# and smoothed. It was trained on few texts and is surer than it should be; where it copies what a prompt says it is no
# better for the target being certain. A step is cheap, so one that did badly a moment ago is not asked again only
# because the target is certain. At a temperature a sample of it is accepted no more often than its most probable token.
_HEAD_GREEDY = Prior(
    (0.05, 0.10, 0.17, 0.25, 0.33, 0.42, 0.48, 0.55, 0.68, 0.80, 0.91, 0.985),
    (
        (0.08, 0.15, 0.14, 0.12, 0.11, 0.09, 0.07, 0.07, 0.06, 0.04, 0.04, 0.03),
        (0.09, 0.13, 0.13, 0.11, 0.11, 0.08, 0.08, 0.06, 0.06, 0.05, 0.05, 0.05),
        (0.12, 0.20, 0.17, 0.14, 0.10, 0.08, 0.06, 0.04, 0.04, 0.02, 0.02, 0.01),
    ),
    (
        (0.08, 0.28, 0.19, 0.12, 0.09, 0.07, 0.06, 0.05, 0.03, 0.02, 0.01, 0.00),
        (0.05, 0.20, 0.20, 0.15, 0.12, 0.09, 0.06, 0.05, 0.04, 0.02, 0.01, 0.01),
        (0.05, 0.17, 0.17, 0.15, 0.12, 0.10, 0.08, 0.06, 0.05, 0.03, 0.01, 0.01),
        (0.06, 0.14, 0.15, 0.13, 0.11, 0.10, 0.08, 0.07, 0.07, 0.04, 0.03, 0.02),
        (0.07, 0.13, 0.13, 0.12, 0.12, 0.09, 0.08, 0.07, 0.07, 0.05, 0.04, 0.03),
        (0.09, 0.12, 0.11, 0.10, 0.09, 0.08, 0.07, 0.07, 0.07, 0.05, 0.08, 0.07),
    ),
    IDLE_MEMORY,
)
_HEAD_MOST_PROBABLE = Prior(
    (0.02, 0.05, 0.08, 0.14, 0.20, 0.24, 0.30, 0.37, 0.44, 0.57, 0.72, 0.94),
    (
        (0.005, 0.04, 0.09, 0.11, 0.12, 0.11, 0.09, 0.09, 0.10, 0.07, 0.08, 0.10),
        (0.005, 0.07, 0.11, 0.11, 0.11, 0.10, 0.09, 0.08, 0.10, 0.06, 0.07, 0.10),
        (0.005, 0.07, 0.13, 0.13, 0.13, 0.12, 0.10, 0.09, 0.09, 0.05, 0.05, 0.04),
    ),
    (
        (0.01, 0.05, 0.23, 0.21, 0.16, 0.12, 0.07, 0.07, 0.04, 0.02, 0.02, 0.00),
        (0.00, 0.05, 0.13, 0.16, 0.15, 0.13, 0.10, 0.09, 0.09, 0.05, 0.04, 0.01),
        (0.00, 0.05, 0.11, 0.13, 0.14, 0.13, 0.10, 0.11, 0.10, 0.06, 0.06, 0.01),
        (0.00, 0.05, 0.09, 0.12, 0.12, 0.12, 0.10, 0.10, 0.12, 0.07, 0.08, 0.03),
        (0.00, 0.04, 0.08, 0.10, 0.12, 0.12, 0.10, 0.10, 0.11, 0.07, 0.10, 0.06),
        (0.00, 0.04, 0.07, 0.08, 0.10, 0.09, 0.08, 0.08, 0.10, 0.08, 0.11, 0.17),
    ),
    IDLE_MEMORY,
)
_HEAD_SAMPLE = Prior(
    (0.04, 0.07, 0.11, 0.16, 0.21, 0.25, 0.30, 0.36, 0.42, 0.55, 0.70, 0.935), *_HEAD_MOST_PROBABLE[1:]
)
_OF_A_HEAD = {GREEDY: _HEAD_GREEDY, MOST_PROBABLE: _HEAD_MOST_PROBABLE, SAMPLE: _HEAD_SAMPLE}

_MOST_TILT = 16.0
"""At 16 a head is expected to be right at 0.95 of all places, at -16 at 0.09."""


def of_a_head(prior: Prior, rate: float | None = None) -> Prior:
    """What is expected of a head, where this is expected of a draft model.

    Args:
        prior: ``GREEDY``, ``MOST_PROBABLE`` or ``SAMPLE``.
        rate: share of places at which the head's first draft token is right, as its card says; None where it says
            nothing. Beside a draft model that pays, a head of which too little is expected is never asked, and cannot
            show that it is better.
    """
    prior = _OF_A_HEAD[prior]
    tilt = 0.0 if rate is None else _tilt_for(rate, prior)
    histograms, where_certain = (
        tuple(_tilted(each, prior, tilt) for each in tables) for tables in (prior.histograms, prior.where_certain)
    )
    return Prior(prior.acceptance, histograms, where_certain, prior.drift)


def _tilt_for(rate: float, prior: Prior) -> float:
    """How far to tilt the histograms, so that the first token of a draft is right at this share of places."""
    low, high = -_MOST_TILT, _MOST_TILT
    for _ in range(24):
        middle = (low + high) / 2
        expected = sum(map(mul, _tilted(prior.histograms[START], prior, middle), prior.acceptance))
        low, high = (middle, high) if expected < rate else (low, middle)
    return low


def _tilted(histogram: Histogram, prior: Prior, tilt: float) -> Histogram:
    """The shares times exp(tilt · acceptance), one in all again."""
    shares = [share * exp(tilt * right) for share, right in zip(histogram, prior.acceptance, strict=True)]
    return tuple(share / sum(shares) for share in shares)


# Drafters that copy report an estimate, not a probability: a bin's middle. "Nothing to copy" counts as no confidence. A
# copy goes on as it began, so only its first token is counted, and what it comes after makes no difference.
COPIED = Prior(
    (0.03, *((low + high) / 2 for low, high in zip(EDGES, (*EDGES[1:], 1.0), strict=True))),
    ((0.40, 0.13, 0.12, 0.09, 0.06, 0.06, 0.05, 0.05, 0.02, 0.01, 0.01, 0.0),) * 3,
)


def bin_of(confidence: float) -> int:
    """Index of the confidence bin [0, N_BINS)."""
    return bisect_right(EDGES, confidence)


def leads_to(confidence: float) -> int:
    """What the next token of the draft comes after, if this one is sent."""
    return AFTER_SURE if confidence >= SURE else AFTER_UNSURE


class SourceAcceptance:
    """Calibration of one drafter.

    Each confidence bin holds a Beta estimate of P(accepted | confidence, all before it accepted), starting from the
    prior; evidence fades, so that a change of topic shows within tens of tokens. The histograms hold the shares of the
    bins among recent draft tokens, for each thing that one can come after.

    Attributes:
        has_drafted: whether a draft token was looked for in this text.
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self.hits = [0.0] * N_BINS
        self.seen = [0.0] * N_BINS
        self._beside = [(0.0, 0.0)] * N_BINS  # hits and seen of tokens beside others
        self.histograms = [list(histogram) for histogram in prior.histograms]
        self._begin()

    def _begin(self) -> None:
        self.typical = [list(histogram) for histogram in self.prior.histograms]
        self._n_certainties = CERTAINTY_PRIOR
        self._n_noticed = [HISTOGRAM_PRIOR] * len(self.histograms)
        self.has_drafted = False

    def new_text(self) -> None:
        """A new answer begins."""
        self._begin()
        self._drift(NEW_TEXT_KEPT)

    def table(self) -> list[float]:
        """Calibrated probabilities of acceptance by bin."""
        return [
            (hits + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)
            for hits, seen, prior in zip(self.hits, self.seen, self.prior.acceptance, strict=True)
        ]

    def expected(self, confidence: float) -> float:
        """Calibrated probability of acceptance of a draft token with this confidence."""
        i = bin_of(confidence)
        return (self.hits[i] + PRIOR_WEIGHT * self.prior.acceptance[i]) / (self.seen[i] + PRIOR_WEIGHT)

    def beside(self, confidence: float) -> float:
        """Calibrated probability that a draft token is right at a place where others are not; see ``expected``."""
        i = bin_of(confidence)
        hits, seen = self._beside[i]
        return (hits + PRIOR_WEIGHT * BESIDE * self.prior.acceptance[i]) / (seen + PRIOR_WEIGHT)

    def observe_beside(self, confidence: float, accepted: float) -> None:
        """Record the fate of a draft token at whose place others were rejected."""
        i, fade = bin_of(confidence), 1.0 - 1.0 / MEMORY
        hits, seen = self._beside[i]
        self._beside[i] = hits * fade + accepted, seen * fade + 1.0

    def mean(self) -> float:
        """Expected acceptance of the next draft token, its confidence not yet known."""
        return sum(share * expected for share, expected in zip(self.histograms[START], self.table(), strict=True))

    def observe(self, confidence: float, accepted: float) -> None:
        """Record the fate of a draft token that the target judged (all before it having been accepted)."""
        i = bin_of(confidence)
        fade = 1.0 - 1.0 / MEMORY
        self.hits[i] = self.hits[i] * fade + accepted
        self.seen[i] = self.seen[i] * fade + 1.0

    def notice(self, confidence: float, after: int = START) -> None:
        """Record the confidence of a draft token, sent to the target or not."""
        self.has_drafted = True
        n = self._n_noticed[after] = min(self._n_noticed[after] + 1, HISTOGRAM_MEMORY)
        fade = 1.0 - 1.0 / n
        histogram = self.histograms[after]
        histogram[:] = [share * fade for share in histogram]
        histogram[bin_of(confidence)] += 1.0 - fade

    def idle(self, n_tokens: int, certainties: Sequence[float] = ()) -> None:
        """Tokens went by without a draft token: evidence fades, and the histograms drift to what the text predicts.

        A small model is unsure where a large one is. So how certain the target was of its tokens, which costs nothing
        to know, predicts how a draft model would fare.

        Args:
            n_tokens: how many.
            certainties: the target's probability for its most probable token, for each of them, if that is known.
        """
        fade = (1.0 - 1.0 / IDLE_MEMORY) ** n_tokens
        self.hits = [hits * fade for hits in self.hits]
        self.seen = [seen * fade for seen in self.seen]
        if certainties:
            self._predict(certainties)
            # At once, where of this text nothing else is known.
            fade = (1.0 - 1.0 / self.prior.drift) ** n_tokens if self.has_drafted else 0.0
        self._drift(fade)

    def _predict(self, certainties: Sequence[float]) -> None:
        start = self.typical[START]
        for certainty in certainties:
            self._n_certainties = min(self._n_certainties + 1, CERTAINTY_MEMORY)
            there = self.prior.where_certain[bisect_right(CERTAINTY_EDGES, certainty)]
            start[:] = [share + (new - share) / self._n_certainties for share, new in zip(start, there, strict=True)]
        usual = self.prior.histograms
        for after in (AFTER_SURE, AFTER_UNSURE):
            moved = [now * of / at for now, of, at in zip(start, usual[after], usual[START], strict=True)]
            self.typical[after] = [share / sum(moved) for share in moved]

    def _drift(self, keep: float) -> None:
        for histogram, typical in zip(self.histograms, self.typical, strict=True):
            histogram[:] = [keep * old + (1.0 - keep) * new for old, new in zip(histogram, typical, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        beside = [list(each) for each in self._beside]
        return {"hits": self.hits, "seen": self.seen, "histograms": self.histograms, "beside": beside}

    def restore(self, stored: Any) -> None:
        """Start from what another run learned, at half its weight; anything that is not that is ignored."""
        try:
            hits, seen = [float(x) for x in stored["hits"]], [float(x) for x in stored["seen"]]
            histograms = [[float(x) for x in histogram] for histogram in stored["histograms"]]
            beside = [(float(hit), float(n)) for hit, n in stored.get("beside", self._beside)]
        except (TypeError, KeyError, ValueError, AttributeError):
            return
        sizes = [len(each) for each in (hits, seen, *histograms)]
        if sizes != [N_BINS] * (2 + len(self.histograms)):
            return
        are_shares = all(abs(sum(shares) - 1) < 0.05 and min(shares) >= 0 for shares in histograms)
        counts = [*zip(hits, seen, strict=True), *beside]
        if are_shares and len(beside) == N_BINS and all(0 <= hit <= n <= 1e4 for hit, n in counts):
            self._beside = [(hit / 2, n / 2) for hit, n in beside]
            self.hits, self.seen = [hit / 2 for hit in hits], [n / 2 for n in seen]
            self.histograms = histograms
            self._drift(0.5)
