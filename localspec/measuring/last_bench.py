"""Last speed-ups that ``bench`` measured of a model here, for ``doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from localspec.backends.trust import fingerprint
from localspec.system.files import JsonStore, home
from localspec.system.machine import cpu_name


@dataclass(frozen=True, slots=True)
class LastBench:
    """Speed over plain decoding by kind of question (median; ``all`` over all), the drafters, and draft tokens sent."""

    day: str
    engine: str
    drafters: list[str]
    speedups: dict[str, float]
    n_questions: int
    n_guesses: int


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
