"""Arguments that callers of the Python API give; each check raises ``UsageError`` with one line."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

import numpy as np

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
    if isinstance(value, str) and value == "auto":
        return value
    try:
        length = int(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"the draft length must be auto or a number, not {value!r}") from None
    return FixedController(length).length


def checked_names(value: Sequence[str] | None) -> Sequence[str] | None:
    """The drafters of one request; None is all."""
    if value is None or isinstance(value, str):
        return value if value is None else (value,)
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"drafters must be names, or None, not {value!r:.80}")
    return value


def checked_ids(value: Sequence[int] | None, what: str) -> list[int]:
    """Token ids, such as those of a prediction; they may lie outside of the vocabulary."""
    if value is None:
        return []
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes)
    if not is_list or not all(isinstance(token, Integral) for token in value):
        raise UsageError(f"{what} must be a text or token ids, not {value!r:.80}")
    return [int(token) for token in value]
