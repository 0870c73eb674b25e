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
from typing import Any

import numpy as np

from localspec.errors import EngineError, UsageError
from localspec.sampling.distribution import Distribution as Distribution
from localspec.sampling.distribution import Probs as Probs
from localspec.sampling.noise import PIECE
from localspec.sampling.noise import Noise as Noise  # what a distribution is sampled with
from localspec.sampling.rows import Ids as Ids
from localspec.sampling.rows import Row as Row
from localspec.sampling.rows import all_ids, largest_ids, likely_ids
from localspec.values import as_float, is_number, is_whole, shown

_DRAFT_DEPTH = 8.0
_COLDEST = 1e-30
"""Temperatures below are as this one: what is less likely at all has no probability in double precision."""

_FEW = 256
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
        seed: None, or -1, draws a fresh one. The same seed gives the same text again on the same machine and setup.
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
        if self.seed == -1:  # what other servers and their clients call a fresh one
            put("seed", None)
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

    @property
    def n_best(self) -> int:
        """How many of the largest logits of a row say which token comes next; 0 where it may take all of them."""
        return 0 if self.edits_logits else 1 if self.greedy else self.top_k


_NOT_OF_A_CHAT = ("logit_bias", "ignore_eos", "response_format", "grammar")
CHAT_SETTINGS = tuple(each.name for each in fields(SamplingParams) if each.name not in _NOT_OF_A_CHAT)
"""Parameters that the catalogue may set for a model, that ``/set`` changes and that a saved chat remembers."""


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


def greedy_token(row: Row, history: Sequence[int], params: SamplingParams, token_ids: Ids | None = None) -> int:
    """The most probable token after bias and penalties (the lowest id among equals); see ``distribution``.

    Raises:
        NotNumbers: that is what the logits are.
        UsageError: every token is banned.
    """
    edited = edit_logits(row, history, params, token_ids)
    best = int(edited.argmax())
    _check_top(edited[best], row)  # argmax takes NaN for the largest
    return best if token_ids is None else int(token_ids[best])


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
        return Distribution(np.array([greedy_token(row, history, params, token_ids)]), np.ones(1))
    edited = edit_logits(row, history, params, token_ids)
    if params.top_k:
        return _top_k_law(edited, row, params, token_ids)
    top = float(edited[edited.argmax()])  # faster than the maximum, where the row is not in the processor's cache
    _check_top(top, row)
    return _law(edited, top, params, token_ids)


def draft_distribution(
    row: Row, history: Sequence[int], params: SamplingParams, token_ids: Ids | None = None
) -> Distribution:
    """The distribution that a draft token comes from: ``distribution``, or of a large vocabulary its likely tokens.

    A draft is verified by what it was really drawn from, so it may leave out what it likes. Without what is less than
    e^-8 times as likely as the first, a draft token of Qwen2.5-Coder 0.5B is accepted by the 1.5B with a probability of
    0.712 instead of 0.714 at a temperature of 0.8, and 0.713 instead of 0.716 at 1 (101 rows); where many tokens are
    likely, all are kept. Arguments and errors are those of ``distribution``.
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
    _check_top(float(logits[0]), raw)
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
    """Min-p, and what has no probability at all."""
    if min_p:
        keep = np.flatnonzero(probs >= min_p * probs.max())
        ids, probs = ids[keep], probs[keep] / probs[keep].sum()
    if probs.min() <= 0.0:
        alive = np.flatnonzero(probs)
        ids, probs = ids[alive], probs[alive]
    return Distribution(ids, probs)


def _nucleus(probs: Probs | Row, top_p: float) -> Ids:
    """Positions, increasing, of the fewest weights that sum to at least ``top_p``; among equals the first.

    Sorting a whole vocabulary takes 10 ms; nearly always what lies within a few powers of e of the largest suffices.
    """
    largest = probs.max()
    few = len(probs) < _FEW
    for depth in (math.inf,) if few else (4.0, 8.0, 12.0, math.inf):
        near = all_ids(len(probs)) if few else np.flatnonzero(probs >= largest * math.exp(-depth))
        order = np.argsort(-probs[near], kind="stable")
        reached = np.cumsum(probs[near[order]], dtype=np.float64)
        n = int(np.searchsorted(reached, top_p))
        if n < len(near) or len(near) == len(probs):
            return np.sort(near[order[: n + 1]])
    raise AssertionError("the last depth holds every probability")
