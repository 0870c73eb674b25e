"""Switch every mechanism of the controller off alone, in the replay of recorded texts, and print what each is worth.

    python -m benchmarks.ablations TRACES.json ... [--cells CELLS.json] [--arm NAME ...] [--condition NAME ...]
        [--machine NAME ...] [--repeats 2] [--jobs 1] [--details FILE] [--print]
    python -m benchmarks.ablations --branches 40
    python -m benchmarks.ablations --shared-steps

TRACES come from ``record_traces.py``, one file a temperature. Each answer is replayed with the costs of several
machines (``MACHINES``) under conditions (``CONDITIONS``): a machine that is as calibrated, one that keeps what it
learned from answer to answer, one beside another program, one whose further rows cost something else than was
calibrated, and drafters that are right less often than their confidences say. An arm (``ARMS``) is the full controller
with one thing replaced, in this file: nothing in ``localspec`` knows of it. All arms meet the same texts with the same
seeds, and are compared answer by answer. CELLS holds the results so far; an interrupted run goes on from there, and
``--print`` only reports.

Columns: the median over answers of the time of plain decoding over that of the arm; the 10th percentile; the share of
answers that are slower than plain decoding; the share of their ends (at 48, 96, 192 tokens and the last) under 0.97 of
it. Changes are the arm's less the full controller's, with 95 % intervals by a bootstrap over answers, which takes all
that was made of an answer (machines, repeats, both arms) together.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from benchmarks import branching
from benchmarks.record_traces import Spy
from benchmarks.replay_traces import CURVES, Replay, Times
from localspec.controllers import auto, cost_model, stopping
from localspec.controllers.acceptance import START, SourceAcceptance
from localspec.controllers.auto import AutoController, AutoPlan, PrefillGate
from localspec.controllers.cost_model import Corrections, PassTimes
from localspec.controllers.learned import TimeBudget
from localspec.controllers.stopping import Continuation, expected_tokens
from localspec.sampling.sampling import Noise, SamplingParams
from localspec.spec_decode import decoder
from localspec.spec_decode.drafters import draft_model
from localspec.spec_decode.drafters.base import Proposer
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.system.files import write_atomically
from tests.support import ggufs

Floats = npt.NDArray[np.float64]

ENDS = (48, 96, 192)
BOOTSTRAPS = 1000
MEDIAN_LEAST = 0.01
SHARE_LEAST = 0.01
"""What moves the median by less than this and the shares of slow answers by less than that proves nothing."""


# -- machines and conditions ---------------------------------------------------------------------------------------


def _linear(one_ms: float, row: float) -> Times:
    return {width: one_ms * (1 + row * (width - 1)) for width in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 64, 128)}


def _scaled(curve: Times, factor: float) -> Times:
    return {width: factor * ms for width, ms in curve.items()}


_SMALL_DRAFT_ON_C: Times = {1: 6.3, 2: 8, 4: 12.6, 8: 23, 16: 44, 64: 115, 128: 230}
_DRAFT_ON_C: Times = {1: 7.9, 2: 10, 4: 16, 8: 26, 16: 50, 64: 140, 128: 275}

MACHINES: dict[str, tuple[Times, Times]] = {
    "A": CURVES["avx2"],
    "B": CURVES["avx512"],
    "desktop": (_linear(77.5, 0.05), _linear(0.23 * 77.5, 0.05)),
    "7B": (
        {1: 133, 2: 162, 3: 207, 4: 243, 5: 282, 6: 321, 7: 360, 8: 399, 16: 770},
        _scaled(CURVES["avx512"][1], 13.3 / CURVES["avx512"][1][1]),
    ),
    "7B, fast memory": (
        {1: 113.3, 2: 158.9, 3: 211.4, 4: 245.9, 5: 272.5, 6: 303.4, 7: 341.5, 8: 393.3, 10: 498.6, 16: 757.7},
        {1: 12.9, 2: 15.0, 3: 17.6, 4: 22.2, 5: 25.9, 6: 28.8, 7: 32.6, 8: 36.0, 16: 69.9, 64: 187.8, 128: 370},
    ),
    "7B, cheap rows": (
        _linear(133, 0.133),
        _scaled(CURVES["avx512"][1], 13.3 / CURVES["avx512"][1][1]),
    ),
    "1.5B, C": ({1: 23.1, 2: 24.9, 3: 36, 4: 44.3, 5: 50.5, 6: 56.1, 7: 62.3, 8: 66.5, 16: 124.8}, _SMALL_DRAFT_ON_C),
    "3B, C": ({1: 44.9, 2: 49.9, 3: 69.4, 4: 86.3, 5: 97.9, 6: 106.5, 7: 122.3, 8: 128, 16: 237.7}, _SMALL_DRAFT_ON_C),
    "7B, C": ({1: 97, 2: 122, 3: 185, 4: 222, 5: 254, 6: 284, 7: 314, 8: 343, 16: 591}, _DRAFT_ON_C),
    "30B A3B, C": (
        {1: 42.5, 2: 66.5, 3: 80.8, 4: 93.6, 5: 113, 6: 132, 7: 158, 8: 170, 10: 208, 12: 238, 16: 307},
        _DRAFT_ON_C,
    ),
    "7B, C, compiled": ({1: 101, 2: 117, 3: 168, 4: 199, 5: 225, 6: 253, 7: 277, 8: 286, 16: 483}, _DRAFT_ON_C),
}
"""t(w) of target and draft model [ms]. A and B: two cores with AVX2 and AVX-512, measured. desktop: six cores, 12.9
tokens a second of a 3B as others measured; that a further row costs a twentieth of a pass is assumed, of the 0.5B too,
and so is that this takes 0.23 of the target's time, which is its size over that of the 3B. 7B: t(1), t(2), t(3), t(4)
and t(8) measured with an inflated 1.5B on two cores with AVX-512, the rest interpolated; a draft token is put at a
tenth of its pass. With fast memory: all measured so on another such machine, where reading the weights takes less time.
With cheap rows: what a further row costs in an engine that was compiled for the CPU. C: as measured there on
26 November, with ik-llama's wheel and compiled. 30B A3B: random weights in the shape of Qwen3 30B, a mixture of
128 experts of which a token uses 8 (``random_ggufs.py --time``); further rows read further experts. A head's costs are
``HEAD_SHARES`` of the target's pass everywhere. All draft tokens are those of the 1.5B with its 0.5B and its head."""


@dataclass(frozen=True)
class Condition:
    """What an answer meets.

    Attributes:
        what: in words.
        keeps: whether what was learned is kept from answer to answer.
        order: of answers: random; turns: one of each category after the other, as ``bench`` asks; alike: by category.
        busy: see ``replay_traces.BUSY``.
        row: how many times as much time as calibrated further rows take.
        right: see ``Replay``.
    """

    what: str
    keeps: bool = False
    order: str = "random"
    busy: bool = False
    row: float = 1.0
    right: Mapping[str, float] = field(default_factory=dict)


CONDITIONS = {
    "new": Condition("nothing known before an answer, passes cost what was calibrated"),
    "kept": Condition("one process answers all in a random order and keeps what it learns", keeps=True),
    "turns": Condition("the same, one of each category after the other", keeps=True, order="turns"),
    "alike": Condition("the same, those of one category after each other", keeps=True, order="alike"),
    "busy": Condition(
        "beside a program that takes 40 % of the CPUs since calibration; nothing known before", busy=True
    ),
    "rows": Condition("further rows take 1.6 times what was calibrated; nothing known before", row=1.6),
    "cheap rows": Condition("further rows take half of what was calibrated; in turns", True, "turns", row=0.5),
    "dear rows": Condition("further rows take 2.5 times what was calibrated; in turns", True, "turns", row=2.5),
    "overconfident": Condition(
        "half of the draft model's right tokens are wrong, with the same confidences; in turns",
        True,
        "turns",
        right={"model": 0.5},
    ),
    "copies fail": Condition(
        "the same, and of the copied ones 60 %; in turns", True, "turns", right={"model": 0.5, "ngram": 0.4}
    ),
}


Patches = tuple[tuple[Any, str, Any], ...]


# -- what arms replace ---------------------------------------------------------------------------------------------


class Myopic(Continuation):
    """Stops by the next token alone: one is worth what it adds, a step what its one token is worth.

    The rate that time is weighed with is the best that this rule reaches.
    """

    def _solve(self) -> float:
        n_rows, rate = self._n_ahead, self.rate
        n_groups = len(self._models[0][0].shares) if self._models else 1
        grid = stopping._N_GRID
        value, ms = np.zeros((n_rows + 1, n_groups, grid)), np.zeros((n_rows + 1, n_groups, grid))
        self._steps = np.full((len(self._models), n_rows + 1, n_groups, grid), -np.inf)
        n_bins = len(self._free[0].acceptance) if self._free else 0
        run, run_ms = np.zeros((n_bins, grid)), np.zeros((n_bins, grid))
        for n in range(n_rows - 1, -1, -1):
            row = self._row[n]
            best, best_ms, chosen_step = (np.zeros((n_groups, grid)) for _ in range(3))
            for index, (model, shift) in enumerate(self._models):
                now = shift.reached - rate * row
                good = now > 0
                price = model.step_ms if n == 0 or not model.one_pass else 0.0
                step = model.shares @ np.where(good, now, 0.0) - rate * price
                self._steps[index, n] = step
                onward = model.shares @ np.where(good, now + shift.of(value[n + 1][model.group]), 0.0) - rate * price
                onward_ms = model.shares @ np.where(good, row + shift.of(ms[n + 1][model.group]), 0.0) + price
                better = step > chosen_step
                chosen_step = np.where(better, step, chosen_step)
                best, best_ms = np.where(better, onward, best), np.where(better, onward_ms, best_ms)
            if self._free is not None:
                free, shift = self._free
                now = shift.reached - rate * row
                run_ms = np.where(now > 0, row + shift.of(run_ms), 0.0)
                run = np.where(now > 0, now + shift.of(run), 0.0)
                copied = (now > 0) & (now >= chosen_step[0])
                best_ms = np.einsum("b,gbp->gp", free.shares[0], np.where(copied, run_ms, best_ms[:, None]))
                best = np.einsum("b,gbp->gp", free.shares[0], np.where(copied, run, best[:, None]))
            value[n], ms[n] = best, best_ms
        self._ms = ms
        self._looked_up = np.zeros_like(value).tolist(), self._steps.tolist()  # nothing is to be had later
        return float(1.0 + value[0, 0, 0] - rate * self.rows_ms[0])

    def copy(self, n: int, reach: float, acceptance: float, room: int, leads_to: int = 0) -> float:
        return self.send(n, reach, acceptance, leads_to)


def bounds(for_drafts: Callable[[TimeBudget], float] | None, for_reading: Callable[[TimeBudget], float]) -> Patches:
    """Other bounds of what drafts (None: as they are) and readings may cost."""
    drafts = () if for_drafts is None else ((TimeBudget, "for_drafts", property(for_drafts)),)
    return (*drafts, (TimeBudget, "for_reading", property(for_reading)))


def of_the_process(budget: TimeBudget) -> float:
    return budget.balance


def of_the_answer(name: str) -> Callable[[TimeBudget], float]:
    bound = getattr(TimeBudget, name).fget
    return lambda budget: bound(replace(budget, balance=math.inf))


def unbounded(budget: TimeBudget) -> float:
    return math.inf


class ScaleAlone(Corrections):
    """In place of the filter: a fixed share of each surprise goes to the scale."""

    def observe(self, width: int, surprise: float, believed: float) -> float:
        change = max(believed, 0.1 * min(cost_model.ONCE_MORE, max(-cost_model.ONCE_MORE, surprise)), key=abs)
        self.scale *= math.exp(change)
        return change


class OwnShare(ScaleAlone):
    """A fixed share goes to the width's own factor too."""

    def observe(self, width: int, surprise: float, believed: float) -> float:
        if width > 1 and not believed:
            told = min(cost_model.ONCE_MORE, max(-cost_model.ONCE_MORE, surprise))
            self.trim[width] = min(2.0, max(0.5, self.trim.get(width, 1.0) * math.exp(0.2 * told)))
        return super().observe(width, surprise, believed)


def NoRows() -> Corrections:
    return Corrections(_unsure_rows=0.0)


def corrected_by(kind: Callable[[], Corrections]) -> Callable[[PassTimes, Times], None]:
    real = PassTimes.__post_init__

    def init(self: PassTimes, measured: Times) -> None:
        real(self, measured)
        self.corrections = kind()

    return init


class ChargedInFull(AutoPlan):
    """Steps are charged as they went."""

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        more = max(0.0, ms - self.costs.draft_times[source](n_tokens))
        super().spent(source, n_tokens, ms)
        if self._is_reading:
            self.ms_invested += more
        else:
            self.ms_spent += more


class CopiesFirst(AutoPlan):
    """A copy that is worth its row is never passed over for a step of a draft model."""

    def _row_pays(self, source: str, expected: float, after: int) -> bool:
        if source in self.costs.draft_times:
            return super()._row_pays(source, expected, after)
        if not self._affords(0.0, auto.share_of(source), self._n):
            return False
        return self.stopping.current.copy(self._n, self._reach, expected, self.room, after) > 0


def pays_if_affordable(self: PrefillGate, source: str, n_tokens: int, room: int, round_index: int) -> bool:
    """Reading is bounded by its budget, and not weighed."""
    costs, cost = self._costs, self._catch_up(source, n_tokens)
    return cost <= auto.READING * costs.times(1) or cost <= self._budget.for_reading * costs.ms_plain


@dataclass(frozen=True)
class Arm:
    """The full controller but for one thing.

    Attributes:
        off: what is switched off, and what stands in its place.
        patches: object, attribute and what replaces it.
        sources: the drafters.
        conditions: under which it is replayed.
        flags: of the replay.

    Raises:
        AttributeError: a patch replaces what is not there.
    """

    off: str
    patches: Patches = ()
    sources: tuple[str, ...] = ("ngram", "model")
    conditions: tuple[str, ...] = ("new",)
    flags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for what, name, _ in self.patches:
            getattr(what, name)


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of something."""


COSTS = ("new", "busy", "rows", "cheap rows", "dear rows")
BUSY = ("new", "busy")
LEARNING = ("new", "turns", "overconfident", "copies fail")
BUDGETS = ("new", "turns", "busy", "rows", "overconfident", "copies fail")
ALL = ("new", "kept", *BUDGETS[1:], "cheap rows", "dear rows")
FULL = "full controller"
DRAFTERS = ("n-grams alone", "draft model alone")
ARMS: dict[str, Arm] = {
    FULL: Arm("", conditions=ALL),
    # Drafters.
    "n-grams alone": Arm("no draft model", sources=("ngram",), conditions=ALL),
    "draft model alone": Arm("no n-grams", sources=("model",)),
    "n-grams' hit rates": Arm("the prior shares only", flags=frozenset({"prior"})),
    # When to stop.
    "look-ahead": Arm(
        "a myopic rule, with the best rate it reaches", ((stopping, "Continuation", Myopic),), conditions=LEARNING
    ),
    "copies give way": Arm("a copy that pays is always taken", ((auto, "AutoPlan", CopiesFirst),)),
    "runs of sure tokens": Arm(
        "one histogram, whatever a token comes after",
        (
            (auto, "leads_to", lambda confidence: START),
            (stopping, "_LEADS_TO", np.zeros_like(stopping._LEADS_TO)),
        ),
        conditions=LEARNING,
    ),
    "plain rounds": Arm(
        "none is plain to see t(1)", ((AutoController, "_wants_plain", lambda self: False),), conditions=COSTS
    ),
    # What may be lost.
    "budget of the answer": Arm("the process's alone", bounds(of_the_process, of_the_process), conditions=BUDGETS),
    "budget of the process": Arm(
        "the answer's alone", bounds(of_the_answer("for_drafts"), of_the_answer("for_reading")), conditions=BUDGETS
    ),
    "both budgets": Arm("none", bounds(unbounded, unbounded), conditions=BUDGETS),
    "budget of readings": Arm("the process's alone", bounds(None, of_the_process), conditions=LEARNING),
    "half for copies": Arm("they may lose all", ((auto, "share_of", lambda source: 1.0),), conditions=LEARNING),
    "charged as expected": Arm("steps are charged as they went", ((auto, "AutoPlan", ChargedInFull),), conditions=BUSY),
    # Reading.
    "prefill gate": Arm(
        "the budget of readings alone",
        ((PrefillGate, "pays", pays_if_affordable),),
        conditions=("new", "turns", "busy"),
    ),
    "gate: least gain": Arm(
        "any", ((auto, "HORIZON", math.inf), (auto, "LONGEST_HORIZON", math.inf)), conditions=LEARNING
    ),
    "gate: clear gain": Arm(
        "every reading has to pay within the horizon", ((auto, "CLEAR_GAIN", math.inf),), conditions=LEARNING
    ),
    "gate: slow machine": Arm("as on a calm one", ((auto, "SLOW_SCALE", math.inf),), conditions=("busy",)),
    # Acceptance.
    "target's certainty": Arm("not looked at", ((AutoController, "_certainty_of", nothing),), conditions=LEARNING),
    "calibration online": Arm("the priors", ((SourceAcceptance, "observe", nothing),), conditions=LEARNING),
    "histograms online": Arm(
        "the priors, and certainty", ((SourceAcceptance, "notice", nothing),), conditions=LEARNING
    ),
    "drift when idle": Arm("none, nor certainty", ((SourceAcceptance, "idle", nothing),), conditions=LEARNING),
    "acceptance kept": Arm("forgotten after each answer", flags=frozenset({"forgets"}), conditions=LEARNING[1:]),
    # Costs.
    "corrections": Arm("none", ((PassTimes, "observe", nothing), (PassTimes, "slow_down", nothing)), conditions=COSTS),
    "corrections: a width alone": Arm("none", ((cost_model, "ALONE", 0.0),), conditions=COSTS),
    "corrections: further rows": Arm(
        "none", ((cost_model, "ROWS", 0.0), (PassTimes, "__post_init__", corrected_by(NoRows))), conditions=COSTS
    ),
    "corrections: Kalman, by width": Arm(
        "fixed shares", ((PassTimes, "__post_init__", corrected_by(OwnShare)),), conditions=COSTS
    ),
    "corrections: Kalman": Arm(
        "a fixed share, to the scale", ((PassTimes, "__post_init__", corrected_by(ScaleAlone)),), conditions=COSTS
    ),
    "corrections: two that agree": Arm("the filter alone", ((cost_model, "NOISE", math.inf),), conditions=COSTS),
    "corrections: of idle models": Arm(
        "the draft's passes teach alone", ((PassTimes, "slow_down", nothing),), conditions=COSTS
    ),
    "unprofitable left out": Arm("thought about", ((auto, "NEVER", 2.0),)),
}


# -- replaying -----------------------------------------------------------------------------------------------------


@contextmanager
def switched_off(arm: Arm) -> Iterator[None]:
    with ExitStack() as stack:
        for what, name, replacement in arm.patches:
            stack.enter_context(patch.object(what, name, replacement))
        yield


def prior_ngrams(trace: dict[str, Any]) -> dict[str, list[float]]:
    """The n-gram drafter's confidences without what it learns; what it proposes is the same."""
    drafter, tokens, confidences = NgramDrafter(), list(trace["prompt"]), list[float]()
    drafter.begin(tokens)
    proposer = Proposer(SamplingParams(), Noise(0))
    with patch.object(drafter._hits, "learn", nothing):
        for token in trace["answer"]:
            spy = Spy()
            found = drafter.draft(tokens, spy, proposer)
            confidences.append(round(spy.confidence, 4) if found else -1.0)
            drafter.accept([token])
            tokens.append(token)
    return {"confidence": confidences, "right": trace["sources"]["ngram"]["right"]}


def replayed(
    stored: dict[str, Any], name: str, machine: str, condition_name: str, repeat: int
) -> dict[str, list[float]]:
    """By answer: plain decoding's time over the arm's at its ends, the last of which is its whole length."""
    arm, condition, traces = ARMS[name], CONDITIONS[condition_name], stored["traces"]
    target, model = MACHINES[machine]
    chosen = random.Random(repeat).sample(traces, len(traces))
    if condition.order != "random":
        categories = list(dict.fromkeys(trace["category"] for trace in traces))
        groups = [[trace for trace in chosen if trace["category"] == category] for category in categories]
        rows = zip_longest(*groups) if condition.order == "turns" else groups
        chosen = [trace for row in rows for trace in row if trace]
    rate = stored.get("rates", {}).get("head")
    found: dict[str, list[float]] = {}
    replay: Replay | None = None
    with switched_off(arm):
        for trace in chosen:
            if replay is None or not condition.keeps:
                replay = Replay(
                    target, model, stored["temperature"], condition.busy, arm.sources, rate, right=condition.right
                )
                wide = {w: target[1] + condition.row * (ms - target[1]) for w, ms in target.items()}
                replay.real_target = PassTimes(wide)
            if "prior" in arm.flags:
                trace = trace | {"sources": trace["sources"] | {"ngram": prior_ngrams(trace)}}
            rng = np.random.default_rng([repeat, zlib.crc32(trace["id"].encode())])
            speeds = replay.answer(trace, rng)
            if "forgets" in arm.flags:
                for tables in (replay.sources, replay.sampled):
                    tables.update({source: SourceAcceptance(each.prior) for source, each in tables.items()})
            n = len(speeds)
            ends = sorted({min(length, n) for length in ENDS} | {n})
            found[trace["id"]] = [round(float(speeds[end - 1]), 5) for end in ends]
    return found


Key = tuple[str, str, str, str, int]
"""Temperature, arm, machine, condition, repeat."""


def missing(stored: dict[str, Any], key: Key, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The texts still to be replayed; all of them where one learns from the other."""
    traces: list[dict[str, Any]] = stored["traces"]
    rest = [trace for trace in traces if trace["id"] not in found]
    return traces if rest and CONDITIONS[key[3]].keeps else rest


def work(path: Path, key: Key, found: dict[str, list[float]]) -> tuple[Key, dict[str, list[float]]]:
    _, arm, machine, condition, repeat = key
    stored = _stored(path)
    some = stored | {"traces": missing(stored, key, found)}
    return key, found | replayed(some, arm, machine, condition, repeat)


_READ: dict[Path, dict[str, Any]] = {}


def _stored(path: Path) -> dict[str, Any]:
    if path not in _READ:
        _READ[path] = json.loads(path.read_text())
    return _READ[path]


# -- statistics ----------------------------------------------------------------------------------------------------


STATISTICS = ("median", "10th percentile", "slower", "under 0.97", "mean")
LEAST = (MEDIAN_LEAST, math.inf, SHARE_LEAST, SHARE_LEAST, math.inf)
WORSE = (-1, -1, 1, 1, -1)
"""Of each of them what change counts, and which sign of it is worse."""


Runs = Sequence[Mapping[str, Sequence[float]]]


def sample(runs: Runs, there: Sequence[set[str]], ids: Sequence[str]) -> tuple[Floats, Floats, Floats]:
    """Whole answers [n_answers, n_runs], NaN where a run has none; how many ends of each are under 0.97; how many ends.

    Args:
        there: of each run the answers that count.
        ids: all of them.
    """
    found = [[run[i] if i in known else [] for run, known in zip(runs, there, strict=True)] for i in ids]
    whole = np.array([[ends[-1] if ends else math.nan for ends in row] for row in found])
    under = np.array([float(sum(end < 0.97 for ends in row for end in ends)) for row in found])
    return whole, under, np.array([float(sum(map(len, row))) for row in found])


def quantile(in_order: Floats, n: Floats, share: float) -> Floats:
    """Of sorted rows with NaN at their ends, which have so many numbers."""
    at = share * (n - 1)
    low = at.astype(np.int64)
    rows = np.arange(len(in_order))
    below, above = in_order[rows, low], in_order[rows, np.minimum(low + 1, n.astype(np.int64) - 1)]
    return np.asarray(below + (at - low) * (above - below))


def statistics_of(whole: Floats, n_under: Floats, n_ends: Floats) -> Floats:
    """``STATISTICS`` [n_draws, 5].

    Args:
        whole: answers [n_draws, n_answers, n_runs].
        n_under: ends under 0.97 of each [n_draws, n_answers].
        n_ends: ends of each.
    """
    values = np.sort(whole.reshape(len(whole), -1), axis=1)
    n = np.sum(~np.isnan(values), axis=1).astype(np.float64)
    slower, under = np.sum(values < 1.0, axis=1) / n, n_under.sum(1) / n_ends.sum(1)
    mean = np.exp(np.nansum(np.log(values), axis=1) / n)
    return np.stack([quantile(values, n, 0.5), quantile(values, n, 0.1), slower, under, mean], axis=1)


@dataclass(frozen=True)
class Comparison:
    """An arm beside the full controller.

    Attributes:
        stats: the arm's ``STATISTICS``.
        change: the arm's less the full controller's; of ratios, relative.
        likely, sure: intervals of the changes, of 95 and 99 % [5, 2].
    """

    stats: Floats
    change: Floats
    likely: Floats
    sure: Floats

    def differs(self, sure: bool) -> set[int]:
        """Which statistics change by as much as counts, the interval all on one side; negative ones are better."""
        found = set()
        for i, (value, (low, high)) in enumerate(zip(self.change, self.sure if sure else self.likely, strict=True)):
            if abs(value) >= LEAST[i] and low * high > 0:
                found.add((i + 1) * (1 if value * WORSE[i] > 0 else -1))
        return found

    def told(self, i: int) -> str:
        low, high = self.likely[i]
        return f"{100 * self.change[i]:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def compared(cells: Mapping[str, Any], arm: Sequence[Key], full: Sequence[Key]) -> Comparison:
    runs = [[cells[key] for key in keys] for keys in (arm, full)]
    there = [set(one) & set(other) for one, other in zip(*runs, strict=True)]
    ids = sorted(set.union(*there))
    ours, theirs = (sample(of_one, there, ids) for of_one in runs)
    n = len(ids)
    drawn = np.random.default_rng(0).integers(0, n, (BOOTSTRAPS, n))
    rows = np.concatenate([np.arange(n)[None], drawn])
    new, old = (statistics_of(*(each[rows] for each in of)) for of in (ours, theirs))
    changes = new - old
    for ratio in (0, 1, 4):
        changes[:, ratio] /= old[:, ratio]
    likely, sure = (np.quantile(changes[1:], [p, 1 - p], axis=0).T for p in (0.025, 0.005))
    return Comparison(new[0], changes[0], likely, sure)


class Table:
    """All comparisons."""

    def __init__(self, cells: Mapping[str, Any]) -> None:
        self.cells = {_key(name): found for name, found in cells.items()}
        self.temperatures = sorted({key[0] for key in self.cells})
        self._known: dict[tuple[str, ...], Comparison | None] = {}

    def of(self, arm: str, temperature: str = "all", machine: str = "all", condition: str = "all") -> Comparison | None:
        which = arm, temperature, machine, condition
        if which not in self._known:
            wanted = temperature, arm, machine, condition
            ours = [
                key
                for key in self.cells
                if all(of in ("all", value) for of, value in zip(wanted, key, strict=False)) and key[2] in MACHINES
            ]
            full = [(key[0], FULL, *key[2:]) for key in ours]
            is_there = ours and all(key in self.cells for key in full)
            self._known[which] = compared(self.cells, ours, full) if is_there else None  # type: ignore[arg-type]
        return self._known[which]

    def verdict(self, arm: str) -> str:
        """What is lost or gained where a mechanism is off.

        A change counts where it is as large as ``LEAST`` says and its interval does not reach zero: of all runs
        together one of 95 %; of each condition and temperature, and of each machine, one of 99 %, as they are many.
        """
        parts = [(t, "all", c) for c in ARMS[arm].conditions for t in self.temperatures]
        parts += [("all", machine, "all") for machine in MACHINES]
        worse, better = list[str](), list[str]()
        overall = self.of(arm)
        assert overall is not None
        for part in [("all", "all", "all"), *parts]:
            found = self.of(arm, *part)
            signs = found.differs(sure=found is not overall) if found else set()
            name = " ".join(each for each in part if each != "all") or "in all"
            for where, sign in ((worse, 1), (better, -1)):
                of = [STATISTICS[abs(each) - 1] for each in sorted(signs, key=abs) if each * sign > 0]
                where += [f"{name} ({', '.join(of)})"] * bool(of)
        if worse or better:
            said = [f"{how} {'; '.join(where)}" for how, where in (("worse:", worse), ("better:", better)) if where]
            return ". Off is ".join(["", *said])[2:]
        changes = zip(overall.change, overall.likely, LEAST, strict=True)
        if all(abs(change) < least and np.abs(likely).max() < least for change, likely, least in changes):
            return "**proves nothing**"
        if all(abs(change) < least for change, least in zip(overall.change, LEAST, strict=True)):
            return "proves nothing, intervals wider"
        return "not told apart"

    def full(self) -> str:
        """The full controller, and what it is without some drafters, by machine."""
        columns = [f"{t}: {of}" for t in self.temperatures for of in STATISTICS]
        lines = [f"| condition | machine | | {' | '.join(columns)} |", "|---|---|---|" + "--:|" * len(columns)]
        for condition, machine, arm in product(CONDITIONS, MACHINES, (FULL, *DRAFTERS)):
            found = [self.of(arm, t, machine, condition) for t in self.temperatures]
            if any(found):
                told = [shown(each.stats) if each else "| " * (len(STATISTICS) - 1) for each in found]
                lines.append(f"| {condition} | {machine} | {arm} | {' | '.join(told)} |")
        return "\n".join(lines)

    def summary(self) -> str:
        """A line a mechanism: changes of all runs together, and what they and their parts say."""
        columns = ["all: median, %", "slower, points", "under 0.97, points", "10th percentile, %", "mean, %"]
        columns += [f"{t}: mean, %" for t in self.temperatures]
        lines = [f"| switched off | in its place | under | {' | '.join(columns)} | verdict |"]
        lines.append("|---|---|---|" + "---|" * len(columns) + "---|")
        for name, arm in ARMS.items():
            overall = self.of(name)
            if name == FULL or overall is None:
                continue
            of_each = [self.of(name, t) for t in self.temperatures]
            told = [overall.told(i) for i in (0, 2, 3, 1, 4)] + [each.told(4) if each else "" for each in of_each]
            there = ", ".join(c for c in arm.conditions if self.of(name, condition=c))
            lines.append(f"| {name} | {arm.off} | {there} | {' | '.join(told)} | {self.verdict(name)} |")
        return "\n".join(lines)

    def report(self) -> str:
        lines = ["# Ablations", "", (__doc__ or "").split("\n\n")[2], "", self.full(), "", self.summary()]
        for condition, temperature in product(CONDITIONS, self.temperatures):
            if self.of(FULL, temperature, "all", condition) is None:
                continue
            lines += ["", f"## {condition}, temperature {temperature}", "", f"{CONDITIONS[condition].what}."]
            changes = " | ".join(f"{of}, change" for of in ("median", "slower", "under 0.97", "mean"))
            lines += ["", f"| switched off | machine | {' | '.join(STATISTICS)} | {changes} |"]
            lines.append("|---|---|" + "--:|" * 5 + "---|" * 4)
            for arm, machine in product(ARMS, ("all", *MACHINES)):
                found = self.of(arm, temperature, machine, condition)
                if found is None:
                    continue
                what = ": ".join(filter(None, (arm, ARMS[arm].off))) if machine == "all" else ""
                told = " | ".join("" if arm == FULL else found.told(i) for i in (0, 2, 3, 4))
                lines.append(f"| {what} | {machine} | {shown(found.stats)} | {told} |")
        return "\n".join([*lines, ""])


def shown(stats: Floats) -> str:
    median, low, slower, under, mean = stats
    return f"{median:.3f} | {low:.3f} | {slower:.1%} | {under:.1%} | {mean:.3f}"


def shared_steps(rate: float = 0.75) -> str:
    """By the formula: answers that share passes, draft steps as one pass for all or one after the other, over plain."""
    lines = ["| machine | answers | steps shared | apart | acceptance needed, shared | apart |", "|---" * 6 + "|"]
    for (machine, curves), n in product(MACHINES.items(), (2, 4)):
        target, model = (PassTimes(dict(curve)) for curve in curves)

        def speedup(right: float, step_ms: float, n: int = n, target: PassTimes = target) -> float:
            ms = [target(n * (k + 1)) + k * step_ms for k in range(8)]
            return max(expected_tokens(right, k) * ms[0] / ms[k] for k in range(8))

        told = [f"{speedup(rate, ms):.2f}" for ms in (model(n), n * model(1))]
        rates = np.arange(0.0, 1.0, 0.01)
        for ms in (model(n), n * model(1)):
            needed = next((right for right in rates if speedup(right, ms) > 1.0), None)
            told.append("never" if needed is None else f"{needed:.2f}")
        lines.append(f"| {machine} | {n} | {' | '.join(told)} |")
    return "\n".join(lines)


def branches(n_answers: int, n_tokens: int) -> str:
    """Drafts that may branch beside chains: tiny models decode, see ``branching.py``."""
    lines = [
        "| machine | temperature | chains / plain | branches / plain | rounds that branch "
        "| chains instead: median, % | slower, points |"
    ]
    lines.append("|---" * 7 + "|")
    shape = ggufs.Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = ggufs.correlated_pair(folder, ggufs.bpe_vocab(300), shape=shape, name="quick")
        for (machine, (target, model)), temperature in product(MACHINES.items(), (0.0, 0.8)):
            pair, rng = branching.Pair(files, target, model[1] / target[1]), np.random.default_rng(0)
            tallies = {arm: branching.Tally() for arm in ("plain", "chains", "branches")}
            params = SamplingParams(temperature=temperature, top_k=40, max_tokens=n_tokens, ignore_eos=True)
            with patch.object(decoder, "time", pair.clock), patch.object(draft_model, "time", pair.clock):
                for _ in range(n_answers):
                    prompt = [int(token) for token in rng.integers(5, pair.target.n_vocab, 24)]
                    for arm, tally in tallies.items():
                        pair.answer(arm, prompt, params, tally)
            plain, chains, branched = (np.array(tally.seconds) for tally in tallies.values())
            cells = {
                (f"{temperature}", arm, machine, "new", 0): {
                    str(i): [float(ratio)] for i, ratio in enumerate(plain / of)
                }
                for arm, of in ((FULL, branched), ("chains", chains))
            }
            full, without = cells
            found = compared(cells, [without], [full])
            share = tallies["branches"].share_branched()
            medians = [float(np.median(plain / of)) for of in (chains, branched)]
            told = " | ".join(found.told(i) for i in (0, 2))
            lines.append(f"| {machine} | {temperature} | {medians[0]:.3f} | {medians[1]:.3f} | {share:.0%} | {told} |")
    return "\n".join(lines)


def _key(name: str) -> Key:
    temperature, arm, machine, condition, repeat = name.split("|")
    return temperature, arm, machine, condition, int(repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--cells", type=Path, default=Path("ablations.json"))
    parser.add_argument("--arm", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--condition", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--machine", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--details", type=Path, help="a file for the tables of every machine")
    parser.add_argument(
        "--branches", type=int, default=0, help="so many answers of tiny models, drafts of which branch"
    )
    parser.add_argument("--shared-steps", action="store_true", help="what shared draft steps gain by the formula")
    args = parser.parse_args()
    if args.shared_steps:
        print(shared_steps())
        return
    if args.branches:
        print(branches(args.branches, 120))
        return
    cells: dict[str, Any] = json.loads(args.cells.read_text()) if args.cells.exists() else {}
    todo: list[tuple[Path, Key]] = []
    for repeat in range(args.repeats):
        for condition in args.condition:
            for path in args.traces:
                temperature = _stored(path)["temperature"]
                for name in args.arm:
                    arm = ARMS[name]
                    if condition in arm.conditions:
                        todo += [(path, (str(temperature), name, m, condition, repeat)) for m in args.machine]
    known = {key: cells.get("|".join(map(str, key)), {}) for _, key in todo}
    todo = [(path, key) for path, key in todo if missing(_stored(path), key, known[key])]
    if todo and not args.print:
        with ProcessPoolExecutor(args.jobs) as pool:
            running = [pool.submit(work, path, key, known[key]) for path, key in todo]
            for n, each in enumerate(as_completed(running), 1):
                key, found = each.result()
                cells["|".join(map(str, key))] = found
                if n % 20 == 0 or n == len(running):
                    with write_atomically(args.cells, durable=False) as file:
                        file.write(json.dumps(cells).encode())
                    print(f"{n} of {len(running)}", flush=True)
    table = Table(cells)
    print(f"{table.full()}\n\n{table.summary()}")
    if args.details:
        with write_atomically(args.details, durable=False) as file:
            file.write(table.report().encode())


if __name__ == "__main__":
    main()
