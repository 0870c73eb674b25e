"""Rows of which only the largest logits are handed out, as an engine would that finds them on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from localspec.backends.base import Context, Forward
from localspec.sampling.rows import top_k_ids


def cut(forward: Forward, n_best: int) -> Forward:
    """The same pass, with the largest logits of each row only."""
    ids = np.stack([top_k_ids(row, n_best) for row in forward.logits])
    return Forward(np.take_along_axis(forward.logits, ids, 1), forward.hidden, ids)


def hand_out_best(patch: pytest.MonkeyPatch, kind: type[Context]) -> list[int]:
    """Contexts of this kind hand out exactly what is asked for; returns how many rows of each pass, as they come."""
    n_rows: list[int] = []

    def decode_best(self: Context, tokens: Sequence[int], n_best: int, logits: Any) -> Forward:
        forward = cut(self._decode(tokens, logits), n_best)
        n_rows.append(len(forward))
        return forward

    patch.setattr(kind, "finds_best", property(lambda self: True, lambda self, value: None), raising=False)
    patch.setattr(kind, "_decode_best", decode_best)
    return n_rows
