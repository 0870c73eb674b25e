"""What measured passes mean for speculation, by the theory.

With a draft of k tokens, each accepted with probability a given that all before it were, a round emits
(1 − a^(k+1)) / (1 − a) tokens (Leviathan et al. 2023, equation 1) and takes t(k + 1) + k·d, where t(w) is the
target's time for a pass over w tokens and d the draft's for one step. Plain decoding emits one token in t(1); the
quotient is the speed-up. Real guesses are neither independent nor equally likely, so this is what to expect, not what
will be. Guesses from the text itself cost nothing (d = 0), but are only there where something repeats.
"""

from __future__ import annotations

from collections.abc import Callable

from localspec.doctor.report import PayoffFacts

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths for which the break-even acceptance is told."""

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptances for which the speed-up is told."""

Times = Callable[[int], float]
"""t(w): tokens in a pass -> milliseconds."""


def expected_tokens(acceptance: float, length: int) -> float:
    """Mean number of tokens that a round with a draft of this length emits."""
    if acceptance >= 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def speedup(acceptance: float, length: int, times: Times, step_ms: float) -> float:
    """Predicted speed over plain decoding.

    Args:
        acceptance: probability that a guess is accepted, those before it having been.
        length: tokens per draft; 0 is plain decoding.
        times: the target's t(w).
        step_ms: time of one draft token; 0 for guesses without a model.
    """
    return expected_tokens(acceptance, length) * times(1) / (times(length + 1) + length * step_ms)


def break_even(length: int, times: Times, step_ms: float) -> float | None:
    """The acceptance at which drafting this many tokens equals plain decoding; None: not even perfect guesses pay."""
    if speedup(1.0, length, times, step_ms) <= 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):  # the speed-up rises with the acceptance
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, length, times, step_ms) > 1.0 else (middle, high)
    return high


def best_length(acceptance: float, times: Times, step_ms: float) -> int:
    """The draft length with the largest predicted speed-up; 0 where plain decoding is the fastest."""
    return max(range(LENGTHS[-1] + 1), key=lambda length: speedup(acceptance, length, times, step_ms))


def payoff(drafter: str, times: Times, step_ms: float) -> PayoffFacts:
    """Everything on one drafter."""
    best = {acceptance: best_length(acceptance, times, step_ms) for acceptance in ACCEPTANCES}
    even = {length: break_even(length, times, step_ms) for length in LENGTHS}
    return PayoffFacts(
        drafter=drafter,
        step_ms=round(step_ms, 4),
        break_even={length: None if share is None else round(share, 4) for length, share in even.items()},
        speedup={a: round(speedup(a, length, times, step_ms), 4) for a, length in best.items()},
        best_length=best,
    )
