"""An untrained head for states that leave the target early: its last norm, and rows of its output matrix."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from localspec.errors import EngineError, UnsupportedModel, UsageError, is_number
from localspec.heads.card import HeadCard, TargetFacts
from localspec.heads.file import heads_folder, write_head
from localspec.model_files.gguf import GGUFFile, tensor_rows
from localspec.model_files.vocab import Vocab

# Tokens that it can guess: the first of the vocabulary, the commonest where it was made by merging, and those that end
# an answer
N_OUT = 32768


def exit_head(target: Path, facts: TargetFacts, n_layers: int) -> Path:
    """The head file for a target and a number of layers, written once.

    Raises:
        UsageError: the target has not so many layers.
        UnsupportedModel: its last norm is not one that heads have.
    """
    if not 0 < n_layers < facts.n_layers:
        raise UsageError(f"{facts.name} can be left after 1 to {facts.n_layers - 1} layers, not after {n_layers}")
    digest = hashlib.sha256(facts.fingerprint.encode()).hexdigest()[:20]
    path = heads_folder() / "exits" / f"{target.stem[:60]}.{digest}.{n_layers}.gguf"
    if path.exists():
        return path
    with GGUFFile(target) as file:
        eps = file.field("attention.layer_norm_rms_epsilon")
        if not is_number(eps) or "output_norm.weight" not in file.tensors or "output_norm.bias" in file.tensors:
            raise UnsupportedModel(f"{target.name} cannot be left early: its last norm is not an RMS norm")
        ends = [token for token in Vocab.from_gguf(file).eog if token < facts.n_vocab]
        ids = np.union1d(np.arange(min(N_OUT, facts.n_vocab)), np.array(ends, dtype=np.int64))
        tap = f"layer:{n_layers - 1}"
        card = HeadCard("exit", (tap,), ids.astype(np.int32), steps=1, target=facts, norm_eps=float(eps))
        weights = {"output_norm.weight": tensor_rows(file, "output_norm.weight", [0])[0]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_head(path, card, weights)
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror or error}") from None
