"""Several sequences in one memory of a llama.cpp engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from localspec.backends.forward import Forward
from localspec.backends.llama_passes import LlamaPasses
from localspec.backends.sequence_batch import Pieces, SequenceBatch
from localspec.errors import UsageError

if TYPE_CHECKING:
    from localspec.backends.llama_family import LlamaModel

MAX_SEQUENCES = 64
"""llama.cpp takes 64 without saying that it was compiled for more."""


class LlamaSequences(SequenceBatch):
    """See ``SequenceBatch``. Keys and values are kept in 16 bits: without flash attention there are no fewer."""

    model: LlamaModel

    def __init__(self, model: LlamaModel, n_sequences: int, n_ctx_each: int, hidden: tuple[str, ...]) -> None:
        if n_sequences > MAX_SEQUENCES:
            raise UsageError(f"{model.engine} takes at most {MAX_SEQUENCES} sequences, not {n_sequences}")
        super().__init__(model, n_sequences, n_ctx_each, hidden)
        self._passes = LlamaPasses(model, n_sequences * n_ctx_each, model.n_threads, "f16", hidden, n_sequences)

    def _decode(self, pieces: Pieces, logits: Literal["all", "last"]) -> Forward:
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        for sequence, piece in pieces:
            n_past = self._n_past[sequence]
            tokens += piece
            positions += range(n_past, n_past + len(piece))
            sequences += [sequence] * len(piece)
            wanted += [*([logits == "all"] * (len(piece) - 1)), True]
        return self._passes.run(tokens, positions, np.array(wanted), sequences=sequences)

    def _truncate(self, sequence: int, n: int) -> None:
        self.model.binding.remove(self._passes.handle, n, sequence)
        self.model.binding.close_gaps(self._passes.handle, max(0, self._n_past[sequence] - n))

    def _close(self) -> None:
        self._passes.close()
