"""The most that any policy could make of a pair's guesses: what one does that knows which of them are right.

    python benchmarks/clairvoyant.py TRACES.json [--target W=MS ...] [--model W=MS ...]

TRACES comes from ``record_traces.py``: real texts, what each drafter would have guessed at every place, and what passes
cost on that machine. A clairvoyant sends right guesses only, as many as pay: copies where they are right, and the draft
model's where only those are. It is charged for every guess of the model that it sends, for a pass as wide as the draft,
and for the model's reading of the prompt, if it uses it at all. How much faster than plain decoding it is bounds every
policy with these drafters, costs and texts. Next to it: the bound if the model's guesses cost nothing, that with copies
alone, and fixed lengths of the model's guesses, which pay for wrong ones too. For greedy texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from localspec.controllers.cost_model import PassTimes

MS_OTHER = 0.5
"""Of a round, outside the models [ms]."""

FIXED = (1, 2, 3, 4)


def clairvoyant(trace: dict[str, Any], target: PassTimes, model: PassTimes | None, widest: int) -> float:
    """Least time for the text [ms]; without a model, copies alone are sent."""
    sources = trace["sources"]
    copied, guessed = (
        [confidence >= 0 and right > 0.5 for confidence, right in zip(s["confidence"], s["right"], strict=True)]
        for s in (sources["ngram"], sources["model"])
    )
    n = len(guessed)
    rest = [0.0] * (n + 1)  # least time for the text from each place on
    for i in range(n - 1, -1, -1):
        best, ms_draft = target(1) + MS_OTHER + rest[i + 1], 0.0
        for k in range(1, min(widest, n - i)):
            at = i + k - 1
            if not copied[at]:
                if model is None or not guessed[at]:
                    break
                ms_draft += model(1)
            best = min(best, target(k + 1) + MS_OTHER + ms_draft + rest[i + k + 1])
        rest[i] = best
    return rest[0] + (model(trace["prompt_tokens"]) if model else 0.0)


def fixed(trace: dict[str, Any], target: PassTimes, model: PassTimes, k: int) -> float:
    """Time for the text with k guesses of the model in every round [ms]."""
    right = [fate > 0.5 for fate in trace["sources"]["model"]["right"]]
    ms, i = model(trace["prompt_tokens"]), 0
    while i < len(right):
        n_right = 0
        while n_right < k and i + n_right < len(right) and right[i + n_right]:
            n_right += 1
        # After a draft that was right throughout, its last token is read along with the next.
        catch_up = model(2) - model(1) if n_right == k else 0.0
        ms += target(k + 1) + MS_OTHER + k * model(1) + catch_up
        i += n_right + 1
    return ms


def _pairs(given: list[str] | None) -> list[list[str]]:
    return [each.split("=") for each in given or ()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    for name in ("target", "model"):
        parser.add_argument(f"--{name}", nargs="+", metavar="W=MS", help="costs to use instead of those in TRACES")
    parser.add_argument("--widest", type=int, default=8, help="widest pass")
    args = parser.parse_args()
    stored = json.loads(args.traces.read_text())
    target, model = (
        PassTimes({int(width): float(ms) for width, ms in given or stored["ms"][name].items()})
        for name, given in (("target", _pairs(args.target)), ("model", _pairs(args.model)))
    )
    names = ["clairvoyant", "guesses free", "copies only", *(f"fixed {k}" for k in FIXED)]
    print(f"{'':14}{'right':>7}" + "".join(f"{name:>14}" for name in names))
    by_category: dict[str, list[list[float]]] = {}
    for trace in stored["traces"]:
        n = len(trace["sources"]["model"]["right"])
        alone = clairvoyant(trace, target, None, args.widest)
        times = [
            min(alone, clairvoyant(trace, target, model, args.widest)),
            clairvoyant(trace, target, PassTimes({1: 0.0}), args.widest),
            alone,
            *(fixed(trace, target, model, k) for k in FIXED),
        ]
        speeds = [n * (target(1) + MS_OTHER) / ms for ms in times]
        by_category.setdefault(trace["category"], []).append(speeds)
        right = statistics.fmean(trace["sources"]["model"]["right"])
        print(f"{trace['id']:14}{right:7.2f}" + "".join(f"{speed:14.2f}" for speed in speeds))
    for category, rows in by_category.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{category + ' (median)':21}" + "".join(f"{speed:14.2f}" for speed in medians))


if __name__ == "__main__":
    main()
