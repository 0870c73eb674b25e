"""A context of its own, or one of several sequences that all hold something: the same is asked of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from localspec.backends.base import Context, Model, Piece

KINDS = ("alone", "one of several")
NEIGHBOURS = {0: [*range(7, 47), *[8, 7] * 10], 2: [9] * 30}


@contextmanager
def opened(model: Model, kind: str, n_ctx: int, hidden: Sequence[str] = ()) -> Iterator[Context]:
    """An empty context of one of the ``KINDS``, for n_ctx tokens; at the end neighbours must hold what they held."""
    if kind == "alone":
        with model.new_context(n_ctx, hidden=hidden) as context:
            yield context
        return
    with model.new_batch(3, n_ctx + 100, n_ctx=n_ctx, hidden=hidden) as batch, model.new_context(64) as alone:
        batch.decode([Piece(sequence, text[:40], "none") for sequence, text in NEIGHBOURS.items()])
        batch[0].decode(NEIGHBOURS[0][40:], "none")
        yield batch[1]
        batch[1].close()
        for sequence, text in NEIGHBOURS.items():
            found = batch[sequence].decode([5]).logits.copy()
            alone.truncate(0)
            assert np.abs(alone.decode([*text, 5]).logits[-1] - found).max() < 0.05
