"""Logits and history -> the probabilities a token is drawn from; stateless, sparse after truncation.

The chain, in order: logit bias, penalties, temperature, top-k, top-p, min-p. Both the target's p and a draft model's q
go through it, so exactness is with respect to what plain sampling with the same settings would do.

Randomness is addressed, not consumed: the noise for a decision is a hash of (seed, position in the sequence, token id).
So the draw at a position does not depend on how many tokens were drafted before it, and a fixed seed gives the same
text whether or not, and however far, a draft ran ahead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import EngineError, UsageError
from localspec.sampling.noise import PIECE
from localspec.sampling.noise import Noise as Noise  # what a distribution is sampled with
from localspec.sampling.rows import Ids as Ids
from localspec.sampling.rows import Row as Row
from localspec.sampling.rows import top_k_ids
from localspec.values import as_float, is_number, is_whole, shown

Probs = npt.NDArray[np.float64]

_N_IDS = 1 << 31  # of more no engine knows

HUGE, MANY = 1e30, 1e6
"""Most that may be added to a logit, and most times that it may be taken: finite in single precision, both at once."""


class NotNumbers(EngineError):
    """A row of logits has NaN or infinity for its maximum."""


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
        seed: None draws a fresh one. The same seed gives the same text again on the same machine and setup.
        max_tokens: token budget of the answer; None is what the context has room for.
        stop: strings that end the answer; neither they nor what follows is part of the text.
        ignore_eos: do not stop at end tokens (for benchmarks).
        response_format: the form of the answer, as OpenAI has it: ``{"type": "json_object"}``, ``{"type":
            "json_schema", "json_schema": {"schema": …}}``, or ``{"type": "text"}``; see ``structured.request``.
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

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise UsageError(f"{name} must be {rule}, not {shown(getattr(self, name))}")

        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        # Kept as Python's own numbers: NumPy's wrap around, and a Fraction is none to NumPy.
        for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
            check(is_number(getattr(self, name)), name, "a number")
            put(name, as_float(getattr(self, name)))
        for name in ("top_k", "repeat_last_n", "max_tokens", "seed"):
            optional = name in ("max_tokens", "seed")
            value = getattr(self, name)
            if not (optional and value is None):
                check(is_whole(value), name, "a whole number or None" if optional else "a whole number")
                put(name, int(value))
        check(isinstance(self.logit_bias, Mapping) and all(map(is_whole, self.logit_bias)), "logit_bias", "by token id")
        check(all(map(is_number, self.logit_bias.values())), "logit_bias", "numbers by token id")
        put("logit_bias", {int(token): as_float(bias) for token, bias in self.logit_bias.items()})
        check(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "in 0..100")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(0 < self.top_p <= 1, "top_p", "over 0 and at most 1")
        check(0 <= self.min_p < 1, "min_p", "at least 0 and under 1")
        check(1 / MANY <= self.repeat_penalty <= MANY, "repeat_penalty", f"over 0, in {1 / MANY:g}..{MANY:g}")
        check(self.repeat_last_n >= 0, "repeat_last_n", "0 or more")
        check(abs(self.presence_penalty) <= HUGE, "presence_penalty", f"in {-HUGE:g}..{HUGE:g}")
        check(abs(self.frequency_penalty) <= HUGE, "frequency_penalty", f"in {-HUGE:g}..{HUGE:g}")
        biases = self.logit_bias.values()
        check(
            all(abs(bias) <= HUGE or bias == -math.inf for bias in biases),
            "logit_bias",
            f"numbers in {-HUGE:g}..{HUGE:g}, or -inf to ban a token",
        )
        check(self.max_tokens is None or self.max_tokens > 0, "max_tokens", "over 0")
        check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        if isinstance(self.stop, str):
            put("stop", (self.stop,))
        is_list = isinstance(self.stop, Sequence)
        check(is_list and all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        put("stop", tuple(self.stop))
        check(isinstance(self.ignore_eos, bool | np.bool_), "ignore_eos", "True or False")
        put("ignore_eos", bool(self.ignore_eos))
        if self.response_format is not None or self.grammar is not None:
            from localspec.sampling.structured.request import grammar_of

            constrained = grammar_of(self.response_format, self.grammar) is not None
            check(not (constrained and self.ignore_eos), "ignore_eos", "off where a grammar says where the answer ends")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether bias or penalties change the logits before anything else."""
        return bool(self.logit_bias) or (
            self.repeat_last_n > 0
            and (self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0)
        )


_NOT_OF_A_CHAT = ("logit_bias", "ignore_eos", "response_format", "grammar")
CHAT_SETTINGS = tuple(each.name for each in fields(SamplingParams) if each.name not in _NOT_OF_A_CHAT)
"""Parameters that the catalogue may set for a model, that ``/set`` changes and that a saved chat remembers."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sparse probability distribution: ``probs[i]`` belongs to ``ids[i]``; all other tokens have 0.

    ids are strictly increasing [n]; probs are float64 [n], not negative, summing to 1.
    """

    ids: Ids
    probs: Probs

    def prob(self, token: int) -> float:
        i = int(np.searchsorted(self.ids, token))
        return float(self.probs[i]) if i < len(self.ids) and self.ids[i] == token else 0.0

    def probs_of(self, ids: Ids) -> Probs:
        """The probabilities of these tokens [n]."""
        if ids is self.ids:  # of the whole vocabulary, see `_all_ids`
            return self.probs
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.probs[at], 0.0)

    def argmax(self) -> int:
        return int(self.ids[int(np.argmax(self.probs))])

    def sample(self, noise: Noise, position: int, stream: int = 0) -> int:
        """Draw by the Gumbel-max trick: argmax(log p + g), g addressed by (seed, position, stream, token id).

        Equivalently argmin of e/p with e exponential, which needs one logarithm less and never takes log 0.
        """
        if len(self.ids) == 1:
            return int(self.ids[0])
        unbeaten: list[tuple[Ids, Probs]] = []
        least = math.inf
        with np.errstate(divide="ignore", over="ignore"):
            for start in range(0, len(self.ids), PIECE):
                ids, probs = self.ids[start : start + PIECE], self.probs[start : start + PIECE]
                u = noise.uniforms(position, ids, stream)
                if len(self.ids) > PIECE:
                    # e = -log u is at least 1 - u, so few tokens need the logarithm: those not beaten for certain.
                    bound = (1.0 - u) / probs
                    leader = int(np.argmin(bound))
                    least = min(least, -math.log(u[leader]) / float(probs[leader] or 5e-324))
                    near = np.flatnonzero(bound <= least)
                    ids, probs, u = ids[near], probs[near], u[near]
                unbeaten.append((ids, -np.log(u) / probs))
        ids, times = (np.concatenate(parts) for parts in zip(*unbeaten, strict=True))
        return int(ids[int(np.argmin(times))])

    def minus(self, other: Distribution) -> Distribution:
        """The residual normalise(max(p - q, 0)) of rejection sampling (Leviathan et al. 2023, eq. 1-2)."""
        rest = self.probs - other.probs_of(self.ids)
        np.maximum(rest, 0.0, out=rest)
        total = rest.sum()
        # p == q up to rounding: rejection then has probability 0 up to rounding, and p itself is the right law.
        if total <= 0.0:
            return self
        if len(rest) > PIECE:
            rest /= total
            return Distribution(self.ids, rest)  # picking out takes ten times as long as leaving zeros in
        keep = rest > 0
        return Distribution(self.ids[keep], rest[keep] / total)


def edit_logits(row: Row, history: Sequence[int], params: SamplingParams, ids: Ids | None = None) -> Row:
    """Logit bias and penalties; returns ``row`` itself, uncopied, where nothing changes it.

    Args:
        row: logits [n].
        history: all tokens before the one to choose, the accepted draft tokens of this round included.
        params: the sampling parameters.
        ids: the tokens that the logits belong to, increasing [n]; None is 0, 1, 2, …
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
    """Numbers by token id: the places in a row of n logits that they belong to, and the numbers for those."""
    by_token = {token: number for token, number in by_token.items() if 0 <= token < _N_IDS}
    tokens = np.fromiter(by_token.keys(), dtype=np.int64, count=len(by_token))
    numbers = np.fromiter(by_token.values(), dtype=np.float64, count=len(by_token))
    if ids is None:
        at, found = tokens, tokens < n
    else:
        at = np.minimum(np.searchsorted(ids, tokens), n - 1)
        found = ids[at] == tokens
    return at[found], numbers[found]


def greedy_token(row: Row, history: Sequence[int], params: SamplingParams) -> int:
    """The most probable token after bias and penalties (the lowest id among equals).

    Raises:
        NotNumbers: that is what the logits are.
        UsageError: every token is banned.
    """
    edited = edit_logits(row, history, params)
    best = int(np.argmax(edited))
    _check_top(edited[best], row)  # argmax takes NaN for the largest
    return best


def _check_top(top: float, row: Row) -> None:
    """Refuse to choose from edited logits whose largest is no number; ``row`` is what they were."""
    if math.isfinite(top):
        return
    if top == -math.inf and math.isfinite(row.max()):
        raise UsageError("logit_bias bans every token")
    raise NotNumbers("the engine computed logits that are not numbers")


def distribution(
    row: Row, history: Sequence[int], params: SamplingParams, token_ids: Ids | None = None
) -> Distribution:
    """The distribution that plain sampling draws the next token from.

    Args:
        row: logits [n]; not modified.
        history: all tokens before the one to choose.
        params: temperature 0 gives the point mass on the greedy token.
        token_ids: the tokens that the logits belong to, increasing [n], where sampled; None is 0, 1, 2, …

    Returns:
        A ``Distribution`` over the tokens that survive the chain.

    Raises:
        NotNumbers: that is what the logits are.
        UsageError: every token is banned.
    """
    if params.greedy:
        return Distribution(np.array([greedy_token(row, history, params)]), np.ones(1))
    raw, row = row, edit_logits(row, history, params, token_ids)
    top = float(row.max())
    _check_top(top, raw)
    ids: Ids | None = None
    if params.top_k:
        ids = top_k_ids(row, params.top_k)
    elif params.min_p and params.top_p == 1:
        # min-p in logit space: p >= min_p * p_max  <=>  logit >= max + T log(min_p), with room for rounding; the exact
        # comparison follows. Top-p, which comes before it, would have to see every token's mass.
        ids = np.flatnonzero(row >= top + params.temperature * math.log(params.min_p) - 1e-3)
    probs = (row if ids is None else row[ids]).astype(np.float64)
    with np.errstate(over="ignore"):
        for start in range(0, len(probs), PIECE):
            piece = probs[start : start + PIECE]
            piece -= top
            piece /= params.temperature
            np.exp(piece, out=piece)
    probs /= probs.sum()
    if params.top_p < 1:
        keep = _nucleus(probs, params.top_p)
        ids, probs = keep if ids is None else ids[keep], probs[keep] / probs[keep].sum()
    if params.min_p:
        keep = np.flatnonzero(probs >= params.min_p * probs.max())
        ids, probs = keep if ids is None else ids[keep], probs[keep] / probs[keep].sum()
    if ids is None:
        ids = _all_ids(len(probs))
    if probs.min() <= 0.0:
        alive = np.flatnonzero(probs)
        ids, probs = ids[alive], probs[alive]
    return Distribution(ids if token_ids is None else token_ids[ids], probs)


@lru_cache(maxsize=4)
def _all_ids(n: int) -> Ids:
    """0, 1, 2, … [n]: one array for all distributions over a whole vocabulary, not to be written to."""
    ids = np.arange(n)
    ids.flags.writeable = False
    return ids


def _nucleus(probs: Probs, top_p: float) -> Ids:
    """Positions, increasing, of the fewest probabilities that sum to at least ``top_p``; among equals the first.

    Sorting a whole vocabulary takes 10 ms; nearly always what lies within a few powers of e of the largest suffices.
    """
    largest = probs.max()
    for depth in (4.0, 8.0, 12.0, math.inf):
        near = np.flatnonzero(probs >= largest * math.exp(-depth))
        order = np.argsort(-probs[near], kind="stable")
        reached = np.cumsum(probs[near[order]])
        n = int(np.searchsorted(reached, top_p))
        if n < len(near) or len(near) == len(probs):
            return np.sort(near[order[: n + 1]])
    raise AssertionError("the last depth holds every probability")
