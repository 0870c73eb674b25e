"""The status line, and the figures behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.model_files.catalog import short_name
from localspec.spec_decode.rounds import Round, SpecStats

RECENT = 16
"""Rounds over which the draft length is averaged."""


class AnswerStatus:
    """Follows an answer round by round.

    Args:
        drafters: names of the drafters in use.
        draft_length: ``auto`` or a number.
        plain_speed: expected tokens per second of plain decoding, where it is known.
    """

    def __init__(self, drafters: Sequence[str], draft_length: int | str, plain_speed: float | None = None) -> None:
        self.drafters = "+".join(map(short_name, drafters)) or "no draft"
        self.draft_length = draft_length
        self.stats = SpecStats()
        self.stats.seconds_plain_token = 1 / plain_speed if plain_speed else None
        self._lengths: deque[int] = deque(maxlen=RECENT)

    def add(self, round_: Round) -> None:
        """Count one round."""
        self.stats.add(round_)
        if round_.emitted:
            self._lengths.append(len(round_.draft))

    def line(self, stats: Mapping[str, Any] | None = None) -> str:
        """The status while the answer is being written, or with the figures of the finished answer."""
        return status_line(self.stats if stats is None else stats, self.drafters, self._length())

    def _length(self) -> str:
        if self.draft_length != "auto":
            return f"{self.draft_length}"
        mean = sum(self._lengths) / len(self._lengths) if self._lengths else 0.0
        return f"~{mean:.1f}"


def status_line(stats: Mapping[str, Any], drafters: str, draft_length: str) -> str:
    """Speed, estimated plain speed, acceptance, draft length and drafter; 80 columns hold it with most names."""
    speed, plain = stats["tokens_per_second"], stats["estimated_plain_tokens_per_second"]
    parts = [f"{speed:.1f} tok/s" if speed else "… tok/s"]
    if plain:
        parts.append(f"plain ~{plain:.1f}")
    if stats["num_draft_tokens"]:
        parts.append(f"accepted {stats['acceptance_rate']:.0%}")
    else:
        parts.append("no guesses")
    parts += [f"draft {draft_length}", drafters]
    return " · ".join(parts)
