"""Arguments that callers of the Python API give; each check raises ``UsageError`` with one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localspec.controller import FixedController
from localspec.errors import UsageError

DraftLength = int | str
"""``auto``, or a number of tokens."""


def checked_bound(value: int | None) -> int | None:
    """A bound of the queue; None is none."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UsageError(f"max_queue must be 0 or more, or None, not {value!r}")
    return value


def checked_bytes(value: int) -> int:
    """A size of the prefix cache."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"prefix_cache_bytes must be a number of bytes, 0 or more, not {value!r}")
    return value


def draft_specs(draft: str | Path | Sequence[str | Path] | None) -> list[str]:
    """The ``draft`` argument as a list of names."""
    if draft is None:
        return []
    if isinstance(draft, str | Path):
        return [str(draft)]
    return [str(each) for each in draft]


def checked_length(value: DraftLength) -> DraftLength:
    """A draft length."""
    if value == "auto":
        return value
    try:
        length = int(value)
    except ValueError:
        raise UsageError(f"the draft length must be auto or a number, not {value!r}") from None
    return FixedController(length).length
