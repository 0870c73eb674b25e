"""Figures as people read them, the same in every rendering."""

from __future__ import annotations

from localspec.commands.bench.record import Record
from localspec.commands.bench.results import Row
from localspec.measuring.statistics import Estimate
from localspec.model_files.catalog import short_name


def times_text(value: float | None) -> str:
    """A speed-up."""
    return "–" if value is None else f"×{value:.2f}"


def interval_text(found: Estimate | None) -> str:
    """``1.07–1.42``, with its level where that is under 95 %."""
    if found is None or found.low is None or found.high is None or found.level is None:
        return "–"
    text = f"{found.low:.2f}–{found.high:.2f}"
    return text if found.is_firm else f"{text} ({int(found.level * 100)} %)"


def speed_text(row: Row) -> str:
    """``12.3 ±0.4``: tokens a second."""
    spread = "" if row.spread is None else f" ±{row.spread:.1f}"
    return f"{row.tokens_per_second.median:.1f}{spread}"


def same_text(record: Record, row: Row) -> str:
    """``3 of 5 ≈``: answers equal to plain's, and whether the others part from it at near ties."""
    sampling = record.settings.sampling
    if not row.n_compared or (sampling.get("temperature") and sampling.get("seed") is None):
        return "–"  # each answer is a draw of its own
    others = row.n_compared - row.n_same
    return f"{row.n_same} of {row.n_compared}" + (" ≈" if others and row.n_near_ties == others else "")


def share_text(value: float | None) -> str:
    """A share in whole percents."""
    return "–" if value is None else f"{value:.0%}"


def seconds_text(value: float) -> str:
    """``85 ms`` or ``2.4 s``."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def ms_text(value: float | None) -> str:
    """Milliseconds without their unit, to three digits."""
    return "–" if value is None else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def time_text(seconds: float) -> str:
    """``1:05`` or ``2:03:09``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def arm_name(record: Record, backend: str, arm: str) -> str:
    """An arm, with its engine where there are several."""
    name = f"fixed {arm}" if arm.isdigit() else arm
    return f"{backend} {name}" if len(record.settings.backends) > 1 else name


def title(record: Record) -> str:
    """The models, with short names."""
    return " + ".join(map(short_name, record.title.split(" + ")))
