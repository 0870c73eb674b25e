"""Whether a drafter sends the samples that it draws.

Verification trusts the law that a sample was drawn from. A drafter that drops unlikely samples, or draws from another
law than it reports, skews the text. So samples sent, and samples drawn and not sent, are tested: if sending does not
depend on the outcome, both follow the reported law.

Bettors stake as in ``law``. Those of ``THRESHOLDS`` suspect that half of the samples of a probability under c are
dropped, or half of all but the most probable token: a sample sent multiplies the stake by 1/2 + 1/2 [q(x) >= c] / Q(q
>= c), one not sent by the same of the others. Those of ``ORDERS`` suspect nothing in particular: a sample's place in
[0, 1), the probability of all tokens ranked before it plus a random share of its own, is uniform. Tokens rank by
probability and by a scrambled id; places are counted in ``BINS`` parts, and the stake is Dirichlet's mixture with
weights 1/2 (Krichevsky and Trofimov 1981). With n samples sent, a quarter with a share of 1/4 + ``detectable`` is found
with 99 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.commands.verify.law import FALSE_ALARM, THRESHOLD
from localspec.sampling.sampling import Distribution
from localspec.spec_decode.rounds import DraftToken

BINS = 4
ORDERS = ("probability", "id")
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
LIKELIEST = 2.0  # stands for a threshold that only the most probable token passes


@dataclass(slots=True)
class DrawnSamples:
    """Samples that drafters drew with noise of their own; one sent though its law gives it no probability is proof."""

    drawn: int = 0
    sent: int = 0
    impossible: int = 0
    _stakes: dict[float, float] = field(default_factory=lambda: dict.fromkeys((*THRESHOLDS, LIKELIEST), 0.0))
    _rng: random.Random = field(default_factory=lambda: random.Random(23))
    _counts: dict[tuple[str, str], list[int]] = field(
        default_factory=lambda: {(set_, order): [0] * BINS for set_ in ("sent", "not sent") for order in ORDERS}
    )

    def observe(self, drawn: Sequence[tuple[int, Distribution]], draft: Sequence[DraftToken]) -> None:
        """Note the samples drawn in a round, and the draft sent."""
        sent = [(token.id, token.dist) for token in draft if token.dist is not None]
        held = {(token, id(law)) for token, law in sent}
        self.drawn += len(drawn)
        self.sent += len(sent)
        for token, law in sent:
            self._place("sent", token, law)
        for token, law in drawn:
            if (token, id(law)) not in held:
                self._place("not sent", token, law)

    def _place(self, set_: str, token: int, law: Distribution) -> None:
        at = int(np.searchsorted(law.ids, token))
        if at == len(law.ids) or law.ids[at] != token or not law.probs[at]:
            self.impossible += 1
            return
        for threshold in self._stakes:
            kept = law.probs >= (law.probs.max() if threshold == LIKELIEST else threshold)
            if set_ == "not sent":
                kept = ~kept
            if 0.0 < (mass := float(law.probs[kept].sum())) < 1.0:
                self._stakes[threshold] += math.log(0.5 + 0.5 * bool(kept[at]) / mass)
        share = self._rng.random()
        # Ids are scrambled by a multiplication, so that neighbours do not stay together.
        for order, keys in zip(ORDERS, (-law.probs, law.ids * 0x9E3779B1 % (1 << 32)), strict=True):
            before = float(law.probs[keys < keys[at]].sum())
            if order == "probability":  # equals rank by id
                before += float(law.probs[:at][law.probs[:at] == law.probs[at]].sum())
            place = before + share * float(law.probs[at])
            self._counts[set_, order][min(BINS - 1, int(place * BINS))] += 1

    @property
    def evidence(self) -> float:
        """Logarithm of the common stake [nats]."""
        if self.impossible:
            return math.inf
        stakes = list(self._evidence().values())
        return float(np.logaddexp.reduce(stakes)) - math.log(len(stakes))

    def _evidence(self) -> dict[str, float]:
        """Log stake [nats] by suspicion."""
        found = {
            "unlikely samples are thrown away"
            if threshold == LIKELIEST
            else f"samples of a probability under {threshold:g} are thrown away": stake
            for threshold, stake in self._stakes.items()
        }
        return found | {
            f"samples do not follow the laws they are said to come from (by {order})": sum(
                _stake(self._counts[set_, order]) for set_ in ("sent", "not sent")
            )
            for order in ORDERS
        }

    @property
    def rejected(self) -> bool:
        return self.evidence >= THRESHOLD

    @property
    def worst(self) -> str:
        """Where the evidence is largest, in words."""
        if self.impossible:
            return "a sample was sent that its own law gives no probability"
        found = self._evidence()
        return f"{max(found, key=lambda name: found[name])}; of {self.drawn} that were drawn {self.sent} were sent"

    @property
    def detectable(self) -> float | None:
        """Error of a quarter's share that is found with 99 %; None if none is."""
        n = self.sent
        for error in np.arange(0.01, 0.76, 0.01):
            share = 0.25 + float(error)
            count = n * share - 2.33 * math.sqrt(n * share * (1 - share))
            rest = (n - count) / (BINS - 1)
            if count > rest and _stake([count, *[rest] * (BINS - 1)]) - math.log(len(self._evidence())) >= THRESHOLD:
                return float(error)
        return None

    def figures(self) -> dict[str, Any]:
        """``samples`` of the JSON."""
        return {
            "drawn": self.drawn,
            "sent": self.sent,
            "impossible": self.impossible,
            "evidence_nats": None if self.impossible else self.evidence,
            "threshold_nats": THRESHOLD,
            "worst": self.worst,
            "detectable_error": self.detectable,
            "false_alarm": FALSE_ALARM,
        }


def _stake(counts: Sequence[float]) -> float:
    """Log probability of counts under Dirichlet's mixture over that under even shares."""
    n, half = sum(counts), 0.5
    mixed = math.lgamma(BINS * half) - math.lgamma(n + BINS * half)
    mixed += sum(math.lgamma(count + half) - math.lgamma(half) for count in counts)
    return mixed + n * math.log(BINS)
