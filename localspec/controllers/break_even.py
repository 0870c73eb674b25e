"""The speed-up formula: what a draft of fixed length is worth if all its tokens are equally likely to be accepted.

A draft of k tokens, each accepted with probability a given that those before it were, emits (1 - a^(k+1)) / (1 - a)
tokens a round (Leviathan et al. 2023, equation 1) and takes t(k + 1) + k·d: t(w) is the target's time for a pass over w
tokens, d that of a draft step. Plain decoding emits one token in t(1); the quotient is the speed-up. Leviathan et al.
(theorem 3.8) take t(k + 1) for t(1), as on hardware with arithmetic to spare; here t is measured.

Real draft tokens are neither independent nor equally likely to be accepted, so ``auto`` decides by ``stopping``. This
formula compares models and engines before there is a text, and says in one number what acceptance rate is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Times = Callable[[int], float]
"""t(w): tokens in a pass -> milliseconds."""


def with_block(times: Times, block_ms: float) -> Times:
    """t(w) of rounds whose draft comes from one pass, whatever its length; its tokens then take no time of their own.

    Args:
        times: the target's t(w).
        block_ms: time of that pass.
    """
    return lambda w: times(w) + block_ms * (w > 1)


def expected_tokens(acceptance: float, length: int) -> float:
    """Mean number of tokens that a round with a draft of this length emits."""
    if acceptance >= 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def round_time(length: int, times: Times, step_ms: float) -> float:
    """Time of a round with a draft of this length, in that of plain decoding's."""
    return (times(length + 1) + length * step_ms) / times(1)


def speedup(acceptance: float, length: int, times: Times, step_ms: float) -> float:
    """Predicted speed over plain decoding.

    Args:
        acceptance: probability that a draft token is accepted, those before it having been.
        length: tokens per draft; 0 is plain decoding.
        times: the target's t(w).
        step_ms: time of one draft token; 0 where no model runs.
    """
    return expected_tokens(acceptance, length) / round_time(length, times, step_ms)


def best_length(acceptance: float, lengths: Iterable[int], times: Times, step_ms: float) -> int:
    """The draft length with the largest predicted speed-up, of these."""
    return max(lengths, key=lambda length: speedup(acceptance, length, times, step_ms))


def best_speedup(acceptance: float, lengths: Iterable[int], times: Times, step_ms: float) -> float:
    """The largest predicted speed-up of these draft lengths."""
    return max(speedup(acceptance, length, times, step_ms) for length in lengths)


def break_even(length: int, times: Times, step_ms: float) -> float | None:
    """The acceptance rate at which drafting this many tokens equals plain decoding; None: 1 would not do."""
    needed = round_time(length, times, step_ms)
    if length + 1 <= needed:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):  # the number of tokens rises with the acceptance
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, length) > needed else (middle, high)
    return high


def lowest_break_even(lengths: Iterable[int], times: Times, step_ms: float) -> float:
    """The least acceptance rate that pays, at whichever of these lengths; 1 where none does."""
    shares = (break_even(length, times, step_ms) for length in lengths)
    return min((share for share in shares if share is not None), default=1.0)
