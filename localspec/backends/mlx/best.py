"""The largest logits of each row, found by MLX where it computes them; see ``backends.best_rows``."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from localspec.backends.best_rows import by_token, n_looked_for
from localspec.backends.forward import FloatArray, TokenIds

_BLOCK = 128


class Largest(NamedTuple):
    """Of a pass, before it is computed.

    Attributes:
        values: the k largest logits of each row, in any order [n_rows, k].
        ids: their tokens [n_rows, k].
        has_nan: whether a logit, of all of them, is NaN.
    """

    values: mx.array
    ids: mx.array
    has_nan: mx.array


def largest(logits: mx.array, n_best: int) -> Largest | None:
    """The largest logits of rows, ``n_best`` or more of each; None where rows have to be whole.

    A GPU sorts all of a row to partition it. The k largest logits of 152k are in the k blocks with the largest maxima,
    so 1,188 maxima and k * 128 logits are sorted instead; of equals some may then be missing, as ever at the end.

    Args:
        logits: float32 [n_rows, n_vocab]
        n_best: over 0.
    """
    n_rows, n_vocab = logits.shape
    k = n_looked_for(n_best, n_vocab)
    if not k:
        return None
    n_blocks = n_vocab // _BLOCK
    if n_blocks <= k:
        ids = _places(logits, k)
        values = mx.take_along_axis(logits, ids, axis=-1)
    else:
        blocks = logits[:, : n_blocks * _BLOCK].reshape(n_rows, n_blocks, _BLOCK)
        near = _places(blocks.max(axis=-1), k)  # [n_rows, k]
        rest = mx.arange(n_blocks * _BLOCK, n_vocab, dtype=near.dtype)
        inside = near[..., None] * _BLOCK + mx.arange(_BLOCK, dtype=near.dtype)
        candidates = mx.concatenate([inside.reshape(n_rows, -1), mx.broadcast_to(rest, (n_rows, len(rest)))], axis=-1)
        found = mx.take_along_axis(logits, candidates, axis=-1)
        at = _places(found, k)
        ids, values = mx.take_along_axis(candidates, at, axis=-1), mx.take_along_axis(found, at, axis=-1)
    return Largest(values, ids, mx.isnan(logits).any())


def _places(values: mx.array, k: int) -> mx.array:
    """Where the k largest numbers of each row are [n_rows, k]."""
    return mx.argpartition(values, -k, axis=-1)[..., -k:]


def settled(best: Largest, n_best: int) -> tuple[FloatArray, TokenIds] | None:
    """Of a pass that was computed, see ``best_rows.by_token``; None also where any logit is NaN."""
    if best.has_nan.item():
        return None
    return by_token(np.array(best.values, copy=False), np.array(best.ids, copy=False), n_best)
