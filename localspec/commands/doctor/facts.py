"""What the doctor found, as data. ``Examination.as_dict`` is what ``doctor --json`` prints.

The JSON has the fields of these classes under the same names; sizes are bytes, times milliseconds unless the name says
otherwise, shares lie in [0, 1], and None (null) means that it is not known here or was not measured. Where a field maps
numbers to something, the keys are strings, as JSON has no others. ``schema_version`` rises when a field is renamed,
removed or changes its meaning; new fields do not raise it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from localspec.backends.gpus import Device
from localspec.commands.report.model import Finding

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Check(Finding):
    """A finding, under the heading where it is shown; one with status ``fail`` always has advice."""

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
    devices: list[Device] | None = None  # GPUs it can use; None where it does not say
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
        """All that is known of it."""
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
class BenchFacts:
    """What localspec bench last measured of this model on this engine."""

    day: str  # when
    engine: str  # name and version
    drafters: list[str]  # what drafted
    speedups: dict[str, float]  # kind of question -> median speed over plain decoding; all: over all questions
    n_questions: int  # how many in all
    n_guesses: int  # draft tokens sent


@dataclass(frozen=True, slots=True)
class PayoffFacts:
    """What speculation with one drafter is worth here; see ``controllers.break_even``."""

    drafter: str  # a model's name, or ngram
    step_ms: float  # time of one draft token, or of a whole draft where one pass makes it
    break_even: dict[int, float | None]  # draft length -> acceptance rate from which it pays; None: never
    speedup: dict[float, float]  # acceptance rate -> best predicted speed-up over all lengths; 1 is plain decoding
    best_length: dict[float, int]  # acceptance rate -> the length that reaches it; 0: do not draft

    @property
    def lowest_break_even(self) -> float | None:
        """The least acceptance rate that pays, at whatever length; None where nothing does."""
        known = [share for share in self.break_even.values() if share is not None]
        return min(known, default=None)


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
    bench: BenchFacts | None = None  # measured answers; None where bench was not run with this model and engine


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
        """Whether nothing was found that would not work."""
        return all(check.status != "fail" for check in self.checks)

    def add(self, section: str, findings: Iterable[Finding]) -> None:
        """Note what was found under a heading."""
        self.checks += [Check(each.status, each.name, each.text, each.advice, section) for each in findings]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, with ``schema_version`` and ``holds``."""
        facts = asdict(self)
        return {"schema_version": SCHEMA_VERSION, "localspec": facts.pop("localspec"), "holds": self.holds, **facts}
