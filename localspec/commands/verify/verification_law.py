"""The law of verification, drawn thousands of times on distributions that this model and this draft really had.

A window is a draft of a real round with the target's rows for it. Rows are reduced to their most probable tokens, as
real rows but small, and then verification is asked again and again, each time with fresh noise, what it says of the
draft: row i follows i tokens, whatever they are, so token i must follow p_i exactly, whoever guessed and however rounds
fell. Five kinds of guesses are sent: sampled from the draft's real distribution, its argmax, one that is seldom right,
drawn with the target's own noise (what a fixed seed does), and in turns sampled from a poor draft's law and fixed.

Two tests read the counts. Bets against named defects (see ``betting``), and one that suspects nothing in particular:
a token said c times in n draws has n * KL(c/n || p) over ln(2 * cells / a) with probability at most a among all cells
(Chernoff 1952; valid for every n). Its power: a token whose probability is off by ``detectable`` is found with 99 %.
Noise comes from fixed seeds, so the outcome is the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.backends.base import FloatArray
from localspec.commands.verify.betting import FALSE_ALARM, Bets, expected_evidence
from localspec.commands.verify.paths import Check
from localspec.commands.verify.rows import Array
from localspec.sampling.sampling import Distribution, Noise, SamplingParams, distribution, edit_logits, top_k_ids
from localspec.spec_decode import verification
from localspec.spec_decode.rounds import Draft, DraftToken
from localspec.spec_decode.verification import STREAM_DRAFT, STREAM_TARGET

PER_ROW = 16
"""Tokens kept of each row of a window."""

MAX_GUESSES = 3

CHECKED_DRAWS = 50
"""Draws between two looks at the cancel flag."""

KINDS = ("sampled", "fixed", "seldom right", "coupled", "mixed")


@dataclass(frozen=True, slots=True)
class Window:
    """A draft of a real round and the target's rows for it, over the tokens that matter.

    Attributes:
        rows: [k + 1, n_kept]; penalties are applied.
        guesses: the laws the k guesses were drawn from, over the tokens kept; None for a deterministic guess.
    """

    rows: FloatArray
    guesses: list[Distribution | None]

    @classmethod
    def of(cls, rows: FloatArray, draft: Draft, settled: Sequence[int], params: SamplingParams) -> Window:
        """Reduce the rows [k + 1, n_vocab] of a round; ``settled`` is the text before it."""
        k = min(len(draft), MAX_GUESSES)
        edited = [edit_logits(rows[i], [*settled, *draft.ids[:i]], params) for i in range(k + 1)]
        kept = [top_k_ids(row, PER_ROW) for row in edited]
        laws = [guess.dist for guess in draft[:k]]
        kept += [law.ids[np.sort(np.argsort(-law.probs)[:PER_ROW])] for law in laws if law is not None]
        ids = np.unique(np.concatenate(kept))
        return cls(np.stack([row[ids] for row in edited]), [law and _restricted(law, ids) for law in laws])

    def telling(self, params: SamplingParams) -> float:
        """How much a draw would tell if verification were wrong, in nats: by the suspicion about the residual, which is
        the hardest to see, over all places."""
        bare, total = _without_edits(params), 0.0
        for row, guess in zip(self.rows, self.guesses, strict=False):
            p = distribution(row, (), bare)
            nats = expected_evidence(p, guess or _hotter(row, self.rows[-1], bare))
            total += max(value for name, value in nats.items() if name.startswith("no residual"))
        return total


def law_of(token: int, dist: Distribution | None) -> Distribution:
    """The law that a guess was drawn from: a point mass for a deterministic one."""
    return dist if dist is not None else Distribution(np.array([token]), np.ones(1))


@dataclass(slots=True)
class VerificationLaw:
    """What the draws say.

    Attributes:
        bets: the evidence of named defects.
        n_draws: trials.
        excess: largest n * KL over its threshold; 1 or more is a defect.
        worst: the cell it was found in, in words.
        detectable: the smallest error of a probability, anywhere, that is found with 99 %.
    """

    bets: Bets = field(default_factory=Bets)
    n_draws: int = 0
    excess: float = 0.0
    worst: str = ""
    detectable: float = 0.0

    @property
    def rejected(self) -> bool:
        """Whether verification does not follow the target's law."""
        return self.excess >= 1 or self.bets.rejected

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {
            "draws": self.n_draws,
            "largest_excess": self.excess,
            "worst_cell": self.worst,
            "detectable_error": self.detectable,
            **self.bets.as_dict(),
        }


def examine(windows: Sequence[Window], params: SamplingParams, n_draws: int, check: Check) -> VerificationLaw:
    """Draw ``n_draws`` times from every kind of guess on every window.

    Args:
        windows: real ones; at least two.
        params: the chain; penalties were applied already.
        n_draws: trials for each window and kind.
        check: see ``paths.Check``.
    """
    found, bare = VerificationLaw(), _without_edits(params)
    n_cells = sum(sum(len(distribution(row, (), bare).ids) for row in window.rows) for window in windows) * len(KINDS)
    limit = math.log(2 * max(1, n_cells) / FALSE_ALARM)
    for number, window in enumerate(windows):
        for index, kind in enumerate(KINDS):
            trial = _Trial(window, kind, bare)
            counts = [np.zeros(window.rows.shape[1]) for _ in window.rows]
            for draw in range(n_draws):
                if draw % CHECKED_DRAWS == 0:
                    check()
                noise = Noise((number * len(KINDS) + index) * 2**32 + draw)
                for count, token in zip(counts, trial.draw(noise), strict=False):
                    count[token] += 1
            found.n_draws += n_draws
            for place, count in enumerate(counts):
                _judge(found, trial, place, count, limit, f"window {number}, {kind} guesses, place {place}")
    return found


def _judge(found: VerificationLaw, trial: _Trial, place: int, count: Array, limit: float, where: str) -> None:
    p, n = trial.laws[place], float(count.sum())
    found.bets.impossible += int(n - count[p.ids].sum())
    before = trial.laws[place - 1] if place else None
    found.bets.observe_counts(p, count[p.ids], trial.guess_law(place), before)
    excess = n * _binary_kl(count[p.ids] / n, p.probs) / limit
    if excess.max() > found.excess:
        found.excess = float(excess.max())
        token = int(np.argmax(excess))
        seen, claimed = float(count[p.ids][token] / n), float(p.probs[token])
        found.worst = f"{where}: a token of probability {claimed:.4f} was said in {seen:.4f} of {n:.0f} draws"
    spread = np.sqrt(p.probs * (1 - p.probs) / n)
    found.detectable = max(found.detectable, float((spread * (math.sqrt(2 * limit) + 2.33)).max()))


class _Trial:
    """One kind of guesses on one window; ``draw`` says as many tokens as the window has rows."""

    def __init__(self, window: Window, kind: str, params: SamplingParams) -> None:
        self.rows, self.kind, self.params = window.rows, kind, params
        self.laws = [distribution(row, (), params) for row in window.rows]
        # Where no draft model sampled, and where guesses are to be worse than a good draft's: see _hotter.
        self._hot = [_hotter(row, window.rows[-1], params) for row in window.rows[:-1]]
        self._guesses = [law or hot for law, hot in zip(window.guesses, self._hot, strict=True)]
        if kind == "mixed":
            self._guesses = self._hot
        self._n_sampled = 0
        self._guess_laws = [self._law_to_bet_with(place) for place in range(len(self._guesses))]

    def guess_law(self, place: int) -> Distribution | None:
        """The law of the guess for a place, to bet with; None where the guess knows the target's noise."""
        return self._guess_laws[place] if place < len(self._guess_laws) else None

    def _law_to_bet_with(self, place: int) -> Distribution | None:
        if self.kind == "coupled":
            return None
        if self.kind == "sampled" or (self.kind == "mixed" and place % 2 == 0):
            return self._guesses[place]
        return law_of(self._fixed(place), None)

    def _fixed(self, place: int) -> int:
        law = self.laws[place] if self.kind == "seldom right" else self._guesses[place]
        rank = min(2, len(law.ids) - 1) if self.kind == "seldom right" else 0
        return int(law.ids[np.argsort(-law.probs, kind="stable")[rank]])

    def draw(self, noise: Noise) -> list[int]:
        """Rounds of guessing and verifying until every row has had its token."""
        said: list[int] = []
        n_rows = len(self.rows)
        while len(said) < n_rows:
            start = len(said)
            draft = Draft([self._guess(place, noise) for place in range(start, n_rows - 1)])
            tokens = [0] * (1 + start)  # only their number matters: it addresses the noise
            verdict = verification.verify(draft, self.rows[start:], tokens, self.params, noise)
            said += [*draft.ids[: verdict.n_accepted], verdict.next_token]
        return said

    def _guess(self, place: int, noise: Noise) -> DraftToken:
        if self.kind == "coupled":
            return DraftToken(self._guesses[place].sample(noise, place + 1, STREAM_TARGET), "audit", 0.5)
        law = self._guess_laws[place]
        assert law is not None
        if len(law.ids) == 1 and law is not self._guesses[place]:
            return DraftToken(int(law.ids[0]), "audit", 0.5)
        self._n_sampled += 1
        return DraftToken(law.sample(noise, self._n_sampled, STREAM_DRAFT), "audit", 0.5, law)


def _restricted(law: Distribution, ids: Any) -> Distribution:
    """A law over the kept tokens alone, numbered by their place among them."""
    places = np.searchsorted(ids, law.ids)
    places[places == len(ids)] = 0
    kept = ids[places] == law.ids
    probs = law.probs[kept]
    return Distribution(places[kept].astype(np.int64), probs / probs.sum())


def _hotter(row: FloatArray, other: FloatArray, params: SamplingParams) -> Distribution:
    """A poor draft's law for a row: the target's own at twice the temperature, mixed with another row of the text."""
    return distribution(0.7 * row + 0.3 * other, (), SamplingParams(temperature=2 * params.temperature))


def _without_edits(params: SamplingParams) -> SamplingParams:
    return SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def _binary_kl(a: Array, p: Array) -> Array:
    """KL divergence [nats] of a coin of probability a from one of probability p, elementwise."""
    p = np.clip(p, 1e-300, 1 - 1e-16)
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = np.where(a > 0, a * np.log(a / p), 0.0)
        tails = np.where(a < 1, (1 - a) * np.log((1 - a) / (1 - p)), 0.0)
    return np.asarray(np.maximum(heads + tails, 0.0))
