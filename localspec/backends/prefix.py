"""What two texts in tokens begin with alike."""

from __future__ import annotations

from collections.abc import Sequence


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two texts in tokens."""
    n = min(len(a), len(b))
    if _first(a, n) == _first(b, n):
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _first(tokens: Sequence[int], n: int) -> list[int]:
    """The first n, copied only if need be: this is asked of whole conversations, before every draft token."""
    first = tokens if len(tokens) == n else tokens[:n]
    return first if isinstance(first, list) else list(first)
