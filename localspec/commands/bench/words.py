"""Figures as people read them, the same on the terminal, in Markdown and on the page."""

from __future__ import annotations

from localspec.commands.bench.record import Record
from localspec.commands.bench.results import ALL, Results, Row
from localspec.commands.bench.schedule import time_text
from localspec.commands.bench.statistics import Estimate
from localspec.model_files.catalog import short_name
from localspec.model_files.sources.base import size_text


def times_text(value: float | None) -> str:
    """A speed-up."""
    return "–" if value is None else f"×{value:.2f}"


def interval_text(found: Estimate | None) -> str:
    """``1.07–1.42``, with its level where that is under 95 %."""
    if found is None or found.low is None or found.high is None or found.level is None:
        return "–"
    text = f"{found.low:.2f}–{found.high:.2f}"
    return text if found.is_firm else f"{text} ({int(found.level * 100)} %)"


def share_text(value: float | None) -> str:
    """A share in whole percents."""
    return "–" if value is None else f"{value:.0%}"


def seconds_text(value: float) -> str:
    """``85 ms`` or ``2.4 s``."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def slower_text(row: Row) -> str:
    """On how many questions it was slower than plain."""
    return "–" if row.speedup is None else f"{row.n_slower} of {row.speedup.n}"


def arm_name(record: Record, backend: str, arm: str) -> str:
    """An arm, with its engine where there are several."""
    name = f"fixed {arm}" if arm.isdigit() else arm
    return f"{backend} {name}" if len(record.settings.backends) > 1 else name


def title(record: Record) -> str:
    """The models, with short names."""
    return " + ".join(map(short_name, record.title.split(" + ")))


def scope(record: Record, results: Results) -> str:
    """What was measured, in a line."""
    settings = record.settings
    questions = len({sample.question for sample in record.samples})
    repeats = max(sample.repeat for sample in record.samples) + 1
    given = {name: value for name, value in settings.sampling.items() if settings.sampling.get("temperature")}
    how = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in given.items()) or "greedy"
    parts = [
        f"{questions} question{'s' * (questions != 1)}"
        + (f" of {len(results.categories)} categories" if results.categories else ""),
        f"{len(record.samples)} answers" + (f" in up to {repeats} repeats" if repeats > 1 else ""),
        f"of at most {settings.max_tokens} tokens",
        how,
        f"in turns of {settings.slice_tokens} tokens" if settings.slice_tokens else "in turns",
        f"{time_text(record.seconds)} in all",
    ]
    return ", ".join(parts)


def ending(record: Record) -> str:
    """Why the run ended, in a clause."""
    return {
        "complete": "everything was measured",
        "tight": "the intervals were narrow enough",
        "time": "time was up",
        "interrupted": "it was interrupted",
        "running": "it was cut off",
    }[record.ended]


def verdict(record: Record, row: Row) -> str:
    """An arm's overall speed-up, in a sentence that says no more than the interval allows."""
    name, found = arm_name(record, row.backend, row.arm), row.speedup
    if found is None:
        return f"{name}: there is no plain answer to compare with."
    what = f"{name} decodes at {times_text(found.median)} of plain's speed"
    if found.low is None or found.high is None:
        return f"{what} on the one question measured: too few to say more."
    level = f"{found.level:.0%}" if found.is_firm else f"range of {found.n} questions"
    sure = f"{what} ({level}: {found.low:.2f} to {found.high:.2f})"
    if not found.is_firm:
        return f"{sure}: too few questions for a verdict."
    if found.low > 1:
        return f"{sure}: faster."
    if found.high < 1:
        return f"{sure}: slower."
    return f"{sure}: no difference can be told."


def verdicts(record: Record, results: Results) -> list[str]:
    """One sentence for each arm but plain."""
    rows = [results.row(ALL, backend, arm) for backend, arm in results.arms]
    return [verdict(record, row) for row in rows if row is not None]


def machine_text(record: Record) -> str:
    """The computer, in a line."""
    machine = record.machine
    cores, features = machine.get("cores"), " ".join(machine.get("features") or [])
    return f"{machine.get('cpu')}, {cores} CPUs, {features or machine.get('platform')}"


def engines_text(record: Record) -> str:
    """The engines, in a line."""
    return "; ".join(
        f"{each.version} on {each.device}, {each.threads} thread{'s' * (each.threads != 1)}" for each in record.engines
    )


def memory_text(record: Record) -> str:
    """Weights, contexts and the peak, in a line."""
    models = [model for engine in record.engines for model in engine.models]
    weights, kv = sum(model.bytes for model in models), sum(model.kv_bytes for model in models)
    peaks = [session.peak_memory_bytes for session in record.sessions if session.peak_memory_bytes]
    text = f"weights {size_text(weights)}, attention caches {size_text(kv)}"
    return f"{text}, peak of the process {size_text(max(peaks))}" if peaks else text


def energy_text(record: Record, row: Row) -> str | None:
    """Joules per token; None where it is not measured."""
    return None if row.joules_per_token is None else f"{row.joules_per_token:.2f} J/token"
