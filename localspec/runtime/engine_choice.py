"""Which engine is faster for a file here: measured when there is time, remembered, and followed by ``auto``.

Where several engines on the CPU are usable for a file, t(w) of both is kept. What counts is the time of a nominal
answer: reading a prompt, then decoding at the best fixed draft length, plain decoding included, with draft tokens that
are accepted as often and cost as much as those of a small draft model typically do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from localspec.backends.base import Model
from localspec.backends.registry import engine_module, unavailable_reason
from localspec.backends.trust import fingerprint
from localspec.controllers.break_even import best_speedup
from localspec.controllers.calibration import WIDE, calibrating, curve_key, curves
from localspec.controllers.cost_model import PassTimes
from localspec.system.home import home
from localspec.system.json_store import JsonStore
from localspec.system.machine import cpu_name, default_threads
from localspec.system.steps import Steps

ENGINES = ("ik-llama", "llama-cpp")
N_PROMPT, N_ANSWER = 256, 192
"""Tokens of a nominal turn. Those of the 52 recorded answers have 130 and 160; a chat's second turn reads more."""

ACCEPTANCE, STEP_SHARE = 0.7, 0.3
"""Of a small draft model of the same family: its acceptance rate, and a step's share of t(1). Qwen2.5-Coder 1.5B with
its 0.5B: 0.80 on the recorded answers, 0.77 on the text in ``draft_choice``, and 0.28 to 0.31 on two machines."""

LENGTHS = range(9)

MARGIN = 1.05
"""How much faster an engine must be to be taken before the one that is usually the faster. Speeds of plain decoding
spread by 5 to 10 % from answer to answer."""


def nominal_ms(times: PassTimes) -> float:
    """Time of a nominal answer, its prompt included."""
    prefill = N_PROMPT * times(WIDE) / WIDE
    return prefill + N_ANSWER * times(1) / best_speedup(ACCEPTANCE, LENGTHS, times, STEP_SHARE * times(1))


def draft_gain(times: PassTimes) -> float:
    """How much sooner a nominal answer is there with a small draft model of the same family, which reads the prompt
    too, than plainly.

    By what passes of Qwen2.5-Coder 1.5B took on two machines, where a second row costs 0.14 and 0.25 of the first, it
    is 1.04 and 0.97. On the latter ``auto``, with a head beside it, sent no token of the 0.5B in 34 answers of 256.
    """
    prefill, answer = N_PROMPT * times(WIDE) / WIDE, N_ANSWER * times(1)
    faster = best_speedup(ACCEPTANCE, LENGTHS, times, STEP_SHARE * times(1))
    return (prefill + answer) / ((1 + STEP_SHARE) * prefill + answer / faster)


def engines_measuring(n_ctx: int, kv_type: str) -> Callable[[Model], Steps[None]]:
    """What measures a model on an engine and remembers the figure; see ``SecondOpinion``."""

    def measuring(model: Model) -> Steps[None]:
        key = curve_key(model, kv_type)
        times = curves().get(key)
        if times is None or times.quick:
            times = yield from calibrating(model, n_ctx)
            curves().put(key, times)
        remember(model, kv_type, times)

    return measuring


def remember(model: Model, kv_type: str, times: PassTimes) -> None:
    """Keep what a nominal answer takes on a model's engine."""
    store, key = _store(), _key(fingerprint(model.path), model.n_threads, kv_type)
    stored = store.get(key) or {}
    figures = {**stored.get("ms", {}), model.backend: round(nominal_ms(times), 1)}
    plain = {**stored.get("plain", {}), model.backend: round(1e3 / times(1), 2)}
    store.put(key, {**stored, "ms": figures, "plain": plain})


def measured(path: Path, n_threads: int | None, kv_type: str) -> dict[str, float]:
    """Engine -> time of a nominal answer [ms], where it was measured with the present versions of all engines."""
    return _figures(_store().get(_key(fingerprint(path), n_threads or default_threads(), kv_type)))


def ordered(
    names: Sequence[str],
    path: Path,
    *,
    n_threads: int | None = None,
    kv_type: str = "f16",
    on_gpu: bool = False,
    warn: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Engines in the order in which to try them.

    Args:
        names: in the usual order, see ``backends.candidates``.
        path: the file.
        n_threads, kv_type: as it will be loaded.
        on_gpu: whether one of them would run it on a GPU: what was measured on the CPU says nothing then.
        warn: takes a line when the order differs from the usual for the first time.
    """
    if on_gpu or not all(name in names for name in ENGINES):
        return list(names)
    store, key = _store(), _key(fingerprint(path), n_threads or default_threads(), kv_type)
    stored = store.get(key) or {}
    figures = _figures(stored)
    usual = [name for name in names if name in ENGINES]
    if any(name not in figures for name in usual):
        return list(names)
    first, second = usual
    if figures[first] <= MARGIN * figures[second]:
        return list(names)
    if not stored.get("told"):
        store.put(key, {**stored, "told": True})
        share = figures[first] / figures[second]
        warn(f"{second} answers {share:.2f} times as fast as {first} with {path.name} here, as measured: auto uses it")
    return [{first: second, second: first}.get(name, name) for name in names]


def _figures(stored: dict[str, Any] | None) -> dict[str, float]:
    found = (stored or {}).get("ms")
    if not isinstance(found, dict):
        return {}
    return {str(name): float(ms) for name, ms in found.items() if isinstance(ms, int | float) and ms > 0}


def _store() -> JsonStore:
    return JsonStore(home() / "engines", 1)


def _key(digest: str, n_threads: int, kv_type: str) -> dict[str, str]:
    return {
        "machine": cpu_name(),
        "engines": ", ".join(_versions()),
        "file": digest,
        "threads": str(n_threads),
        "kv": kv_type,
    }


def _versions() -> list[str]:
    usable = [name for name in ENGINES if unavailable_reason(name) is None]
    return [f"{name} {engine_module(name).binding().version}" for name in usable]
