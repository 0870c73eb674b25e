"""The process that may die of a file in the place of ours; started by ``trial``."""

from __future__ import annotations

import sys
from pathlib import Path

from localspec.backends.base import Model, Piece
from localspec.backends.registry import engine_module

N_TOKENS = 280
"""More than ik-llama computes together, so that windows and masks are met by a second piece."""


def main() -> None:
    """What the child does: read, draft, reject, start over."""
    path, backend, kv_type, n_threads, how_many = sys.argv[1:]
    with engine_module(backend).open_untried(Path(path), n_threads=int(n_threads), kv_type=kv_type) as model:
        tokens = [i % model.n_vocab for i in range(1, N_TOKENS + 1)]
        (_feed_several if how_many == "several" else _feed_one)(model, tokens)


def _feed_one(model: Model, tokens: list[int]) -> None:
    with model.new_context(N_TOKENS + 8) as context:
        context.decode(tokens, "last")
        context.decode(tokens[:5])
        context.truncate(N_TOKENS + 2)
        context.decode(tokens[:1])
        context.truncate(0)
        context.decode(tokens[:3])


def _feed_several(model: Model, tokens: list[int]) -> None:
    with model.new_batch(2, 2 * N_TOKENS) as batch:
        batch.decode([Piece(0, tokens[:-8], "last"), Piece(1, tokens[:20])])
        batch.decode([Piece(0, tokens[:5]), Piece(1, tokens[:3])])
        batch.truncate(0, 40)
        batch.decode([Piece(0, tokens[:1]), Piece(1, tokens[:1])])
        batch.copy_prefix(0, 1, 30)
        batch.decode([Piece(0, tokens[:3]), Piece(1, tokens[:2])])
    with model.new_context(N_TOKENS + 8, branches=True) as context:
        context.decode(tokens[:-20], "last")
        for parents in ([-1, 0, 0, -1, 3], [-1, -1, 1]):
            context.decode_tree(tokens[: len(parents)], parents)
            context.keep([parents.index(-1, 1)])
            context.decode(tokens[:1])
        context.truncate(9)
        context.decode(tokens[:40])
