"""How well do the corrections of ``controllers/cost_model.py`` follow what passes really took?

    python -m benchmarks.pass_prediction BENCH.json ...

The files come from ``localspec bench --json``. The passes of the arm ``auto``, in their order, begin with the curve of
that run, or with one that is wrong as the rows of the table say. Printed is the mean error of the time expected of a
pass before it was seen, |ln(ms / expected)|, of passes over several tokens and over one: with all corrections,
without that of single widths, without that of further rows, and with one factor for all widths.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from localspec.controllers import cost_model
from localspec.controllers.cost_model import PassTimes

Times = dict[int, float]

NONE = 1e-6  # a standard deviation of what is never corrected
ARMS: dict[str, Mapping[str, float]] = {
    "all corrections": {"ROWS": cost_model.ROWS},
    "no single widths": {"ALONE": NONE},
    "no further rows": {"ROWS": NONE},
    "one factor": {"ALONE": NONE, "ROWS": NONE},
}
CURVES: dict[str, Callable[[int, float, float], float]] = {
    "as calibrated": lambda width, ms, one: ms,
    "one token 15 % too short": lambda width, ms, one: 0.85 * ms if width == 1 else ms,
    "further rows 1.5 times too dear": lambda width, ms, one: one + 1.5 * (ms - one),
    "further rows 0.6 times": lambda width, ms, one: one + 0.6 * (ms - one),
}


def errors(run: Mapping[str, Any], curve: Times) -> dict[bool, list[float]]:
    """By whether a pass was over one token: by how much its time was off what was expected, as a logarithm."""
    found: dict[bool, list[float]] = defaultdict(list)
    times = PassTimes(dict(curve))
    times.corrections._unsure_rows = cost_model.ROWS**2
    for answer in run["samples"]:
        if answer["arm"] != "auto":
            continue
        times.begin()
        for i, (_, ms, _, n_draft, *_) in enumerate(answer["rounds"]):
            width = n_draft + 1
            if i:  # the first follows the prompt, whose last token it may decode
                found[width == 1].append(abs(math.log(ms / times(width))))
            times.observe(width, ms)
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [f"| the curve at the start | {' | '.join(ARMS)} |", "|---|" + "--:|" * len(ARMS)]
    for name, distorted in CURVES.items():
        cells = []
        for constants in ARMS.values():
            with patch.multiple(cost_model, **constants):
                found: dict[bool, list[float]] = defaultdict(list)
                for run in runs:
                    measured = {int(width): float(ms) for width, ms in run["engines"][0]["pass_ms"].items()}
                    curve = {width: distorted(width, ms, measured[1]) for width, ms in measured.items()}
                    for one, off in errors(run, curve).items():
                        found[one] += off
            cells.append(f"{fmean(found[False]):.3f}, {fmean(found[True]):.3f}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    files = parser.parse_args().files
    print(table([json.loads(file.read_text(encoding="utf-8")) for file in files]))


if __name__ == "__main__":
    main()
