"""Loading the models of a pair: with the right engine, and the copy of a draft that drafts faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import backends
from localspec.backends.base import Model
from localspec.backends.llama.ggml import NATIVE_COMMAND, NATIVE_TIMES, built_for, native_gain, system_info
from localspec.backends.registry import engine_module, unavailable_reason
from localspec.backends.repack import lightening, lighter_copy
from localspec.backends.trust import verdict_key, verdicts
from localspec.controllers.calibration import (
    NOISY,
    WHOLE,
    WIDE,
    PassKind,
    Timer,
    calibrating,
    calibrating_quickly,
    curve_key,
    curves,
    growth,
    in_turns,
    timer,
)
from localspec.controllers.cost_model import Curve, PassTimes
from localspec.controllers.stopping import best_speedup
from localspec.engine.options import LoadOptions
from localspec.engine.state import DecodingState
from localspec.errors import Cancelled, LocalspecError, VocabularyMismatch
from localspec.model_files.gguf import fingerprint
from localspec.system.files import JsonStore, home
from localspec.system.machine import BUSY, cpu_features, cpu_name, default_threads
from localspec.system.steps import Steps, exhaust

# Which engine is faster for a file here: measured when there is time, remembered, and followed by ``auto``.
#
# Passes of the engines on the CPU are timed in turns. What counts is the time of a nominal answer: reading a prompt,
# then decoding at the best fixed draft length, with draft tokens that are accepted as often and cost as much as those
# of a small draft model typically do. The usual engine stays unless rounds on an otherwise idle CPU agree that the
# other is faster, by more than unnoticed load explains. What was measured under load is provisional: it chooses
# nothing, and is measured again in idle time.

ENGINES = ("ik-llama", "llama-cpp")
N_PROMPT, N_ANSWER = 256, 192
"""Tokens of a nominal turn. Those of the 52 recorded answers have 130 and 160; a chat's second turn reads more."""

ACCEPTANCE, STEP_SHARE = 0.7, 0.3
"""Of a small draft model of the same family: its acceptance rate, and a step's share of t(1). Qwen2.5-Coder 1.5B with
its 0.5B: 0.80 on the recorded answers, 0.77 on ``draft_choice.txt``, and 0.28 to 0.31 on two machines."""

TIMED_LENGTHS = range(9)

MARGIN = 1 + BUSY
"""How much faster an engine must be to be taken before the one that is usually the faster: load up to ``BUSY`` is not
noticed. Speeds of plain decoding spread by 5 to 10 % from answer to answer."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Engines timed in turns with one file.

    Attributes:
        ms: engine -> time of a nominal answer [ms], by the passes that count.
        rounds: engine -> the same by each round in which no other program used the CPUs.
        others_share: of the CPUs' time, used by other programs meanwhile.
        told: whether a user was told of another order than the usual.
    """

    day: str
    ms: dict[str, float]
    rounds: dict[str, list[float]]
    others_share: float
    told: bool = False

    @property
    def provisional(self) -> bool:
        """Whether nothing follows from it: an engine does not have two quiet rounds that agree."""
        rounds = (sorted(self.rounds.get(name, [])) for name in ENGINES)
        return any(len(found) < 2 or found[1] > NOISY * found[0] for found in rounds)

    def prefers(self, other: str, usual: str) -> bool:
        if self.provisional:
            return False
        # The best round of the usual one against the second best of the other: an outlier on either side keeps it.
        return min(self.rounds[usual]) > MARGIN * sorted(self.rounds[other])[1]


def nominal_ms(times: PassTimes) -> float:
    """Time of a nominal answer, its prompt included."""
    prefill = N_PROMPT * times(WIDE) / WIDE
    return prefill + N_ANSWER * times(1) / best_speedup(ACCEPTANCE, TIMED_LENGTHS, times, STEP_SHARE * times(1))


OFFERED_GAIN = 1.05  # from which on a compiled engine is offered


def compiled_gain(model: Model, times: PassTimes) -> tuple[str, float, float] | None:
    """What ik-llama compiled for this CPU would gain with a file: the present engine's curve, times what compiling made
    of passes where that was measured.

    Returns:
        The instruction set, and the lowest and the highest estimate of how many times as fast a nominal answer would
        be; None where that is under ``OFFERED_GAIN``, was not measured, or the curve is provisional.
    """
    if model.backend != "ik-llama" or model.capabilities.device != "cpu" or times.noisy:
        return None
    engine = engine_module(model.backend)
    if engine.compiled_library() is not None:
        return None
    gain = native_gain(built_for(system_info(engine.binding().lib)), cpu_features())
    if gain is None:
        return None
    now, estimates = times.curve.measured, list[float]()
    for ratios in map(Curve, NATIVE_TIMES.get(gain[0], ())):
        compiled = PassTimes({width: ms * ratios(width) for width, ms in now.items()})
        estimates.append(nominal_ms(PassTimes(now)) / nominal_ms(compiled))
    return (gain[0], min(estimates), max(estimates)) if min(estimates, default=0.0) >= OFFERED_GAIN else None


def compiled_offer(model: Model, times: PassTimes) -> str | None:
    """``compiled_gain`` as a line for people; or that what was compiled is of an earlier version."""
    if model.backend == "ik-llama" and model.capabilities.device == "cpu":
        engine = engine_module(model.backend)
        if engine.compiled_earlier():
            return str(engine.EARLIER)
    found = compiled_gain(model, times)
    if found is None:
        return None
    feature, low, high = found
    second = (times.curve(2) - times.curve(1)) / times.curve(1)
    return (
        f"compiled for this CPU's {feature}, ik-llama would answer an estimated {low:.2f} to {high:.2f} times as fast "
        f"here (a second row costs {second:.2f} of a token now)"
    )


def compiled_offer_once(model: Model, times: PassTimes) -> str | None:
    """``compiled_offer`` with its command, the first time for this engine; None from then on."""
    store, key = _store(), {"offered": "a compiled engine", "instead of": model.engine}
    line = None if store.get(key) else compiled_offer(model, times)
    if line is None:
        return None
    store.put(key, {"told": True})
    return f"{line}: {NATIVE_COMMAND}"


def comparing_engines(n_ctx: int, options: LoadOptions, model: Model, other: Model) -> Steps[None]:
    """Time a file on two engines in turns, and remember what was found; see ``SecondOpinion``."""
    both = (model, other)
    with ExitStack() as stack:
        timers = [stack.enter_context(timer(each, n_ctx)) for each in both]
        yield from in_turns(timers)
        for each, timed in zip(both, timers, strict=True):
            curves().put(curve_key(each, options.kv_cache_type), timed.times())
        remember(both, timers, options)


def remember(models: Sequence[Model], timers: Sequence[Timer], options: LoadOptions) -> None:
    today, pairs = date.today(), list(zip(models, timers, strict=True))
    found = EngineTimes(
        f"{today.day} {today:%b %Y}",
        {model.backend: round(nominal_ms(timed.times()), 1) for model, timed in pairs},
        {model.backend: [round(nominal_ms(each), 1) for each in timed.quiet_rounds()] for model, timed in pairs},
        max(timed.times().others_share for timed in timers),
    )
    _store().put(_key(models[0].path, replace(options, n_threads=models[0].n_threads)), asdict(found))


def compared(path: Path, options: LoadOptions) -> EngineTimes | None:
    """What was found of a file, with the present versions of all engines; None where nothing was."""
    try:
        found = EngineTimes(**(_store().get(_key(path, options)) or {}))
    except TypeError:  # nothing, or what another version keeps
        return None
    return found if all(name in found.ms for name in ENGINES) else None


def forget(path: Path, options: LoadOptions) -> None:
    _store().put(_key(path, options), {})


def ordered(
    names: Sequence[str], path: Path, options: LoadOptions, on_gpu: bool, warn: Callable[[str], None]
) -> list[str]:
    """Engines in the order in which to try them, given the usual one (``backends.candidates``).

    ``on_gpu``: whether one would run the file on a GPU: what was measured on the CPU says nothing then. ``warn`` takes
    a line when the order differs from the usual for the first time.
    """
    if on_gpu or not all(name in names for name in ENGINES):
        return list(names)
    found = compared(path, options)
    first, second = (name for name in names if name in ENGINES)
    if found is None or not found.prefers(second, first):
        return list(names)
    if not found.told:
        _store().put(_key(path, options), asdict(replace(found, told=True)))
        again = f"localspec doctor --calibrate measures again, --backend {first} overrides"
        warn(f"Engine for {path.name}: {second} (measured faster on {found.day}; {again})")
    return [{first: second, second: first}.get(name, name) for name in names]


def _store() -> JsonStore:
    return JsonStore(home() / "engines", 2)


def _key(path: Path, options: LoadOptions) -> dict[str, str]:
    usable = [name for name in ENGINES if unavailable_reason(name) is None]
    return {
        "machine": cpu_name(),
        "engines": ", ".join(f"{name} {engine_module(name).binding().version}" for name in usable),
        "file": fingerprint(path),
        "threads": str(options.n_threads or default_threads()),
        "kv": options.kv_cache_type,
    }


# Which copy of a draft model drafts faster: the published file, or a lighter one that agrees a little less?
#
# Both read a text of ours next to the target. The share of positions at which a copy's most probable token is the
# target's stands for its acceptance rate, and the copy with the larger predicted speed-up is used (see ``break_even``).
# Measured once per target, draft and engine, and kept.

DRAFT_LENGTHS = range(1, 9)
"""Draft lengths; the best one counts. On ik-llama a pass over 9 tokens takes over three times one over a single."""

N_STEPS = 12
"""Draft steps of each copy that are timed, in turns; their median counts. The copies compared so far differ by 1.5
times and more."""

MAX_TOKENS = 400
"""Read of the text, which makes the standard error of an agreement of 0.75 two percent."""

_PIECE = 32

TEXT = Path(__file__).with_name("draft_choice.txt")
"""Code, prose, sums and a little French: what both copies of a draft read."""


@dataclass(frozen=True, slots=True)
class DraftCopy:
    """A copy of the draft as measured: how often its best token is the target's, ms per token, predicted speed-up."""

    agreement: float
    step_ms: float
    speedup: float


def reading(model: Model, tokens: Sequence[int], n_vocab: int | None = None) -> Steps[npt.NDArray[np.int64]]:
    """The most probable token below ``n_vocab`` after every token of a text [n]; -1 where logits are not numbers."""
    tops = []
    with model.new_context(len(tokens)) as context:
        for start in range(0, len(tokens), _PIECE):
            logits = context.decode(tokens[start : start + _PIECE]).logits[:, :n_vocab]
            tops.append(np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1))
            yield
    return np.concatenate(tops)


def measuring(
    copies: Sequence[Model], tokens: Sequence[int], target_tops: npt.NDArray[np.int64], times: PassTimes, n_vocab: int
) -> Steps[list[DraftCopy]]:
    """Measure copies; their steps in turns, so that they meet the same machine. ``target_tops`` as from ``reading``."""
    agreements = []
    for model in copies:
        tops = yield from reading(model, tokens, n_vocab)
        agreements.append(float(((tops == target_tops) & (tops >= 0)).mean()))
    steps: list[list[float]] = [[] for _ in copies]
    with ExitStack() as stack:
        # Contexts that never handed out many rows; see FEW_ROWS.
        contexts = [stack.enter_context(model.new_context(_PIECE + N_STEPS)) for model in copies]
        for context in contexts:
            context.decode(tokens[:_PIECE], "none")
            yield
        for token in tokens[:N_STEPS]:
            for context, taken in zip(contexts, steps, strict=True):
                yield
                started = time.perf_counter()
                context.decode([token], "last")
                taken.append((time.perf_counter() - started) * 1e3)
    found = []
    for agreement, taken in zip(agreements, steps, strict=True):
        step_ms = statistics.median(taken)
        found.append(DraftCopy(agreement, step_ms, best_speedup(agreement, DRAFT_LENGTHS, times, step_ms)))
    return found


Report = Callable[[str, "float | None"], None]
"""Progress: what is being done, and the fraction done if it is known. Raising from it cancels."""


class Remarks(list[str]):
    """One-line remarks, each once, however often a model is loaded."""

    def append(self, line: str) -> None:
        if line not in self:
            super().append(line)


class Loader:
    def __init__(self, options: LoadOptions, warnings: list[str]) -> None:
        self.options = options
        self.parallel = 1
        self.warnings = warnings
        self._choices = JsonStore(home() / "drafts", 2)

    def load(
        self,
        path: Path,
        report: Report,
        *,
        backend: str | None = None,
        check: bool = True,
        engine: dict[str, Any] | None = None,
        layers: Callable[[str], int | None] = lambda name: None,
    ) -> Model:
        """Load a file; see ``backends.load``. An exception from ``report`` cancels, and is raised here."""
        cancel: list[BaseException] = []

        def progress(fraction: float) -> bool:
            try:
                report(f"loading {path.name}", fraction)
            except BaseException as error:  # carried around the C code that calls this
                cancel.append(error)
                return False
            return True

        try:
            return backends.load(
                path,
                backend or self.options.backend,
                **(engine or self.options.engine),
                progress=progress,
                say=lambda line: report(line, None),
                warn=self.warnings.append,
                check=check,
                put_off=self.options.idle,
                layers=layers,
                order=lambda names, on_gpu: ordered(names, path, self.options, on_gpu, self.warnings.append),
            )
        except LocalspecError:
            if cancel:
                raise cancel[0] from None
            raise

    def times(
        self, model: Model, n_ctx: int, report: Report, passes: PassKind = WHOLE, called: str | None = None
    ) -> PassTimes:
        """The cost model of a model's passes, measured now if need be: roughly where there will be idle time."""
        idle, key = self.options.idle, curve_key(model, self.options.kv_cache_type)
        times = curves().get(key)
        if times is None or (times.noisy and not idle and curves().is_worth_waiting_for(key)):
            how = "a first time, briefly" if idle else "once" if times is None else "again"
            report(f"measuring what a pass of {called or model.path.name} costs here ({how})", None)
            measuring = calibrating_quickly if idle else calibrating
            times = exhaust(measuring(model, n_ctx, passes), tick=lambda: report("measuring", None))
            curves().put(key, times)  # which keeps the best of what it knows
        times.growth = growth(model, self.options.kv_cache_type)
        return times

    def forget_if_wrong(self, model: Model, times: PassTimes) -> None:
        """Have a cost model measured again at the next load that hundreds of passes contradicted."""
        if not times.fits:
            with suppress(OSError):  # the file is gone
                curves().drop(curve_key(model, self.options.kv_cache_type))

    def load_draft(self, path: Path, state: DecodingState, report: Report, *, any_vocabulary: bool = False) -> Model:
        """Load a draft model, or its copy that drafts faster here. Raises ``VocabularyMismatch``."""
        known = self._choices.get(self._choice_key(path, state)) if self.options.light_draft else None
        if known is not None and known.get("light") and (lighter := self._open_lighter(path, state, report)):
            return lighter
        # An engine that was found to compute it wrongly is not taken: then one, or a copy, that is right is looked for.
        backend, digest = self.options.draft_backend or self.options.backend, fingerprint(path)
        names = backends.candidates(self.options.n_gpu_layers) if backend == "auto" else [backend]
        found = (verdicts().get(verdict_key(name, self.options.engine, digest)) for name in names)
        check = not self.options.idle or any(verdict is not None and not verdict["holds"] for verdict in found)
        published = self._open_draft(path, state, report, check=check, any_vocabulary=any_vocabulary)
        if self.options.idle or not self.may_be_lighter(path, published, state):
            return published
        with ExitStack() as replaced:
            replaced.callback(published.close)
            prefers_light = exhaust(self.choosing(path, published, state, report), lambda: report("measuring", None))
            lighter = self._open_lighter(path, state, report) if prefers_light else None
            if lighter is None:
                replaced.pop_all()
        return lighter or published

    def may_be_lighter(self, path: Path, model: Model, state: DecodingState) -> bool:
        on_cpu = model.capabilities.device == "cpu" and not model.capabilities.batch_invariant
        known = self._choices.get(self._choice_key(path, state)) is not None
        shares_tokens = state.target.vocab.difference(model.vocab, special=False) is None
        return self.options.light_draft and on_cpu and model.path == path and not known and shares_tokens

    def choosing(self, path: Path, published: Model, state: DecodingState, report: Report) -> Steps[bool]:
        """Compare a draft with its lighter copy, which is made, and remember whether that drafts faster."""
        key = self._choice_key(path, state)
        lighter: Model | None = None
        try:
            light = yield from lightening(path, key["draft"], lambda line: report(line, None))
            if light is None:
                return False
            lighter = self._open_draft(light, state, report, check=False)
            report(f"comparing {path.name} with its lighter copy (once)", None)
            tokens = state.target.tokenize(TEXT.read_text(encoding="utf-8"), add_special=True)[:MAX_TOKENS]
            tops = yield from reading(state.target, tokens)
            copies = (published, lighter)
            one, two = yield from measuring(copies, tokens, tops, state.times, state.target.n_vocab)
        except Cancelled:
            raise
        except LocalspecError:
            return False  # not worth failing over: an engine that cannot run the copy drafts with the published file
        finally:
            if lighter is not None:
                lighter.close()
        light_is_faster = two.speedup > one.speedup
        self._choices.put(key, {"light": light_is_faster, "published": asdict(one), "lighter": asdict(two)})
        return light_is_faster

    def _open_lighter(self, path: Path, state: DecodingState, report: Report) -> Model | None:
        light = lighter_copy(path, fingerprint(path), lambda line: report(line, None))
        return None if light is None else self._open_draft(light, state, report, check=False)

    def _choice_key(self, path: Path, state: DecodingState) -> dict[str, str]:
        key = {
            "engine": state.target.engine,
            "machine": cpu_name(),
            "threads": str(state.target.n_threads),
            "target": fingerprint(state.target.path),
            "draft": fingerprint(path),
        }
        if self.options.draft_backend is not None:
            key["draft engine"] = self.options.draft_backend
        return key

    def _open_draft(
        self, path: Path, state: DecodingState, report: Report, *, check: bool = True, any_vocabulary: bool = False
    ) -> Model:
        model, target = self.load(path, report, backend=self.options.draft_backend, check=check), state.target
        difference = target.vocab.difference(model.vocab, special=False)
        if difference and not any_vocabulary:
            model.close()
            raise VocabularyMismatch(f"{path.name} cannot draft for {target.path.name}: {difference}")
        if model.size_bytes > target.size_bytes:
            self.warnings.append(
                f"the draft {path.name} is larger than the target {target.path.name}: it will cost more than it saves"
            )
        return model


def giving_way(stopped: Callable[[], bool]) -> Report:
    """Ends a load with ``Cancelled`` once it is to stop."""

    def report(what: str, fraction: float | None) -> None:
        if stopped():
            raise Cancelled(f"{what}: stopped")

    return report
