"""Several sequences where a pass over several has no flash attention: one that is fed alone does not pay for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from localspec.backends.context import Context
from localspec.backends.context_state import ContextState
from localspec.backends.forward import FloatArray, Forward, Wanted
from localspec.backends.llama_binding import Bytes
from localspec.backends.llama_sequences import LlamaSequences
from localspec.backends.sequence_batch import Piece
from localspec.errors import EngineError

if TYPE_CHECKING:
    from localspec.backends.llama_family import LlamaModel

N_ALONE = 24
"""Passes over one sequence alone after which it is copied to a context of its own, if it holds anything. Copying 1,000
tokens of Qwen2.5-Coder 1.5B there or back takes 30 ms of CPU time, a pass 26, of which it saves 2 to 10 %."""


class SequencesOrOne(LlamaSequences):
    """While no sequence but one holds tokens, that one lies in a context of its own, and is computed as if there were
    no others. Before the next pass over several it is copied back."""

    def __init__(
        self, model: LlamaModel, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> None:
        super().__init__(model, n_sequences, n_cells, n_ctx, n_threads, hidden)
        self._n_threads = n_threads
        self._own: Context | None = None
        self._has_room = True
        self._apart: int | None = None
        """The sequence that lies in a context of its own."""
        self._n_alone = 0

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        sequence, tokens, logits = pieces[0]
        if len(pieces) == 1 and (own := self._own_for(sequence)) is not None:
            own.interrupted = self.interrupted
            return [own.decode(tokens, logits)]
        if any(piece.sequence == self._apart for piece in pieces):
            self._join()
        return super()._decode(pieces)

    def _decode_floats(self, sequence: int, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        if (own := self._own_for(sequence)) is not None:
            return own.decode_floats(rows, tokens, logits)
        return super()._decode_floats(sequence, rows, tokens, logits)

    def _decode_first_layers(self, sequence: int, tokens: Sequence[int], n_layers: int) -> Forward:
        if (own := self._own_for(sequence)) is not None:
            return own.decode_first_layers(tokens, n_layers)
        return super()._decode_first_layers(sequence, tokens, n_layers)

    def _own_for(self, sequence: int) -> Context | None:
        """The context of its own in which a sequence that is fed alone is computed; None: in the memory of all."""
        if sequence == self._apart:
            return self._own
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
        """Copy a sequence to the context of its own; None where there is no memory for that."""
        tokens, own = self._sequences[sequence].tokens, self._emptied()
        if own is None:
            return None
        if tokens:
            try:
                own.import_state(ContextState(tuple(tokens), super()._export(sequence)))
            except (EngineError, MemoryError):
                self._has_room = False
                return None
            super()._truncate(sequence, 0)
        self._apart = sequence
        return own

    def _emptied(self) -> Context | None:
        """The context of its own, empty and nobody's; None where there is no memory for it."""
        self._apart = None
        if self._own is not None:
            self._own.truncate(0)
        elif self._has_room:
            try:
                self._own = self.model.new_context(self.n_ctx, n_threads=self._n_threads, hidden=self.hidden)
            except EngineError:
                self._has_room = False
        return self._own if self._has_room else None

    def _join(self) -> None:
        """Copy the sequence that lies by itself back, to be fed with others; rows of the first layers go with it.

        Raises:
            EngineError: the engine refuses it; it stays where it is.
        """
        assert self._own is not None
        assert self._apart is not None
        if self._own.tokens:
            super()._import(self._apart, ContextState(tuple(self._own.tokens), self._own._export()))
        self._emptied()
        self._n_alone = 0

    def _truncate(self, sequence: int, n: int) -> None:
        if sequence == self._apart and self._own is not None:
            self._truncate_in(self._own, sequence, n)
        else:
            super()._truncate(sequence, n)

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        if self._apart in (source, target):
            self._join()
        super()._copy_prefix(source, target, n)

    def _export(self, sequence: int) -> Mapping[str, Bytes]:
        if sequence == self._apart and self._own is not None:
            return self._own.export_state().arrays
        return super()._export(sequence)

    def _state_bytes(self, sequence: int) -> int:
        if sequence == self._apart and self._own is not None:
            return self._own.state_bytes
        return super()._state_bytes(sequence)

    def _import(self, sequence: int, state: ContextState) -> None:
        if sequence == self._apart:
            self._emptied()
        if self._apart is None and not self._others_hold_tokens(sequence):
            super()._truncate(sequence, 0)
            own = self._emptied()
            if own is not None:
                own.import_state(state)
                self._apart = sequence
                return
        super()._import(sequence, state)

    def _close(self) -> None:
        if self._own is not None:
            self._own.close()
        super()._close()
