"""The most that any policy could make of a pair's guesses: what one does that knows which of them are right.

    python -m benchmarks.clairvoyant TRACES.json [--target W=MS ...] [--model W=MS ...]
    python -m benchmarks.clairvoyant TRACES.json --machines

TRACES comes from ``record_traces.py``: real texts, what each drafter would have guessed at every place, and what passes
cost on that machine. A clairvoyant sends right guesses only, as many as pay: copies where they are right, and the draft
model's where only those are. It is charged for every guess of the model that it sends, for a pass as wide as the draft,
and for the model's reading of the prompt, if it uses it at all. How much faster than plain decoding it is bounds every
policy with these drafters, costs and texts. Next to it: the bound if the model's guesses cost nothing, that with copies
alone, and fixed lengths of the model's guesses, which pay for wrong ones too. For greedy texts.

``confidences`` is the bound for policies that cannot know what is right: one that sees, before it drafts anything, how
confident the drafters will be at every place of the text, and what that means (calibrated on the other answers), and
always sends the draft of the least expected time. It pays for what it sends as a clairvoyant does, right or wrong. At a
temperature its guesses are the model's most probable tokens, or samples: what is faster in that answer. With
``--machines`` it is that alone, with the costs of each machine of ``ablations.py``, and what ``auto`` makes of the same
answers there: nothing known before, two replays of each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ablations import MACHINES, replayed
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


def calibrated(traces: list[dict[str, Any]], left_out: dict[str, Any]) -> dict[str, list[float]]:
    """By kind of fate, of most probable tokens and of samples: ``_calibrated``."""
    return {fates: _calibrated(traces, left_out, fates) for fates in ("right", "sampled")}


def _calibrated(traces: list[dict[str, Any]], left_out: dict[str, Any], fates: str) -> list[float]:
    """The chance that each guess of the model is right in one answer, by its confidence: a logistic regression, with a
    knee at either side, of the ``fates`` in all other answers."""

    def features(trace: dict[str, Any]) -> Any:
        confidence = np.clip(trace["sources"]["model"]["confidence"], 0.0001, 0.9999)
        odds = np.log(confidence / (1.0 - confidence))
        return np.stack([np.ones(len(odds)), odds, np.minimum(odds, 0.0), np.maximum(odds - 3.0, 0.0)], axis=1)

    others = [trace for trace in traces if trace is not left_out]
    x = np.concatenate([features(trace) for trace in others])
    y = np.concatenate([trace["sources"]["model"][fates] for trace in others])

    penalty, weights = np.diag([0.0, 1.0, 1.0, 1.0]), np.zeros(4)
    for _ in range(20):  # Newton's method
        p = 1 / (1 + np.exp(-x @ weights))
        curvature = (x * (p * (1 - p))[:, None]).T @ x + penalty
        weights -= np.linalg.solve(curvature, x.T @ (p - y) + penalty @ weights)
    return [float(each) for each in 1 / (1 + np.exp(-features(left_out) @ weights))]


def seeing(
    trace: dict[str, Any], chances: dict[str, list[float]], target: PassTimes, model: PassTimes, widest: int
) -> float:
    """Least time of one who sees all confidences ahead [ms], with the fates of which these are the chances."""
    return min(_seeing(trace, each, fates, target, model, widest) for fates, each in chances.items())


def _seeing(
    trace: dict[str, Any], chances: list[float], fates: str, target: PassTimes, model: PassTimes, widest: int
) -> float:
    """Expected time for the text of one who sees all confidences ahead [ms]; ``chances``: what those of the model mean,
    whose guesses have these ``fates``.

    A place of a draft has the copy where that is as likely right as the model's guess, or all are of one of the two.
    """
    sources, n = trace["sources"], len(chances)
    copies = [max(0.0, each) for each in sources["ngram"]["confidence"]]
    ways = [  # which places are copied
        [True] * n,
        [False] * n,
        [copy > 0 and copy >= chance for copy, chance in zip(copies, chances, strict=True)],
    ]
    least = math.inf
    for reads in (False, True):
        rest, choice = [0.0] * (n + 1), [(0, ways[0])] * n  # the least expected time from each place on, and the draft
        for i in range(n - 1, -1, -1):
            rest[i] = target(1) + MS_OTHER + rest[i + 1]
            for copied in ways if reads else ways[:1]:
                reached, expected, ms_draft = 1.0, 0.0, 0.0
                for k in range(1, min(widest, n - i)):
                    at = i + k - 1
                    chance = copies[at] if copied[at] else chances[at]
                    ms_draft += 0.0 if copied[at] else model(1)
                    expected += reached * (1.0 - chance) * rest[at + 1]
                    reached *= chance
                    ms = target(k + 1) + MS_OTHER + ms_draft + expected + reached * rest[at + 2]
                    if ms < rest[i]:
                        rest[i], choice[i] = ms, (k, copied)
        ms, visits = model(trace["prompt_tokens"]) if reads else 0.0, [1.0] + [0.0] * n
        for i, (k, copied) in enumerate(choice):
            reached, ms_draft = visits[i], sum(0.0 if copied[at] else model(1) for at in range(i, i + k))
            ms += reached * (target(k + 1) + MS_OTHER + ms_draft)
            for at in range(i, i + k):
                right = sources["ngram"]["right"][at] if copied[at] else sources["model"][fates][at]
                visits[at + 1] += reached * (1.0 - right)
                reached *= right
            visits[i + k + 1] += reached
        least = min(least, ms)
    return least


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


def against_auto(stored: dict[str, Any], widest: int) -> None:
    """Print the bound and ``auto`` for all machines of the ablations."""
    traces = stored["traces"]
    chances = {trace["id"]: calibrated(traces, trace) for trace in traces}
    print(f"{'':18}{'bound: median':>15}{'mean':>7}{'auto: median':>15}{'mean':>7}{'auto / bound':>15}")
    for name, (target_ms, model_ms) in MACHINES.items():
        target, model = PassTimes(target_ms), PassTimes(model_ms)
        bounds = [
            len(trace["answer"]) * (target(1) + MS_OTHER) / seeing(trace, chances[trace["id"]], target, model, widest)
            for trace in traces
        ]
        replays = [replayed(stored, "no head", name, "new", repeat) for repeat in range(2)]
        auto = [statistics.fmean(replay[trace["id"]][-1] for replay in replays) for trace in traces]
        means = [statistics.geometric_mean(each) for each in (bounds, auto)]
        print(
            f"{name:18}{statistics.median(bounds):15.2f}{means[0]:7.2f}{statistics.median(auto):15.2f}{means[1]:7.2f}"
            f"{means[1] / means[0]:15.2f}"
        )


def _pairs(given: list[str] | None) -> list[list[str]]:
    return [each.split("=") for each in given or ()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    for name in ("target", "model"):
        parser.add_argument(f"--{name}", nargs="+", metavar="W=MS", help="costs to use instead of those in TRACES")
    parser.add_argument("--widest", type=int, default=8, help="widest pass")
    parser.add_argument("--machines", action="store_true", help="the bound and auto, with the costs of each machine")
    args = parser.parse_args()
    stored = json.loads(args.traces.read_text())
    if args.machines:
        against_auto(stored, args.widest)
        return
    target, model = (
        PassTimes({int(width): float(ms) for width, ms in given or stored["ms"][name].items()})
        for name, given in (("target", _pairs(args.target)), ("model", _pairs(args.model)))
    )
    names = ["clairvoyant", "confidences", "guesses free", "copies only", *(f"fixed {k}" for k in FIXED)]
    print(f"{'':14}{'right':>7}" + "".join(f"{name:>14}" for name in names))
    by_category: dict[str, list[list[float]]] = {}
    for trace in stored["traces"]:
        n = len(trace["sources"]["model"]["right"])
        alone = clairvoyant(trace, target, None, args.widest)
        times = [
            min(alone, clairvoyant(trace, target, model, args.widest)),
            seeing(trace, calibrated(stored["traces"], trace), target, model, args.widest),
            clairvoyant(trace, target, PassTimes({1: 0.0}), args.widest),
            alone,
            *(fixed(trace, target, model, k) for k in FIXED),
        ]
        speeds = [n * (target(1) + MS_OTHER) / ms for ms in times]
        by_category.setdefault(trace["category"], []).append(speeds)
        right = statistics.fmean(trace["sources"]["model"]["right"])
        print(f"{trace['id']:14}{right:7.2f}" + "".join(f"{speed:14.2f}" for speed in speeds))
    by_category["all"] = [row for rows in by_category.values() for row in rows]
    for category, rows in by_category.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{category + ' (median)':21}" + "".join(f"{speed:14.2f}" for speed in medians))


if __name__ == "__main__":
    main()
