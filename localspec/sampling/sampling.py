"""Logits and history -> the probabilities a token is drawn from; stateless, sparse after truncation.

The chain, in order: logit bias, penalties, temperature, top-k, top-p, min-p. Both the target's p and a draft model's q
go through it, so exactness is with respect to plain sampling with the same settings.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import EngineError, UsageError, as_float, checked_whole, is_number, is_whole, shown

# The largest of a row of logits. The maxima of blocks come first, which NumPy finds in little more than the time of
# reading the row. A block is every n-th logit: along that axis maxima are twenty times as fast as over neighbours, and
# similar tokens, which often are neighbours, lie in different ones.

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Probs = npt.NDArray[np.float64]

_BLOCK = 128
_FEW_BEST = 8
_MANY = 192


def best_and_certainty(row: Row, temperature: float = 1.0) -> tuple[int, float]:
    """The most probable token (the lowest id among equals), and roughly its probability at a temperature, in (0, 1].

    Of every block of eight logits only the largest counts, so it is too large, by under 1 % on average and by up to
    15 % where it is small. Where logits are NaN or infinite, the token is one of these.
    """
    n = len(row) // _FEW_BEST
    if n < _BLOCK:
        best = int(row.argmax())
        top = row[best]
        if not math.isfinite(top):
            return best, 1.0
        weights = row - top
    else:
        blocks = row[: n * _FEW_BEST].reshape(_FEW_BEST, n)
        largest = np.maximum.reduce(blocks, axis=0)  # NaN is the largest
        if n * _FEW_BEST < len(row):
            largest = np.concatenate([largest, row[n * _FEW_BEST :]])
        at = int(largest.argmax())
        top = largest[at]
        if not math.isfinite(top):
            return int(row.argmax()), 1.0
        weights = largest - top
        if np.count_nonzero(weights == 0) > 1:  # of equals in several blocks the lowest id may be in any
            best = int(row.argmax())
        else:
            best = at + n * int(blocks[:, at].argmax()) if at < n else at + n * (_FEW_BEST - 1)
    if temperature != 1.0:
        weights /= np.float32(max(temperature, 1e-6))  # what is less makes no difference
    return best, float(1.0 / np.add.reduce(np.exp(weights, out=weights)))


def top_probability(row: Row, temperature: float = 1.0) -> float:
    return best_and_certainty(row, temperature)[1]


def top_k_ids(row: Row, k: int) -> Ids:
    return np.sort(largest_ids(row, k))


def largest_ids(row: Row, k: int) -> Ids:
    """The ids of the k largest logits, the largest first; the lower id first among equals; a NaN, if any, alone.

    They are in the few blocks whose maxima reach the k-th largest maximum; partitioning 152k logits takes 1 ms.
    """
    if len(row) // _BLOCK > k:
        maxima = _maxima(row)
        rest = row[len(maxima) * _BLOCK :]
        largest = maxima[maxima.argmax()]  # NaN counts as the largest
        if largest != largest or (len(rest) and (last := rest[rest.argmax()]) != last):
            return np.array([int(row.argmax())])
        candidates = _at_least(row, maxima, np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    else:
        best = int(row.argmax())
        if row[best] != row[best]:
            return np.array([best])
        candidates = all_ids(len(row))
    # argsort on (-logit, id): stable, and candidates increase, so ties go to the lower id.
    return candidates[np.argsort(-row[candidates], kind="stable")[:k]]


def likely_ids(row: Row, depth: float) -> Ids | None:
    """Increasing ids of the logits at most ``depth`` under the largest; None: many. ``row`` has at least 128."""
    bound = row[row.argmax()] - np.float32(depth)
    maxima = _maxima(row)
    if not bound > -np.inf or np.count_nonzero(maxima >= bound) > _MANY:
        return None
    return _at_least(row, maxima, bound)


def _maxima(row: Row) -> Row:
    n = len(row) // _BLOCK
    maxima: Row = np.maximum.reduce(row[: n * _BLOCK].reshape(_BLOCK, n), axis=0)
    return maxima


def _at_least(row: Row, maxima: Row, bound: np.float32) -> Ids:
    n = len(maxima)
    near = np.flatnonzero(maxima >= bound)
    found = np.flatnonzero(row[: n * _BLOCK].reshape(_BLOCK, n)[:, near] >= bound)
    ids = found // len(near) * n + near[found % len(near)] if len(near) else found
    return np.concatenate([ids, n * _BLOCK + np.flatnonzero(row[n * _BLOCK :] >= bound)]) if len(row) % _BLOCK else ids


@lru_cache(maxsize=8)
def all_ids(n: int) -> Ids:
    ids = np.arange(n)
    ids.flags.writeable = False
    return ids


# Randomness is addressed, not consumed: the number for a decision is a hash of (seed, position in the text, stream,
# token id). So the draw at a position does not depend on how many tokens were drafted before it, and a fixed seed gives
# the same text whether or not, and however far, a draft ran ahead.

# Numbers worked on at a time, so that a computation in several steps over a vocabulary stays in the processor's cache.
PIECE = 16384


class Noise:
    """A counter-based generator: splitmix64 over seed, position, stream and id. ``fresh``: no seed was given."""

    __slots__ = ("fresh", "seed")

    def __init__(self, seed: int | None) -> None:
        self.fresh = seed is None
        self.seed = (secrets.randbits(64) if seed is None else int(seed)) & 0xFFFFFFFFFFFFFFFF

    def _key(self, position: int, stream: int) -> int:
        seed = _mix_int(self.seed ^ 0x9E3779B97F4A7C15)
        return _mix_int(seed + position * 0xD1342543DE82EF95 + stream * 0xDB4F0B9175AE2165)

    def uniform(self, position: int, stream: int) -> float:
        return ((_mix_int(self._key(position, stream) ^ 0xA0761D6478BD642F) >> 12) + 0.5) * 2.0**-52

    def uniforms(self, position: int, ids: Ids, stream: int = 0) -> Probs:
        """Numbers in (0, 1), one per token id [n]."""
        u = np.empty(len(ids))
        key = np.uint64(self._key(position, stream))
        for start in range(0, len(ids), PIECE):
            x = ids[start : start + PIECE].astype(np.uint64)
            x *= np.uint64(0x9E3779B97F4A7C15)  # of arrays of integers no overflow is reported
            x += key
            x ^= x >> np.uint64(30)
            x *= np.uint64(0xBF58476D1CE4E5B9)
            x ^= x >> np.uint64(27)
            x *= np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
            # 52 bits: with one more the largest number would round to 1, whose logarithm is 0.
            x >>= np.uint64(12)
            u[start : start + PIECE] = x
        u += 0.5
        u *= 2.0**-52
        return u


def _mix_int(x: int) -> int:
    mask = 0xFFFFFFFFFFFFFFFF
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


class Distribution:
    """A probability distribution over tokens; those that it does not name have 0.

    Over a large vocabulary (``of_row``) its weights are in single precision, whose rounding is that of the logits they
    come from, about one part in a million. ``ids`` are strictly increasing [n]; the probabilities are ``weights`` [n]
    over their sum, ``total``.
    """

    __slots__ = ("_reached", "ids", "total", "weights")

    def __init__(self, ids: Ids, probs: Probs) -> None:
        self.ids = ids
        self.weights: Probs | Row = probs
        self.total = 1.0
        self._reached: Probs | None = None  # of a whole vocabulary: the sum up to the end of each block

    @classmethod
    def of_row(cls, row: Row, top: float, temperature: float, ids: Ids | None) -> Distribution:
        """The softmax of a row of many logits [n], ``top`` the largest of them, at a temperature over 0; ``ids`` None
        is 0, 1, 2, …"""
        n = len(row)
        padded = np.zeros(n + -n % _BLOCK, dtype=np.float32)
        weights = padded[:n]
        with np.errstate(over="ignore"):
            np.subtract(row, np.float32(top), out=weights)
            weights *= np.float32(1.0 / max(temperature, 1e-30))  # what is less is 0 in single precision
            np.exp(weights, out=weights)
        return cls._of_weights(all_ids(n) if ids is None else ids, padded)

    @classmethod
    def _of_weights(cls, ids: Ids, padded: Row) -> Distribution:
        law = cls.__new__(cls)
        law.ids, law.weights = ids, padded[: len(ids)]
        law._reached = np.cumsum(np.add.reduce(padded.reshape(_BLOCK, -1), axis=0), dtype=np.float64)
        law.total = float(law._reached[-1])
        return law

    @property
    def probs(self) -> Probs:
        if self._reached is None:
            return self.weights  # type: ignore[return-value] # float64, as it was given
        return self.weights / np.float64(self.total)

    @property
    def top(self) -> float:
        return float(self.weights.max()) / self.total

    def prob(self, token: int) -> float:
        i = int(np.searchsorted(self.ids, token))
        return float(self.weights[i]) / self.total if i < len(self.ids) and self.ids[i] == token else 0.0

    def probs_of(self, ids: Ids) -> Probs:
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.weights[at] / np.float64(self.total), 0.0)

    def argmax(self) -> int:
        return int(self.ids[int(np.argmax(self.weights))])

    def sample(self, noise: Noise, position: int, stream: int = 0) -> int:
        """Draw a token, with the randomness of (seed, position, stream).

        With a seed by the Gumbel-max trick, addressed by token id, so that similar laws agree on the token: argmin of
        e/p with e = -log u exponential. Without a seed by inverse transform sampling, which hashes one number.
        """
        if len(self.ids) == 1:
            return int(self.ids[0])
        if noise.fresh:
            return self._looked_up(noise.uniform(position, stream))
        scores = noise.uniforms(position, self.ids, stream)
        with np.errstate(divide="ignore", over="ignore"):
            np.log(scores, out=scores)
            scores /= self.weights
        return int(self.ids[int(np.argmax(scores))])

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
        padded = np.zeros(n + -n % _BLOCK, dtype=np.float32)
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
    """The first place at which more than ``at`` is reached; the last that adds anything where rounding leaves none."""
    return int(np.searchsorted(cumulated, min(at, math.nextafter(float(cumulated[-1]), 0.0)), side="right"))


_DRAFT_DEPTH = 8.0
_COLDEST = 1e-30  # Least temperature: at lower ones all but the most probable have no probability in double precision

_N_IDS = 1 << 31  # of more no engine knows

# Most that may be added to a logit, and most times that it may be taken: finite in single precision, both at once.
HUGE, MANY = 1e30, 1e6


class NotNumbers(EngineError):
    """The maximum of a row of logits is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Attributes:
        temperature: 0 is greedy: always the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this total probability; 1 keeps all.
        min_p: drop tokens less probable than this fraction of the most probable one; 0 keeps all.
        repeat_penalty: divide the positive and multiply the negative logits of recent tokens; 1 is off.
        repeat_last_n: how many recent tokens (prompt included) the penalties look at.
        presence_penalty: subtracted once from the logit of each recent token.
        frequency_penalty: subtracted per occurrence.
        logit_bias: added to the logits of these token ids.
        seed: None, or -1, draws a fresh one. The same seed gives the same text again on the same machine and setup.
        max_tokens: token budget of the answer; None is what the context has room for.
        stop: strings that end the answer; neither they nor what follows is part of the text.
        ignore_eos: do not stop at end tokens (for benchmarks).
        response_format: the form of the answer, as OpenAI has it; see ``grammar_of``.
        grammar: a GBNF grammar that the answer follows, instead of ``response_format``.

    Raises:
        UsageError: a value is out of range, or the schema or the grammar cannot be followed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    response_format: Mapping[str, Any] | None = None
    grammar: str | None = None

    # What follows from the fields above, and is asked of every row: whether it is greedy; whether bias or penalties
    # change the logits before anything else; how many of the largest logits of a row decide which token comes next, 0
    # being possibly all; whether a schema or a grammar says what the answer may be.
    greedy: bool = field(init=False, repr=False, compare=False)
    edits_logits: bool = field(init=False, repr=False, compare=False)
    n_best: int = field(init=False, repr=False, compare=False)
    constrained: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        # Kept as Python's own numbers: NumPy's wrap around, and a Fraction is none to NumPy.
        for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
            if not is_number(getattr(self, name)):
                raise self._refusal(name, "a number")
            put(name, as_float(getattr(self, name)))
        for name in ("top_k", "repeat_last_n", "max_tokens", "seed"):
            value, or_none = getattr(self, name), " or None" if name in ("max_tokens", "seed") else ""
            if is_whole(value):
                put(name, int(value))
            elif not (or_none and value is None):
                raise self._refusal(name, f"a whole number{or_none}")
        bias = self.logit_bias
        if not (isinstance(bias, Mapping) and all(map(is_whole, bias)) and all(map(is_number, bias.values()))):
            raise self._refusal("logit_bias", "numbers by token id")
        put("logit_bias", {int(token): as_float(bias) for token, bias in self.logit_bias.items()})
        if self.seed == -1:  # what other servers and their clients call a fresh one
            put("seed", None)
        if isinstance(self.stop, str):
            put("stop", (self.stop,))
        fits_bias = all(abs(bias) <= HUGE or bias == -math.inf for bias in self.logit_bias.values())
        fits_stop = isinstance(self.stop, Sequence) and all(isinstance(s, str) and s for s in self.stop)
        range_of_bias = f"in {-HUGE:g}..{HUGE:g}"
        for name, fits, rule in (
            ("temperature", 0 <= self.temperature <= 100, "in 0..100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "over 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and under 1"),
            ("repeat_penalty", 1 / MANY <= self.repeat_penalty <= MANY, f"over 0, in {1 / MANY:g}..{MANY:g}"),
            ("repeat_last_n", self.repeat_last_n >= 0, "0 or more"),
            ("presence_penalty", abs(self.presence_penalty) <= HUGE, range_of_bias),
            ("frequency_penalty", abs(self.frequency_penalty) <= HUGE, range_of_bias),
            ("logit_bias", fits_bias, f"numbers {range_of_bias}, or -inf to ban a token"),
            ("max_tokens", self.max_tokens is None or self.max_tokens > 0, "over 0"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            ("stop", fits_stop, "non-empty strings"),
            ("ignore_eos", isinstance(self.ignore_eos, bool | np.bool_), "True or False"),
        ):
            if not fits:
                raise self._refusal(name, rule)
        put("stop", tuple(self.stop))
        put("ignore_eos", bool(self.ignore_eos))
        put("greedy", self.temperature == 0)
        penalises = self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        put("edits_logits", bool(self.logit_bias) or (self.repeat_last_n > 0 and penalises))
        put("n_best", 0 if self.edits_logits else 1 if self.greedy else self.top_k)
        if self.response_format is not None or self.grammar is not None:
            from localspec.sampling.grammar import grammar_of

            put("constrained", grammar_of(self.response_format, self.grammar) is not None)
            if self.constrained and self.ignore_eos:
                raise self._refusal("ignore_eos", "off where a grammar says where the answer ends")

    def _refusal(self, name: str, rule: str) -> UsageError:
        return UsageError(f"{name} must be {rule}, not {shown(getattr(self, name))}")


SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.init)
_NOT_OF_A_CHAT = ("logit_bias", "ignore_eos", "response_format", "grammar")
# Parameters that the catalogue may set for a model, that ``/set`` changes and that a saved chat remembers.
CHAT_SETTINGS = tuple(name for name in SAMPLING if name not in _NOT_OF_A_CHAT)


def edit_logits(row: Row, history: Sequence[int], params: SamplingParams, ids: Ids | None = None) -> Row:
    """Logit bias and penalties; returns ``row`` itself, uncopied, where nothing changes it.

    ``history`` is all tokens before the one to choose, the accepted draft tokens of this round included; ``ids`` are
    the tokens of the logits, increasing [n], None is 0, 1, 2, …
    """
    if not params.edits_logits:
        return row
    row = row.copy()
    at, bias = _placed(params.logit_bias, ids, len(row))
    row[at] += bias.astype(row.dtype)
    recent = history[-params.repeat_last_n :] if params.repeat_last_n else ()
    if recent and (params.repeat_penalty != 1.0 or params.presence_penalty or params.frequency_penalty):
        at, times = _placed(Counter(recent), ids, len(row))
        values = row[at].astype(np.float64)
        values = np.where(values > 0, values / params.repeat_penalty, values * params.repeat_penalty)
        row[at] = values - params.presence_penalty - params.frequency_penalty * times
    return row


def _placed(by_token: Mapping[int, float], ids: Ids | None, n: int) -> tuple[Ids, Probs]:
    """Numbers by token id: their places in a row of n logits, and the numbers there."""
    by_token = {token: number for token, number in by_token.items() if 0 <= token < _N_IDS}
    tokens = np.fromiter(by_token.keys(), dtype=np.int64, count=len(by_token))
    numbers = np.fromiter(by_token.values(), dtype=np.float64, count=len(by_token))
    if ids is None:
        at, found = tokens, tokens < n
    else:
        at = np.minimum(np.searchsorted(ids, tokens), n - 1)
        found = ids[at] == tokens
    return at[found], numbers[found]


def greedy_token(row: Row, history: Sequence[int], params: SamplingParams, token_ids: Ids | None = None) -> int:
    """The most probable token after bias and penalties, the lowest id among equals; see ``distribution``."""
    edited = edit_logits(row, history, params, token_ids)
    best = int(edited.argmax())
    if not math.isfinite(edited[best]):  # argmax takes NaN for the largest
        raise _not_finite(edited[best], row)
    return best if token_ids is None else int(token_ids[best])


def _not_finite(top: float, row: Row) -> Exception:
    """The error for edited logits whose largest is no number; ``row`` is what they were."""
    if top == -math.inf and math.isfinite(row.max()):
        return UsageError("logit_bias bans every token")
    return NotNumbers("the engine computed logits that are not numbers")


def distribution(
    row: Row, history: Sequence[int], params: SamplingParams, token_ids: Ids | None = None
) -> Distribution:
    """The distribution that plain sampling draws the next token from, by a row of logits [n]; at temperature 0 the
    point mass on the greedy token.

    ``history`` is all tokens before the one to choose, ``token_ids`` the tokens that the logits belong to, increasing
    [n]; None is 0, 1, 2, … ``NotNumbers``: the largest logit is NaN or infinite; ``UsageError``: every token is banned.
    """
    if params.greedy:
        return Distribution(np.array([greedy_token(row, history, params, token_ids)]), np.ones(1))
    edited = edit_logits(row, history, params, token_ids)
    if params.top_k:
        return _top_k_law(edited, row, params, token_ids)
    top = float(edited[edited.argmax()])  # faster than the maximum, where the row is not in the processor's cache
    if not math.isfinite(top):
        raise _not_finite(top, row)
    return _law(edited, top, params, token_ids)


def draft_distribution(
    row: Row, history: Sequence[int], params: SamplingParams, token_ids: Ids | None = None
) -> Distribution:
    """The distribution of a draft token: ``distribution``, or over a large vocabulary its likely tokens only.

    Without those less than e^-8 times as likely as the first, the acceptance rate falls by 0.003 at most.
    """
    if params.greedy or params.top_k or len(row) <= PIECE:
        return distribution(row, history, params, token_ids)
    edited = edit_logits(row, history, params, token_ids)
    ids = likely_ids(edited, _DRAFT_DEPTH * params.temperature)
    if ids is None:
        return distribution(row, history, params, token_ids)
    logits = edited[ids]
    return _law(logits, float(logits.max()), params, ids if token_ids is None else token_ids[ids])


def _top_k_law(row: Row, raw: Row, params: SamplingParams, token_ids: Ids | None) -> Distribution:
    """The chain after bias and penalties, where it begins with top-k: what each step keeps is the first of an order."""
    ids = largest_ids(row, params.top_k)
    logits = row[ids].astype(np.float64)
    if not math.isfinite(logits[0]):
        raise _not_finite(float(logits[0]), raw)
    logits -= logits[0]
    logits /= max(params.temperature, _COLDEST)
    weights = np.exp(logits, out=logits)
    reached = np.cumsum(weights)
    n = int(np.count_nonzero(weights >= params.min_p)) if params.min_p else int(np.count_nonzero(weights))
    if params.top_p < 1:
        n = min(n, int(np.searchsorted(reached, params.top_p * float(reached[-1]))) + 1)
    kept = ids[:n]
    order = np.argsort(kept)
    kept, probs = kept[order], weights[order] / reached[n - 1]
    return Distribution(kept if token_ids is None else token_ids[kept], probs)


def _law(row: Row, top: float, params: SamplingParams, token_ids: Ids | None) -> Distribution:
    """The chain after bias and penalties, without top-k; ``top`` is the largest of the logits."""
    ids: Ids | None = None
    if params.min_p and params.top_p == 1:
        # min-p in logit space: p >= min_p * p_max  <=>  logit >= max + T log(min_p), with room for rounding; the exact
        # comparison follows. Top-p, which comes before it, would have to see every token's mass.
        ids = np.flatnonzero(row >= top + params.temperature * math.log(params.min_p) - 1e-3)
    elif len(row) > PIECE:
        whole = Distribution.of_row(row, top, params.temperature, token_ids)
        if params.top_p == 1:
            return whole
        ids = _nucleus(whole.weights, params.top_p * whole.total)
        probs = whole.weights[ids].astype(np.float64)
        return _cut(whole.ids[ids], probs / probs.sum(), params.min_p)
    probs = (row if ids is None else row[ids]).astype(np.float64)
    probs -= top
    probs /= max(params.temperature, _COLDEST)
    np.exp(probs, out=probs)
    probs /= probs.sum()
    ids = ids if token_ids is None else token_ids if ids is None else token_ids[ids]
    ids = all_ids(len(probs)) if ids is None else ids
    if params.top_p < 1:
        keep = _nucleus(probs, params.top_p)
        ids, probs = ids[keep], probs[keep] / probs[keep].sum()
    return _cut(ids, probs, params.min_p)


def _cut(ids: Ids, probs: Probs, min_p: float) -> Distribution:
    if min_p:
        keep = np.flatnonzero(probs >= min_p * probs.max())
        ids, probs = ids[keep], probs[keep] / probs[keep].sum()
    if probs.min() <= 0.0:
        alive = np.flatnonzero(probs)
        ids, probs = ids[alive], probs[alive]
    return Distribution(ids, probs)


def _nucleus(probs: Probs | Row, top_p: float) -> Ids:
    """Increasing positions of the fewest weights that sum to at least ``top_p``; the first among equals."""
    largest = probs.max()  # sorting a whole vocabulary takes 10 ms, and what is near the largest mostly suffices
    for depth in (4.0, 8.0, 12.0, math.inf):
        near = np.flatnonzero(probs >= largest * math.exp(-depth))
        order = np.argsort(-probs[near], kind="stable")
        reached = np.cumsum(probs[near[order]], dtype=np.float64)
        n = int(np.searchsorted(reached, top_p))
        if n < len(near) or len(near) == len(probs):
            return np.sort(near[order[: n + 1]])
    raise AssertionError("the last depth holds every probability")


# Logprobs come from the target's verified rows of raw logits: before logit bias, penalties, temperature, truncation and
# any grammar. A greedy answer has the same ones as a sampled answer with the same tokens, and drafting changes them
# only by the noise of the engine's kernels.

MAX_TOP = 20  # Most alternatives a request may ask for, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logarithm of one token's probability, and of the likeliest at its place (best first: token id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of a given text (see ``LLM.logprobs``), and its text alone; ``logprob`` is None for the first."""

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(row: Row, token: int, n_top: int) -> TokenLogprobs:
    """Logprobs of a token, and of the ``n_top`` most probable ones, by the raw logits that predict it [n_vocab]."""
    shifted = row - row.max()
    log_total = float(np.log(np.exp(shifted, dtype=np.float64).sum()))
    best = largest_ids(row, n_top).tolist() if n_top else []
    return TokenLogprobs(float(shifted[token]) - log_total, tuple((i, float(shifted[i]) - log_total) for i in best))


def checked_top(n_top: int) -> int:
    return checked_whole("the number of most probable tokens", n_top, 0, MAX_TOP)
