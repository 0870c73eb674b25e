"""Records as files: what ``--json`` writes, and ``--resume``, ``show`` and ``compare`` read."""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from localspec.commands.bench.record import READABLE_VERSIONS, TYPE, Record
from localspec.errors import LocalspecError
from localspec.terminal.text import on_one_line

_MOST_BYTES = 1 << 30


class RecordError(LocalspecError):
    """A file that should hold a run does not."""


def to_json(record: Record, results: dict[str, Any] | None = None) -> str:
    """A run as text: the samples come last, one a line."""
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
