"""Everything that a run measured; SCHEMA.md documents every field."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from localspec.errors import LocalspecError
from localspec.measuring.subject import Sample
from localspec.system.terminal import on_one_line

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1 also had energy, clock, temperature and load average
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
    pass_ms: dict[str, float]  # t(w) of the target, by width
    draft_ms: dict[str, float]  # a one-token pass of a draft model, by source
    passes_measured: Literal["now", "before"]  # before: when the pair was first loaded here
    warnings: list[str] = field(default_factory=list)
    one_pass: list[str] = field(default_factory=list)  # sources whose draft_ms is that of a whole draft


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
        """Duration of all sittings."""
        return sum(session.seconds for session in self.sessions)

    def as_dict(self) -> dict[str, Any]:
        return {"type": TYPE, "schema_version": SCHEMA_VERSION, **asdict(self)}


_NAMES = ("mode", "model", "draft", "questions", "ctx", "threads")
"""Settings that only name something; what they come to is compared instead."""


def differences(a: Record, b: Record) -> Iterator[tuple[str, Any, Any]]:
    """What is not the same in two runs: its name, and its value in each."""
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


# Records as files: written by ``--json``, read by ``--resume``, ``show`` and ``compare``.

_MOST_BYTES = 1 << 30


class RecordError(LocalspecError):
    """A file that should hold a run does not."""


def to_json(record: Record, results: dict[str, Any] | None = None) -> str:
    """A run as text, one sample a line."""
    head = record.as_dict()
    samples = head.pop("samples")
    if results is not None:
        head["results"] = results
    lines = ",\n".join(json.dumps(sample, ensure_ascii=False, allow_nan=False) for sample in samples)
    text = json.dumps(head, ensure_ascii=False, allow_nan=False, indent=1)
    return f'{text[:-2]},\n "samples": [\n{lines}\n]}}\n'


def read_record(path: Path) -> Record:
    """A run from a file.

    Raises:
        RecordError: it cannot be read, or is something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise RecordError(f"{path} is larger than {_MOST_BYTES >> 30} GB")
        stored = json.loads(data)
    except (OSError, RecursionError) as error:
        raise RecordError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'nested too deeply'}") from None
    except ValueError as error:
        cut = " (it may have been cut short)" if isinstance(error, json.JSONDecodeError) else ""
        raise RecordError(f"{path} is not JSON{cut}") from None
    if not isinstance(stored, dict) or stored.get("type") != TYPE:
        raise RecordError(f"{path} is not a run of localspec bench --json")
    version = stored.get("schema_version")
    if version not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise RecordError(f"{path} has schema version {version!r}; this localspec reads {known}")
    try:
        record: Record = _build(Record, {key: stored[key] for key in stored if key in _RECORD_FIELDS}, "the run")
    except (ValueError, OverflowError) as error:
        raise RecordError(f"{path} is damaged: {on_one_line(str(error))}") from None
    return record


_RECORD_FIELDS = {each.name for each in fields(Record)}


def _build(wanted: Any, value: Any, where: str) -> Any:
    """A JSON value as a type: dataclasses, lists, mappings, unions and plain values.

    Raises:
        ValueError: it does not fit.
    """
    if wanted is Any:
        return value
    if isinstance(wanted, str):
        return _build(typing.get_type_hints(Record)[wanted], value, where)
    if is_dataclass(wanted):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        hints, found = typing.get_type_hints(wanted), {}
        for each in fields(wanted):
            if each.name in value:
                found[each.name] = _build(hints[each.name], value[each.name], f"{each.name} of {where}")
        try:
            return wanted(**found)  # type: ignore[operator]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        except TypeError:  # what has no default is not there
            missing = [each.name for each in fields(wanted) if each.name not in found]
            raise ValueError(f"{where} lacks {', '.join(missing)}") from None
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{where} is not a list")
        if inner[0] is float and all(type(each) in (float, int) and abs(each) < math.inf for each in value):
            return [float(each) for each in value]  # most of a record is this
        return [_build(inner[0], each, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        return {key: _build(inner[1], each, f"{where}[{key}]") for key, each in value.items()}
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{where} is {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _build(next(each for each in inner if each is not type(None)), value, where)
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if wanted in (int, str, bool) and type(value) is wanted:
        return value
    raise ValueError(f"{where} is {value!r}")
