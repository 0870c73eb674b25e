"""Everything that a run measured; SCHEMA.md documents every field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from localspec.errors import LocalspecError, first_problem, is_number
from localspec.measuring.subject import Sample
from localspec.model_files.catalog import short_name
from localspec.system.terminal import on_one_line

SCHEMA_VERSION = 2
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
    """One engine with its models."""

    backend: str
    version: str  # its own name and version
    device: str  # cpu, gpu or mixed
    threads: int
    n_ctx: int
    models: list[ModelFile]  # the target first
    sources: list[str]  # drafters, in the order in which they are asked
    pass_ms: dict[int, float]  # t(w) of the target, by width
    draft_ms: dict[str, float]  # a one-token pass of a draft model, by source
    passes_measured: Literal["now", "before"]  # before: when the pair was first loaded here
    warnings: list[str] = field(default_factory=list)
    one_pass: list[str] = field(default_factory=list)  # sources whose draft_ms is that of a whole draft
    # By source, where that pass has a row for each draft token: number of draft tokens -> milliseconds
    block_ms: dict[str, dict[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides what is measured; only a run with the same settings can be resumed."""

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

    __pydantic_config__ = {"strict": True, "allow_inf_nan": False}  # noqa: RUF012

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
        if any(engine.pass_ms.get(1, 0.0) <= 0 for engine in self.engines):
            raise ValueError("the time of a pass over one token is not known")
        features, cores = self.machine.get("features") or [], self.machine.get("cores") or 0
        if not (isinstance(features, list) and all(isinstance(each, str) for each in features) and is_number(cores)):
            raise ValueError("the machine is not described")
        odd = next((s for s in self.samples if s.backend not in names or s.arm not in self.settings.arms), None)
        if odd is not None:
            raise ValueError(f"a sample of {odd.backend} {odd.arm} was not asked for")

    @property
    def title(self) -> str:
        """The models by their short names."""
        models = {each.source: each.name for each in self.engines[0].models}
        return " + ".join(short_name(models.get(each, each)) for each in ["target", *self.engines[0].sources])

    def arm_name(self, backend: str, arm: str) -> str:
        """An arm, with its engine where there are several."""
        name = f"fixed {arm}" if arm.isdigit() else arm
        return f"{backend} {name}" if len(self.engines) > 1 else name

    @property
    def seconds(self) -> float:
        """Duration of all sittings."""
        return sum(session.seconds for session in self.sessions)


_NAMES = ("mode", "model", "draft", "questions", "ctx", "threads")
"""Settings that only name something; what they come to is compared instead."""


def differences(a: Record, b: Record) -> Iterator[tuple[str, Any, Any]]:
    """What is not the same in two runs: its name, and its value in each."""
    old, new = _compared(a), _compared(b)
    return ((name, old[name], new[name]) for name in old if old[name] != new[name])


def _compared(record: Record) -> dict[str, Any]:
    engines, machine, latest = record.engines, record.machine, record.sessions[-1]
    settings = {name: value for name, value in asdict(record.settings).items() if name not in _NAMES}
    return {
        "processor": machine.get("cpu"),
        "system": machine.get("platform"),
        "CPUs": machine.get("cores"),
        "localspec": latest.localspec,
        "Python": latest.python,
        "engine": [each.version for each in engines],
        "device": [each.device for each in engines],
        "threads": [each.threads for each in engines],
        "context": [each.n_ctx for each in engines],
        "models": [f"{model.file} ({model.sha256[:8]})" for engine in engines for model in engine.models],
        **{_SHOWN.get(name, name.replace("_", " ")): value for name, value in settings.items()},
    }


_SHOWN = {"questions_sha256": "questions", "system": "system prompt"}


# Records as files: written by ``--json``, read by ``--resume``, ``show`` and ``compare``.

_MOST_BYTES = 1 << 30


def to_json(record: Record, results: dict[str, Any] | None = None) -> str:
    """A run as text, one sample a line."""
    head = {"type": TYPE, "schema_version": SCHEMA_VERSION, **asdict(record)}
    samples = head.pop("samples")
    if results is not None:
        head["results"] = results
    lines = ",\n".join(json.dumps(sample, ensure_ascii=False, allow_nan=False) for sample in samples)
    text = json.dumps(head, ensure_ascii=False, allow_nan=False, indent=1)
    return f'{text[:-2]},\n "samples": [\n{lines}\n]}}\n'


def read_record(path: Path) -> Record:
    """A run from a file. ``LocalspecError``: it cannot be read, or is something else."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise LocalspecError(f"{path} is larger than {_MOST_BYTES >> 30} GB")
        stored = json.loads(data)
    except (OSError, RecursionError) as error:
        raise LocalspecError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'nested too deeply'}") from None
    except ValueError as error:
        cut = " (it may have been cut short)" if isinstance(error, json.JSONDecodeError) else ""
        raise LocalspecError(f"{path} is not JSON{cut}") from None
    if not isinstance(stored, dict) or stored.get("type") != TYPE:
        raise LocalspecError(f"{path} is not a run of localspec bench --json")
    version = stored.get("schema_version")
    if version != SCHEMA_VERSION:
        raise LocalspecError(f"{path} has schema version {version!r}; this localspec reads {SCHEMA_VERSION}")
    from pydantic import TypeAdapter, ValidationError  # takes a while

    try:
        return TypeAdapter(Record).validate_json(data)
    except ValidationError as error:
        raise LocalspecError(f"{path} is damaged: {on_one_line(first_problem(error))}") from None
