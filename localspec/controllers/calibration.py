"""Measuring t(w), what a pass over w tokens costs, once for each model, engine and machine; and keeping it on disk.

A curve counts for good once rounds of it agree that no other program disturbed. Until then it is provisional: used,
measured again in idle time, and nothing is chosen for good by it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localspec.backends.base import FEW_ROWS, Context, Model, Wanted
from localspec.backends.trust import CHECK_TEXT
from localspec.controllers.cost_model import CALIBRATED_PAST, Curve, PassTimes
from localspec.errors import ModelFileError
from localspec.model_files.gguf import GGUFFile, fingerprint
from localspec.model_files.kv_memory import kv_shape
from localspec.system.files import JsonStore, Key, home
from localspec.system.machine import BUSY, CPUTimes, busy_share, cpu_name, others_share
from localspec.system.steps import Steps

# Which passes are timed: of a whole model over tokens, of a head over rows, of a target's first layers.


Feed = Callable[[Context, Sequence[int], Wanted], object]


@dataclass(frozen=True, slots=True)
class PassKind:
    """A kind of pass that is timed: in which memory, over which tokens, and how it is run."""

    context: Callable[[Model, int], Context] = lambda model, n_ctx: model.new_context(n_ctx)
    tokens: Callable[[Model], list[int]] = lambda model: model.tokenize(CHECK_TEXT, add_special=True) or [0]
    feed: Feed = lambda memory, tokens, logits: memory.decode(tokens, logits)


WHOLE = PassKind()  # a whole model, over an ordinary text


WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)
# Widths timed three times as often: most passes are this narrow, and what a row costs is a small difference.
NARROW = (1, 2, 3, 4)

# A width at which the engines' kernels for many tokens are at work: what prefill costs, per token. Of such a pass only
# the last row's logits are computed.
WIDE = 64

REPEATS = 3  # Rounds of timed passes; up to three times as many where they do not agree

# Timings whose median exceeds the minimum by this factor were disturbed: another program had the CPU. Undisturbed
# timings spread by 5 to 10 %. Two measurements that differ by less agree.
NOISY = 1.15

# A pass that takes this many times as long as passes over its parts, or as a wider one, is doubted: it takes twice as
# many rounds for that to be believed. Engines have such steps where they change kernels, and outliers look the same.
OUT_OF_LINE = 1.25

ENOUGH_S = 45.0  # After so many seconds nothing is timed again: engines that exist for tests take minutes otherwise
SPAN_S = 0.25  # The least time over which a share of the CPUs is known: the system counts in hundredths of a second

QUICK_WIDTHS = (1, 2, 1, 4, 1, 2, 8, 3, 1, 12, 6, 2, 4, 3, 24, WIDE)
QUICK_S = 0.8  # How long ``calibrating_quickly`` begins new passes of widths beyond 2
_LEAST_CTX = 16  # Room for passes of a few widths over a few tokens

_FORMAT = 9

Samples = dict[int, list[float]]  # Milliseconds of single passes, by width


def calibrating(model: Model, n_ctx: int, passes: PassKind = WHOLE) -> Steps[PassTimes]:
    """Measure t(w) of a model in contexts made for it, a pass at a time; see ``Timer``."""
    with timer(model, n_ctx, passes) as one:
        yield from in_turns([one])
        return one.times()


@contextmanager
def timer(model: Model, n_ctx: int, passes: PassKind = WHOLE) -> Iterator[Timer]:
    n_ctx = min(max(n_ctx, _LEAST_CTX), CALIBRATED_PAST + WIDE + FEW_ROWS)
    with passes.context(model, n_ctx) as narrow, passes.context(model, n_ctx) as wide:
        yield Timer(narrow, wide, passes.tokens(model), passes)


def in_turns(timers: Sequence[Timer]) -> Steps[None]:
    """Take rounds of several models in turns, in an order that is reversed each time: what drifts favours none."""
    for each in timers:
        yield from each.beginning()
    order = list(timers)
    while not all(each.enough for each in timers):
        for each in order:
            yield from each.round()
        order.reverse()
    for each in timers:
        each.end()


@dataclass(slots=True)
class _Round:
    """One pass of every width, some of them more; and what the CPUs did meanwhile."""

    samples: Samples
    before: CPUTimes
    after: CPUTimes

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at


class Timer:
    """Times the passes of one model, in rounds over all widths.

    Other programs can only make a pass longer, so the shortest third of the repeats counts, which favours no width for
    having more of them. Rounds in which others used the CPUs do not count where there are two without.

    ``narrow`` and ``wide`` are used and left empty, the latter for more than ``FEW_ROWS`` rows of logits; the two may
    be one. The first of the ``tokens`` of any ordinary text fill the context, the others are timed.
    """

    def __init__(self, narrow: Context, wide: Context, tokens: Sequence[int], passes: PassKind = WHOLE) -> None:
        n_ctx = narrow.n_ctx
        widths = [w for w in WIDTHS if w + 8 <= n_ctx]
        often = [w for w in NARROW if w in widths]
        prefill = [w for w in (WIDE,) if w + CALIBRATED_PAST <= n_ctx]
        self._order = [*often, *widths, *often, *prefill]
        self._tokens = [tokens[i % len(tokens)] for i in range(CALIBRATED_PAST + max(self._order))]
        self._fill = min(CALIBRATED_PAST, n_ctx - max(widths))
        self._narrow, self._wide, self._passes = narrow, wide, passes
        self._rounds: list[_Round] = []

    def beginning(self) -> Steps[None]:
        for each in {self._narrow, self._wide}:
            each.truncate(0)
            for start in range(0, self._fill, 16):
                self._passes.feed(each, self._tokens[start : min(start + 16, self._fill)], "none")
                yield
            # The first pass of a kind allocates.
            self._passes.feed(each, self._tokens[self._fill : self._fill + 2], "all")
            each.truncate(self._fill)

    def round(self) -> Steps[None]:
        samples, before = Samples(), CPUTimes.now()
        for width in self._order:
            yield
            used = self._wide if width > FEW_ROWS else self._narrow
            tokens = self._tokens[self._fill : self._fill + width]
            ms = _timed(self._passes, used, tokens, last_row=width == WIDE)
            used.truncate(self._fill)
            samples.setdefault(width, []).append(ms)
        self._rounds.append(_Round(samples, before, CPUTimes.now()))

    def end(self) -> None:
        for each in {self._narrow, self._wide}:
            each.truncate(0)

    @property
    def enough(self) -> bool:
        n = len(self._rounds)
        timed = sum(ms for each in self._rounds for widths in each.samples.values() for ms in widths) / 1e3
        if n >= 3 * REPEATS or (n and timed > ENOUGH_S):
            return True
        counted, n_quiet = self._counted()
        if n < REPEATS or n_quiet == 1 or not _agree(counted):
            return False
        return len(counted[1]) >= 2 * REPEATS * self._order.count(1) or not _out_of_line(counted)

    def times(self) -> PassTimes:
        """What was measured; ``noisy`` unless at least two undisturbed rounds agree."""
        counted, n_quiet = self._counted()
        curve = {width: _undisturbed(ms) for width, ms in counted.items()}
        others = others_share((each.before, each.after) for each in self._rounds) or 0.0
        noisy = n_quiet < 2 or not _agree(counted)
        return PassTimes(_bounded(curve) if noisy else curve, noisy=noisy, others_share=others)

    def quiet_rounds(self) -> list[PassTimes]:
        """Each undisturbed round by itself."""
        curves = [{width: _undisturbed(ms) for width, ms in each.samples.items()} for each in self._quiet()]
        return [PassTimes(curve, noisy=True) for curve in curves]

    def _counted(self) -> tuple[Samples, int]:
        quiet = self._quiet()
        counted = Samples()
        for each in quiet if len(quiet) > 1 else self._rounds:
            for width, ms in each.samples.items():
                counted.setdefault(width, []).extend(ms)
        return counted, len(quiet)

    def _quiet(self) -> list[_Round]:
        groups: list[list[_Round]] = [[]]
        for each in self._rounds:  # rounds of a tiny model are too short to know
            if sum(known.seconds for known in groups[-1]) >= SPAN_S:
                groups.append([])
            groups[-1].append(each)
        if len(groups) > 1 and sum(each.seconds for each in groups[-1]) < SPAN_S:
            groups[-2:] = [groups[-2] + groups[-1]]
        if sum(each.seconds for each in groups[0]) < SPAN_S:
            return self._rounds
        busy = [others_share((each.before, each.after) for each in group) or 0.0 for group in groups]
        return [each for group, share in zip(groups, busy, strict=True) if share < BUSY for each in group]


def calibrating_quickly(model: Model, n_ctx: int, passes: PassKind = WHOLE) -> Steps[PassTimes]:
    """A first curve from a few passes, in about a second, the widths that matter most first."""
    tokens = passes.tokens(model)
    n_ctx = min(n_ctx, WIDE + FEW_ROWS)
    tokens = [tokens[i % len(tokens)] for i in range(n_ctx)]
    samples: dict[int, list[float]] = {}
    with passes.context(model, n_ctx) as context:
        passes.feed(context, tokens[:2], "all")  # the first pass of a kind allocates
        context.truncate(1)
        began = time.perf_counter()
        for width in [w for w in QUICK_WIDTHS if w < n_ctx]:
            if width not in (1, 2) and time.perf_counter() - began > QUICK_S:
                break
            yield
            ms = _timed(passes, context, tokens[1 : 1 + width], last_row=width > FEW_ROWS)
            samples.setdefault(width, []).append(ms)
            context.truncate(1)
    return PassTimes({width: min(ms) for width, ms in samples.items()}, noisy=True, quick=True)


def _timed(passes: PassKind, context: Context, tokens: Sequence[int], *, last_row: bool) -> float:
    started = time.perf_counter()
    passes.feed(context, tokens, "last" if last_row else "all")
    return (time.perf_counter() - started) * 1e3


def _undisturbed(samples: list[float]) -> float:
    shortest = sorted(samples)[: max(1, len(samples) // 3)]
    return statistics.fmean(ms for ms in shortest if ms <= NOISY * shortest[0])


def _agree(samples: Samples) -> bool:
    for ms in samples.values():
        least = sorted(ms)[:2]
        if len(least) < 2 or least[1] > NOISY * least[0]:
            return False
    return sum(map(statistics.median, samples.values())) <= NOISY * sum(map(_undisturbed, samples.values()))


def _out_of_line(samples: Samples) -> bool:
    """Whether a width takes longer than passes over its parts, or than a wider one."""
    curve = {width: _undisturbed(ms) for width, ms in sorted(samples.items())}
    for width, ms in curve.items():
        parts = [-(-width // part) * curve[part] for part in curve if part < width]
        wider = [curve[other] for other in curve if other > width]
        if ms > OUT_OF_LINE * min([*parts, *wider]):
            return True
    return False


def _bounded(curve: dict[int, float]) -> dict[int, float]:
    """A disturbed curve, no point of it longer than passes over its parts or a wider one: others only lengthen."""
    bounded: dict[int, float] = {}
    for width in sorted(curve):
        parts = [-(-width // part) * ms for part, ms in bounded.items()]
        bounded[width] = min([ms for other, ms in curve.items() if other >= width] + parts)
    return bounded


class CalibrationCache:
    """Calibrated curves on disk; see ``curve_key`` for what they depend on."""

    def __init__(self, folder: Path) -> None:
        self._store = JsonStore(folder, _FORMAT)

    def get(self, key: Key) -> PassTimes | None:
        """The stored curve, if there is one. One that is ``noisy`` is provisional: measure again, and ``put`` keeps the
        best of both."""
        stored = self._store.get(key) or {}
        try:
            base = {int(width): float(ms) for width, ms in stored["ms"].items()}
            others, quick = float(stored["others_share"]), bool(stored["quick"])
            noisy = quick or int(stored["disturbed"]) > 0
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if 1 not in base or any(not (math.isfinite(ms) and ms > 0) for ms in base.values()):
            return None
        return PassTimes(base, noisy=noisy, quick=quick, others_share=others)

    def is_worth_waiting_for(self, key: Key) -> bool:
        """Whether a provisional curve should be measured again before an answer: not where that was done ``REPEATS``
        times, nor where it would be disturbed again."""
        stored = self._store.get(key) or {}
        if bool(stored.get("quick")) or not stored:
            return True
        return int(stored.get("disturbed", 0)) < REPEATS and busy_share(SPAN_S) < BUSY

    def put(self, key: Key, times: PassTimes) -> None:
        """Store a curve, if the disk takes it. A provisional one replaces no other; of two the shortest times are kept,
        and where they agree undisturbed, the result is provisional no more."""
        known, n_disturbed = self.get(key), 0
        if times.noisy and known is not None and not known.quick:
            if times.quick or not known.noisy:
                return
            both = {w: (ms, known.curve.measured.get(w, ms)) for w, ms in times.curve.measured.items()}
            quiet = max(times.others_share, known.others_share) < BUSY
            agree = quiet and all(max(pair) <= NOISY * min(pair) for pair in both.values())
            n_disturbed = 0 if agree else 1 + int((self._store.get(key) or {})["disturbed"])
            times.curve, times.noisy = Curve({w: min(pair) for w, pair in both.items()}), not agree
        elif times.noisy and not times.quick:
            n_disturbed = 1
        curve = {str(w): round(ms, 4) for w, ms in times.curve.measured.items()}
        value = {"ms": curve, "disturbed": n_disturbed, "quick": times.quick}
        self._store.put(key, value | {"others_share": times.others_share})

    def drop(self, key: Key) -> None:
        self._store.put(key, {})

    def fastest(self, path: Path) -> tuple[float, str] | None:
        """The time of a one-token pass of a model file on this machine's CPU [ms], and the engine that it was measured
        with: the shortest of curves that count for good."""
        known = {"machine": cpu_name(), "device": "cpu", "file": fingerprint(path)}
        keys = [key for key, _ in self._store.items() if known.items() <= key.items()]
        counting = [(key["engine"], times) for key in keys if (times := self.get(key)) and not times.noisy]
        return min(((times.curve.measured[1], engine) for engine, times in counting), default=None)


def curves() -> CalibrationCache:
    return CalibrationCache(home() / "calibration")


def curve_key(model: Model, kv_type: str) -> dict[str, str]:
    key = {
        "machine": cpu_name(),
        "engine": model.engine,
        "device": model.capabilities.device,
        "file": fingerprint(model.path),
        "threads": str(model.n_threads),
        "kv": kv_type,
    }
    return key | ({"placement": model.placement} if model.placement else {})


def growth(model: Model, kv_type: str) -> float:
    """By what share a pass grows with every token in the context: keys and values read, over weights read."""
    try:
        with GGUFFile(model.path) as gguf:
            per_token = kv_shape(gguf).bytes(1, kv_type)
    except ModelFileError:  # a model that is no file, as the reference backend's can be
        return 0.0
    return per_token / model.size_bytes if model.size_bytes else 0.0
