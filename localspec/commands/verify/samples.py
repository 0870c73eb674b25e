"""Whether a drafter sends the samples that it draws, whatever they are.

Verification takes the law that a sample was drawn from on trust. A drafter that throws unlikely samples away, or draws
from another law than it reports, skews the text of answers, and no look at verification alone can tell. So samples are
looked at themselves: those that were sent, and those that were drawn and not sent. If sending does not depend on what
came out, both follow the law that was reported.

The statistic: under its law each sample has a place in [0, 1), the probability of all tokens that rank before it plus a
random share of its own, and these places are independent and uniform. Tokens rank once by their probability, once by a
scrambled id. So there are four rows of places, each counted in ``BINS`` equal parts, and on each a bettor stakes that
the counts follow some other law: Dirichlet's mixture with weights of one half (Krichevsky and Trofimov 1981). His stake
is a non-negative martingale, as is the mean of the four, so it reaches 10^6 with a probability of at most 10^-6,
however many samples there are and whenever one looks (Ville 1939). The power: with n samples a part that holds a share
of 1/4 + ``detectable`` in place of a quarter is found with 99 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.commands.verify.betting import FALSE_ALARM, THRESHOLD
from localspec.sampling.sampling import Distribution
from localspec.spec_decode.rounds import DraftToken

BINS = 4
ORDERS = ("probability", "id")


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
        stakes = np.array([_stake(counts) for counts in self._counts.values()])
        return float(np.logaddexp.reduce(stakes)) - math.log(len(stakes))

    @property
    def rejected(self) -> bool:
        """Whether what is sent depends on what was drawn."""
        return self.evidence >= THRESHOLD

    @property
    def worst(self) -> str:
        """Where the evidence is largest, in words."""
        if self.impossible:
            return "a sample was sent that its own law gives no probability"
        set_, order = max(self._counts, key=lambda each: _stake(self._counts[each]))
        counts = self._counts[set_, order]
        shares = ", ".join(f"{count / max(1, sum(counts)):.0%}" for count in counts)
        return f"of {sum(counts)} samples {set_}, by {order}, {shares} fall into the quarters of their laws"

    @property
    def detectable(self) -> float | None:
        """The error of a quarter's share that is found with 99 %; None where no error is, with so few."""
        n = self.sent
        for error in np.arange(0.01, 0.76, 0.01):
            share = 0.25 + float(error)
            count = n * share - 2.33 * math.sqrt(n * share * (1 - share))
            rest = (n - count) / (BINS - 1)
            if count > rest and _stake([count, *[rest] * (BINS - 1)]) - math.log(4) >= THRESHOLD:
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
