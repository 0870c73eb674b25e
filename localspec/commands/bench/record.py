"""Everything that a run measured, as data; SCHEMA.md, next to this file, documents every field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from localspec.measuring.answer import Sample

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""1 had figures besides that are no longer measured: energy, clock, temperature, load average."""
TYPE = "localspec bench"

Ending = Literal["running", "complete", "tight", "time", "interrupted"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that took part."""

    source: str  # target, or the name under which its draft tokens are counted
    name: str  # for people
    file: str  # what ran; a draft may be a lighter copy of the one asked for
    bytes: int
    sha256: str
    kv_bytes: int  # what its context takes


@dataclass(slots=True)
class Engine:
    """One engine with its models, loaded."""

    backend: str
    version: str  # its own name and version
    device: str  # cpu, gpu or mixed
    threads: int
    n_ctx: int
    models: list[ModelFile]  # the target first
    sources: list[str]  # drafters, in the order in which they are asked
    pass_ms: dict[str, float]  # t(w) of the target, by width
    draft_ms: dict[str, float]  # a one-token pass of a draft model, by source
    passes_measured: Literal["now", "before"]  # before: when the pair was first loaded here
    warnings: list[str] = field(default_factory=list)
    one_pass: list[str] = field(default_factory=list)  # sources whose draft_ms is that of a whole draft


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides what is measured; a run is only resumed with the same."""

    model: str
    draft: list[str]  # as given; empty is auto
    backends: list[str]
    draft_backend: str | None  # None: each target's own
    arms: list[str]  # plain first
    questions: str  # own:report, own:tuning, or a file
    categories: list[str]  # those that were named; empty: all
    questions_sha256: str  # of all questions chosen
    max_tokens: int
    sampling: dict[str, Any]  # empty is greedy
    ignore_eos: bool
    system: str | None
    ctx: int | None
    threads: int | None
    gpu_layers: int | None
    kv_cache: str
    light_draft: bool
    mode: str
    slice_tokens: int = 0  # arms take turns after so many tokens; 0: after whole answers
    placement: dict[str, Any] = field(default_factory=dict)  # what was said of where the target's weights go


@dataclass(slots=True)
class Sitting:
    """One process's part of a run."""

    started: float  # seconds since 1970
    seconds: float  # loading included
    localspec: str
    python: str
    command: str
    on_battery: bool | None = None  # at the start or at the end
    slow_clock: str | None = None  # a setting that keeps the clock low, in words
    throttled: bool | None = None  # whether heat or a power limit slowed a CPU
    peak_memory_bytes: int | None = None


@dataclass(slots=True)
class Record:
    """A run."""

    machine: dict[str, Any]  # the doctor's MachineFacts, but for what changes
    settings: Settings
    engines: list[Engine]  # in the order of settings.backends
    sessions: list[Sitting]  # several if the run was resumed
    ended: Ending = "running"
    skipped: list[str] = field(default_factory=list)  # questions that do not fit into the context
    samples: list[Sample] = field(default_factory=list)  # in the order measured

    def __post_init__(self) -> None:
        names = [engine.backend for engine in self.engines]
        if not names or not self.sessions or names != self.settings.backends:
            raise ValueError("engines, sessions and backends do not match")
        if any(all(model.source != "target" for model in engine.models) for engine in self.engines):
            raise ValueError("an engine has no target")
        if "plain" not in self.settings.arms:
            raise ValueError("there is no plain arm")
        odd = next((s for s in self.samples if s.backend not in names or s.arm not in self.settings.arms), None)
        if odd is not None:
            raise ValueError(f"a sample of {odd.backend} {odd.arm} was not asked for")

    @property
    def title(self) -> str:
        """The models, in words."""
        models = {each.source: each.name for each in self.engines[0].models}
        return " + ".join([models["target"], *(models.get(source, source) for source in self.engines[0].sources)])

    @property
    def seconds(self) -> float:
        """How long it took, all sessions together."""
        return sum(session.seconds for session in self.sessions)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, without the conclusions."""
        return {"type": TYPE, "schema_version": SCHEMA_VERSION, **asdict(self)}


_NAMES = ("mode", "model", "draft", "questions", "ctx", "threads")
"""Settings that only name something: what they come to is compared, by digest where it is a file."""


def differences(a: Record, b: Record) -> Iterator[tuple[str, Any, Any]]:
    """What is not the same in two runs: its name, and what it is in each."""
    old, new = asdict(a.settings), asdict(b.settings)
    pairs: list[tuple[str, Any, Any]] = [
        ("processor", a.machine.get("cpu"), b.machine.get("cpu")),
        ("system", a.machine.get("platform"), b.machine.get("platform")),
        ("CPUs", a.machine.get("cores"), b.machine.get("cores")),
        ("localspec", a.sessions[-1].localspec, b.sessions[-1].localspec),
        ("Python", a.sessions[-1].python, b.sessions[-1].python),
        ("engine", [each.version for each in a.engines], [each.version for each in b.engines]),
        ("device", [each.device for each in a.engines], [each.device for each in b.engines]),
        ("threads", [each.threads for each in a.engines], [each.threads for each in b.engines]),
        ("context", [each.n_ctx for each in a.engines], [each.n_ctx for each in b.engines]),
        ("models", _models(a), _models(b)),
        *((_SHOWN.get(name, name.replace("_", " ")), old[name], new[name]) for name in old if name not in _NAMES),
    ]
    return (each for each in pairs if each[1] != each[2])


_SHOWN = {"questions_sha256": "questions", "system": "system prompt"}


def _models(record: Record) -> list[str]:
    return [f"{model.file} ({model.sha256[:8]})" for engine in record.engines for model in engine.models]
