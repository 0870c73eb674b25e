"""What the doctor found, as data. ``Examination.as_dict`` is what ``doctor --json`` prints.

The JSON has the fields of these classes under the same names; sizes are bytes, times milliseconds unless the name says
otherwise, shares lie in [0, 1], and null means that it is not known here or was not measured. Where a field maps
numbers to something, the keys are strings, as JSON has no others. ``schema_version`` rises when a field is renamed,
removed or changes its meaning; new fields do not raise it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from localspec.commands.report.model import Finding

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Check(Finding):
    """A finding, under the heading where it is shown.

    Attributes:
        section: ``machine``, ``engines``, ``models``, ``pair`` or ``cost``.
        name: what was looked at.
        status: ``ok``; ``info``: a fact that is neither good nor bad; ``note``: it works, but not as well as it could;
            ``fail``: it would not work.
        text: what was found.
        advice: what to do about it; always there for a ``fail``.
    """

    section: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The computer.

    Attributes:
        platform: system and processor architecture.
        cpu: its marketing name.
        features: instruction sets that matter for inference.
        cores: logical CPUs that this process may use.
        threads: threads that an engine gets here.
        cpu_quota: CPUs' worth of time that a container grants, where it limits it.
        memory_total_bytes: what the machine has.
        memory_available_bytes: what could be taken now without swapping, a container's limit included.
        memory_limit_bytes: a container's limit, where there is one.
        bandwidth_gb_per_s: memory read speed with all threads, in 10⁹ bytes per second.
        busy_share: share of the CPUs' time that others were using just before anything was measured.
        on_battery: whether it runs on battery.
        throttled: whether heat or a power limit slowed the CPU while this was measured.
        gpus: graphics hardware that is visible, whether or not an engine can use it.
    """

    platform: str
    cpu: str
    features: list[str]
    cores: int
    threads: int
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None = None
    cpu_quota: float | None = None
    bandwidth_gb_per_s: float | None = None
    busy_share: float = 0.0
    on_battery: bool | None = None
    throttled: bool | None = None
    gpus: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A GPU that an engine can use.

    Attributes:
        name: as the engine calls it, e.g. ``CUDA0``.
        description: its product name.
        free_bytes: memory free now.
        total_bytes: memory it has.
        shared: whether this is the machine's own memory.
    """

    name: str
    description: str
    free_bytes: int
    total_bytes: int
    shared: bool


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine.

    Attributes:
        name: what ``--backend`` takes.
        usable: whether it can be used here.
        version: of its package.
        built_for: devices and instruction sets it was compiled for.
        devices: GPUs it can use; null where it does not say.
        reason: why it cannot be used.
    """

    name: str
    usable: bool
    version: str | None = None
    built_for: list[str] = field(default_factory=list)
    devices: list[DeviceFacts] | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model file.

    Attributes:
        name: catalogue name, or name of the file.
        path: where it is, or will be.
        present: whether it is on this disk.
        bytes: its size; 0 if unknown.
        bytes_exact: whether that is known exactly, or about.
        architecture, quantization, n_ctx_train, n_vocab: from its header.
        rollback: ``exact``, or ``replay`` where its memory cannot forget single tokens.
        error: what is wrong with the file.
    """

    name: str
    path: str
    present: bool
    bytes: int
    bytes_exact: bool
    architecture: str | None = None
    quantization: str | None = None
    n_ctx_train: int | None = None
    n_vocab: int | None = None
    rollback: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class NeedFacts:
    """Memory that one model takes.

    Attributes:
        name: of the model.
        weights_bytes: its tensors.
        kv_bytes: keys and values of the whole context; null before its header can be read.
        compute_bytes: the engine's buffers for a pass; null before its header can be read.
    """

    name: str
    weights_bytes: int
    kv_bytes: int | None
    compute_bytes: int | None

    @property
    def total(self) -> int:
        """All that is known of it."""
        return self.weights_bytes + (self.kv_bytes or 0) + (self.compute_bytes or 0)


@dataclass(frozen=True, slots=True)
class FitFacts:
    """Whether the models fit at this context.

    Attributes:
        n_ctx: tokens of context.
        kv_type: type of the KV caches.
        models: what each takes, the target first.
        ram_needed_bytes: of them, what goes into RAM; at least, where something is null in ``models``.
        ram_available_bytes: free now.
        gpu_needed_bytes: what goes into GPU memory; null where no GPU is used.
        gpu_available_bytes: free now; null where no GPU is used or the engine does not say.
        fits: null where that cannot be known yet.
    """

    n_ctx: int
    kv_type: str
    models: list[NeedFacts]
    ram_needed_bytes: int
    ram_available_bytes: int | None
    gpu_needed_bytes: int | None
    gpu_available_bytes: int | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class CurveFacts:
    """t(w): the time of a pass by the number of tokens in it.

    Attributes:
        name: of the model.
        file: what was measured: its file, or a copy of it in other tensor types.
        ms: width -> milliseconds.
    """

    name: str
    file: str
    ms: dict[int, float]


@dataclass(frozen=True, slots=True)
class CostFacts:
    """Measured passes.

    Attributes:
        engine: name and version.
        device: ``cpu``, ``gpu`` or ``mixed``.
        target: its t(w).
        drafts: those of the draft models; a draft step costs their t(1).
        now_ms: the target's t(1) measured just now; ``target`` may come from the calibration on disk.
        bytes_per_token: weights that a one-token pass reads.
        bound_ms: the time that reading them takes at the measured bandwidth; null on a GPU.
    """

    engine: str
    device: str
    target: CurveFacts
    drafts: list[CurveFacts]
    now_ms: float
    bytes_per_token: int
    bound_ms: float | None


@dataclass(frozen=True, slots=True)
class PayoffFacts:
    """What speculation with one drafter is worth here; see ``controllers.break_even``.

    Attributes:
        drafter: a model's name, or ``ngram``.
        step_ms: time of one guess.
        break_even: draft length -> acceptance from which it is faster than plain decoding; null: never.
        speedup: acceptance -> best predicted speed-up over all lengths; 1 is plain decoding.
        best_length: acceptance -> the length that reaches it; 0: do not draft.
    """

    drafter: str
    step_ms: float
    break_even: dict[int, float | None]
    speedup: dict[float, float]
    best_length: dict[float, int]

    @property
    def lowest_break_even(self) -> float | None:
        """The least acceptance that pays, at whatever length; None where nothing does."""
        known = [share for share in self.break_even.values() if share is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Target and drafters.

    Attributes:
        target: the model that answers.
        drafts: the draft models.
        ngram: whether n-grams guess as well.
        vocabulary: by draft name, its first difference from the target's vocabulary; null: they match.
        fit: memory.
        cost: measured passes; null where nothing was loaded.
        payoff: by drafter, what they mean.
    """

    target: ModelFacts
    drafts: list[ModelFacts]
    ngram: bool
    vocabulary: dict[str, str | None]
    fit: FitFacts
    cost: CostFacts | None = None
    payoff: list[PayoffFacts] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankedFacts:
    """One candidate as measured.

    Attributes:
        drafters: the drafters it uses; empty is plain decoding.
        n_prompts: prompts it was measured on; 0: time ran out before.
        speedup: geometric mean over the prompts of its speed over plain decoding of the same prompt.
        lowest, highest: the extremes of those ratios.
        tokens_per_second: plain decoding's median over the prompts, times ``speedup``.
        acceptance_rate: accepted guesses of all guesses; null where none were made.
    """

    drafters: list[str]
    n_prompts: int
    speedup: float | None
    lowest: float | None
    highest: float | None
    tokens_per_second: float | None
    acceptance_rate: float | None


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Candidates measured side by side, the fastest first.

    Attributes:
        seconds: what it took, loading included.
        max_tokens: longest answer.
        prompts: ids of the prompts that all measured candidates share; the ratios are over these.
        noise: relative standard deviation of plain decoding of one prompt, measured again and again; null if it was
            measured once only.
        candidates: see ``RankedFacts``.
    """

    seconds: float
    max_tokens: int
    prompts: list[str]
    noise: float | None
    candidates: list[RankedFacts]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do, in a sentence or two.

    Attributes:
        speculate: null where there is nothing to judge it by.
        text: the sentences.
        command: what to type.
    """

    speculate: bool | None
    text: str
    command: str | None = None


@dataclass(slots=True)
class Examination:
    """Everything that was found.

    Attributes:
        localspec: our version.
        machine: the computer.
        engines: known engines, usable or not.
        models: models on this disk.
        pair: the models asked about; null where none were and the default ones are not on this disk.
        rank: measured candidates, with ``--rank``.
        checks: the rows, in the order in which they are shown.
        recommendation: what to do.
    """

    localspec: str
    machine: MachineFacts
    engines: list[EngineFacts] = field(default_factory=list)
    models: list[ModelFacts] = field(default_factory=list)
    pair: PairFacts | None = None
    rank: RankFacts | None = None
    checks: list[Check] = field(default_factory=list)
    recommendation: Recommendation | None = None

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
