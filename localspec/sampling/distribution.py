"""The probabilities of the next token, sparse or over a whole vocabulary, and how a token is drawn from them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from localspec.sampling.noise import PIECE, Noise
from localspec.sampling.rows import Ids, Row, all_ids

Probs = npt.NDArray[np.float64]

_BLOCK = 128
_PIECE = 4 * PIECE
_SHARE = 1 / 1024


class Distribution:
    """A probability distribution over tokens; those that it does not name have 0.

    Over a large vocabulary (``of_row``) its weights are in single precision, whose rounding is that of the logits they
    come from, about one part in a million: exponentials take a third of the time so, and memory half.

    Args:
        ids: strictly increasing [n].
        probs: float64 [n], not negative, summing to 1.

    Attributes:
        ids: as given.
        weights: what the probabilities are in proportion to [n].
        total: their sum.
    """

    __slots__ = ("_reached", "ids", "total", "weights")

    def __init__(self, ids: Ids, probs: Probs) -> None:
        self.ids = ids
        self.weights: Probs | Row = probs
        self.total = 1.0
        self._reached: Probs | None = None  # of a whole vocabulary: the sum up to the end of each block

    @classmethod
    def of_row(cls, row: Row, top: float, temperature: float, ids: Ids | None) -> Distribution:
        """The softmax of a row of many logits.

        Args:
            row: logits [n].
            top: the largest of them.
            temperature: that they are divided by, over 0.
            ids: the tokens that they belong to [n]; None is 0, 1, 2, …
        """
        n = len(row)
        padded = np.empty(n + -n % _BLOCK, dtype=np.float32)
        factor = np.float32(1.0 / max(temperature, 1e-30))  # what is less is 0 in single precision
        with np.errstate(over="ignore"):
            for start in range(0, n, _PIECE):
                logits = row[start : start + _PIECE]
                weights = padded[start : start + len(logits)]
                np.subtract(logits, np.float32(top), out=weights)
                weights *= factor
                np.exp(weights, out=weights)
        padded[n:] = 0.0
        return cls._of_weights(all_ids(n) if ids is None else ids, padded)

    @classmethod
    def _of_weights(cls, ids: Ids, padded: Row) -> Distribution:
        law = cls.__new__(cls)
        law.ids, law.weights = ids, padded[: len(ids)]
        law._reached = np.cumsum(np.add.reduce(_in_blocks(padded), axis=0), dtype=np.float64)
        law.total = float(law._reached[-1])
        return law

    @property
    def probs(self) -> Probs:
        """Of each token [n]."""
        if self._reached is None:
            return self.weights  # type: ignore[return-value] # float64, as it was given
        return self.weights / np.float64(self.total)

    @property
    def top(self) -> float:
        """The largest probability."""
        return float(self.weights.max()) / self.total

    def prob(self, token: int) -> float:
        i = int(np.searchsorted(self.ids, token))
        return float(self.weights[i]) / self.total if i < len(self.ids) and self.ids[i] == token else 0.0

    def probs_of(self, ids: Ids) -> Probs:
        """The probabilities of these tokens [n]."""
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.weights[at] / np.float64(self.total), 0.0)

    def argmax(self) -> int:
        return int(self.ids[int(np.argmax(self.weights))])

    def sample(self, noise: Noise, position: int, stream: int = 0) -> int:
        """Draw a token, with the randomness of (seed, position, stream).

        With a seed by the Gumbel-max trick: argmax(log p + g), g addressed by the token id too, so that laws which are
        alike agree on the token. Equivalently argmin of e/p with e exponential, which needs one logarithm less and
        never takes log 0. That hashes every token; without a seed nothing is gained by it, and one number is looked up
        in the cumulated probabilities (inverse transform sampling).
        """
        if len(self.ids) == 1:
            return int(self.ids[0])
        if noise.fresh:
            return self._looked_up(noise.uniform(position, stream))
        at = slice(None) if len(self.ids) <= PIECE else self._not_beaten(noise, position, stream)
        ids, weights = self.ids[at], self.weights[at]
        with np.errstate(divide="ignore", over="ignore"):
            times = -np.log(noise.uniforms(position, ids, stream)) / weights
        return int(ids[int(np.argmin(times))])

    def _not_beaten(self, noise: Noise, position: int, stream: int) -> Ids:
        """Places, increasing, of a few tokens among which the one with the least e/p is.

        The most probable ones set a time to beat. As e = -log u is at least 1 - u, all others need a u so near to 1
        that of most nothing has to be known but that it is not.
        """
        share = self.total * _SHARE
        leaders = np.flatnonzero(self.weights >= share)
        if not len(leaders):
            leaders = np.array([int(np.argmax(self.weights))])
            share = float(self.weights[leaders[0]])
        with np.errstate(over="ignore"):
            times = -np.log(noise.uniforms(position, self.ids[leaders], stream)) / self.weights[leaders]
        near = noise.at_least(1.0 - share * float(times.min()), position, self.ids, stream)
        return np.union1d(leaders, near)

    def _looked_up(self, share: float) -> int:
        """The token at which the weights, block by block, sum to more than this share [0, 1) of all."""
        if self._reached is None:
            cumulated: Probs = np.cumsum(self.weights, dtype=np.float64)
            return int(self.ids[_place(cumulated, share * float(cumulated[-1]))])
        n, at = len(self._reached), share * self.total
        block = _place(self._reached, at)
        cumulated = np.cumsum(self.weights[block::n], dtype=np.float64)
        before = float(self._reached[block - 1]) if block else 0.0
        return int(self.ids[block + n * _place(cumulated, at - before)])

    def minus(self, other: Distribution) -> Distribution:
        """The residual normalise(max(p - q, 0)) of rejection sampling (Leviathan et al. 2023, eq. 1-2).

        p == q up to rounding: rejection then has probability 0 up to rounding, and p itself is the right law.
        """
        if self._reached is not None:
            return self._whole_minus(other)
        rest = self.weights - other.probs_of(self.ids)
        np.maximum(rest, 0.0, out=rest)
        total = rest.sum()
        if total <= 0.0:
            return self
        keep = rest > 0
        return Distribution(self.ids[keep], rest[keep] / total)

    def _whole_minus(self, other: Distribution) -> Distribution:
        n = len(self.ids)
        padded = np.empty(n + -n % _BLOCK, dtype=np.float32)
        padded[n:] = 0.0
        rest = padded[:n]
        scale = self.total / other.total
        if other.ids is self.ids:
            np.multiply(other.weights, np.float32(-scale), out=rest)
            rest += self.weights
            np.maximum(rest, 0.0, out=rest)
        else:
            rest[:] = self.weights
            at = np.minimum(np.searchsorted(self.ids, other.ids), n - 1)
            found = self.ids[at] == other.ids
            at, weights = at[found], other.weights[found]
            rest[at] = np.maximum(rest[at] - weights * scale, 0.0)
        law = Distribution._of_weights(self.ids, padded)
        return law if law.total > 0.0 else self


def _place(cumulated: Probs, at: float) -> int:
    """The first at which more than ``at`` is reached, and more than before; where rounding lets none, the last such."""
    return int(np.searchsorted(cumulated, min(at, math.nextafter(float(cumulated[-1]), 0.0)), side="right"))


def _in_blocks(padded: Row) -> Row:
    """A block is every n-th weight: along that axis NumPy sums twenty times as fast."""
    return padded.reshape(_BLOCK, -1)
