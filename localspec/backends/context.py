"""The memory of one sequence, which every engine's own is a subclass of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from localspec.backends.context_state import ContextState
from localspec.backends.forward import FloatArray, Forward, Wanted, joined_states, layer_name
from localspec.backends.prefix import shared_prefix
from localspec.errors import Cancelled, Closed, ContextFull, UsageError

if TYPE_CHECKING:
    from localspec.backends.base import Model

N_UNINTERRUPTED = 256
"""Tokens decoded between two looks at ``Context.interrupted``: what the engines compute together anyway."""


class Context(ABC):
    """The memory of one sequence.

    ``tokens`` is what the memory holds, in order. Subclasses implement ``_decode`` and ``_truncate``, and what else
    their model's ``capabilities`` promise; arguments are checked here, so that all refuse the same in the same words.

    Attributes:
        hidden: names of the hidden states that every pass returns; see ``Forward.hidden``.
        finds_best: whether the engine can find the largest logits; it has ``_decode_best`` then, also for float rows.
        interrupted: asked between the pieces of a long input; a true answer ends the decode with ``Cancelled``.
        overlaps: whether a device computes passes while their caller does something else.
        meanwhile: of one that overlaps, called within a pass once the device has begun with it, perhaps several times.
    """

    def __init__(self, model: Model, n_ctx: int, hidden: tuple[str, ...] = ()) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.hidden = hidden
        self.tokens: list[int] = []
        self.interrupted: Callable[[], bool] | None = None
        self.finds_best = False
        self.overlaps = False
        self.meanwhile: Callable[[], None] | None = None
        self._partial: tuple[int, int] | None = None  # where rows begin that only the first layers have, and how many
        self._tree: tuple[list[int], list[int]] | None = None  # tokens and parents of rows of which none is kept yet
        self._closed = False

    @property
    def n_past(self) -> int:
        """Tokens in the memory."""
        return len(self.tokens)

    @property
    def n_whole(self) -> int:
        """Tokens in the memory whose rows went through all layers: those before rows of ``decode_first_layers``."""
        return self.n_past if self._partial is None else self._partial[0]

    @property
    def n_free(self) -> int:
        """Tokens that still have room."""
        return self.n_ctx - self.n_past

    @property
    def can_branch(self) -> bool:
        """Whether ``decode_tree`` works; see ``Model.new_context``."""
        return self.model.capabilities.trees and type(self)._decode_tree is not Context._decode_tree

    def decode(self, tokens: Sequence[int], logits: Wanted = "all") -> Forward:
        """Feed tokens after those already in the memory.

        Args:
            tokens: at least one token id.
            logits: which rows to return: one per token, the last one only, or none (prefill).

        Raises:
            ContextFull: they do not fit; the memory is unchanged.
            UsageError: no tokens, an id outside the vocabulary, or behind rows of ``decode_first_layers``.
            Cancelled: ``interrupted`` was true; the memory holds the pieces that were done.
            Closed: the context was closed.
        """
        self._check_ids(tokens)
        self._check_whole()
        pieces: list[Forward] = []
        if logits != "all":
            while len(tokens) > N_UNINTERRUPTED and self.interrupted is not None:
                piece, tokens = tokens[:N_UNINTERRUPTED], tokens[N_UNINTERRUPTED:]
                pieces.append(self._feed(piece, partial(self._decode, piece, "none")))
                if self.interrupted():
                    raise Cancelled("decoding was stopped")
        pieces.append(self._feed(tokens, partial(self._decode, tokens, logits)))
        return Forward(pieces[-1].logits, joined_states(pieces)) if len(pieces) > 1 else pieces[0]

    def decode_best(self, tokens: Sequence[int], n_best: int, logits: Literal["all", "last"] = "all") -> Forward:
        """``decode`` of rows that may be cut: to their ``n_best`` largest logits or more, where ``finds_best``."""
        if not self.finds_best or len(tokens) > N_UNINTERRUPTED:
            return self.decode(tokens, logits)
        self._check_ids(tokens)
        self._check_whole()
        return self._feed(tokens, partial(self._decode_best, tokens, n_best, logits, None))

    def decode_floats(
        self, rows: FloatArray, tokens: Sequence[int], logits: Wanted = "all", n_best: int = 0
    ) -> Forward:
        """Feed rows in the place of token embeddings.

        Args:
            rows: what the first block reads, float32 [n, n_embd], n at least 1.
            tokens: what ``Context.tokens`` is to say of each row, so that truncate and reuse work as ever; they need
                not be ids of this model.
            logits: which rows to return, as for ``decode``.
            n_best: how many of the largest logits of each row are enough, as for ``decode_best``; 0 wants whole rows.

        Raises:
            ContextFull: they do not fit; the memory is unchanged.
            UsageError: the model cannot (``Capabilities.float_rows``), the shapes are wrong, or a row is not finite.
            EngineError: the engine failed.
            Closed: the context was closed.
        """
        self._check_room(len(tokens))
        self._check_whole()
        if not self.model.capabilities.float_rows:
            raise UsageError(f"{self.model.engine} cannot be fed with rows of floats for {self.model.path.name}")
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        if rows.shape != (len(tokens), self.model.n_embd):
            raise UsageError(f"expected rows of shape {[len(tokens), self.model.n_embd]}, not {list(rows.shape)}")
        if not np.isfinite(rows).all() or min(tokens) < 0:
            raise UsageError("rows of floats must be finite, and be named by tokens of 0 or more")
        if n_best and self.finds_best and logits != "none" and len(tokens) <= N_UNINTERRUPTED:
            return self._feed(tokens, partial(self._decode_best, tokens, n_best, logits, rows))
        return self._feed(tokens, partial(self._decode_floats, rows, tokens, logits))

    def decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        """Feed tokens through the first layers only, and return the state after them.

        The rows are in the memory as if they were whole, and have to be truncated before the next whole decode;
        afterwards the context behaves as if they had never been.

        Args:
            tokens: at least one token id.
            n_layers: how many layers, at least 1 and fewer than the model has. The context must have been made to
                return the state after the last of them.

        Returns:
            No logits; ``hidden`` has the state after layer ``n_layers - 1``, and those before it that the context
            returns, each with a row for every token.

        Raises:
            ContextFull: they do not fit; the memory is unchanged.
            UsageError: the model cannot (``Capabilities.first_layers``), the context does not return that state, or
                the memory ends with rows of another number of layers.
            EngineError: the engine failed.
            Closed: the context was closed.
        """
        self._check_ids(tokens)
        name = layer_name(n_layers - 1)
        if not self.model.capabilities.first_layers:
            raise UsageError(f"{self.model.engine} cannot end a pass early for {self.model.path.name}")
        if not 0 < n_layers < self.model.n_layers:
            raise UsageError(f"a pass can end after 1 to {self.model.n_layers - 1} layers, not after {n_layers}")
        if name not in self.hidden:
            raise UsageError(f"this context was not made to return {name!r}")
        if self._partial is not None and self._partial[1] != n_layers:
            raise UsageError(f"the memory ends with rows of {self._partial[1]} layers: truncate them first")
        first = self.n_past if self._partial is None else self._partial[0]
        forward = self._feed(tokens, partial(self._decode_first_layers, tokens, n_layers))
        self._partial = first, n_layers
        return forward

    def decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        """Feed tokens that branch behind those in the memory: each sees the memory and its own path, and no more.

        They are no part of the memory until a path is kept (``keep``), and whatever comes before that drops them. Each
        takes a place in the memory meanwhile, whatever its depth.

        Args:
            tokens: at least one token id.
            parents: for each the index of the token that it follows, which comes before it; -1 is the last token of the
                memory.

        Returns:
            A row of logits for each token, and of every hidden state: as ``decode`` gives it for that token's path.

        Raises:
            ContextFull: they do not fit; the memory is unchanged.
            UsageError: the model cannot (``Capabilities.trees``), no tokens, an id outside of the vocabulary, parents
                that do not come before, or behind rows of ``decode_first_layers``.
            EngineError: the engine failed.
            Closed: the context was closed.
        """
        self._check_ids(tokens)
        self._check_whole()
        if not self.can_branch:
            raise UsageError(self.model.why_no_trees() or "this context was not made for tokens that branch")
        if len(parents) != len(tokens) or any(not -1 <= parent < i for i, parent in enumerate(parents)):
            raise UsageError("each token of a tree follows one before it, or the memory")
        self._drop_tree()
        self._tree = list(tokens), list(parents)
        try:
            return self._decode_tree(tokens, parents)
        except BaseException:
            self._drop_tree()
            raise

    def keep(self, path: Sequence[int]) -> None:
        """Make a path of the tokens last fed to ``decode_tree`` part of the memory, and drop the others.

        Args:
            path: their indices, in order: the first follows the memory, each other one the one before it. None of them
                leaves the memory as it was.

        Raises:
            UsageError: there is no such path, or other calls have come in between.
            EngineError: the engine failed.
            Closed: the context was closed.
        """
        self._check_open()
        if self._tree is None:
            raise UsageError("there is no tree to keep a path of")
        tokens, parents = self._tree
        if any(not 0 <= at < len(tokens) or parents[at] != before for before, at in zip([-1, *path], path)):  # noqa: B905
            raise UsageError(f"{list(path)} is not a path of the tree")
        if not path:
            self._drop_tree()
            return
        try:
            self._keep(path)
        except BaseException:
            self._drop_tree()
            raise
        self._tree = None
        self.tokens.extend(tokens[at] for at in path)

    def _drop_tree(self) -> None:
        if self._tree is not None:
            self._tree = None
            self._truncate(self.n_past)

    def _check_ids(self, tokens: Sequence[int]) -> None:
        self._check_room(len(tokens))
        if min(tokens) < 0 or max(tokens) >= self.model.n_vocab:
            raise UsageError(f"token ids must lie in 0..{self.model.n_vocab - 1}")

    def _check_room(self, n: int) -> None:
        self._check_open()
        if not n:
            raise UsageError("decode needs at least one token")
        if self.n_past + n > self.n_ctx:
            raise ContextFull(f"the context holds {self.n_ctx} tokens; {self.n_past} are used and {n} more do not fit")

    def _check_whole(self) -> None:
        if self._partial is not None:
            raise UsageError(f"the rows from {self._partial[0]} on have the first layers only: truncate them first")

    def _feed(self, tokens: Sequence[int], compute: Callable[[], Forward]) -> Forward:
        self._drop_tree()
        n_before = self.n_past
        try:
            forward = compute()
        except BaseException:
            # A pass that broke off (Ctrl-C lands between chunks) must not leave rows that `tokens` does not name.
            self._truncate(n_before)
            raise
        self.tokens.extend(tokens)
        return forward

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens; afterwards the context behaves as a fresh one that was fed just those.

        Raises:
            UsageError: n is negative or larger than ``n_past``.
            Closed: the context was closed.
        """
        self._check_open()
        if not 0 <= n <= self.n_past:
            raise UsageError(f"cannot truncate {self.n_past} tokens to {n}")
        self._drop_tree()
        if n < self.n_past:
            self._truncate(n)
            del self.tokens[n:]
        if self._partial is not None and n <= self._partial[0]:
            self._partial = None

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of the memory and ``tokens``, drop the rest, and return its length."""
        n = shared_prefix(self.tokens, tokens)
        self.truncate(n)
        return n

    def export_state(self) -> ContextState:
        """A copy of what the memory holds, to be given back to this context, or to one like it, later.

        Raises:
            UsageError: the model's engine cannot (``Capabilities.saves_state``), or the memory ends with rows of
                ``decode_first_layers``.
            EngineError: the engine failed.
            Closed: the context was closed.
        """
        self._check_saves_state()
        self._check_whole()
        self._drop_tree()
        return ContextState(tuple(self.tokens), self._export() if self.tokens else {})

    @property
    def state_bytes(self) -> int:
        """Size of what ``export_state`` would give now, or an upper bound of it [bytes]."""
        self._check_saves_state()
        self._drop_tree()
        return self._state_bytes() if self.tokens else 0

    def import_state(self, state: ContextState) -> None:
        """Hold what was exported: afterwards the context behaves as the exporting one did.

        The state must come from a context of the same file on the same engine and version, with the same type of cache,
        which the caller has to see to; the size of the context may differ.

        Raises:
            ContextFull: more tokens than this context has room for; it is left as it was.
            UsageError: the model's engine cannot.
            EngineError: the engine refuses the state; the context is then empty.
            Closed: the context was closed.
        """
        self._check_saves_state()
        if len(state.tokens) > self.n_ctx:
            raise ContextFull(f"the state holds {len(state.tokens)} tokens and the context has room for {self.n_ctx}")
        try:
            if state.tokens:
                self._import(state)
            else:  # engines abort the whole process on the state of an empty memory
                self._truncate_all()
        except BaseException:
            self._truncate_all()
            raise
        self._partial = self._tree = None
        self.tokens = list(state.tokens)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this context was closed")

    def _truncate_all(self) -> None:
        self.tokens, self._partial, self._tree = [], None, None
        self._truncate(0)

    def _check_saves_state(self) -> None:
        self._check_open()
        if not self.model.capabilities.saves_state:
            raise UsageError(f"{self.model.engine} cannot save the state of a context")

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        if not self._closed:
            self._closed = True
            self.tokens = []
            self._close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward: ...

    def _decode_best(self, tokens: Sequence[int], n_best: int, logits: Wanted, rows: FloatArray | None) -> Forward:
        raise NotImplementedError

    @abstractmethod
    def _truncate(self, n: int) -> None:
        """Drop all rows from position n on, rows of a broken-off pass included.

        If that fails, ``tokens`` must be left naming no more than what is still there.
        """

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        """As ``_decode``, with contiguous rows in the place of the tokens' embeddings."""
        raise NotImplementedError

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        raise NotImplementedError

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        """Put rows behind the memory; ``_truncate`` to the memory's end drops them."""
        raise NotImplementedError

    def _keep(self, path: Sequence[int]) -> None:
        """Of the rows that ``_decode_tree`` put behind the memory keep these, at least one, in its order."""
        raise NotImplementedError

    def _export(self) -> Mapping[str, npt.NDArray[Any]]:
        raise NotImplementedError

    def _state_bytes(self) -> int:
        raise NotImplementedError

    def _import(self, state: ContextState) -> None:
        """Replace what the memory holds. Must refuse, with EngineError, arrays that cannot be right."""
        raise NotImplementedError

    @abstractmethod
    def _close(self) -> None: ...
