"""The process that may die of a file in the place of ours; started by ``trial``."""

from __future__ import annotations

import sys
from pathlib import Path

from localspec.backends import ik_llama

N_TOKENS = 280
"""More than the engine computes together, so that windows and masks are met by a second piece."""


def main() -> None:
    """What the child does: read, draft, reject, start over."""
    path, kv_type, n_threads = sys.argv[1:]
    ik_llama.binding().repacks = False
    with (
        ik_llama.open_untried(Path(path), n_threads=int(n_threads), kv_type=kv_type) as model,
        model.new_context(N_TOKENS + 8) as context,
    ):
        tokens = [i % model.n_vocab for i in range(1, N_TOKENS + 1)]
        context.decode(tokens, "last")
        context.decode(tokens[:5])
        context.truncate(N_TOKENS + 2)
        context.decode(tokens[:1])
        context.truncate(0)
        context.decode(tokens[:3])
