"""Figures as people read them, the same in every rendering."""

from __future__ import annotations

from localspec.commands.bench.record import Record
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
