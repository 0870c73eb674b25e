"""Findings as data; ``Examination.as_dict`` is what ``doctor --json`` prints.

The JSON has these fields: sizes in bytes, times in milliseconds unless the name says otherwise, shares in [0, 1], null
for unknown or not measured; number keys are strings. ``schema_version`` rises when a field is renamed, removed or
changes its meaning.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from localspec.backends import candidates, unavailable_reason
from localspec.backends.llama import ggml, ik_llama
from localspec.backends.registry import engine_module
from localspec.controllers.stopping import Times, best_length, speedup, with_block
from localspec.measuring.last_bench import LastBench
from localspec.measuring.passes import LENGTHS, break_even_by_length
from localspec.model_files.sources.base import size_text
from localspec.report.model import Finding, Status
from localspec.system import machine

if TYPE_CHECKING:
    from localspec.engine.options import LoadOptions

SCHEMA_VERSION = 1
HARD = 0.85  # acceptance rate of a small draft model of the target's family, greedy, on code


@dataclass(frozen=True, slots=True)
class Check(Finding):
    """A finding under its heading; one with status ``fail`` has advice."""

    section: str = ""  # machine, engines, models, pair or cost


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The computer."""

    platform: str  # system and processor architecture
    cpu: str  # its marketing name
    features: list[str]  # instruction sets that matter for inference
    cores: int  # logical CPUs that this process may use
    threads: int  # threads that an engine gets here
    memory_total_bytes: int  # what the machine has
    memory_available_bytes: int  # what could be taken now without swapping, a container's limit included
    memory_limit_bytes: int | None = None  # a container's limit, where there is one
    cpu_quota: float | None = None  # CPUs' worth of time that a container grants, where it limits it
    bandwidth_gb_per_s: float | None = None  # memory read speed with all threads, in 10⁹ bytes per second
    busy_share: float = 0.0  # share of the CPUs' time that others were using just before anything was measured
    on_battery: bool | None = None  # whether it runs on battery
    throttled: bool | None = None  # whether heat or a power limit slowed the CPU while this was measured
    gpus: list[str] = field(default_factory=list)  # graphics hardware, whether or not an engine can use it


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine."""

    name: str  # what --backend takes
    usable: bool  # whether it can be used here
    version: str | None = None  # of its package
    built_for: list[str] = field(default_factory=list)  # devices and instruction sets it was compiled for
    devices: list[ggml.Device] | None = None  # GPUs it can use; None where it does not say
    reason: str | None = None  # why it cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model file; its header is read where it is on this disk."""

    name: str  # catalogue name, or name of the file
    path: str  # where it is, or will be
    present: bool  # whether it is on this disk
    bytes: int  # its size; 0 if unknown
    bytes_exact: bool  # whether that is known exactly, or about
    architecture: str | None = None  # as the header names it
    quantization: str | None = None  # as the header names it
    n_ctx_train: int | None = None  # context it was trained for, in tokens
    n_vocab: int | None = None  # tokens in its vocabulary
    rollback: str | None = None  # exact, or replay where its memory cannot forget single tokens
    error: str | None = None  # what is wrong with the file


@dataclass(frozen=True, slots=True)
class NeedFacts:
    """Memory that one model takes."""

    name: str  # of the model
    weights_bytes: int  # its tensors
    kv_bytes: int | None  # keys and values of the whole context; None before its header can be read
    compute_bytes: int | None  # the engine's buffers for a pass; None before its header can be read

    @property
    def total(self) -> int:
        return self.weights_bytes + (self.kv_bytes or 0) + (self.compute_bytes or 0)


@dataclass(frozen=True, slots=True)
class FitFacts:
    """Whether the models fit at this context."""

    n_ctx: int  # tokens of context
    kv_type: str  # type of the KV caches
    models: list[NeedFacts]  # what each takes, the target first
    ram_needed_bytes: int  # of them, what goes into RAM; at least, where something is None in models
    ram_available_bytes: int  # free now
    gpu_needed_bytes: int | None  # what goes into GPU memory; None where no GPU is used
    gpu_available_bytes: int | None  # free now; None where no GPU is used or the engine does not say
    fits: bool | None  # None where that cannot be known yet


@dataclass(frozen=True, slots=True)
class CurveFacts:
    """t(w): the time of a pass by the number of tokens in it."""

    name: str  # of the model
    file: str  # what was measured: its file, or a copy of it in other tensor types
    ms: dict[int, float]  # width -> milliseconds


@dataclass(frozen=True, slots=True)
class CostFacts:
    """Measured passes."""

    engine: str  # name and version
    device: str  # cpu, gpu or mixed
    target: CurveFacts  # its t(w)
    drafts: list[CurveFacts]  # those of the draft models; a draft step costs their t(1)
    now_ms: float  # the target's t(1) measured just now; target may come from the calibration on disk
    bytes_per_token: int  # weights that a one-token pass reads
    bound_ms: float | None  # the time that reading them takes at the measured bandwidth; None on a GPU
    why_chains: str | None = None  # why drafts do not branch; None where they may
    provisional: bool = False  # whether the target's t(w) was disturbed while it was measured, and will be again
    others_share: float = 0.0  # of the CPUs' time, used by others while it was measured


@dataclass(frozen=True, slots=True)
class PayoffFacts:
    """What speculation with one drafter is worth here; see ``controllers.stopping``."""

    drafter: str  # a model's name, or ngram
    step_ms: float  # time of one draft token, or of a whole draft where one pass makes it
    break_even: dict[int, float | None]  # draft length -> acceptance rate from which it pays; None: never
    speedup: dict[float, float]  # acceptance rate -> best predicted speed-up over all lengths; 1 is plain decoding
    best_length: dict[float, int]  # acceptance rate -> the length that reaches it; 0: do not draft

    @property
    def least(self) -> float:
        """Least acceptance rate that pays at any length; infinite where none does."""
        return min((share for share in self.break_even.values() if share is not None), default=math.inf)

    @property
    def pays(self) -> bool:
        """Whether a drafter is worth trying here, by what passes cost."""
        return self.least <= HARD


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Target and drafters."""

    target: ModelFacts  # the model that answers
    drafts: list[ModelFacts]  # the draft models
    ngram: bool  # whether n-grams draft as well
    vocabulary: dict[str, str | None]  # by draft name, its first difference from the target's; None: they match
    fit: FitFacts  # memory
    cost: CostFacts | None = None  # measured passes; None where nothing was loaded
    payoff: list[PayoffFacts] = field(default_factory=list)  # by drafter, what they mean
    bench: LastBench | None = None  # measured answers; None where bench was not run with this model and engine


@dataclass(frozen=True, slots=True)
class RankedFacts:
    """One candidate as measured."""

    drafters: list[str]  # the drafters it uses; empty is plain decoding
    n_prompts: int  # prompts it was measured on; 0: it was not reached, or cannot run
    speedup: float | None  # geometric mean over the prompts of its speed over plain decoding of the same prompt
    lowest: float | None  # of these ratios
    highest: float | None  # of these ratios
    tokens_per_second: float | None  # plain decoding's median over the prompts, times speedup
    acceptance_rate: float | None  # accepted draft tokens of all; None where none were proposed


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Candidates measured side by side, the fastest first."""

    seconds: float  # what it took, loading included
    max_tokens: int  # longest answer
    prompts: list[str]  # ids of the prompts that were measured
    noise: float | None  # relative standard deviation of plain decoding of one prompt, measured twice
    candidates: list[RankedFacts]  # plain decoding is one of them


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do, in a sentence or two."""

    speculate: bool | None  # None where there is nothing to judge it by
    text: str  # the sentences
    command: str | None = None  # what to type


@dataclass(slots=True)
class Examination:
    """Everything that was found."""

    localspec: str  # our version
    machine: MachineFacts  # the computer
    engines: list[EngineFacts] = field(default_factory=list)  # known engines, usable or not
    models: list[ModelFacts] = field(default_factory=list)  # models on this disk
    pair: PairFacts | None = None  # None where no model was named and the default ones are not on this disk
    rank: RankFacts | None = None  # measured candidates, with --rank
    checks: list[Check] = field(default_factory=list)  # the rows, in the order in which they are shown
    recommendation: Recommendation | None = None  # what to do

    @property
    def holds(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def add(self, section: str, findings: Iterable[Finding]) -> None:
        self.checks += [Check(each.status, each.name, each.text, each.advice, section) for each in findings]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with ``schema_version`` and ``holds``."""
        facts = asdict(self)
        return {"schema_version": SCHEMA_VERSION, "localspec": facts.pop("localspec"), "holds": self.holds, **facts}


def look_at_machine(n_threads: int | None = None, *, measure: bool = True) -> MachineFacts:
    """Read what the system says and, with ``measure``, the memory's bandwidth."""
    found, cores, threads = machine.read_memory(), machine.usable_cpus(), n_threads or machine.default_threads()
    busy = machine.busy_share()
    speed = machine.measure_bandwidth(min(threads, cores), available=found.available) if measure else None
    return MachineFacts(
        platform=f"{platform.system()} {platform.machine()}",
        cpu=machine.cpu_name(),
        features=machine.cpu_features(),
        cores=cores,
        threads=threads,
        cpu_quota=machine.cpu_quota(),
        memory_total_bytes=found.total,
        memory_available_bytes=found.available,
        memory_limit_bytes=found.limit,
        bandwidth_gb_per_s=round(speed / 1e9, 2) if speed else None,
        busy_share=round(busy, 3),
        on_battery=machine.on_battery(),
        gpus=machine.visible_gpus(),
    )


def machine_findings(here: MachineFacts) -> Iterator[Finding]:
    threads, cores, quota = here.threads, here.cores, here.cpu_quota
    features = " ".join(here.features) or "instruction sets unknown"
    text = f"{here.cpu} · {threads} of {cores} CPUs used · {features}"
    if quota is not None and quota < threads - 0.01:
        text += f"; its container grants the time of {quota:.3g} only, so threads stall"
        yield Finding("note", "CPU", text, f"use --threads {max(1, int(quota))}")
    elif threads > cores:
        text += ": more threads than CPUs slow each other down"
        yield Finding("note", "CPU", text, f"use --threads {cores}")
    else:
        yield Finding("ok", "CPU", text)
    free, busy = size_text(here.memory_available_bytes), here.busy_share >= machine.BUSY
    whole = f" of {size_text(here.memory_total_bytes)}"
    if here.memory_limit_bytes is not None:
        whole = f", of {size_text(here.memory_limit_bytes)} that the container may use"
    yield Finding("ok", "memory", f"{free} free{whole}")
    if here.bandwidth_gb_per_s is not None:
        text = f"{here.bandwidth_gb_per_s:.1f} GB/s read by {threads} thread" + "s" * (threads != 1)
        yield Finding("info" if busy else "ok", "bandwidth", text)
    if busy:
        text = f"others use {here.busy_share:.0%} of the CPU: what is timed now is too slow"
        yield Finding("note", "load", text, "stop them, then: localspec doctor --calibrate")
    if here.on_battery:
        yield Finding("note", "power", "on battery, where the clock is lower", "plug it in before you compare")
    if (why := machine.slow_clock()) is not None:
        yield Finding("note", "clock", why, "choose the performance setting before you compare")


HEAT = Finding(
    "note", "heat", "the CPU was slowed by heat or a power limit while this was measured",
    "let it cool, then: localspec doctor --calibrate",
)  # fmt: skip


# The engines: present ones, what they were built for, and how to get missing ones.

_LLAMA_CPP = "'llama-cpp-python>=0.3.36,<0.4'"
_BUILDS = {
    "NVIDIA": ("CUDA", "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native"),
    "Apple": ("Metal", "-DGGML_METAL=on"),
    "AMD": ("Vulkan", "-DGGML_VULKAN=on"),
    "other": ("Vulkan", "-DGGML_VULKAN=on"),
}
"""Graphics hardware -> what to build for it, and how."""

WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"
"""Where the makers of llama-cpp-python publish wheels, a folder for each kind of GPU; their README lists these."""

CUDA_WHEELS = (118, 121, 122, 123, 124, 125, 130, 132)  # versions of CUDA, times ten; the folders are cu118 and so on
WHEEL_PYTHONS = ((3, 10), (3, 12))  # the first and the last Python that these wheels are for


def wheel_folder(kind: str, cuda: tuple[int, int] | None) -> str | None:
    """The folder of wheels for a kind of ``_BUILDS``; None where there is none for this Python or ``cuda``, the newest
    version that the driver runs."""
    first, last = WHEEL_PYTHONS
    if not first <= sys.version_info[:2] <= last:
        return None
    if kind != "CUDA":
        return kind.lower()
    # A driver runs what was built for older minor versions of its own major one too.
    fitting = [each for each in CUDA_WHEELS if cuda is None or (each // 10 == cuda[0] and each % 10 <= cuda[1])]
    return f"cu{fitting[-1]}" if fitting else None


_INSTEAD = {"ik-llama": "compile llama.cpp for this machine: pip install 'localspec[llama-cpp]'"}
_ANEW = f"install it anew: pip install --force-reinstall --no-cache-dir {_LLAMA_CPP}"

FOR_GPUS = ("llama-cpp", "mlx")  # engines with builds for GPUs


def look_at_engine(name: str) -> EngineFacts:
    """Load an engine, if it can be loaded."""
    reason = unavailable_reason(name)
    if reason is not None:
        return EngineFacts(name, False, reason=reason)
    module = engine_module(name)
    if not hasattr(module, "binding"):
        return EngineFacts(name, True, built_for=["NumPy"], devices=[])
    binding = module.binding()
    version, gpu = str(getattr(binding, "version", "")) or None, bool(getattr(binding, "gpu", False))
    library = getattr(binding, "lib", None)
    if not hasattr(library, "llama_print_system_info"):
        return EngineFacts(name, True, version, list(binding.built_for), ggml.metal_gpu() if gpu else [])
    return EngineFacts(name, True, version, ggml.built_for(ggml.system_info(library)), ggml.llama_gpus() if gpu else [])


def engine_findings(
    engines: Sequence[EngineFacts], gpus: Sequence[str], wanted: str, cpu: Sequence[str] = ()
) -> Iterator[Finding]:
    """Findings on engines, given ``--backend`` and the instruction sets of the CPU."""
    # MLX without a GPU is there for tests, and never taken unless asked for.
    usable = [e for e in engines if e.usable and e.name != "reference" and (e.name != "mlx" or e.devices != [])]
    for engine in engines:
        if engine.name == "mlx" and not engine.usable and wanted != "mlx" and "Apple" not in gpus:
            continue
        if not engine.usable:
            what, _, hint = (engine.reason or "it cannot be used").partition("; install it with: ")
            needed = wanted == engine.name or (wanted == "auto" and not usable)
            yield Finding("fail" if needed else "info", engine.name, what, hint or _INSTEAD.get(engine.name, _ANEW))
        elif engine.name == "reference":
            if wanted == "reference":
                yield Finding("ok", engine.name, "NumPy, float64: exact and slow, for tests")
        else:
            yield Finding("ok" if engine in usable else "info", engine.name, _described(engine))
            gain = ggml.native_gain(engine.built_for, cpu) if engine.name == "ik-llama" else None
            if gain is not None and ik_llama.compiled_library() is None:
                status: Status = "note" if wanted in ("auto", engine.name) else "info"
                text = f"ik-llama compiled for its {gain[0]}: {gain[1]}"
                yield Finding(status, "this CPU", text, ggml.NATIVE_COMMAND)
    if any(engine.usable and engine.name in FOR_GPUS and engine.devices != [] for engine in engines):
        return
    again = " --force-reinstall --no-cache-dir --no-deps" if any(e.name == "llama-cpp" for e in usable) else ""
    for gpu in gpus:
        if gpu in _BUILDS:
            kind, define = _BUILDS[gpu]
            text = f"a GPU{'' if gpu == 'other' else f' of {gpu}'} is here, but no engine is built for it"
            command = f'CMAKE_ARGS="{define}" pip install {_LLAMA_CPP}{again}'
            folder = wheel_folder(kind, machine.cuda_version() if kind == "CUDA" else None)
            if folder is not None:
                text += "; its makers have wheels, docs/engines.md says how to compile instead"
                wheel = f"--only-binary llama-cpp-python --extra-index-url {WHEELS}/{folder}"
                command = f"pip install {_LLAMA_CPP} {wheel}{again}"
            yield Finding("info" if gpu == "other" else "note", kind, text, command)


def _described(engine: EngineFacts) -> str:
    parts = [engine.version or "", " ".join(engine.built_for) or "built for any CPU of its kind"]
    for device in engine.devices or ():
        parts.append(f"{device.description} ({size_text(device.free_bytes)} of {size_text(device.total_bytes)} free)")
    return " · ".join(part for part in parts if part)


def preferred_engine(engines: Sequence[EngineFacts], load: LoadOptions) -> EngineFacts | None:
    """The engine that would load a model; None where the one asked for cannot be used. ``EngineUnavailable``: there is
    none, or none for a GPU where layers are to go there."""
    by_name = {engine.name: engine for engine in engines}
    if load.backend == "auto":
        return by_name[load.placement.in_order(candidates(None if load.placement.rpc else load.n_gpu_layers))[0]]
    return by_name[load.backend] if by_name[load.backend].usable else None


# What measured passes mean for speculation: the speed-up formula.

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # acceptance rates of the speed-up table


def payoff(drafter: str, times: Times, step_ms: float, block_ms: Times | None = None) -> PayoffFacts:
    """Everything on one drafter; arguments as above."""
    rounds, each = (times, step_ms) if block_ms is None else (with_block(times, block_ms), 0.0)
    best = {a: best_length(a, range(LENGTHS[-1] + 1), rounds, each) for a in ACCEPTANCES}
    return PayoffFacts(
        drafter=drafter,
        step_ms=round(step_ms, 4),
        break_even=break_even_by_length(times, step_ms, block_ms),
        speedup={a: round(speedup(a, length, rounds, each), 4) for a, length in best.items()},
        best_length=best,
    )
