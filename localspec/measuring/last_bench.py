"""Last speed-ups that ``bench`` measured of a model here, for ``doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from localspec.model_files.gguf import fingerprint
from localspec.system.files import JsonStore, home
from localspec.system.machine import cpu_name


@dataclass(frozen=True, slots=True)
class LastBench:
    """What bench last measured of a model on an engine."""

    day: str  # when, as people write it
    engine: str  # name and version
    drafters: list[str]  # what drafted
    speedups: dict[str, float]  # kind of question -> median speed over plain decoding; all: over all questions
    n_questions: int  # how many in all
    n_guesses: int  # draft tokens sent


def remember(path: Path, engine: str, found: Mapping[str, Any]) -> None:
    """Keep what was found of a target's file: the fields of ``LastBench`` but day and engine."""
    today = date.today()
    _store().put(_key(path, engine), asdict(LastBench(f"{today.day} {today:%b %Y}", engine, **found)))


def last_bench(path: Path, engine: str) -> LastBench | None:
    """What was found of a target's file on an engine of this version."""
    try:
        return LastBench(**(_store().get(_key(path, engine)) or {}))
    except TypeError:
        return None


def _store() -> JsonStore:
    return JsonStore(home() / "benches", 1)


def _key(path: Path, engine: str) -> dict[str, str]:
    return {"machine": cpu_name(), "file": fingerprint(path), "engine": engine}
