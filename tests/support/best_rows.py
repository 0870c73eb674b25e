"""Rows of which only the largest logits are handed out, as an engine would that finds them on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from localspec.backends.base import Context, Forward
from localspec.backends.llama.model import LlamaModel
from localspec.heads.llama import LlamaHeadModel
from localspec.sampling.sampling import top_k_ids


def cut(forward: Forward, n_best: int) -> Forward:
    """The same pass, with the largest logits of each row only."""
    ids = np.stack([top_k_ids(row, n_best) for row in forward.logits])
    return Forward(np.take_along_axis(forward.logits, ids, 1), forward.hidden, ids)


def force_best(patch: pytest.MonkeyPatch, finds_best: bool) -> list[Context]:
    """Whether models and heads on llama.cpp find the largest logits; returns the contexts of passes that were cut, as
    they come."""
    cut: list[Context] = []
    for kind in (LlamaModel, LlamaHeadModel):
        patch.setattr(kind, "finds_best", finds_best)
    feed = Context._feed

    def counted(self: Context, *arguments: Any) -> Forward:
        forward = feed(self, *arguments)
        if forward.ids is not None:
            cut.append(self)
        return forward

    patch.setattr(Context, "_feed", counted)
    return cut


def hand_out_best(patch: pytest.MonkeyPatch, kind: type[Context], besides: Context | None = None) -> list[int]:
    """Contexts of this kind hand out exactly what is asked for; returns how many rows of each pass, as they come.

    Args:
        patch: until when.
        kind: the kind.
        besides: one that does not.
    """
    n_rows: list[int] = []

    def decode_best(self: Context, tokens: Sequence[int], n_best: int, logits: Any, rows: Any) -> Forward:
        whole = self._decode(tokens, logits) if rows is None else self._decode_floats(rows, tokens, logits)
        forward = cut(whole, n_best)
        n_rows.append(len(forward))
        return forward

    patch.setattr(
        kind, "finds_best", property(lambda self: self is not besides, lambda self, value: None), raising=False
    )
    patch.setattr(kind, "_decode_best", decode_best)
    return n_rows
