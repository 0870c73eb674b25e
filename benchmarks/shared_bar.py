"""Requests that share passes beside the better of plain shared passes and one request at a time, on a simulated clock.

    python -m benchmarks.shared_bar

The worlds of ``tests/controllers/test_shared_rows.py``: passes that cost what a curve of ``tests/support/simulator.py``
says, rows that pay for the cells of all conversations, prompts of 120 tokens and answers of 60, of which a share of all
guesses is right. Printed is the speed over that of the better of both, in percent; 97 is the bar. In brackets without
the bound on stalls: prompts are then read as wide as passes can be, not in pieces that keep a pass within ``STALL``
plain ones.
"""

from __future__ import annotations

import argparse
from itertools import product

import pytest

from localspec.controllers import batching as batching_module
from tests.controllers.test_shared_rows import BAR, speed_beside_the_better
from tests.support.simulator import CURVES

READS = (1.0, 5.0)
"""What a row pays for a cell, in times of reading it."""

ANSWERS = (2, 3, 4, 8)
RIGHT = (0.05, 0.5, 0.9)


def without_bound(curve: str, reads: float, n: int, right: float) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching_module, "STALL", 1e9)
        return speed_beside_the_better(curve, reads, n, right)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| passes | a cell costs | right | " + " | ".join(f"{n} answers" for n in ANSWERS) + " |")
    print("|---|--:|--:|" + "--:|" * len(ANSWERS))
    shipped: list[float] = []
    unbounded: list[float] = []
    for curve, reads, right in product(CURVES, READS, RIGHT):
        row = [
            (speed_beside_the_better(curve, reads, n, right), without_bound(curve, reads, n, right)) for n in ANSWERS
        ]
        print(
            f"| {curve} | {reads:.0f} | {right} | "
            + " | ".join(f"{100 * a:.0f} ({100 * b:.0f})" for a, b in row)
            + " |"
        )
        shipped += [a for a, _ in row]
        unbounded += [b for _, b in row]
    below, below_without = (sum(speed < BAR for speed in found) for found in (shipped, unbounded))
    print(f"\nUnder {BAR}: {below} of {len(shipped)}; without the bound {below_without}.")


if __name__ == "__main__":
    main()
