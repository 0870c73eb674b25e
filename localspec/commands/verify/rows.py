"""Rows of logits, kept small, and how far two computations of one row lie apart."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from localspec.backends.base import FloatArray
from localspec.errors import EngineError
from localspec.sampling.sampling import Ids, Probs

TOP = 20
"""Tokens that a deviation looks at: those that could have been chosen."""

KEPT = 64
"""Tokens of a row that are kept: a row of 152,000 logits takes 600 KB, and an audit compares hundreds."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far two computations of one row lie apart; all 0 exactly where they are equal to the bit.

    Attributes:
        rms: root mean square change of the top 20 logits about their common shift, in logits.
        swing: largest change of one of them against the best: bounds the gap that a flipped argmax can have.
        kl: Kullback-Leibler divergence over the tokens kept, in nats.
        flips: whether the argmax differs.
    """

    rms: float = 0.0
    swing: float = 0.0
    kl: float = 0.0
    flips: bool = False


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The head of a row of logits, and a digest of all of it.

    Attributes:
        ids: the most probable tokens [n <= KEPT], the first first; among equals the lower id, as in greedy decoding.
        logits: theirs [n].
        digest: equal for rows that are equal to the bit.
    """

    ids: Ids
    logits: Probs
    digest: bytes

    @classmethod
    def of(cls, row: FloatArray) -> KeptRow:
        """Keep what matters of a row [n_vocab].

        Raises:
            EngineError: its largest value is not a finite number.
        """
        if not np.isfinite(row.max()):
            raise EngineError("the engine computed logits that are not numbers")
        n = min(KEPT, len(row))
        # All that equal the last one kept are candidates, so that ties are cut by id and not by chance.
        candidates = np.flatnonzero(row >= np.partition(row, len(row) - n)[len(row) - n])
        ids = candidates[np.argsort(-row[candidates], kind="stable")][:n]
        return cls(ids, row[ids].astype(np.float64), digest_of(row))

    @property
    def best(self) -> int:
        """The argmax."""
        return int(self.ids[0])

    def gap(self, token: int) -> float:
        """How far a token lies under the most probable one, in logits; at least that, where it was not kept."""
        at = np.flatnonzero(self.ids == token)
        return float(self.logits[0] - self.logits[int(at[0]) if len(at) else -1])

    def compared(self, row: FloatArray) -> Deviation:
        """Compare another computation of the same row [n_vocab] with this one."""
        if digest_of(row) == self.digest:
            return Deviation()
        change = row[self.ids].astype(np.float64) - self.logits
        top = change[:TOP]
        log_p, log_q = _log_softmax(self.logits), _log_softmax(self.logits + change)
        kl = float((np.exp(log_p) * (log_p - log_q)).sum())
        rms = float(np.sqrt(np.mean((top - top.mean()) ** 2)))
        # Not equal to the bit, but all by the same amount, or only far down: the smallest number that says so.
        rms, swing = max(rms, 1e-12), float(np.abs(top - top[0]).max())
        return Deviation(rms, swing, max(0.0, kl), int(np.argmax(row)) != self.best)


def digest_of(row: FloatArray) -> bytes:
    """Equal for rows that are equal to the bit."""
    return blake2b(row.tobytes(), digest_size=16).digest()


def _log_softmax(logits: Probs) -> Probs:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
