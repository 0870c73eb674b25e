"""What a draft of fixed length is worth if all guesses are equally likely to be right: the rule of thumb.

With a draft of k tokens, each accepted with probability a given that all before it were, a round emits
(1 − a^(k+1)) / (1 − a) tokens (Leviathan et al. 2023, equation 1) and takes t(k + 1) + k·d, where t(w) is the
target's time for a pass over w tokens and d the draft's for one step. Plain decoding emits one token in t(1); the
quotient is the speed-up. Real guesses are neither independent nor equally likely: decisions are made by ``stopping``,
this is for telling people in one number what is needed. Guesses from the text itself cost nothing (d = 0).
"""

from __future__ import annotations

from collections.abc import Callable

NEVER = 0.995
"""Where more guesses than this must be right, drafting does not pay whatever the text."""

Times = Callable[[int], float]
"""t(w): tokens in a pass -> milliseconds."""


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
        acceptance: probability that a guess is accepted, those before it having been.
        length: tokens per draft; 0 is plain decoding.
        times: the target's t(w).
        step_ms: time of one draft token; 0 for guesses without a model.
    """
    return expected_tokens(acceptance, length) / round_time(length, times, step_ms)


def break_even(length: int, times: Times, step_ms: float) -> float | None:
    """The acceptance at which drafting this many tokens equals plain decoding; None: not even perfect guesses pay."""
    needed = round_time(length, times, step_ms)
    if length + 1 <= needed:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):  # the number of tokens rises with the acceptance
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, length) > needed else (middle, high)
    return high


def reason(source: str, need: float, mean: float, *, gains: bool, is_behind: bool) -> str:
    """Why there is drafting with a source or not, in a sentence.

    Args:
        source: its name.
        need: acceptance per token at which its best fixed length equals plain decoding; 1 where none does.
        mean: acceptance expected of its next guess.
        gains: whether it is expected to make this text faster, alone and at its best.
        is_behind: whether it would have to read too much first.
    """
    if need > NEVER:
        return f"not drafting with {source}: here even guesses that are always right cost more than they save"
    if not gains:
        needs = f"needs {need:.0%} acceptance to break even here, this text gives {mean:.0%}"
        return f"not drafting with {source}: {needs}"
    if is_behind:
        return f"not drafting with {source}: reading the text so far would cost more than it is expected to save"
    return f"drafting with {source}: {need:.0%} acceptance breaks even here, this text gives {mean:.0%}"
