"""Several sequences in one memory of a llama.cpp engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from localspec.backends.context_state import ContextState
from localspec.backends.forward import NORM, FloatArray, Forward, Wanted, layer_name, n_wanted
from localspec.backends.llama_binding import MAX_SEQUENCES, Bytes
from localspec.backends.llama_passes import LlamaPasses
from localspec.backends.llama_state import restore, save, saved_sequence, state_bytes
from localspec.backends.sequence_batch import Piece, SequenceBatch
from localspec.backends.state_tap import Flags
from localspec.errors import UsageError

if TYPE_CHECKING:
    from localspec.backends.llama_family import LlamaModel


class LlamaSequences(SequenceBatch):
    """See ``SequenceBatch``. Each token is one cell of the engine's memory, whichever sequences have it."""

    model: LlamaModel
    shares_prefix = True

    def __init__(
        self, model: LlamaModel, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> None:
        if n_sequences > MAX_SEQUENCES:
            raise UsageError(f"{model.engine} takes at most {MAX_SEQUENCES} sequences, not {n_sequences}")
        super().__init__(model, n_sequences, n_cells, n_ctx, hidden)
        self._binding = model.binding
        kv_type = model.kv_type if model.binding.batches_kv_types else "f16"
        self._passes = LlamaPasses(model, n_cells, n_threads, kv_type, hidden, n_sequences)
        self._handle = self._passes.handle
        self._n_gaps = 0
        """Cells that were given back since rows were last moved together."""

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        tokens = [token for piece in pieces for token in piece.tokens]
        positions: list[int] = []
        sequences: list[tuple[int]] = []
        wanted = np.zeros(len(tokens), dtype=bool)
        for sequence, piece, logits in pieces:
            start, n_past = len(positions), self._sequences[sequence].n_past
            positions += range(n_past, n_past + len(piece))
            sequences += [(sequence,)] * len(piece)
            wanted[start : len(positions)] = logits == "all"
            wanted[len(positions) - 1] = logits != "none"
        return _divided(self._run(tokens, positions, wanted, sequences), pieces, self.model.n_layers)

    def _decode_floats(self, sequence: int, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._one(sequence, rows, logits)

    def _decode_first_layers(self, sequence: int, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._one(sequence, tokens, "none", layer_name(n_layers - 1))

    def _one(self, sequence: int, rows: Sequence[int] | FloatArray, logits: Wanted, last: str | None = None) -> Forward:
        n_past = self._sequences[sequence].n_past
        wanted = np.full(len(rows), logits == "all")
        wanted[-1] = logits != "none"
        return self._run(rows, range(n_past, n_past + len(rows)), wanted, [(sequence,)] * len(rows), last)

    def _run(
        self,
        rows: Sequence[int] | FloatArray,
        positions: Sequence[int],
        wanted: Flags,
        sequences: Sequence[Sequence[int]],
        last: str | None = None,
    ) -> Forward:
        self._close_gaps()
        try:
            return self._passes.run(
                rows, positions, wanted, sequences=sequences, last=last, interrupted=self.interrupted
            )
        except BaseException:
            self._n_gaps += len(rows)  # those that it came to will be removed
            raise

    def _truncate(self, sequence: int, n: int) -> None:
        self._n_gaps += max(0, self._sequences[sequence].n_past - n)
        if not self._binding.remove(self._handle, n, sequence):
            self._read_again(sequence, n)

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        self._binding.copy(self._handle, source, target, n)
        if not self._binding.holds(self._handle, n, target):
            self._read_again(target, n)

    def _read_again(self, sequence: int, n: int) -> None:
        """Feed the first n tokens anew: a window that moved on has lost rows that they look at.

        Raises:
            ContextFull: what they shared with other sequences takes room of its own now, which there is not.
        """
        context = self._sequences[sequence]
        tokens = context.tokens[:n]
        try:
            self._binding.remove(self._handle, 0, sequence)
            self._n_gaps += n
            self.cells.cut(sequence, 0)
            self.check_cells(n)
            self._run(tokens, range(n), np.zeros(n, dtype=bool), [(sequence,)] * n)
            self.cells.take(sequence, n)
        except BaseException:
            self._binding.remove(self._handle, 0, sequence)
            context.tokens = []
            raise

    def _export(self, sequence: int) -> Mapping[str, Bytes]:
        return {"sequence": self._binding.by_rows(save(self.model, self._handle, sequence))}

    def _state_bytes(self, sequence: int) -> int:
        return state_bytes(self._binding, self._handle, sequence)

    def _import(self, sequence: int, state: ContextState) -> None:
        saved = saved_sequence(state, self.model.path)
        self._n_gaps += self._sequences[sequence].n_past
        self._binding.remove(self._handle, 0, sequence)
        self._close_gaps()
        restore(self.model, self._handle, self._binding.by_columns(saved), sequence)

    def _close(self) -> None:
        self._passes.close()

    def _close_gaps(self) -> None:
        if self._n_gaps:
            self._binding.close_gaps(self._handle, self._n_gaps)
            self._n_gaps = 0


def _divided(forward: Forward, pieces: Sequence[Piece], n_layers: int) -> list[Forward]:
    """What a pass returned, for each piece."""
    last_names = (NORM, layer_name(n_layers - 1))  # of these there is a row for each row of logits
    found: list[Forward] = []
    row, token = 0, 0
    for _, tokens, logits in pieces:
        end, after = row + n_wanted(logits, len(tokens)), token + len(tokens)
        hidden = {
            name: states[row:end] if name in last_names else states[token:after]
            for name, states in forward.hidden.items()
        }
        found.append(Forward(forward.logits[row:end], hidden))
        row, token = end, after
    return found
