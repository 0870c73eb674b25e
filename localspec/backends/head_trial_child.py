"""The process that may die of llama-cpp's functions for heads in the place of ours; started by ``head_trial``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import numpy as np

from localspec.backends.base import Model
from localspec.backends.llama import llama_cpp
from localspec.backends.llama_heads import LlamaHeadModel
from localspec.backends.published_heads import EngineHead, disagreement
from localspec.model_files.head_kinds import read_mtp, read_published


def main() -> None:
    """What the child does: load, read states, draft, reject. On the CPU, where the target's pages are shared."""
    path, lent, n_threads = sys.argv[1:]
    head = read_mtp(Path(path)) if path == lent else read_published(Path(path))
    target = llama_cpp.load(lent, n_threads=int(n_threads), n_gpu_layers=0) if lent else None
    if target is not None:
        with target.new_context(64, hidden=head.taps) as context:
            context.decode([1, 2, 3])
            context.truncate(1)
            context.decode([2, 3])
    # A head to which nothing is lent does not look at its target.
    model = LlamaHeadModel(head, cast(Model, target), n_threads=int(n_threads), n_gpu_layers=0)
    disagreement(EngineHead(head, model))
    with model.new_context(8) as context:
        context.decode_floats(np.zeros((3, head.row_width), dtype=np.float32), [1, 2, 3], "none")
