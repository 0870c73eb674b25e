"""Testing a law by betting against it: evidence that may be looked at as often as one likes.

Token by token, the claim is that x follows p, given everything before it. A bettor who suspects a defect, under which x
would follow r, multiplies his stake by r(x) / p(x). If the claim holds this is fair, whatever the bettor knows of the
past: the stake is a non-negative martingale, and the probability that it *ever* reaches 1/a is at most a (Ville 1939;
Shafer and Vovk 2019). So a stake of 10^6 is a defect with a false-alarm rate of 10^-6, without approximation, however
long the audit runs and whenever it is interrupted. Several bettors share one stake: their mean is fair too.

The power is as exact. If the defect is there just as bettor i suspects, his log stake grows by KL(r || p) nats a token
on average; with its variance, which is known as well, that gives the probability that the threshold would have been
reached on the very distributions that were met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from localspec.sampling.sampling import Distribution, Ids, Probs

FALSE_ALARM = 1e-6
THRESHOLD = -math.log(FALSE_ALARM)
"""The evidence that counts as a defect, in nats."""

SAMPLED, FIXED = "sampled", "deterministic"

ABOUT_DRAFTS = {
    "followed": "every other token is the {} guess, whatever p says",
    "followed a little": "one token in twenty is the {} guess, whatever p says",
    "avoided": "every other token avoids the {} guess",
    "no residual": "after a rejected {} guess the token is drawn from p, not from the residual",
}
ABOUT_ROWS = {
    "row before": "every other token is drawn from the row before its own",
    "row before a little": "one token in twenty is drawn from the row before its own",
    "sharper": "the text is too likely, as if the temperature were lower by a fifth",
    "flatter": "the text is too unlikely, as if the temperature were higher by a quarter",
}
ON_Q = f"accepted on q ({SAMPLED})"
SUSPICIONS = (
    {f"{name} ({rule})": words.format(rule) for rule in (SAMPLED, FIXED) for name, words in ABOUT_DRAFTS.items()}
    | {ON_Q: "a sampled guess is accepted with the draft's probability for it, not by p / q"}
    | ABOUT_ROWS
)
"""What the bettors suspect. The two rules of verification are code of their own, so each has bettors of its own."""

MIXTURES = {"": 0.5, " a little": 0.05}
"""The share of tokens that a suspected defect touches."""


@dataclass(slots=True)
class _Bettor:
    """One suspicion: its log stake [nats], and what that would be if the suspicion were true."""

    log_stake: float = 0.0
    expected: float = 0.0
    variance: float = 0.0


@dataclass(slots=True)
class Bets:
    """The evidence against one law.

    Attributes:
        n_tokens: tokens looked at.
        impossible: tokens that p gives no probability; one is proof.
    """

    n_tokens: int = 0
    impossible: int = 0
    _bettors: dict[str, _Bettor] = field(default_factory=lambda: {name: _Bettor() for name in SUSPICIONS})

    def observe(self, p: Distribution, tokens: int | Ids, q: Distribution | None, before: Distribution | None) -> None:
        """Bet on tokens that were drawn.

        Args:
            p: the law they are claimed to follow.
            tokens: one, or many draws from the same law [n].
            q: the law of their draft token, a point mass for a deterministic one; None where there was none.
            before: the law of the token before them, if it is known.
        """
        drawn = np.atleast_1d(tokens)
        at = np.minimum(np.searchsorted(p.ids, drawn), len(p.ids) - 1)
        counts = np.bincount(at[p.ids[at] == drawn], minlength=len(p.ids))
        n = int(counts.sum())
        self.n_tokens += n
        self.impossible += len(drawn) - n
        for name, r in _suspected(p, q, before).items():
            ratio = np.log(np.maximum(r, 1e-300) / p.probs)
            mean = float((r * ratio).sum())
            bettor = self._bettors[name]
            bettor.log_stake += float((counts * ratio).sum())
            bettor.expected += n * mean
            bettor.variance += n * max(0.0, float((r * ratio * ratio).sum()) - mean * mean)

    @property
    def evidence(self) -> float:
        """Logarithm of the common stake, in nats; infinite where something impossible was emitted."""
        if self.impossible:
            return math.inf
        stakes = np.array([bettor.log_stake for bettor in self._bettors.values()])
        return float(np.logaddexp.reduce(stakes)) - math.log(len(stakes))

    @property
    def rejected(self) -> bool:
        """Whether the law does not hold."""
        return self.evidence >= THRESHOLD

    @property
    def strongest(self) -> str:
        """The suspicion with the most evidence, in words."""
        if self.impossible:
            return "a token was said that p gives no probability"
        return SUSPICIONS[max(self._bettors, key=lambda name: self._bettors[name].log_stake)]

    def power(self) -> Mapping[str, float]:
        """For each suspicion, the probability that it would have been found if it were true (normal approximation)."""
        alone = THRESHOLD + math.log(len(self._bettors))  # the stake that one bettor needs when all others lose
        found = {}
        for name, bettor in self._bettors.items():
            spread = math.sqrt(bettor.variance)
            found[name] = NormalDist().cdf((bettor.expected - alone) / spread) if spread else 0.0
        return found

    def figures(self) -> dict[str, Any]:
        """``decoding_law`` in ``result``."""
        return {
            "tokens": self.n_tokens,
            "impossible_tokens": self.impossible,
            "evidence_nats": None if self.impossible else self.evidence,
            "threshold_nats": THRESHOLD,
            "strongest_suspicion": self.strongest,
            "false_alarm": FALSE_ALARM,
            "power": {SUSPICIONS[name]: value for name, value in self.power().items()},
        }


def expected_evidence(p: Distribution, q: Distribution) -> Mapping[str, float]:
    """What one token tells on average, in nats, if a suspicion about its draft token is true."""
    laws = _suspected(p, q, None)
    return {name: float((r * np.log(np.maximum(r, 1e-300) / p.probs)).sum()) for name, r in laws.items()}


def _suspected(p: Distribution, q: Distribution | None, before: Distribution | None) -> Mapping[str, Probs]:
    """What the token would follow under each suspicion, on the support of p [n]; mass elsewhere is given up."""
    probs = p.probs
    laws: dict[str, Probs] = {}
    if q is not None:
        rule = f" ({FIXED if len(q.ids) == 1 else SAMPLED})"
        drafted = q.probs_of(p.ids)
        overlap = np.minimum(probs, drafted)
        rest = probs - overlap
        for suffix, share in MIXTURES.items():
            laws["followed" + suffix + rule] = (1 - share) * probs + share * drafted
        if rest.sum() > 1e-9:
            laws["avoided" + rule] = 0.5 * probs + 0.5 * rest / rest.sum()
        laws["no residual" + rule] = overlap + (1 - overlap.sum()) * probs
        if len(q.ids) > 1 and rest.sum() > 1e-9:
            laws[ON_Q] = drafted * drafted + (1 - (q.probs**2).sum()) * rest / rest.sum()
    if before is not None:
        for suffix, share in MIXTURES.items():
            laws["row before" + suffix] = (1 - share) * probs + share * before.probs_of(p.ids)
    for name, power in (("sharper", 1.25), ("flatter", 0.8)):
        tilted = probs**power
        laws[name] = tilted / tilted.sum()
    return laws
