"""Several sequences in one memory of a llama.cpp engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from localspec.backends.base import (
    NORM,
    Context,
    ContextState,
    FloatArray,
    Forward,
    Piece,
    SequenceBatch,
    Wanted,
    layer_name,
    n_wanted,
)
from localspec.backends.llama.binding import MAX_SEQUENCES, Bytes
from localspec.backends.llama.passes import LlamaPasses, PassRows, restore, save, saved_sequence, state_bytes
from localspec.backends.llama.weights import LlamaWeights
from localspec.errors import EngineError, UsageError


class LlamaSequences(SequenceBatch):
    """See ``SequenceBatch``. Each token is one cell of the engine's memory, whichever sequences have it."""

    model: LlamaWeights
    shares_prefix = True

    def __init__(
        self, model: LlamaWeights, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> None:
        if n_sequences > MAX_SEQUENCES:
            raise UsageError(f"{model.engine} takes at most {MAX_SEQUENCES} sequences, not {n_sequences}")
        super().__init__(model, n_sequences, n_cells, n_ctx, hidden)
        self._binding = model.binding
        kv_type = model.kv_type if model.binding.batches_kv_types else "f16"
        self._passes = LlamaPasses(model, n_cells, n_threads, kv_type, hidden, n_sequences)
        self._handle = self._passes.handle

    @property
    def passes(self) -> LlamaPasses:
        return self._passes

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        parts = [self._behind(sequence, tokens, logits) for sequence, tokens, logits in pieces]
        rows = PassRows(
            [token for piece in pieces for token in piece.tokens],
            [position for part in parts for position in part.positions],
            np.concatenate([part.wanted for part in parts]),
            [(piece.sequence,) for piece in pieces for _ in piece.tokens],
        )
        return _divided(self._run(rows), pieces, self.model.n_layers)

    def _decode_floats(self, sequence: int, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._run(self._behind(sequence, rows, logits))

    def _decode_first_layers(self, sequence: int, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._run(self._behind(sequence, tokens, "none"), layer_name(n_layers - 1))

    def _behind(self, sequence: int, rows: Sequence[int] | FloatArray, logits: Wanted) -> PassRows:
        return PassRows.behind(self._sequences[sequence].n_past, rows, logits, sequence)

    def _run(self, rows: PassRows, last: str | None = None) -> Forward:
        try:
            return self._passes.run(rows, last=last, interrupted=self.interrupted)
        except BaseException:
            self._passes.n_gaps += len(rows)  # those that it came to will be removed
            raise

    def _truncate(self, sequence: int, n: int) -> None:
        self._passes.n_gaps += max(0, self._sequences[sequence].n_past - n)
        if not self._binding.remove(self._handle, n, sequence):
            self._read_again(sequence, n)

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        self._binding.copy(self._handle, source, target, n)
        if not self._binding.holds(self._handle, n, target):
            self._read_again(target, n)

    def _read_again(self, sequence: int, n: int) -> None:
        """Feed the first n tokens anew: a window that moved on has lost rows that they look at.

        Raises:
            ContextFull: there is no room for what they shared with other sequences.
        """
        context = self._sequences[sequence]
        tokens = context.tokens[:n]
        try:
            self._binding.remove(self._handle, 0, sequence)
            self._passes.n_gaps += n
            self.cells.cut(sequence, 0)
            self.check_cells(n)
            self._run(PassRows.behind(0, tokens, "none", sequence))
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
        self._passes.n_gaps += self._sequences[sequence].n_past
        self._binding.remove(self._handle, 0, sequence)
        self._passes.close_gaps()
        restore(self.model, self._handle, self._binding.by_columns(saved), sequence)

    def _close(self) -> None:
        self._passes.close()


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


N_ALONE = 24
"""Passes over one sequence alone after which it is copied to a context of its own, if it holds anything. Copying 1,000
tokens there or back takes about as long as a pass; a pass there takes 2 to 10 % less."""


class SequencesOrOne(LlamaSequences):
    """For an engine without flash attention in a pass over several sequences: while only one sequence holds tokens, it
    is kept and computed in a context of its own. Before the next pass over several it is copied back."""

    def __init__(
        self, model: LlamaWeights, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> None:
        super().__init__(model, n_sequences, n_cells, n_ctx, n_threads, hidden)
        self._n_threads = n_threads
        self._own: Context | None = None
        self._has_room = True
        self.apart: int | None = None  # the sequence that is in ``_own``
        self._n_alone = 0

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        sequence, tokens, logits = pieces[0]
        if len(pieces) == 1 and (own := self._apart(sequence, fed_alone=True)) is not None:
            own.interrupted = self.interrupted
            return [own.decode(tokens, logits)]
        if any(piece.sequence == self.apart for piece in pieces):
            self._join()
        return super()._decode(pieces)

    def _apart(self, sequence: int, *, fed_alone: bool = False) -> Context | None:
        if sequence == self.apart or not fed_alone:
            return self._own if sequence == self.apart else None
        if self._others_hold_tokens(sequence):
            self._n_alone = 0
            return None
        self._n_alone += 1
        if self._sequences[sequence].n_past and self._n_alone < N_ALONE:
            return None
        return self._set_apart(sequence)

    def _others_hold_tokens(self, sequence: int) -> bool:
        return any(context.n_past for i, context in enumerate(self._sequences) if i != sequence)

    def _set_apart(self, sequence: int) -> Context | None:
        """Copy a sequence to the context for one; None where there is no memory for that."""
        tokens, own = self._sequences[sequence].tokens, self._emptied()
        if own is None:
            return None
        if tokens:
            try:
                own.import_state(ContextState(tuple(tokens), self._export(sequence)))
            except (EngineError, MemoryError):
                self._has_room = False
                return None
            self._truncate(sequence, 0)
        self.apart = sequence
        return own

    def _emptied(self) -> Context | None:
        """The context for one sequence, empty; None where there is no memory for it."""
        self.apart = None
        if self._own is not None:
            self._own.truncate(0)
        elif self._has_room:
            try:
                self._own = self.model.new_context(self.n_ctx, n_threads=self._n_threads, hidden=self.hidden)
            except EngineError:
                self._has_room = False
        return self._own if self._has_room else None

    def _join(self) -> None:
        """Copy the sequence that is apart back, rows of the first layers too. On EngineError it stays where it is."""
        assert self._own is not None
        assert self.apart is not None
        if self._own.tokens:
            super()._import(self.apart, ContextState(tuple(self._own.tokens), self._own._export()))
        self._emptied()
        self._n_alone = 0

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        if self.apart in (source, target):
            self._join()
        super()._copy_prefix(source, target, n)

    def _import(self, sequence: int, state: ContextState) -> None:
        if not self._others_hold_tokens(sequence):
            self._truncate(sequence, 0)
            own = self._emptied()
            if own is not None:
                own.import_state(state)
                self.apart = sequence
                return
        super()._import(sequence, state)

    def _close(self) -> None:
        if self._own is not None:
            self._own.close()
        super()._close()
