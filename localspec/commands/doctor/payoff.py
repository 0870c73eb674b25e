"""What measured passes mean for speculation: the speed-up formula for each drafter."""

from __future__ import annotations

from localspec.commands.doctor.facts import PayoffFacts
from localspec.controllers.break_even import Times, best_length, break_even, speedup, with_block

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths for which the break-even acceptance rate is shown."""

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptance rates for which the speed-up is shown."""


def break_even_by_length(times: Times, step_ms: float, *, one_pass: bool = False) -> dict[int, float | None]:
    """The acceptance rate from which drafts of each length pay; None: they never do.

    Args:
        times: the target's t(w).
        step_ms: time of a draft token, or of a whole draft.
        one_pass: whether it is that of a whole draft.
    """
    if one_pass:
        times, step_ms = with_block(times, step_ms), 0.0
    found = {length: break_even(length, times, step_ms) for length in LENGTHS}
    return {length: None if share is None else round(share, 4) for length, share in found.items()}


def payoff(drafter: str, times: Times, step_ms: float, *, one_pass: bool = False) -> PayoffFacts:
    """Everything on one drafter; arguments as above."""
    lengths = range(LENGTHS[-1] + 1)
    rounds, each = (with_block(times, step_ms), 0.0) if one_pass else (times, step_ms)
    best = {acceptance: best_length(acceptance, lengths, rounds, each) for acceptance in ACCEPTANCES}
    return PayoffFacts(
        drafter=drafter,
        step_ms=round(step_ms, 4),
        break_even=break_even_by_length(times, step_ms, one_pass=one_pass),
        speedup={a: round(speedup(a, length, rounds, each), 4) for a, length in best.items()},
        best_length=best,
    )
