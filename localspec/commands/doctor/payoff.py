"""What measured passes mean for speculation: the rule of thumb in ``break_even`` for each drafter.

Guesses from the text itself cost nothing, but are only there where something repeats.
"""

from __future__ import annotations

from localspec.commands.doctor.report import PayoffFacts
from localspec.controllers.break_even import Times, break_even, speedup

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths for which the break-even acceptance is told."""

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptances for which the speed-up is told."""


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
