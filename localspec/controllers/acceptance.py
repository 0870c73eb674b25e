"""How likely a draft token is accepted: the drafters' own confidences, calibrated online against the target's verdicts.

A histogram of recent confidences says what the confidence of the next draft token will be before it is made. What is
expected of a drafter before any evidence is data: ``priors.json``, which ``benchmarks/draft_acceptance.py
--write-prior`` measures and writes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.spec_decode.drafters.base import DrafterInfo
from localspec.spec_decode.rounds import Draft

# Upper ends of the confidence bins; the last bin reaches to 1.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

N_BINS = len(EDGES) + 1

SURE = 0.9  # Least confidence of a sure draft token; sure ones come in runs

# What a draft token follows: the target's own token, a sure token of the same draft, an unsure one.
START, AFTER_SURE, AFTER_UNSURE = range(3)

# Upper ends of the bins of the target's certainty: its own probability for its most probable token.
CERTAINTY_EDGES = (0.3, 0.6, 0.85, 0.95, 0.99)

PRIORS = Path(__file__).with_name("priors.json")

# How fast evidence replaces the prior [tokens]. Chosen together in the replay of recorded traces.
PRIOR_WEIGHT = 6.0
MEMORY = 80.0
SIBLING = 0.7  # Prior of a draft token whose siblings were rejected, as a share of the usual one; set by hand
HISTOGRAM_PRIOR = 12.0
HISTOGRAM_MEMORY = 32.0
CERTAINTY_PRIOR = 8.0
CERTAINTY_MEMORY = 48.0
IDLE_MEMORY = 200.0
NEW_TEXT_KEPT = 0.25  # Share of the weight that verdicts in earlier texts have in a new one

Histogram = tuple[float, ...]


class Prior(NamedTuple):
    """What is expected of a drafter before any evidence."""

    acceptance: tuple[float, ...]  # probability of acceptance by confidence bin
    histograms: tuple[Histogram, ...]  # shares of the confidence bins, by START, AFTER_SURE, AFTER_UNSURE
    where_certain: tuple[Histogram, ...]  # the same by the target's certainty at that place
    drift: float = HISTOGRAM_MEMORY  # tokens over which the histograms drift to what the target's certainty predicts


# Greedily a model's probability is a fair estimate. At a temperature its most probable token is right with the target's
# probability for it, which is less; a sample is accepted with probability sum(min(p, q)), which is more where both are
# flat. A drafter that copies reports an estimate: a bin's middle, and no confidence where it has nothing to copy.
_PRIORS = {  # by kind of drafter, and how its token was chosen
    (kind, choice): Prior(
        tuple(prior["acceptance"]),
        tuple(map(tuple, prior["histograms"])),
        tuple(map(tuple, prior["where_certain"])),
        prior["drift"],
    )
    for kind, choices in json.loads(PRIORS.read_bytes()).items()
    for choice, prior in choices.items()
}
GREEDY, MOST_PROBABLE, SAMPLE = (_PRIORS["model", choice] for choice in ("greedy", "most_probable", "sample"))
COPIED = _PRIORS["copy", "greedy"]
_OF_A_HEAD = {_PRIORS["model", choice]: prior for (kind, choice), prior in _PRIORS.items() if kind == "head"}


def prior_of(info: DrafterInfo, *, greedy: bool, sampled: bool = False) -> Prior:
    """What is expected of a drafter in greedy requests, else of its samples or its most probable tokens."""
    if not info.runs_model:
        return COPIED
    choice = "greedy" if greedy else "sample" if sampled else "most_probable"
    if info.as_text:
        return _PRIORS["carried", choice]
    prior = _PRIORS["model", choice]
    return of_a_head(prior, info.rate) if info.taps else prior


_MOST_TILT = 16.0  # At 16 a head is expected to be right at 0.95 of all places, at -16 at 0.09


def of_a_head(prior: Prior, rate: float | None = None) -> Prior:
    """The prior of a head, given that of a draft model; ``rate`` is the share of places at which the head's first draft
    token is right, as its card says. A head that promises too little is never asked where a draft model pays."""
    prior = _OF_A_HEAD[prior]
    tilt = 0.0 if rate is None else _tilt_for(rate, prior)
    histograms, where_certain = (
        tuple(_tilted(each, prior, tilt) for each in tables) for tables in (prior.histograms, prior.where_certain)
    )
    return Prior(prior.acceptance, histograms, where_certain, prior.drift)


def _tilt_for(rate: float, prior: Prior) -> float:
    low, high = -_MOST_TILT, _MOST_TILT
    for _ in range(24):
        middle = (low + high) / 2
        expected = sum(map(mul, _tilted(prior.histograms[START], prior, middle), prior.acceptance))
        low, high = (middle, high) if expected < rate else (low, middle)
    return low


def _tilted(histogram: Histogram, prior: Prior, tilt: float) -> Histogram:
    shares = [share * exp(tilt * right) for share, right in zip(histogram, prior.acceptance, strict=True)]
    return tuple(share / sum(shares) for share in shares)


def bin_of(confidence: float) -> int:
    return bisect_right(EDGES, confidence)


def leads_to(confidence: float) -> int:
    return AFTER_SURE if confidence >= SURE else AFTER_UNSURE


class SourceAcceptance:
    """Calibration of one drafter.

    Each confidence bin holds a Beta estimate of P(accepted | confidence, all before it accepted), starting from the
    prior; evidence fades within tens of tokens. The histograms hold the shares of the bins among recent draft tokens of
    this text, by what these follow: how much is copied, or easy, depends on the text, so every one starts from the
    prior. ``has_drafted``: whether a draft token was looked for in this text.
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self.hits = [0.0] * N_BINS
        self.seen = [0.0] * N_BINS
        self._siblings = [(0.0, 0.0)] * N_BINS  # hits and seen of tokens with siblings
        self.new_text()

    def new_text(self) -> None:
        self.histograms, self.typical = ([list(each) for each in self.prior.histograms] for _ in range(2))
        self._n_certainties = CERTAINTY_PRIOR
        self._n_noticed = [HISTOGRAM_PRIOR] * len(self.histograms)
        self.has_drafted = False
        self.hits, self.seen = ([NEW_TEXT_KEPT * each for each in counts] for counts in (self.hits, self.seen))

    def table(self) -> list[float]:
        return [
            (hits + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)
            for hits, seen, prior in zip(self.hits, self.seen, self.prior.acceptance, strict=True)
        ]

    def expected(self, confidence: float) -> float:
        i = bin_of(confidence)
        return (self.hits[i] + PRIOR_WEIGHT * self.prior.acceptance[i]) / (self.seen[i] + PRIOR_WEIGHT)

    def sibling(self, confidence: float) -> float:
        """Calibrated probability that a draft token is right where its siblings are not."""
        i = bin_of(confidence)
        hits, seen = self._siblings[i]
        return (hits + PRIOR_WEIGHT * SIBLING * self.prior.acceptance[i]) / (seen + PRIOR_WEIGHT)

    def observe_sibling(self, confidence: float, accepted: float) -> None:
        i, fade = bin_of(confidence), 1.0 - 1.0 / MEMORY
        hits, seen = self._siblings[i]
        self._siblings[i] = hits * fade + accepted, seen * fade + 1.0

    def mean(self) -> float:
        return sum(share * expected for share, expected in zip(self.histograms[START], self.table(), strict=True))

    def observe(self, confidence: float, accepted: float) -> None:
        i = bin_of(confidence)
        fade = 1.0 - 1.0 / MEMORY
        self.hits[i] = self.hits[i] * fade + accepted
        self.seen[i] = self.seen[i] * fade + 1.0

    def notice(self, confidence: float, after: int = START) -> None:
        self.has_drafted = True
        n = self._n_noticed[after] = min(self._n_noticed[after] + 1, HISTOGRAM_MEMORY)
        fade = 1.0 - 1.0 / n
        histogram = self.histograms[after]
        histogram[:] = [share * fade for share in histogram]
        histogram[bin_of(confidence)] += 1.0 - fade

    def idle(self, n_tokens: int, certainties: Sequence[float] = ()) -> None:
        """Let evidence fade after tokens without a draft. A small model is unsure where a large one is, so the
        histograms drift to what the target's ``certainties`` (its largest probabilities; empty: unknown) predict."""
        fade = (1.0 - 1.0 / IDLE_MEMORY) ** n_tokens
        self.hits = [hits * fade for hits in self.hits]
        self.seen = [seen * fade for seen in self.seen]
        if certainties:
            self._predict(certainties)
            # At once, where of this text nothing else is known.
            fade = (1.0 - 1.0 / self.prior.drift) ** n_tokens if self.has_drafted else 0.0
        for histogram, typical in zip(self.histograms, self.typical, strict=True):
            histogram[:] = [fade * old + (1.0 - fade) * new for old, new in zip(histogram, typical, strict=True)]

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

    def as_dict(self) -> dict[str, Any]:
        siblings = [list(each) for each in self._siblings]
        return {"hits": self.hits, "seen": self.seen, "beside": siblings}

    def restore(self, stored: Any) -> None:
        """Start from what another run learned, at half its weight; ignores what is malformed."""
        try:
            hits, seen = [float(x) for x in stored["hits"]], [float(x) for x in stored["seen"]]
            siblings = [(float(hit), float(n)) for hit, n in stored["beside"]]
        except (TypeError, KeyError, ValueError, AttributeError):
            return
        if [len(each) for each in (hits, seen, siblings)] != [N_BINS] * 3:
            return
        if all(0 <= hit <= n <= 1e4 for hit, n in [*zip(hits, seen, strict=True), *siblings]):
            self._siblings = [(hit / 2, n / 2) for hit, n in siblings]
            self.hits, self.seen = [hit / 2 for hit in hits], [n / 2 for n in seen]


class Acceptance:
    """Calibrations of all drafters by source, for their most probable tokens and for tokens that they sample."""

    def __init__(self, most_probable: Mapping[str, SourceAcceptance], sampled: Mapping[str, SourceAcceptance]) -> None:
        self.most_probable, self.sampled = most_probable, sampled
        self.takes_samples = False

    def begin(self, *, takes_samples: bool) -> None:
        self.takes_samples = takes_samples
        for table in (*self.most_probable.values(), *self.sampled.values()):
            table.new_text()

    def __getitem__(self, source: str) -> SourceAcceptance:
        return self.most_probable[source]

    def __iter__(self) -> Iterator[str]:
        return iter(self.most_probable)

    def table(self, source: str) -> npt.NDArray[np.float64]:
        """Probability of acceptance by confidence bin [N_BINS]."""
        tables = self.sampled if self.takes_samples and source in self.sampled else self.most_probable
        return np.array(tables[source].table())

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        for at in (-1, *accepted):
            for nth, rival in enumerate(draft.children(at)):
                token, right = draft[rival], rival in accepted
                if nth:
                    self[token.source].observe_sibling(token.prob, right)
                elif token.dist is not None:
                    self.sampled[token.source].observe(token.dist.top, right)
                else:
                    self[token.source].observe(token.prob, right)
                if right:
                    break
