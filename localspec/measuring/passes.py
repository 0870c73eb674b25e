"""What passes of a model cost, and what that means for drafting: for ``bench`` and ``doctor``."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.controllers.stopping import Times, break_even, with_block
from localspec.report.model import Table

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""Widths of a pass that are shown: for drafts of up to 15 tokens, as finely as calibration measures."""

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # draft lengths of the break-even table


def break_even_by_length(times: Times, step_ms: float, block_ms: Times | None = None) -> dict[int, float | None]:
    """Acceptance rate from which drafts of each length pay; None: never. ``step_ms`` is the time of a draft token;
    where one pass makes a whole draft, ``block_ms`` gives its time by the number of draft tokens."""
    if block_ms is not None:
        times, step_ms = with_block(times, block_ms), 0.0
    found = {length: break_even(length, times, step_ms) for length in LENGTHS}
    return {length: None if share is None else round(share, 4) for length, share in found.items()}


def pass_table(where: str, widths: Sequence[int], ms: Mapping[str, Sequence[float | None]]) -> Table:
    """t(w) of the target [ms] in one or more measurements, and the first of them over t(1)."""
    rows = [[name, *map(_three, times)] for name, times in ms.items()]
    first = next(iter(ms.values()))
    shares = [_three(time and time / (first[0] or time)) for time in first]
    title = f"Cost of a target pass over w tokens, t(w){where}"
    return Table(title, ["w", *map(str, widths)], [*rows, ["× t(1)", *shares]])


def _three(value: float | None) -> str:
    """Three significant digits."""
    return "–" if value is None else f"{value:.{2 - bisect([9.995, 99.95], value)}f}"


def break_even_table(drafters: Mapping[str, tuple[float, Mapping[Any, float | None]]], where: str = "") -> Table:
    """Break-even acceptance by drafter: time of a draft token [ms], and acceptance by draft length."""
    return Table(
        f"Break-even: share of guesses that must be right, by draft length k{where}",
        ["k", "a guess", *map(str, next(iter(drafters.values()))[1])],
        [
            [name, f"{ms:.1f} ms" if ms else "free"]
            + ["never" if share is None else f"{share:.0%}" for share in shares.values()]
            for name, (ms, shares) in drafters.items()
        ],
    )
