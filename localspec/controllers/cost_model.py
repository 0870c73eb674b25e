"""What a pass costs: t(w), the measured time of a pass over w tokens, calibrated once and corrected by every round."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localspec.backends.base import FEW_ROWS, Context, Model
from localspec.backends.trust import CHECK_TEXT, fingerprint
from localspec.errors import ModelFileError
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from localspec.system.home import home
from localspec.system.json_store import JsonStore, Key
from localspec.system.machine import cpu_name
from localspec.system.steps import Steps, exhaust

CALIBRATED_PAST = 64
CALIBRATED_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)
WIDE = 64
"""A width at which the engines' kernels for many tokens are at work: what reading a text costs, per token. Of what is
read only the last row's logits are computed."""

NOISY = 1.15
"""Passes whose median is this many times the shortest were disturbed: another program had the CPU."""

NARROW = (1, 2, 3, 4)
"""Widths timed three times as often: most passes are this narrow, and what a row costs is a small difference."""

ONCE_MOST = math.log(2.0)
"""One pass counts at most as if it had taken twice as long as expected, or half."""

NOISE = 0.15
"""Differences under this (of logarithms) are noise: passes of one width spread by 5 to 10 % here."""

AGREED_SHARE = 0.7
AGREED_MOST = math.log(4.0)
"""Of what two passes in a row agree on, the share that is believed at once, and the most."""

TRIM_KEPT = 0.99
"""Of the correction of one width alone, what is left after a pass of another width: half after 69 passes. A width that
was found slow is not used, and would otherwise be taken for slow for ever."""

ENOUGH_S = 45.0
"""After so many seconds nothing is timed again: engines that exist for tests take minutes otherwise."""

QUICK_WIDTHS = (1, 2, 1, 4, 1, 2, 8, 3, 1, 12, 6, 2, 4, 3, 24, WIDE)
QUICK_S = 0.8
"""How long ``calibrate_quickly`` begins new passes of widths beyond 2."""

_MAX_DISTURBED = 3
_LEAST_CTX = 16
"""Room for passes of a few widths over a few tokens."""

_FORMAT = 7


@dataclass(slots=True)
class PassTimes:
    """t(w) of one model in one engine, in milliseconds.

    The calibrated curve is kept as measured, steps and dips included, and read by linear interpolation between
    measured widths. A longer context makes every pass longer, by the share that reading its keys and values has in
    reading the weights. Corrections follow what is observed. Reading the weights is bound by memory, further rows by
    arithmetic, and other programs take of each what they will: ``scale`` moves all widths together, ``slope`` what
    further rows cost, ``trim`` one width alone, and ``beyond`` widths that were not calibrated.

    Attributes:
        base: calibrated milliseconds by width, with ``CALIBRATED_PAST`` tokens in the memory; at least width 1.
        growth: relative increase per token in the memory: its bytes in the KV cache over the bytes of the weights.
        n_past: tokens in the memory now.
        scale, slope, trim, beyond: the corrections; 1 is none.
        noisy: whether the calibration was disturbed, and should be repeated when there is time.
        quick: whether it comes of a few passes only, see ``calibrate_quickly``.
    """

    base: dict[int, float]
    growth: float = 0.0
    n_past: int = CALIBRATED_PAST
    scale: float = 1.0
    slope: float = 1.0
    beyond: float = 1.0
    trim: dict[int, float] = field(default_factory=dict)
    noisy: bool = False
    quick: bool = False
    _n_observed: int = 0
    _n_recent: int = 0
    _last: float = 0.0
    _drift: float = 0.0

    def __call__(self, width: int) -> float:
        """Expected milliseconds of a pass over ``width`` tokens; 0 for no tokens."""
        if width <= 0:
            return 0.0
        one = self._curve(1)
        longer = (1.0 + self.growth * self.n_past) / (1.0 + self.growth * CALIBRATED_PAST)
        ms = (one + self.slope * (self._curve(width) - one)) * longer * self.scale
        return ms * (self.beyond if width > max(self.base) else self.trim.get(width, 1.0))

    def _curve(self, width: int) -> float:
        known = self.base
        if width in known:
            return known[width]
        widths = sorted(known)
        if width > widths[-1]:
            if len(widths) == 1:
                return known[widths[-1]] * width / widths[-1]
            # Beyond what was measured: the mean slope of the whole curve; the last step alone may be a plateau.
            slope = (known[widths[-1]] - known[widths[0]]) / (widths[-1] - widths[0])
            return known[widths[-1]] + slope * (width - widths[-1])
        above = next(w for w in widths if w > width)
        below = max(w for w in widths if w < width)
        share = (width - below) / (above - below)
        return known[below] * (1 - share) + known[above] * share

    def begin(self) -> None:
        """Another answer begins."""
        self._n_recent, self._last = 0, 0.0

    def observe(self, width: int, ms: float) -> None:
        """Correct the curve by one measured pass.

        One pass says little: it moves the estimate by a tenth of the difference, and an outlier counts as a factor of
        two at most. Two in a row that both differ by more than noise are another machine, as when a neighbour has taken
        the CPU, and what they agree on is believed at once.
        """
        expected = self(width)
        if expected <= 0 or ms <= 0:
            return
        wide = width > max(self.base)
        surprise = math.log(ms / expected)
        agreed = min(abs(surprise), abs(self._last), AGREED_MOST) if surprise * self._last > 0 else 0.0
        quick = math.copysign(AGREED_SHARE * agreed, surprise) if agreed > NOISE else 0.0
        once = min(ONCE_MOST, max(-ONCE_MOST, surprise))
        self._n_recent += 1
        if wide:
            self.beyond = min(3.0, max(0.33, self.beyond * math.exp(0.3 * once)))
            return
        self._n_observed += 1
        self._drift += (math.log(ms / self._curve(width)) - self._drift) / min(self._n_observed, 500)
        change = max(quick, (0.1 if width == 1 else 0.08) * once, key=abs)
        self.scale *= math.exp(change)
        self._last = surprise - change
        if width == 1:
            self.slope **= 0.98  # nothing is learned of it now, so it drifts back to what was calibrated
        else:
            self.slope = min(2.5, max(0.4, self.slope * math.exp(0.06 * once)))
        for known in self.trim:
            if known != width:  # the same
                self.trim[known] **= TRIM_KEPT
        if width > 1:
            self.trim[width] = min(1.5, max(0.67, self.trim.get(width, 1.0) * math.exp(0.04 * once)))

    @property
    def is_recent(self) -> bool:
        """Whether passes of this answer have shown what they cost now: two, see ``observe``."""
        return self._n_recent >= 2

    def replace(self, measured: PassTimes) -> None:
        """Go on from another calibration of the same passes: what was corrected in the old one does not hold for it."""
        self.base, self.noisy, self.quick = measured.base, measured.noisy, measured.quick
        self.scale = self.slope = self.beyond = 1.0
        self.trim = {}
        self._n_observed, self._drift = 0, 0.0

    @property
    def fits(self) -> bool:
        """False when hundreds of passes took, on average, over 1.5 times or under two thirds of what was calibrated."""
        return self._n_observed < 300 or abs(self._drift) < math.log(1.5)


def calibrate_model(model: Model, n_ctx: int, *, tick: Callable[[], None] = lambda: None) -> PassTimes:
    """Measure t(w) of a model in contexts made for it; see ``calibrate`` and ``FEW_ROWS``.

    Args:
        model: the model.
        n_ctx: the size of the context it will be used with; a smaller one is enough here, and a tiny one is not.
        tick: see ``calibrate``.
    """
    return exhaust(calibrating_model(model, n_ctx), tick)


def calibrating_model(model: Model, n_ctx: int) -> Steps[PassTimes]:
    """As ``calibrate_model``, a pass at a time."""
    tokens = model.tokenize(CHECK_TEXT, add_special=True) or [0]
    n_ctx = min(max(n_ctx, _LEAST_CTX), CALIBRATED_PAST + WIDE + FEW_ROWS)
    with model.new_context(n_ctx) as narrow, model.new_context(n_ctx) as wide:
        return (yield from calibrating(narrow, tokens, wide=wide))


def calibrate_quickly(model: Model, n_ctx: int, *, tick: Callable[[], None] = lambda: None) -> PassTimes:
    """A first curve from a few passes, in about a second: to begin with, until ``calibrate_model`` had its time.

    The widths that matter most are timed first, and what there is no time for is read off between or beyond them.
    """
    tokens = model.tokenize(CHECK_TEXT, add_special=True) or [0]
    n_ctx = min(n_ctx, WIDE + FEW_ROWS)
    tokens = [tokens[i % len(tokens)] for i in range(n_ctx)]
    samples: dict[int, list[float]] = {}
    with model.new_context(n_ctx) as context:
        context.decode(tokens[:2])  # the first pass of a kind allocates
        context.truncate(1)
        began = time.perf_counter()
        for width in [w for w in QUICK_WIDTHS if w < n_ctx]:
            if width not in (1, 2) and time.perf_counter() - began > QUICK_S:
                break
            tick()
            started = time.perf_counter()
            context.decode(tokens[1 : 1 + width], "last" if width > FEW_ROWS else "all")
            samples.setdefault(width, []).append((time.perf_counter() - started) * 1e3)
            context.truncate(1)
    return PassTimes({width: min(ms) for width, ms in samples.items()}, noisy=True, quick=True)


def calibrate(
    context: Context,
    tokens: Sequence[int],
    *,
    wide: Context | None = None,
    repeats: int = 3,
    tick: Callable[[], None] = lambda: None,
) -> PassTimes:
    """Measure t(w) on a context.

    Other programs can only make a pass longer, so the shortest third of the repeats counts, which favours no width for
    having more of them; where the repeats differ much, there are up to three times as many.

    Args:
        context: used and left empty.
        tokens: any ordinary text's token ids; the first part fills the context, the rest is what is timed.
        wide: another context of the same size, for what takes more than ``FEW_ROWS`` rows of logits; None: the same.
        repeats: timed passes per width; of ``NARROW`` ones three times as many.
        tick: called between passes (for progress); whatever it raises ends the calibration.
    """
    return exhaust(calibrating(context, tokens, wide=wide, repeats=repeats), tick)


def calibrating(
    context: Context, tokens: Sequence[int], *, wide: Context | None = None, repeats: int = 3
) -> Steps[PassTimes]:
    """As ``calibrate``, a pass at a time."""
    wide = wide or context
    widths = [w for w in CALIBRATED_WIDTHS if w + 8 <= context.n_ctx]
    narrow = [w for w in NARROW if w in widths]
    reading = [w for w in (WIDE,) if w + CALIBRATED_PAST <= context.n_ctx]
    tokens = [tokens[i % len(tokens)] for i in range(CALIBRATED_PAST + max([*widths, *reading]))]
    fill = min(CALIBRATED_PAST, context.n_ctx - max(widths))
    for each in {context, wide}:
        each.truncate(0)
        for start in range(0, fill, 16):
            each.decode(tokens[start : min(start + 16, fill)], "none")
            yield
        each.decode(tokens[fill : fill + 2])  # the first pass of a kind allocates
        each.truncate(fill)
    samples: dict[int, list[float]] = {width: [] for width in [*widths, *reading]}
    seconds = 0.0
    for repeat in range(3 * repeats):
        if (repeat >= repeats and not _is_noisy(samples)) or (repeat and seconds > ENOUGH_S):
            break
        # Reading takes long, and is less noisy.
        for width in [*narrow, *widths, *narrow, *(reading if repeat < 2 else [])]:
            yield
            used = wide if width > FEW_ROWS else context
            started = time.perf_counter()
            used.decode(tokens[fill : fill + width], "last" if width in reading else "all")
            samples[width].append((time.perf_counter() - started) * 1e3)
            used.truncate(fill)
            seconds += time.perf_counter() - started
    for each in {context, wide}:
        each.truncate(0)
    times = PassTimes({width: _undisturbed(times) for width, times in samples.items()})
    times.noisy = _is_noisy(samples)
    return times


def _undisturbed(samples: list[float]) -> float:
    return statistics.fmean(sorted(samples)[: max(1, len(samples) // 3)])


def _is_noisy(samples: dict[int, list[float]]) -> bool:
    return sum(map(statistics.median, samples.values())) > NOISY * sum(map(_undisturbed, samples.values()))


class CalibrationCache:
    """Calibrated curves on disk.

    The key names everything the times depend on: machine, engine and version, file, threads, cache type.
    """

    def __init__(self, folder: Path) -> None:
        self._store = JsonStore(folder, _FORMAT)

    def get(self, key: Key) -> PassTimes | None:
        """The stored curve; None where there is none, it cannot be read, or was found not to fit any more.

        One that was disturbed is ``noisy``: measure again, and ``put`` keeps the best of both.
        """
        stored = self._store.get(key) or {}
        try:
            base = {int(width): float(ms) for width, ms in stored["ms"].items()}
            n_disturbed, quick = int(stored.get("disturbed", 0)), bool(stored.get("quick"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if 1 not in base or any(not (math.isfinite(ms) and ms > 0) for ms in base.values()):
            return None
        return PassTimes(base, noisy=quick or 0 < n_disturbed < _MAX_DISTURBED, quick=quick)

    def put(self, key: Key, times: PassTimes) -> None:
        """Store a curve; a full or read-only disk only means that it is measured again next time.

        Of disturbed measurements the shortest times are kept, and after three that is taken for the machine's nature.
        """
        known, n_disturbed = self.get(key), 0
        if times.noisy and not times.quick:
            n_disturbed = 1
            if known is not None and known.noisy and not known.quick:
                n_disturbed += int((self._store.get(key) or {})["disturbed"])
                times.base = {width: min(ms, known.base.get(width, ms)) for width, ms in times.base.items()}
        curve = {str(w): round(ms, 4) for w, ms in times.base.items()}
        self._store.put(key, {"ms": curve, "disturbed": n_disturbed, "quick": times.quick})

    def drop(self, key: Key) -> None:
        """Forget a curve, so that it is measured again at the next load."""
        self._store.put(key, {})


def growth(model: Model, kv_type: str) -> float:
    """By what share a pass grows with every token in the memory: keys and values read, over weights read."""
    try:
        with GGUFFile(model.path) as gguf:
            per_token = kv_shape(gguf).bytes(1, kv_type)
    except ModelFileError:  # a model that is no file, as the reference backend's can be
        return 0.0
    return per_token / model.size_bytes if model.size_bytes else 0.0


def curve_key(model: Model, kv_type: str) -> dict[str, str]:
    """What the times of a model's passes depend on."""
    return {
        "machine": cpu_name(),
        "engine": model.engine,
        "device": model.capabilities.device,
        "file": fingerprint(model.path),
        "threads": str(model.n_threads),
        "kv": kv_type,
    }


def curves() -> CalibrationCache:
    """The curves on disk."""
    return CalibrationCache(home() / "calibration")
