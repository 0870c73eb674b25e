"""Whether a drafter sends the samples that it draws, whatever they are.

Verification takes the law that a sample was drawn from on trust. A drafter that throws unlikely samples away, or draws
from another law than it reports, skews the text of answers, and no look at verification alone can tell. So samples are
looked at themselves: those that were sent, and those that were drawn and not sent. If sending does not depend on what
came out, both follow the law that was reported.

Bettors stake on what a defect would make of each sample, as in ``betting``: each stake is a non-negative martingale
under the claim, and so is their mean, which reaches 10^6 with a probability of at most 10^-6, however many samples
there are and whenever one looks (Ville 1939).

* ``THRESHOLDS``: half of the samples of a probability under c are thrown away; and one suspects that of all but the
  most probable token. A sample that was sent multiplies the stake by 1/2 + 1/2 [q(x) >= c] / Q(q >= c), one that was
  not by the same of the others. Laws that lie on one side of c tell nothing, and cost nothing.
* ``ORDERS``: suspects nothing in particular. Under its law each sample has a place in [0, 1), the probability of all
  tokens that rank before it plus a random share of its own, and these places are uniform. Tokens rank by probability
  and by a scrambled id; places are counted in ``BINS`` equal parts, and the stake is that of Dirichlet's mixture with
  weights of one half (Krichevsky and Trofimov 1981), for those sent and those not. With n samples sent, a quarter that
  holds a share of 1/4 + ``detectable`` is found with 99 %.
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
LIKELIEST = 2.0
"""Stands for a threshold over which only the most probable token is."""


@dataclass(slots=True)
class DrawnSamples:
    """The samples of drafters that were drawn from a law with noise of their own.

    Attributes:
        drawn: how many were seen being drawn.
        sent: how many were sent.
        impossible: sent though their law gives them no probability; one is proof.
    """

    drawn: int = 0
    sent: int = 0
    impossible: int = 0
    _stakes: dict[float, float] = field(default_factory=lambda: dict.fromkeys((*THRESHOLDS, LIKELIEST), 0.0))
    _rng: random.Random = field(default_factory=lambda: random.Random(23))
    _counts: dict[tuple[str, str], list[int]] = field(
        default_factory=lambda: {(set_, order): [0] * BINS for set_ in ("sent", "not sent") for order in ORDERS}
    )

    def observe(self, drawn: Sequence[tuple[int, Distribution]], draft: Sequence[DraftToken]) -> None:
        """Note those of one round: all that were drawn, and the draft that was sent."""
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
        """Logarithm of the common stake, in nats."""
        if self.impossible:
            return math.inf
        stakes = list(self._evidence().values())
        return float(np.logaddexp.reduce(stakes)) - math.log(len(stakes))

    def _evidence(self) -> dict[str, float]:
        """What each bettor's stake grew to, in nats, by what he suspects."""
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
        """Whether what is sent depends on what was drawn."""
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
        """The error of a quarter's share that is found with 99 %; None where no error is, with so few."""
        n = self.sent
        for error in np.arange(0.01, 0.76, 0.01):
            share = 0.25 + float(error)
            count = n * share - 2.33 * math.sqrt(n * share * (1 - share))
            rest = (n - count) / (BINS - 1)
            if count > rest and _stake([count, *[rest] * (BINS - 1)]) - math.log(len(self._evidence())) >= THRESHOLD:
                return float(error)
        return None

    def figures(self) -> dict[str, Any]:
        """``samples`` in ``result``."""
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
    """Logarithm of the probability of counts under Dirichlet's mixture over that under even shares."""
    n, half = sum(counts), 0.5
    mixed = math.lgamma(BINS * half) - math.lgamma(n + BINS * half)
    mixed += sum(math.lgamma(count + half) - math.lgamma(half) for count in counts)
    return mixed + n * math.log(BINS)
