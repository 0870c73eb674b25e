"""The status line of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def status_line(stats: Mapping[str, Any]) -> str:
    """Speed, estimated speed-up and how many guesses were right; without guesses it is plain decoding.

    Args:
        stats: see ``SpecStats``.

    Returns:
        Nothing where nothing was said.
    """
    if not stats["completion_tokens"]:
        return ""
    parts = [f"{stats['tokens_per_second']:.1f} tok/s"]
    if not stats["num_draft_tokens"]:
        return " · ".join([*parts, "nothing guessed (plain decoding)"])
    parts += [f"×{faster:.1f}"] if (faster := stats["estimated_speedup"]) else []
    return " · ".join([*parts, f"{stats['num_accepted_tokens']:,} of {stats['num_draft_tokens']:,} guesses right"])
