"""Everything that a run measured, as data. SCHEMA.md, next to this file, documents what ``storage`` makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from localspec.commands.timing.answer import Sample

SCHEMA_VERSION = 1
TYPE = "localspec bench"

Ending = Literal["running", "complete", "tight", "time", "interrupted"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that took part.

    Attributes:
        source: ``target``, or the name under which its guesses are counted.
        name: for people.
        file: name of the file that ran; a draft may be a lighter copy of the one asked for.
        bytes: its size.
        sha256: its digest.
        kv_bytes: what its context takes.
    """

    source: str
    name: str
    file: str
    bytes: int
    sha256: str
    kv_bytes: int


@dataclass(slots=True)
class Engine:
    """One engine with its models, loaded.

    Attributes:
        backend: ``ik-llama``, ``llama-cpp``, …
        version: the engine's own name and version.
        device: ``cpu``, ``gpu`` or ``mixed``.
        threads: CPU threads.
        n_ctx: context size [tokens].
        models: the target first.
        sources: drafters, in the order in which they are asked.
        pass_ms: t(w) of the target by width, as text [milliseconds].
        draft_ms: by source, time of a one-token pass of a draft model.
        passes_measured: whether these were measured for this run (``now``) or when the pair was first loaded here
            (``before``).
        warnings: remarks from loading.
    """

    backend: str
    version: str
    device: str
    threads: int
    n_ctx: int
    models: list[ModelFile]
    sources: list[str]
    pass_ms: dict[str, float]
    draft_ms: dict[str, float]
    passes_measured: Literal["now", "before"]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides what is measured; a run is only resumed with the same.

    Attributes:
        model: as named on the command line.
        draft: ``--draft`` as given; empty is ``auto``.
        backends: engines, in the order asked for.
        draft_backend: the engine for draft models; None: each target's own.
        arms: ``plain`` first.
        questions: ``own:report``, ``own:tuning``, or a file as named on the command line.
        categories: those that were named; empty: all.
        questions_sha256: digest over the ids, categories and texts of all questions chosen, in order.
        max_tokens: longest answer.
        slice_tokens: the arms of a question take turns after so many tokens; 0: after whole answers.
        sampling: what was given of temperature and its like; empty is greedy.
        ignore_eos: whether answers go on behind an end token.
        system: the system prompt.
        ctx, threads, gpu_layers, kv_cache, light_draft: as given.
        mode: ``quick``, ``default`` or ``full``.
    """

    model: str
    draft: list[str]
    backends: list[str]
    draft_backend: str | None
    arms: list[str]
    questions: str
    categories: list[str]
    questions_sha256: str
    max_tokens: int
    sampling: dict[str, Any]
    ignore_eos: bool
    system: str | None
    ctx: int | None
    threads: int | None
    gpu_layers: int | None
    kv_cache: str
    light_draft: bool
    mode: str
    slice_tokens: int = 0


@dataclass(slots=True)
class Sitting:
    """One process's part of a run.

    Attributes:
        started: seconds since 1970.
        seconds: how long it took, loading included.
        localspec, python: versions.
        command: the command line.
        on_battery: whether it ran on battery, at the start or at the end.
        slow_clock: a setting that keeps the clock low, in words.
        throttled: whether heat or a power limit slowed a CPU.
        peak_memory_bytes: the most memory resident.
    """

    started: float
    seconds: float
    localspec: str
    python: str
    command: str
    on_battery: bool | None = None
    slow_clock: str | None = None
    throttled: bool | None = None
    peak_memory_bytes: int | None = None


@dataclass(slots=True)
class Record:
    """A run.

    Attributes:
        machine: what it ran on; fields of ``doctor``'s ``MachineFacts`` that do not change while it runs.
        settings: what was asked for.
        engines: in the order of ``settings.backends``.
        sessions: the processes that measured; several if the run was resumed.
        ended: ``running``, ``complete`` (everything was measured), ``tight`` (the intervals were narrow enough),
            ``time`` or ``interrupted``.
        skipped: questions that do not fit into the context.
        samples: every answer, in the order measured.
    """

    machine: dict[str, Any]
    settings: Settings
    engines: list[Engine]
    sessions: list[Sitting]
    ended: Ending = "running"
    skipped: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [engine.backend for engine in self.engines]
        if not names or not self.sessions or names != self.settings.backends:
            raise ValueError("engines, sessions and backends do not go together")
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
