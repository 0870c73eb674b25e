"""Several sequences in one memory, fed in one pass: conversations side by side.

A row of a wide pass costs a fraction of a pass of its own: 16 answers side by side made 40 tokens per second where one
alone made 14 (1.5B, ik-llama on two cores).

Each sequence is a ``Context`` too (``batch[i]``): what can be done with one conversation is done with that, as if it
were alone. What concerns several is done with the batch: ``decode`` feeds any of them in one pass, ``copy_prefix``
lets one begin with what another holds. The room is one: ``free_cells`` says what is left of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from localspec.backends.cells import Cells
from localspec.backends.context import Context
from localspec.backends.context_state import ContextState
from localspec.backends.forward import FloatArray, Forward, Wanted
from localspec.errors import Cancelled, Closed, ContextFull, EngineError, UsageError

if TYPE_CHECKING:
    from localspec.backends.base import Model


class Piece(NamedTuple):
    """What one sequence is fed in a pass.

    Attributes:
        sequence: its number.
        tokens: its next ones, at least one.
        logits: which rows to return: one per token, the last one only, or none (of a prompt that is not at its end).
    """

    sequence: int
    tokens: Sequence[int]
    logits: Wanted = "all"


class SequenceBatch(ABC):
    """The memories of several sequences, numbered from 0. Arguments are checked here, as in ``Context``.

    Attributes:
        model: whose memories they are.
        n_sequences: how many there are.
        n_cells: room of all together [tokens].
        n_ctx: most tokens of one.
        hidden: names of the hidden states that passes return.
        shares_prefix: whether tokens that ``copy_prefix`` gives to a second sequence take no more room.
        interrupted: asked between the parts in which an engine computes a long pass; a true answer ends it with
            ``Cancelled``. Each sequence has one of its own, for when it is fed alone.
    """

    shares_prefix = False

    def __init__(self, model: Model, n_sequences: int, n_cells: int, n_ctx: int, hidden: tuple[str, ...]) -> None:
        self.model = model
        self.n_sequences = n_sequences
        self.n_cells = n_cells
        self.n_ctx = n_ctx
        self.hidden = hidden
        self.interrupted: Callable[[], bool] | None = None
        self.cells = Cells(n_cells, n_sequences)
        self._sequences = [_Sequence(self, i) for i in range(n_sequences)]
        self._closed = False

    def __getitem__(self, sequence: int) -> Context:
        """One of the sequences: the same object each time. Closing it empties it for good.

        Raises:
            UsageError: there is no such sequence.
            Closed: the batch was closed.
        """
        self._check_open()
        if not 0 <= sequence < self.n_sequences:
            raise UsageError(f"the sequence must be in 0..{self.n_sequences - 1}, not {sequence}")
        return self._sequences[sequence]

    @property
    def free_cells(self) -> int:
        """Tokens that still have room, of whichever sequence."""
        return self.cells.n_free

    def decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        """Feed the next tokens of some of the sequences, in one pass.

        Args:
            pieces: of which sequences, each at most once.

        Returns:
            What ``Context.decode`` would return, for each piece. The logits are valid until the next pass of any of the
            sequences.

        Raises:
            ContextFull: a piece does not fit, or all together do not; nothing was fed.
            UsageError: a sequence that there is not or that occurs twice, no tokens, an id outside of the vocabulary,
                or behind rows of ``decode_first_layers``.
            Cancelled: ``interrupted`` was true; all memories are as before.
            EngineError: the engine failed; all memories are as before.
            Closed: it was closed.
        """
        self._check_open()
        contexts = [self[piece.sequence] for piece in pieces]
        if not pieces or len({piece.sequence for piece in pieces}) < len(pieces):
            raise UsageError("decode needs at least one piece, and no two of one sequence")
        for context, piece in zip(contexts, pieces, strict=True):
            context._check_ids(piece.tokens)
            context._check_whole()
        self.check_cells(sum(len(piece.tokens) for piece in pieces))
        try:
            forwards = self._decode(pieces)
        except BaseException:
            for context in contexts:
                context._truncate(context.n_past)
            raise
        for context, piece in zip(contexts, pieces, strict=True):
            context.tokens.extend(piece.tokens)
            self.cells.take(piece.sequence, len(piece.tokens))
        return forwards

    def copy_prefix(self, source: int, target: int, n: int) -> None:
        """Let a sequence hold the first n tokens of another, and nothing else; they go on independently.

        Where the engine can (``shares_prefix``) the tokens are held once, and it takes no time to speak of. Else they
        are copied; a memory that cannot be cut (recurrent, or a sliding window that moved on) reads them again.

        Raises:
            ContextFull: there is no room for a copy; the target is then empty.
            UsageError: no such sequence, the two are one, or the source does not hold as many; rows of
                ``decode_first_layers`` do not count.
            EngineError: the engine failed; the target is then empty.
            Closed: it was closed.
        """
        if source == target:
            raise UsageError(f"sequence {source} cannot be copied to itself")
        first, second = self[source], self[target]
        if not 0 <= n <= first.n_whole:
            raise UsageError(f"cannot copy {n} of {first.n_whole} tokens")
        second.truncate(0)
        if not n:
            return
        if self.shares_prefix:
            self.cells.share(source, target, n)
        else:
            self.check_cells(n)
            self.cells.take(target, n)
        second.tokens = first.tokens[:n]
        try:
            self._copy_prefix(source, target, n)
        except BaseException:
            second.truncate(0)
            raise

    def truncate(self, sequence: int, n: int) -> None:
        """Forget all but the first n tokens of a sequence; see ``Context.truncate``."""
        self[sequence].truncate(n)

    def _truncate_in(self, context: Context, sequence: int, n: int) -> None:
        """``_truncate`` of a sequence that lies in a context of its own."""
        try:
            context.truncate(min(n, context.n_past))
        finally:  # of what its context lost, nothing may be named
            del self._sequences[sequence].tokens[context.n_past :]

    def check_cells(self, n: int, n_given_back: int = 0) -> None:
        """Refuse n tokens that do not fit.

        Raises:
            ContextFull: so it is.
        """
        if n > self.free_cells + n_given_back:
            raise ContextFull(
                f"the memory of {self.n_sequences} sequences holds {self.n_cells} tokens; {self.free_cells} are free "
                f"and {n} more do not fit"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this batch of sequences was closed")

    def close(self) -> None:
        """Free the memories; safe to call twice."""
        if not self._closed:
            self._closed = True
            for context in self._sequences:
                context.close()
            self._close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def __enter__(self) -> SequenceBatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        """Feed pieces that were checked; ``interrupted`` is to be asked between parts."""

    @abstractmethod
    def _truncate(self, sequence: int, n: int) -> None:
        """Drop all rows of a sequence from position n on, those of a broken-off pass included; its ``tokens`` still
        name what it held. If that fails, they must be left naming no more than what is still there."""

    @abstractmethod
    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        """Give the rows of the first n tokens to an empty sequence, whose ``tokens`` name them already."""

    def _decode_floats(self, sequence: int, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        raise NotImplementedError

    def _decode_first_layers(self, sequence: int, tokens: Sequence[int], n_layers: int) -> Forward:
        raise NotImplementedError

    @abstractmethod
    def _export(self, sequence: int) -> Mapping[str, npt.NDArray[Any]]: ...

    @abstractmethod
    def _state_bytes(self, sequence: int) -> int: ...

    @abstractmethod
    def _import(self, sequence: int, state: ContextState) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class _Sequence(Context):
    """One sequence of a batch."""

    def __init__(self, batch: SequenceBatch, number: int) -> None:
        super().__init__(batch.model, batch.n_ctx, batch.hidden)
        self._batch, self._number = batch, number

    @property
    def n_free(self) -> int:
        return min(super().n_free, self._batch.free_cells)

    def _check_room(self, n: int) -> None:
        super()._check_room(n)
        self._batch.check_cells(n)

    def import_state(self, state: ContextState) -> None:
        self._check_open()
        if len(state.tokens) <= self.n_ctx:
            self._batch.check_cells(len(state.tokens), self._batch.cells.n_own(self._number))
        super().import_state(state)

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        (forward,) = self._batch._decode([Piece(self._number, tokens, logits)])
        return self._taken(forward, tokens)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._taken(self._batch._decode_floats(self._number, rows, tokens, logits), tokens)

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._taken(self._batch._decode_first_layers(self._number, tokens, n_layers), tokens)

    def _taken(self, forward: Forward, tokens: Sequence[int]) -> Forward:
        self._batch.cells.take(self._number, len(tokens))
        return forward

    def _truncate(self, n: int) -> None:
        try:
            self._batch._truncate(self._number, n)
        finally:
            self._batch.cells.cut(self._number, min(n, self.n_past))

    def _export(self) -> Mapping[str, npt.NDArray[Any]]:
        return self._batch._export(self._number)

    def _state_bytes(self) -> int:
        return self._batch._state_bytes(self._number)

    def _import(self, state: ContextState) -> None:
        self._batch.cells.cut(self._number, 0)
        self._batch._import(self._number, state)
        self._batch.cells.take(self._number, len(state.tokens))

    def _close(self) -> None:
        if not self._batch.closed:
            self._truncate(0)


class SequencesInTurn(SequenceBatch):
    """A context for each sequence, one pass after another: for engines that compute one sequence at a time.

    Nothing is shared: a prefix is copied, and each context has room for ``n_ctx`` tokens; ``n_cells`` is kept to
    nevertheless.
    """

    def __init__(self, contexts: Sequence[Context], n_cells: int) -> None:
        first = contexts[0]
        super().__init__(first.model, len(contexts), n_cells, first.n_ctx, first.hidden)
        self._contexts = contexts

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        forwards: list[Forward] = []
        for sequence, tokens, logits in pieces:
            self._check_held(sequence)
            context = self._contexts[sequence]
            context.interrupted = self.interrupted
            if forwards and self.interrupted is not None and self.interrupted():
                raise Cancelled("decoding was stopped")
            forwards.append(context.decode(tokens, logits))
        return forwards

    def _check_held(self, sequence: int) -> None:
        if self._contexts[sequence].n_past != self._sequences[sequence].n_past:
            raise EngineError(f"the memory of sequence {sequence} was lost with a device; read its text again")

    def _decode_floats(self, sequence: int, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._contexts[sequence].decode_floats(rows, tokens, logits)

    def _decode_first_layers(self, sequence: int, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._contexts[sequence].decode_first_layers(tokens, n_layers)

    def _truncate(self, sequence: int, n: int) -> None:
        self._truncate_in(self._contexts[sequence], sequence, n)

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        tokens, context, held = self._sequences[target].tokens, self._contexts[target], self._contexts[source]
        is_whole = held.n_whole == held.n_past  # else it has no state to give
        if self.model.capabilities.saves_state and (
            n == held.n_past or (is_whole and self.model.capabilities.rollback == "exact")
        ):
            context.import_state(held.export_state())
            context.truncate(n)
        else:
            context.decode(tokens, "none")

    def _export(self, sequence: int) -> Mapping[str, npt.NDArray[Any]]:
        return self._contexts[sequence].export_state().arrays

    def _state_bytes(self, sequence: int) -> int:
        return self._contexts[sequence].state_bytes

    def _import(self, sequence: int, state: ContextState) -> None:
        self._contexts[sequence].import_state(state)

    def _close(self) -> None:
        for context in self._contexts:
            context.close()
