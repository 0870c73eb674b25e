"""Everything that a run measured, as ``--json`` writes it and ``--resume``, ``show`` and ``compare`` read it.

SCHEMA.md, next to this file, documents the format.
"""

from __future__ import annotations

import json
import math
import os
import types
import typing
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from localspec.errors import LocalspecError
from localspec.repl.text import on_one_line

SCHEMA_VERSION = 1
TYPE = "localspec bench"

Ending = Literal["running", "complete", "tight", "time", "interrupted"]

_MOST_BYTES = 1 << 30


class RecordError(LocalspecError):
    """A file that should hold a run does not, or cannot be written."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one arm. Times are seconds unless the name says otherwise.

    Attributes:
        question, category: what was asked.
        backend: the engine's name.
        arm: how it was decoded.
        repeat: from 0.
        order: place of this answer among those to the same question in this repeat, from 0.
        started: when, in seconds since 1970.
        prompt_tokens: tokens of the prompt.
        tokens: tokens of the answer as the engine counted them, an end token included.
        token_sha256: first 16 hexadecimal digits of the SHA-256 of the token ids: equal answers have equal ones.
        finish_reason: ``stop`` or ``length``.
        num_rounds, num_draft_tokens, num_accepted_tokens, drafted_per_position, accepted_per_position, by_source: as
            in ``SpecStats``.
        seconds_prompt: the target's reading of the whole prompt, measured once for all arms of a question and repeat.
        seconds_draft, seconds_verify, seconds_other: as in ``SpecStats``; a draft model's reading of the prompt is in
            ``seconds_draft``.
        time_to_first_token: ``seconds_prompt`` and what this arm took from there to the end of its first round.
        rounds: by round: milliseconds drafting, verifying, other; guesses, accepted guesses, emitted tokens.
        judged: guesses that the target judged (all before them in their draft were accepted): source, position in the
            draft, predicted acceptance, 1 if accepted, else 0.
        others_share, clock_mhz, temperature_c, throttled, joules: see ``Conditions``.
    """

    question: str
    category: str
    backend: str
    arm: str
    repeat: int
    order: int
    started: float
    prompt_tokens: int
    tokens: int
    token_sha256: str
    finish_reason: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    by_source: dict[str, dict[str, int]]
    seconds_prompt: float
    seconds_draft: float
    seconds_verify: float
    seconds_other: float
    time_to_first_token: float
    rounds: list[list[float]]
    judged: list[list[Any]]
    others_share: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    joules: float | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 < self.seconds < math.inf:
            raise ValueError(f"{self.tokens} tokens in {self.seconds} seconds")
        if any(len(row) != 6 for row in self.rounds) or any(len(row) != 4 for row in self.judged):
            raise ValueError("rounds have six figures, judged guesses four")

    @property
    def seconds(self) -> float:
        """Decoding time, the denominator of speed: the target's reading of the prompt is not in it."""
        return self.seconds_draft + self.seconds_verify + self.seconds_other

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.question, self.backend, self.arm, self.repeat


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
        arms: ``plain`` first.
        questions: ``own:report``, ``own:tuning``, or a file as named on the command line.
        categories: those that were named; empty: all.
        questions_sha256: digest over the ids, categories and texts of all questions chosen, in order.
        max_tokens: longest answer.
        sampling: what was given of temperature and its like; empty is greedy.
        ignore_eos: whether answers go on behind an end token.
        system: the system prompt.
        ctx, threads, gpu_layers, kv_cache, light_draft: as given.
        mode: ``quick``, ``default`` or ``full``.
    """

    model: str
    draft: list[str]
    backends: list[str]
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


@dataclass(slots=True)
class Session:
    """One process's part of a run.

    Attributes:
        started: seconds since 1970.
        seconds: how long it took, loading included.
        localspec, python: versions.
        command: the command line.
        load_before: load average at the start.
        others_before: share of the CPUs' time that others used at the start.
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
    load_before: float | None = None
    others_before: float | None = None
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
    sessions: list[Session]
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


def write_record(path: Path, record: Record, results: dict[str, Any] | None = None) -> None:
    """Store a run: complete under its name, or not at all."""
    write(path, to_json(record, results).encode())


def to_json(record: Record, results: dict[str, Any] | None = None) -> str:
    """A run as text: the samples come last, one a line."""
    head = record.as_dict()
    samples = head.pop("samples")
    if results is not None:
        head["results"] = results
    lines = ",\n".join(json.dumps(sample, ensure_ascii=False, allow_nan=False) for sample in samples)
    text = json.dumps(head, ensure_ascii=False, allow_nan=False, indent=1)
    return f'{text[:-2]},\n "samples": [\n{lines}\n]}}\n'


def write(path: Path, data: bytes) -> None:
    """Write a file: complete under its name, or not at all.

    Raises:
        RecordError: the disk refuses.
    """
    path = Path(os.path.realpath(path))  # a link keeps pointing where it does
    temporary = path.with_name(f".{path.name}-{token_hex(4)}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from None


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
    if version != SCHEMA_VERSION:
        raise RecordError(f"{path} has schema version {version!r}; this localspec reads version {SCHEMA_VERSION}")
    try:
        record: Record = _build(Record, {key: stored[key] for key in stored if key in _NAMES}, "the run")
    except (ValueError, OverflowError) as error:
        raise RecordError(f"{path} is damaged: {on_one_line(str(error))}") from None
    return record


_NAMES = {each.name for each in fields(Record)}


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
            raise ValueError(f"{where} is no object")
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
            raise ValueError(f"{where} is no list")
        if inner[0] is float and all(type(each) in (float, int) and abs(each) < math.inf for each in value):
            return [float(each) for each in value]  # most of a record is this
        return [_build(inner[0], each, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no object")
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
