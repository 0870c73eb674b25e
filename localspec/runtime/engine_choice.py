"""Which engine is faster for a file here: measured when there is time, remembered, and followed by ``auto``.

Where several engines on the CPU are usable for a file, their passes are timed in turns. What counts is the time of a
nominal answer: reading a prompt, then decoding at the best fixed draft length, plain decoding included, with draft
tokens that are accepted as often and cost as much as those of a small draft model typically do.

The usual engine stays unless rounds in which nobody else used the CPUs agree that the other is faster, by more than
unnoticed load explains. What was measured beside other programs is provisional: it chooses nothing, and is measured
again in idle time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from localspec.backends.base import Model
from localspec.backends.registry import engine_module, unavailable_reason
from localspec.backends.trust import fingerprint
from localspec.controllers.break_even import best_speedup
from localspec.controllers.calibration import NOISY, WIDE, Timer, curve_key, curves, in_turns, timer
from localspec.controllers.cost_model import PassTimes
from localspec.system.home import home
from localspec.system.json_store import JsonStore
from localspec.system.machine import cpu_name, default_threads
from localspec.system.steps import Steps
from localspec.system.usage import BUSY

ENGINES = ("ik-llama", "llama-cpp")
N_PROMPT, N_ANSWER = 256, 192
"""Tokens of a nominal turn. Those of the 52 recorded answers have 130 and 160; a chat's second turn reads more."""

ACCEPTANCE, STEP_SHARE = 0.7, 0.3
"""Of a small draft model of the same family: its acceptance rate, and a step's share of t(1). Qwen2.5-Coder 1.5B with
its 0.5B: 0.80 on the recorded answers, 0.77 on the text in ``draft_choice``, and 0.28 to 0.31 on two machines."""

LENGTHS = range(9)

MARGIN = 1 + BUSY
"""How much faster an engine must be to be taken before the one that is usually the faster: load up to ``BUSY`` is not
noticed. Speeds of plain decoding spread by 5 to 10 % from answer to answer."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Engines timed in turns with one file.

    Attributes:
        day: when, as people write it.
        ms: engine -> time of a nominal answer [ms], by the passes that count.
        rounds: engine -> the same by each round in which nobody else used the CPUs.
        others_share: of the CPUs' time, used by other programs meanwhile.
    """

    day: str
    ms: dict[str, float]
    rounds: dict[str, list[float]]
    others_share: float

    @property
    def provisional(self) -> bool:
        """Whether nothing follows from it: an engine does not have two quiet rounds that agree."""
        return any(len(found) < 2 or found[1] > NOISY * found[0] for found in map(sorted, self._of_all()))

    def prefers(self, other: str, usual: str) -> bool:
        """Whether an engine is to be taken in place of the usual one."""
        if self.provisional:
            return False
        # The best round of the usual one against the second best of the other: an outlier on either side keeps it.
        return min(self.rounds[usual]) > MARGIN * sorted(self.rounds[other])[1]

    def _of_all(self) -> list[list[float]]:
        return [self.rounds.get(name, []) for name in ENGINES]


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


def engines_comparing(n_ctx: int, kv_type: str) -> Callable[[Model, Model], Steps[None]]:
    """What times a file on two engines in turns, and remembers what was found; see ``SecondOpinion``."""

    def comparing(model: Model, other: Model) -> Steps[None]:
        both = (model, other)
        with ExitStack() as stack:
            timers = [stack.enter_context(timer(each, n_ctx)) for each in both]
            yield from in_turns(timers)
            for each, timed in zip(both, timers, strict=True):
                curves().put(curve_key(each, kv_type), timed.times())
            remember(both, timers, kv_type)

    return comparing


def remember(models: Sequence[Model], timers: Sequence[Timer], kv_type: str) -> None:
    """Keep what nominal answers take on the engines of a file's models."""
    today, pairs = date.today(), list(zip(models, timers, strict=True))
    found = EngineTimes(
        f"{today.day} {today:%b}",
        {model.backend: round(nominal_ms(timed.times()), 1) for model, timed in pairs},
        {model.backend: [round(nominal_ms(each), 1) for each in timed.quiet_rounds()] for model, timed in pairs},
        max(timed.times().others_share for timed in timers),
    )
    _store().put(_key(fingerprint(models[0].path), models[0].n_threads, kv_type), asdict(found))


def compared(path: Path, n_threads: int | None, kv_type: str) -> EngineTimes | None:
    """What was found of a file, with the present versions of all engines; None where nothing was."""
    return _comparison(_store().get(_key(fingerprint(path), n_threads or default_threads(), kv_type)))


def forget(path: Path, n_threads: int | None, kv_type: str) -> None:
    """Have the engines compared again."""
    _store().put(_key(fingerprint(path), n_threads or default_threads(), kv_type), {})


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
    found = _comparison(stored)
    first, second = (name for name in names if name in ENGINES)
    if found is None or not found.prefers(second, first):
        return list(names)
    if not stored.get("told"):
        store.put(key, {**stored, "told": True})
        again = f"localspec doctor --calibrate measures again, --backend {first} overrides"
        warn(f"Engine for {path.name}: {second} (measured faster on {found.day}; {again})")
    return [{first: second, second: first}.get(name, name) for name in names]


def _comparison(stored: dict[str, Any] | None) -> EngineTimes | None:
    """What is stored, if it is a comparison of all engines."""
    if not stored:
        return None
    try:
        ms = {str(name): float(value) for name, value in stored["ms"].items()}
        rounds = {str(name): [float(each) for each in values] for name, values in stored["rounds"].items()}
        found = EngineTimes(str(stored["day"]), ms, rounds, float(stored["others_share"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if all(name in ms for name in ENGINES) else None


def _store() -> JsonStore:
    return JsonStore(home() / "engines", 2)


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
