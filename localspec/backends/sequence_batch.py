"""Several sequences fed in one pass: many answers side by side, as when data for training are made.

A row of a wide pass costs a fraction of a pass of its own: 16 answers side by side made 40 tokens per second where one
alone made 14 (1.5B, ik-llama on two cores).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from localspec.backends.forward import Forward, joined_states
from localspec.errors import Closed, ContextFull, UsageError

if TYPE_CHECKING:
    from localspec.backends.base import Context, Model

Pieces = Sequence[tuple[int, Sequence[int]]]
"""What to feed: (sequence, its next tokens), one after another."""


class SequenceBatch(ABC):
    """The memories of several sequences, numbered from 0. Arguments are checked here, as in ``Context``.

    Attributes:
        model: whose memories they are.
        n_sequences: how many there are.
        n_ctx_each: room of each [tokens].
        hidden: names of the hidden states that passes return.
    """

    def __init__(self, model: Model, n_sequences: int, n_ctx_each: int, hidden: tuple[str, ...]) -> None:
        self.model = model
        self.n_sequences = n_sequences
        self.n_ctx_each = n_ctx_each
        self.hidden = hidden
        self._n_past = [0] * n_sequences
        self._closed = False

    def n_past(self, sequence: int) -> int:
        """Tokens in the memory of a sequence."""
        self._check(sequence)
        return self._n_past[sequence]

    def decode(self, pieces: Pieces, logits: Literal["all", "last"] = "all") -> Forward:
        """Feed the next tokens of some of the sequences.

        Args:
            pieces: which sequences, each at most once, and at least one token for each.
            logits: which rows to return: one per token, or that of the last token of each piece.

        Returns:
            Logits and hidden states in the order of the pieces and of the tokens in them; with ``last``, ``norm`` and
            the last layer have as many rows as the logits. See ``Forward``.

        Raises:
            ContextFull: a piece does not fit; nothing was fed.
            UsageError: a sequence that there is not or that occurs twice, no tokens, an id outside of the vocabulary.
            EngineError: the engine failed; all memories are as before.
            Closed: it was closed.
        """
        for sequence, tokens in pieces:
            self._check(sequence)
            if not tokens:
                raise UsageError("decode needs at least one token of each sequence")
            if min(tokens) < 0 or max(tokens) >= self.model.n_vocab:
                raise UsageError(f"token ids must lie in 0..{self.model.n_vocab - 1}")
            if self._n_past[sequence] + len(tokens) > self.n_ctx_each:
                raise ContextFull(
                    f"sequence {sequence} holds {self.n_ctx_each} tokens; {self._n_past[sequence]} are used and "
                    f"{len(tokens)} more do not fit"
                )
        if not pieces or len({sequence for sequence, _ in pieces}) < len(pieces):
            raise UsageError("decode needs at least one piece, and no two of one sequence")
        try:
            forward = self._decode(pieces, logits)
        except BaseException:
            for sequence, _ in pieces:
                self._truncate(sequence, self._n_past[sequence])
            raise
        for sequence, tokens in pieces:
            self._n_past[sequence] += len(tokens)
        return forward

    def truncate(self, sequence: int, n: int) -> None:
        """Forget all but the first n tokens of a sequence.

        Raises:
            UsageError: there is no such sequence, or it does not hold as many.
            Closed: it was closed.
        """
        if not 0 <= n <= self.n_past(sequence):
            raise UsageError(f"cannot truncate {self._n_past[sequence]} tokens to {n}")
        if n < self._n_past[sequence]:
            self._truncate(sequence, n)
            self._n_past[sequence] = n

    def _check(self, sequence: int) -> None:
        if self._closed:
            raise Closed("this batch of sequences was closed")
        if not 0 <= sequence < self.n_sequences:
            raise UsageError(f"there are sequences 0 to {self.n_sequences - 1}, and no {sequence}")

    def close(self) -> None:
        """Free the memories; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> SequenceBatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _decode(self, pieces: Pieces, logits: Literal["all", "last"]) -> Forward: ...

    @abstractmethod
    def _truncate(self, sequence: int, n: int) -> None:
        """Drop all rows of a sequence from position n on, those of a broken-off pass included."""

    @abstractmethod
    def _close(self) -> None: ...


class SequencesInTurn(SequenceBatch):
    """A context for each sequence, one pass after another: for engines that compute one sequence at a time."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        first = contexts[0]
        super().__init__(first.model, len(contexts), first.n_ctx, first.hidden)
        self._contexts = contexts

    def _decode(self, pieces: Pieces, logits: Literal["all", "last"]) -> Forward:
        forwards = [self._contexts[sequence].decode(tokens, logits) for sequence, tokens in pieces]
        return Forward(np.concatenate([forward.logits for forward in forwards]), joined_states(forwards))

    def _truncate(self, sequence: int, n: int) -> None:
        self._contexts[sequence].truncate(n)

    def _close(self) -> None:
        for context in self._contexts:
            context.close()
