"""Laws, tested: that of verification on distributions that this model and this draft had, and those of drafters.

A window is a draft of a real round with the target's rows, reduced to their most probable tokens. Verification is asked
thousands of times, with fresh noise, which tokens it emits: row i follows i tokens, so token i must follow p_i exactly,
whatever was drafted. Five kinds of drafts are sent (``KINDS``): sampled from the draft's distribution, its argmax, one
that is seldom right, drawn with the target's own noise (as a fixed seed does), and by turns sampled from a poor draft's
law and fixed.

Two tests read the counts: bets against named defects, and an unspecific one: a token emitted c times in n draws has n *
KL(c/n || p) over ln(2 * cells / a) with probability at most a among all cells (Chernoff 1952; valid for every n). A
token whose probability is off by ``detectable`` is found with 99 %. Seeds are fixed, so the outcome is too.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from localspec.backends.base import FloatArray
from localspec.commands.verify.rows import Check
from localspec.sampling.sampling import (
    Distribution,
    Ids,
    Noise,
    Probs,
    SamplingParams,
    distribution,
    edit_logits,
    top_k_ids,
)
from localspec.spec_decode import verification
from localspec.spec_decode.rounds import Draft, DraftToken
from localspec.spec_decode.verification import STREAM_DRAFT, STREAM_TARGET

# Testing a law by betting: evidence that may be looked at at any time. The claim is that x follows p, given everything
# before it. A bettor who suspects that x follows r multiplies his stake by r(x) / p(x). Under the claim the stake is a
# non-negative martingale, and the probability that it ever reaches 1/a is at most a (Ville 1939; Shafer and Vovk 2019).
# Several bettors share one stake, their mean. If suspicion i is true, its log stake grows by KL(r || p) nats a token on
# average; with its variance that gives the power on the distributions that were met.

FALSE_ALARM = 1e-6
THRESHOLD = -math.log(FALSE_ALARM)  # evidence that counts as a defect [nats]
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
"""What the bettors suspect. The two rules of verification are separate code, so each has bettors of its own."""

MIXTURES = {"": 0.5, " a little": 0.05}  # share of tokens that a suspected defect touches


@dataclass(slots=True)
class _Bettor:
    """A suspicion's log stake [nats], and what that would be if the suspicion were true."""

    log_stake: float = 0.0
    expected: float = 0.0
    variance: float = 0.0


@dataclass(slots=True)
class Evidence:
    """Bettors against one law, who share a stake; a token that it gives no probability (``impossible``) is proof."""

    impossible: int = 0

    def stakes(self) -> dict[str, float]:
        """Log stake [nats] by suspicion, in words."""
        raise NotImplementedError

    @property
    def evidence(self) -> float:
        """Logarithm of the common stake [nats]; infinite if something impossible was found."""
        if self.impossible:
            return math.inf
        stakes = list(self.stakes().values())
        return float(np.logaddexp.reduce(stakes)) - math.log(len(stakes))

    @property
    def rejected(self) -> bool:
        return self.evidence >= THRESHOLD

    def figures(self) -> dict[str, Any]:
        nats = None if self.impossible else self.evidence
        return {"evidence_nats": nats, "threshold_nats": THRESHOLD, "false_alarm": FALSE_ALARM}


@dataclass(slots=True)
class Bets(Evidence):
    """Evidence against the law of tokens."""

    n_tokens: int = 0
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

    def stakes(self) -> dict[str, float]:
        return {SUSPICIONS[name]: bettor.log_stake for name, bettor in self._bettors.items()}

    @property
    def strongest(self) -> str:
        """The suspicion with the most evidence, in words."""
        if self.impossible:
            return "a token was said that p gives no probability"
        stakes = self.stakes()
        return max(stakes, key=lambda name: stakes[name])

    def power(self) -> Mapping[str, float]:
        """For each suspicion, the probability of finding it if it were true (normal approximation)."""
        alone = THRESHOLD + math.log(len(self._bettors))  # the stake that one bettor needs when all others lose
        found = {}
        for name, bettor in self._bettors.items():
            spread = math.sqrt(bettor.variance)
            found[name] = NormalDist().cdf((bettor.expected - alone) / spread) if spread else 0.0
        return found

    def figures(self) -> dict[str, Any]:
        """``decoding_law`` of the JSON."""
        return {
            "tokens": self.n_tokens,
            "impossible_tokens": self.impossible,
            "strongest_suspicion": self.strongest,
            "power": {SUSPICIONS[name]: value for name, value in self.power().items()},
            **Evidence.figures(self),
        }


def _suspected(p: Distribution, q: Distribution | None, before: Distribution | None) -> Mapping[str, Probs]:
    """The token's law under each suspicion, on the support of p [n]; mass elsewhere is dropped."""
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


PER_ROW = 16  # tokens kept of each row of a window
LONGEST = 3  # draft tokens kept of a window
CHECKED_DRAWS = 50  # draws between two looks at the cancel flag
KINDS = ("sampled", "fixed", "seldom right", "coupled", "mixed")


@dataclass(frozen=True, slots=True)
class Window:
    """A draft of a real round and the target's rows for it, over the tokens that matter.

    Attributes:
        laws: what the k draft tokens were drawn from, over the tokens kept; None for a deterministic one.
    """

    rows: FloatArray  # [k + 1, n_kept]; penalties are applied
    laws: list[Distribution | None]

    @classmethod
    def of(cls, rows: FloatArray, draft: Draft, settled: Sequence[int], params: SamplingParams) -> Window:
        """Reduce the rows [k + 1, n_vocab] of a round; ``settled`` is the text before it."""
        k = min(len(draft), LONGEST)
        edited = [edit_logits(rows[i], [*settled, *draft.ids[:i]], params) for i in range(k + 1)]
        kept = [top_k_ids(row, PER_ROW) for row in edited]
        laws = [token.dist for token in draft[:k]]
        kept += [law.ids[np.argsort(-law.probs)[:PER_ROW]] for law in laws if law is not None]
        ids = np.unique(np.concatenate(kept))
        return cls(np.stack([row[ids] for row in edited]), [law and _restricted(law, ids) for law in laws])

    def drafted(self, params: SamplingParams, *, poorly: bool = False) -> list[Distribution]:
        """Laws of the draft tokens; where unknown, or ``poorly``, the target's own at twice the temperature, mixed with
        another row."""
        hot = SamplingParams(temperature=2 * params.temperature)
        poor = [distribution(0.7 * row + 0.3 * self.rows[-1], (), hot) for row in self.rows[:-1]]
        return poor if poorly else [law or other for law, other in zip(self.laws, poor, strict=True)]

    def telling(self, params: SamplingParams) -> float:
        """Evidence of a draw [nats] under the suspicion about the residual, which is the hardest to see."""
        total = 0.0
        for row, q in zip(self.rows, self.drafted(params), strict=False):
            p = distribution(row, (), params)
            laws = (r for name, r in _suspected(p, q, None).items() if name.startswith("no residual"))
            total += max(float((r * np.log(np.maximum(r, 1e-300) / p.probs)).sum()) for r in laws)
        return total


def law_of(token: int, dist: Distribution | None) -> Distribution:
    """Law that a draft token was drawn from: a point mass for a deterministic one."""
    return dist if dist is not None else Distribution(np.array([token]), np.ones(1))


@dataclass(slots=True)
class VerificationLaw:
    """What the draws say."""

    bets: Bets = field(default_factory=Bets)  # the evidence of named defects
    n_draws: int = 0  # trials
    excess: float = 0.0  # largest n * KL over its threshold; 1 or more is a defect
    worst: str = ""  # the cell it was found in, in words
    detectable: float = 0.0  # the smallest error of a probability, anywhere, that is found with 99 %

    @property
    def rejected(self) -> bool:
        return self.excess >= 1 or self.bets.rejected

    def figures(self) -> dict[str, Any]:
        """``verification_law`` of the JSON."""
        return {
            "draws": self.n_draws,
            "largest_excess": self.excess,
            "worst_cell": self.worst,
            "detectable_error": self.detectable,
            **self.bets.figures(),
        }

    def examine(self, windows: Sequence[Window], params: SamplingParams, n_draws: int, check: Check) -> None:
        """Draw ``n_draws`` times from every kind of draft on every window; ``params`` must not edit rows."""
        n_laws = sum(len(distribution(row, (), params).ids) for window in windows for row in window.rows)
        limit = math.log(2 * max(1, n_laws * len(KINDS)) / FALSE_ALARM)
        for number, (window, kind) in enumerate(itertools.product(windows, KINDS)):
            trial, emitted = _Trial(window, kind, params), []
            for draw in range(n_draws):
                if draw % CHECKED_DRAWS == 0:
                    check()
                emitted.append(trial.emitted(Noise(number * 2**32 + draw)))
            self.n_draws += n_draws
            for place, tokens in enumerate(np.array(emitted).T):
                p, before = trial.laws[place], trial.laws[place - 1] if place else None
                # A draft that knows the target's noise follows no law of its own.
                q = None if kind == "coupled" or place == len(trial.drafted) else trial.drafted[place][0]
                self.bets.observe(p, tokens, q, before)
                self._compare(p, tokens, limit, f"window {number // len(KINDS)}, {kind} guesses, place {place}")

    def _compare(self, p: Distribution, tokens: Ids, limit: float, where: str) -> None:
        """Compare draws [n] with their law: n * KL stays under ``limit`` for each token."""
        n = len(tokens)
        shares = np.bincount(tokens, minlength=int(p.ids[-1]) + 1)[p.ids] / n
        excess = n * _binary_kl(shares, p.probs) / limit
        if excess.max() > self.excess:
            worst = int(np.argmax(excess))
            self.excess = float(excess[worst])
            self.worst = (
                f"{where}: a token of probability {p.probs[worst]:.4f} was said in {shares[worst]:.4f} of {n} draws"
            )
        spread = np.sqrt(p.probs * (1 - p.probs) / n)
        self.detectable = max(self.detectable, float((spread * (math.sqrt(2 * limit) + 2.33)).max()))


class _Trial:
    """One kind of draft on one window."""

    def __init__(self, window: Window, kind: str, params: SamplingParams) -> None:
        self.laws = [distribution(row, (), params) for row in window.rows]
        self.drafted: list[tuple[Distribution, bool]] = []  # the law of each draft token, and whether the draft says so
        self._rows, self._params, self._coupled = window.rows, params, kind == "coupled"
        self._n_sampled = 0
        for place, q in enumerate(window.drafted(params, poorly=kind == "mixed")):
            sampled = kind == "sampled" or (kind == "mixed" and place % 2 == 0)
            if not sampled and kind != "coupled":
                q = _point_mass(self.laws[place], 2) if kind == "seldom right" else _point_mass(q, 0)
            self.drafted.append((q, sampled))

    def emitted(self, noise: Noise) -> list[int]:
        """Tokens of all rows, by rounds of drafting and verifying."""
        tokens: list[int] = []
        while (start := len(tokens)) < len(self._rows):
            draft = Draft([self._draft_token(place, noise) for place in range(start, len(self._rows) - 1)])
            settled = [0] * (1 + start)  # only their number matters: it addresses the noise
            verdict = verification.verify(draft, self._rows[start:], settled, self._params, noise)
            tokens += [*draft.ids[: verdict.n_accepted], verdict.next_token]
        return tokens

    def _draft_token(self, place: int, noise: Noise) -> DraftToken:
        q, sampled = self.drafted[place]
        if self._coupled:
            token = q.sample(noise, place + 1, STREAM_TARGET)
        else:
            self._n_sampled += 1
            token = q.sample(noise, self._n_sampled, STREAM_DRAFT)
        return DraftToken(token, "audit", 0.5, q if sampled else None)


def _point_mass(law: Distribution, rank: int) -> Distribution:
    """A point mass on the token of a rank, 0 being the most probable."""
    order = np.argsort(-law.probs, kind="stable")
    return law_of(int(law.ids[order[: rank + 1][-1]]), None)


def _restricted(law: Distribution, ids: Ids) -> Distribution:
    """A law over the kept tokens alone, numbered by their place."""
    probs = law.probs_of(ids)
    kept = np.flatnonzero(probs)
    return Distribution(kept, probs[kept] / probs[kept].sum())


def _binary_kl(a: Probs, p: Probs) -> Probs:
    """KL divergence [nats] between coins of probabilities a and p, elementwise."""
    p = np.clip(p, 1e-300, 1 - 1e-16)
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = np.where(a > 0, a * np.log(a / p), 0.0)
        tails = np.where(a < 1, (1 - a) * np.log((1 - a) / (1 - p)), 0.0)
    return np.asarray(np.maximum(heads + tails, 0.0))


# Whether a drafter sends the samples that it draws. Verification trusts the law that a sample was drawn from. A
# drafter that drops unlikely samples, or draws from another law than it reports, skews the text. So samples sent, and
# samples drawn and not sent, are tested: if sending does not depend on the outcome, both follow the reported law.
# Bettors of ``THRESHOLDS`` suspect that half of the samples of a probability under c are dropped, or half of all but
# the most probable token: a sample sent multiplies the stake by 1/2 + 1/2 [q(x) >= c] / Q(q >= c), one not sent by
# the same of the others. Those of ``ORDERS`` suspect nothing in particular: a sample's place in [0, 1), the
# probability of all tokens ranked before it plus a random share of its own, is uniform. Tokens rank by probability
# and by a scrambled id; places are counted in ``BINS`` parts, and the stake is Dirichlet's mixture with weights 1/2
# (Krichevsky and Trofimov 1981). With n samples sent, a quarter with a share of 1/4 + ``detectable`` is found with 99
# %.

BINS = 4
ORDERS = ("probability", "id")
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
LIKELIEST = 2.0  # stands for a threshold that only the most probable token passes


@dataclass(slots=True)
class DrawnSamples(Evidence):
    """Samples that drafters drew with noise of their own."""

    drawn: int = 0
    sent: int = 0
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

    def stakes(self) -> dict[str, float]:
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
    def worst(self) -> str:
        """Where the evidence is largest, in words."""
        if self.impossible:
            return "a sample was sent that its own law gives no probability"
        found = self.stakes()
        return f"{max(found, key=lambda name: found[name])}; of {self.drawn} that were drawn {self.sent} were sent"

    @property
    def detectable(self) -> float | None:
        """Error of a quarter's share that is found with 99 %; None if none is."""
        n = self.sent
        for error in np.arange(0.01, 0.76, 0.01):
            share = 0.25 + float(error)
            count = n * share - 2.33 * math.sqrt(n * share * (1 - share))
            rest = (n - count) / (BINS - 1)
            if count > rest and _stake([count, *[rest] * (BINS - 1)]) - math.log(len(self.stakes())) >= THRESHOLD:
                return float(error)
        return None

    def figures(self) -> dict[str, Any]:
        """``samples`` of the JSON."""
        return {
            "drawn": self.drawn,
            "sent": self.sent,
            "impossible": self.impossible,
            "worst": self.worst,
            "detectable_error": self.detectable,
            **Evidence.figures(self),
        }


def _stake(counts: Sequence[float]) -> float:
    """Log probability of counts under Dirichlet's mixture over that under even shares."""
    n, half = sum(counts), 0.5
    mixed = math.lgamma(BINS * half) - math.lgamma(n + BINS * half)
    mixed += sum(math.lgamma(count + half) - math.lgamma(half) for count in counts)
    return mixed + n * math.log(BINS)
