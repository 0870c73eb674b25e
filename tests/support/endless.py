"""A tiny model that never stops by itself, for tests that interrupt it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.support import ggufs
from tests.support.gguf_vocabs import CONTROL

N_CTX = 16384  # Long enough that no test sees its end


def write_endless(path: Path, draft_path: Path | None = None) -> Path:
    """Write the model and, where asked for, a draft that is often right about it."""
    vocab = ggufs.bpe_vocab()
    shape = ggufs.Shape(n_layer=4, residual=0.1, n_ctx=N_CTX)
    weights = ggufs.llama_weights(shape, len(vocab), seed=7)
    weights["output.weight"][np.array(vocab.types) == CONTROL] = 0.0
    ggufs.write_llama(path, shape, vocab, weights=weights)
    if draft_path is not None:
        ggufs.write_llama(draft_path, replace(shape), vocab, weights=ggufs.perturbed(weights, 1, 0.02))
    return path
