"""Measuring t(w), what a pass over w tokens costs, once for each model, engine and machine; and keeping it on disk."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from localspec.backends.base import FEW_ROWS, Context, Model
from localspec.backends.trust import fingerprint
from localspec.controllers.cost_model import CALIBRATED_PAST, Curve, PassTimes
from localspec.controllers.passes import WHOLE, PassKind
from localspec.errors import ModelFileError
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from localspec.system.home import home
from localspec.system.json_store import JsonStore, Key
from localspec.system.machine import cpu_name
from localspec.system.steps import Steps

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)
NARROW = (1, 2, 3, 4)
"""Widths timed three times as often: most passes are this narrow, and what a row costs is a small difference."""

WIDE = 64
"""A width at which the engines' kernels for many tokens are at work: what prefill costs, per token. Of such a pass only
the last row's logits are computed."""

REPEATS = 3
"""Timed passes per width; up to three times as many where they differ much."""

NOISY = 1.15
"""Timings whose median exceeds the minimum by this factor were disturbed: another program had the CPU. Undisturbed
timings spread by 5 to 10 %."""

ENOUGH_S = 45.0
"""After so many seconds nothing is timed again: engines that exist for tests take minutes otherwise."""

QUICK_WIDTHS = (1, 2, 1, 4, 1, 2, 8, 3, 1, 12, 6, 2, 4, 3, 24, WIDE)
QUICK_S = 0.8
"""How long ``calibrating_quickly`` begins new passes of widths beyond 2."""

_MAX_DISTURBED = 3
_LEAST_CTX = 16
"""Room for passes of a few widths over a few tokens."""

_FORMAT = 8


def calibrating(model: Model, n_ctx: int, passes: PassKind = WHOLE) -> Steps[PassTimes]:
    """Measure t(w) of a model in contexts made for it, a pass at a time.

    Args:
        model: the model.
        n_ctx: the size of the context it will be used with; a smaller one is enough here, and a tiny one is not.
        passes: which passes.
    """
    n_ctx = min(max(n_ctx, _LEAST_CTX), CALIBRATED_PAST + WIDE + FEW_ROWS)
    with passes.context(model, n_ctx) as narrow, passes.context(model, n_ctx) as wide:
        return (yield from timing(narrow, wide, passes.tokens(model), passes))


def timing(narrow: Context, wide: Context, tokens: Sequence[int], passes: PassKind = WHOLE) -> Steps[PassTimes]:
    """Measure t(w) on contexts of one size, a pass at a time.

    Other programs can only make a pass longer, so the shortest third of the repeats counts, which favours no width for
    having more of them; where the repeats differ much, there are up to three times as many.

    Args:
        narrow: used and left empty.
        wide: the same for what takes more than ``FEW_ROWS`` rows of logits; the two may be one.
        tokens: any ordinary text's token ids; the first part fills the context, the rest is what is timed.
        passes: which passes.
    """
    n_ctx = narrow.n_ctx
    widths = [w for w in WIDTHS if w + 8 <= n_ctx]
    often = [w for w in NARROW if w in widths]
    prefill = [w for w in (WIDE,) if w + CALIBRATED_PAST <= n_ctx]
    tokens = [tokens[i % len(tokens)] for i in range(CALIBRATED_PAST + max([*widths, *prefill]))]
    fill = min(CALIBRATED_PAST, n_ctx - max(widths))
    for each in {narrow, wide}:
        each.truncate(0)
        for start in range(0, fill, 16):
            passes.feed(each, tokens[start : min(start + 16, fill)], "none")
            yield
        passes.feed(each, tokens[fill : fill + 2])  # the first pass of a kind allocates
        each.truncate(fill)
    samples: dict[int, list[float]] = {width: [] for width in [*widths, *prefill]}
    seconds = 0.0
    for repeat in range(3 * REPEATS):
        if (repeat >= REPEATS and not _is_noisy(samples)) or (repeat and seconds > ENOUGH_S):
            break
        # Prefill takes long, and is less noisy.
        for width in [*often, *widths, *often, *(prefill if repeat < 2 else [])]:
            yield
            used = wide if width > FEW_ROWS else narrow
            ms = _timed(passes, used, tokens[fill : fill + width], last_row=width in prefill)
            used.truncate(fill)
            samples[width].append(ms)
            seconds += ms / 1e3
    for each in {narrow, wide}:
        each.truncate(0)
    return PassTimes({width: _undisturbed(ms) for width, ms in samples.items()}, noisy=_is_noisy(samples))


def calibrating_quickly(model: Model, n_ctx: int, passes: PassKind = WHOLE) -> Steps[PassTimes]:
    """A first curve from a few passes, in about a second: to begin with, until ``calibrating`` had its time.

    The widths that matter most are timed first, and what there is no time for is read off between or beyond them.
    """
    tokens = passes.tokens(model)
    n_ctx = min(n_ctx, WIDE + FEW_ROWS)
    tokens = [tokens[i % len(tokens)] for i in range(n_ctx)]
    samples: dict[int, list[float]] = {}
    with passes.context(model, n_ctx) as context:
        passes.feed(context, tokens[:2])  # the first pass of a kind allocates
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
    return statistics.fmean(sorted(samples)[: max(1, len(samples) // 3)])


def _is_noisy(samples: dict[int, list[float]]) -> bool:
    return sum(map(statistics.median, samples.values())) > NOISY * sum(map(_undisturbed, samples.values()))


class CalibrationCache:
    """Calibrated curves on disk; see ``curve_key`` for what they depend on."""

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
                best = {w: min(ms, known.curve.measured.get(w, ms)) for w, ms in times.curve.measured.items()}
                times.curve = Curve(best)
        curve = {str(w): round(ms, 4) for w, ms in times.curve.measured.items()}
        self._store.put(key, {"ms": curve, "disturbed": n_disturbed, "quick": times.quick})

    def drop(self, key: Key) -> None:
        """Forget a curve, so that it is measured again at the next load."""
        self._store.put(key, {})


def curves() -> CalibrationCache:
    """The curves on disk."""
    return CalibrationCache(home() / "calibration")


def curve_key(model: Model, kv_type: str) -> dict[str, str]:
    """What the times of a model's passes depend on; of which kind they are follows from the file."""
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
