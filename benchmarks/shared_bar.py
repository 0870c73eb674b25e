"""Requests that share passes against the better of plain shared passes and one request at a time, on a simulated clock.

    python -m benchmarks.shared_bar

The worlds of ``tests/controllers/test_shared_rows.py``: passes of three measured or made-up machines, rows that pay for
the cells of all conversations, prompts of 120 tokens and answers of 60, of which a share of all guesses is right.
Printed is the time of the better of both over the time together, in percent: 97 is the bar. ``bounded`` is what ships,
where a prompt's pieces keep a pass within ``STALL`` plain ones; ``unbounded`` reads prompts as wide as it can.
"""

from __future__ import annotations

import argparse
import zlib

import numpy as np

from localspec.controllers import prompt_pieces
from tests.controllers.test_shared_rows import ANSWER, ms_in_all
from tests.support.simulator import Source, stationary

CURVES = ("ik", "llama.cpp", "gpu")
READS = (1.0, 5.0)
"""What a row pays for a cell, in times of reading it."""

ANSWERS = (2, 3, 4, 8)
RIGHT = (0.05, 0.5, 0.9)
BAR = 0.97


def ratio(curve: str, sources: list[Source], n: int, reads: float) -> float:
    together = ms_in_all(curve, sources, n, reads, drafts=True)
    batched = ms_in_all(curve, sources, n, reads, drafts=False)
    return min(batched, ms_in_all(curve, sources, 1, reads, drafts=True)) / together


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| passes | a cell costs | right | " + " | ".join(f"{n} answers" for n in ANSWERS) + " |")
    print("|---|--:|--:|" + "--:|" * len(ANSWERS))
    below = {"bounded": 0, "unbounded": 0}
    for curve in CURVES:
        for reads in READS:
            for right in RIGHT:
                cells = []
                for n in ANSWERS:
                    rng = np.random.default_rng(zlib.crc32(f"{curve} {right} {n}".encode()))
                    sources = [stationary(rng, 2 * ANSWER, right) for _ in range(2 * n)]
                    found = {}
                    for bound, stall in (("bounded", prompt_pieces.STALL), ("unbounded", 1e9)):
                        shipped, prompt_pieces.STALL = prompt_pieces.STALL, stall
                        try:
                            found[bound] = ratio(curve, sources, n, reads)
                        finally:
                            prompt_pieces.STALL = shipped
                        below[bound] += found[bound] < BAR
                    cells.append(f"{100 * found['bounded']:.0f} ({100 * found['unbounded']:.0f})")
                print(f"| {curve} | {reads:.0f} | {right} | " + " | ".join(cells) + " |")
    n_cases = len(CURVES) * len(READS) * len(RIGHT) * len(ANSWERS)
    print(f"\nBelow {BAR}: {below['bounded']} of {n_cases} with the bound, {below['unbounded']} without it.")


if __name__ == "__main__":
    main()
