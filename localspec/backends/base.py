"""What a backend provides: a ``Model`` (weights), its ``Context`` (the memory of one sequence) or ``SequenceBatch`` (of
several), and what a pass returns, ``Forward``.

Arguments are checked in the base classes, so that every engine refuses the same in the same words; an engine implements
the methods with an underscore. ``registry`` says what its module has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from localspec.errors import Cancelled, Closed, ContextFull, UsageError
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab

FloatArray = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

Wanted = Literal["all", "last", "none"]
"""Which rows of logits a pass returns: one per token, the last one, or none (prefill)."""

Progress = Callable[[float], bool]  # called with the loaded fraction in [0, 1]; returning False cancels the load

FEW_ROWS = 8  # rows of logits that may be asked for at no lasting cost, see ``Capabilities.keeps_rows``

N_UNINTERRUPTED = 256
"""Tokens decoded between two looks at ``Context.interrupted``: what the engines compute together anyway."""

NORM, NEXTN = "norm", "nextn"
"""Names of hidden states [n_embd]: what the output matrix multiplies, and what a model's own layer for multi-token
prediction reads. ``layer:i`` is the residual stream after block i, from 0."""


def layer_name(layer: int) -> str:
    return f"layer:{layer}"


def n_wanted(logits: Wanted, n: int) -> int:
    """How many rows of logits a pass over n tokens returns."""
    return {"all": n, "last": 1, "none": 0}[logits]


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two texts in tokens."""
    n = min(len(a), len(b))
    one, other = a[:n], b[:n]  # asked of whole conversations, before every draft token: without a loop
    if one == other or list(one) == list(other):
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


# -- what a pass returns, and a memory that was copied out -------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Forward:
    """The logits of one pass, and the hidden states that its context was made to return."""

    # Float32 [n_rows, n_vocab]; row i predicts the token that follows the i-th row asked for. Usually a view of the
    # engine's memory, valid until the next decode on the same context.
    logits: FloatArray
    # Name -> float32 [n, n_embd], copies that stay valid. ``nextn`` and a ``layer:i`` before the last layer have a row
    # for every token of the call; ``norm`` and the last layer one for each row of logits.
    hidden: Mapping[str, FloatArray] = field(default_factory=dict)
    # None where rows are whole; else ``logits`` [n_rows, k] has the k largest of each row, and these are their tokens,
    # increasing, int64 [n_rows, k]. See ``Context.decode``.
    ids: TokenIds | None = None

    def __len__(self) -> int:
        return len(self.logits)

    def take(self, rows: Sequence[int]) -> Forward:
        """Some of the rows, copied, of a pass that returned a row of everything for every token."""
        hidden = {name: states[list(rows)] for name, states in self.hidden.items()}
        return Forward(self.logits[list(rows)], hidden, None if self.ids is None else self.ids[list(rows)])

    def best(self) -> list[int]:
        """The most probable token of each row (the lowest id among equals)."""
        at = self.logits.argmax(axis=1)
        best: list[int] = (at if self.ids is None else self.ids[np.arange(len(at)), at]).tolist()
        return best


def joined(forwards: Sequence[Forward]) -> Forward:
    """Passes that continued each other, as one."""
    if len(forwards) == 1:
        return forwards[0]
    hidden = {name: np.concatenate([forward.hidden[name] for forward in forwards]) for name in forwards[0].hidden}
    return Forward(np.concatenate([forward.logits for forward in forwards]), hidden)


@dataclass(frozen=True, slots=True)
class ContextState:
    """What a context held at some moment, copied out of the engine."""

    tokens: tuple[int, ...]  # what was in the memory, in order
    arrays: Mapping[str, npt.NDArray[Any]]  # opaque to all but the engine; contiguous, of dtypes that NumPy can write

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


# -- the weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model's memory and engine can do."""

    rollback: Literal["exact", "replay"] = "exact"
    # ``exact`` drops rows from the KV cache; ``replay`` restores a checkpoint and decodes again (recurrent memories,
    # wrapped windows), so that a rejected token costs another pass.
    batch_invariant: bool = False
    # Logits do not depend on how many tokens share a pass. Only the reference backend can promise that; only there
    # exactness can be asserted to the bit.
    device: str = "cpu"  # where the weights are: ``cpu``, ``gpu`` (any other device), or ``mixed``
    saves_state: bool = False  # ``Context.export_state`` and ``import_state`` work
    keeps_rows: bool = False  # after a pass with more than ``FEW_ROWS`` rows of logits every later one takes longer
    hidden: bool = False  # contexts can return hidden states; see ``Forward.hidden``
    nextn: bool = False  # contexts can return the state ``nextn``
    mtp: bool = False  # the model's own layer for multi-token prediction is loaded
    float_rows: bool = False  # ``Context.decode_floats`` works
    first_layers: bool = False  # ``Context.decode_first_layers`` works, in a context that returns hidden states
    trees: bool = False  # ``Context.decode_tree`` works, in a context made with ``branches``
    trees_apart: bool = False  # such a context computes all passes otherwise: to be made only where trees pay
    batches: bool = False  # ``SequenceBatch.decode`` is one pass; else one for each sequence
    own_cells: bool = False  # a row of such a pass reads the cells of its own sequence only; else those of all
    keeps_kv_type: bool = True  # a memory of several sequences has ``kv_type`` too; else its values have 16 bits


class _Closable(ABC):
    """Holds engine memory until it is closed, at the latest at the end of a ``with`` block; then calls raise Closed."""

    _closed = False
    _closed_error: str

    @property
    def closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._closed_error)

    def close(self) -> None:
        """Free the memory; safe to call twice. Contexts are closed before their model."""
        if not self._closed:
            self._closed = True
            self._close()

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Model(_Closable):
    """Immutable weights, loaded by one engine."""

    path: Path  # the GGUF file; the first of a model in parts
    backend: str  # the engine's catalogue name, e.g. ``ik-llama``
    engine: str  # its name, version and build, part of every cache key and report
    vocab: Vocab  # read from the file, and so the same for every engine
    architecture: str  # the file's name for it
    chat_template: str | None  # the file's Jinja template
    n_ctx_train: int  # the context length that the model was trained for [tokens]
    size_bytes: int  # of the file, or of all parts
    n_embd: int  # width of the residual stream, of hidden states and of rows of floats
    n_layers: int  # number of blocks, without those for multi-token prediction
    n_vocab: int  # width of a row of logits; padding rows can make it exceed the number of named tokens
    n_threads: int  # that compute a pass
    capabilities: Capabilities
    kv_type: str = ""  # of the attention cache, where the engine has several: a saved state has to match it
    placement: str = ""  # where the weights go, as text; empty where nothing was asked
    _closed_error = "this model was closed"

    def _read_header(self, gguf: GGUFFile) -> None:
        """Fill in the attributes that the file alone decides, ``path`` to ``n_layers``.

        Raises:
            UnsupportedModel: the file cannot generate text, and is no head for engines either.
        """
        if gguf.has_rows_only:
            self.vocab = Vocab.none()
        else:
            gguf.check_generates_text()
            self.vocab = Vocab.from_gguf(gguf)
        self.path = gguf.path
        self.architecture = gguf.architecture
        template = gguf.metadata.get("tokenizer.chat_template")
        self.chat_template = str(template) if template is not None else None
        self.n_ctx_train = gguf.n_ctx_train
        self.size_bytes = gguf.n_bytes
        self.n_embd = gguf.whole("embedding_length")
        self.n_layers = gguf.whole("block_count") - gguf.whole("nextn_predict_layers")

    def new_context(self, n_ctx: int, *, hidden: Sequence[str] = (), branches: bool = False) -> Context:
        """An empty memory of one sequence, with room for ``n_ctx`` tokens. Contexts of one model are independent.

        Args:
            hidden: names of the hidden states that every pass returns.
            branches: whether ``Context.decode_tree`` is to work, where it can (``why_no_trees``).

        Raises:
            UsageError: n_ctx is not positive, there is no such state, or the engine returns none.
            EngineError: not enough memory.
        """
        self._check_open()
        make = self._new_branching_context if branches else self._new_context
        return make(n_ctx, self._check_memory(n_ctx, hidden))

    def why_no_trees(self) -> str | None:
        """Why no context takes tokens that branch; None where one can."""
        if self.capabilities.trees:
            return None
        return f"{self.engine} does not take tokens that branch for {self.path.name}"

    def new_batch(
        self, n_sequences: int, n_cells: int, *, n_ctx: int | None = None, hidden: Sequence[str] = ()
    ) -> SequenceBatch:
        """An empty memory of several sequences that are fed together; see ``new_context``.

        Args:
            n_cells: room of all together [tokens].
            n_ctx: most tokens of one; None is ``n_cells``.

        Raises:
            UsageError: as for ``new_context``, or the engine takes fewer sequences.
        """
        self._check_open()
        if n_sequences <= 0:
            raise UsageError(f"the number of sequences must be at least 1, not {n_sequences}")
        n_ctx = n_cells if n_ctx is None else min(n_ctx, n_cells)
        return self._new_batch(n_sequences, n_cells, n_ctx, self._check_memory(n_ctx, hidden))

    def _check_memory(self, n_ctx: int, hidden: Sequence[str]) -> tuple[str, ...]:
        """The names of hidden states without repetitions."""
        if n_ctx <= 0:
            raise UsageError(f"the context size must be at least 1, not {n_ctx}")
        if hidden and not self.capabilities.hidden:
            raise UsageError(f"{self.engine} returns no hidden states for {self.path.name}")
        if NEXTN in hidden and not self.capabilities.nextn:
            raise UsageError(f"{self.engine} returns no states of {self.path.name} for an MTP layer")
        known = {NORM, NEXTN, *map(layer_name, range(self.n_layers))}
        if unknown := [name for name in hidden if name not in known]:
            raise UsageError(
                f"no hidden state is called {unknown[0]!r}: it is {NORM!r} or layer:0 to layer:{self.n_layers - 1}"
            )
        return tuple(dict.fromkeys(hidden))

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: put the begin-of-text token in front if the model wants one.
            parse_special: read ``<|im_end|>`` and the like as the special tokens they name. Only for text that comes
                from a chat template: a user's own text must not be able to forge a turn.

        Raises:
            UsageError: the text holds half a character, or the model has no tokens.
        """
        self._check_open()
        if not self.vocab.n_tokens:
            raise UsageError(f"{self.path.name} is a draft head and cannot tokenize text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the text holds a lone surrogate, which is not valid Unicode") from None
        return self._tokenize(text, add_special, parse_special)

    def recover(self) -> None:
        """Load again what was lost with a device; contexts are empty then. EngineError where it is still gone."""

    @abstractmethod
    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> Context: ...

    def _new_branching_context(self, n_ctx: int, hidden: tuple[str, ...]) -> Context:
        return self._new_context(n_ctx, hidden)

    def _new_batch(self, n_sequences: int, n_cells: int, n_ctx: int, hidden: tuple[str, ...]) -> SequenceBatch:
        contexts: list[Context] = []
        try:
            while len(contexts) < n_sequences:
                contexts.append(self._new_context(n_ctx, hidden))
        except BaseException:
            for context in contexts:
                context.close()
            raise
        return SequencesInTurn(contexts, n_cells)

    @abstractmethod
    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...


# -- the memory of one sequence ----------------------------------------------------------------------------------------


class Context(_Closable):
    """The memory of one sequence, which passes (``decode…``) extend and ``truncate`` cuts.

    Every pass raises ContextFull where its tokens do not fit; UsageError for no tokens, an id outside the vocabulary,
    or tokens behind rows of ``decode_first_layers``; EngineError where the engine failed. The memory is then as before,
    or, where that cannot be, empty.
    """

    _closed_error = "this context was closed"

    def __init__(self, model: Model, n_ctx: int, hidden: tuple[str, ...] = ()) -> None:
        self.model = model
        self.n_ctx = n_ctx  # its room [tokens]
        self.hidden = hidden  # names of the hidden states that every pass returns
        # Whether ``decode_tree`` works.
        self.can_branch = model.capabilities.trees and type(self)._decode_tree is not Context._decode_tree
        self.tokens: list[int] = []  # what the memory holds, in order
        # Asked between the pieces of a long input; True ends the decode with ``Cancelled``.
        self.interrupted: Callable[[], bool] | None = None
        self.finds_best = False  # whether the engine has ``_decode_best``, of tokens and of floats
        self.overlaps = False  # whether a device computes passes while their caller does something else
        # Called within a pass once the device has begun, perhaps several times; else before it.
        self.meanwhile: Callable[[], None] | None = None
        self._partial: tuple[int, int] | None = None  # where rows of the first layers begin, and how many layers
        self._tree: tuple[list[int], list[int]] | None = None  # tokens and parents of a tree behind the memory
        # Of a sequence of a ``SequenceBatch``: the account of the room that all share, and its number there.
        self.cells: Cells | None = None
        self.number = 0

    @property
    def n_past(self) -> int:
        """Tokens in the memory."""
        return len(self.tokens)

    @property
    def n_whole(self) -> int:
        """Tokens in the memory before those of ``decode_first_layers``."""
        return self.n_past if self._partial is None else self._partial[0]

    @property
    def n_free(self) -> int:
        """Tokens that still have room."""
        n_free = self.n_ctx - self.n_past
        return n_free if self.cells is None else min(n_free, self.cells.n_free)

    def decode(self, tokens: Sequence[int], logits: Wanted = "all", n_best: int = 0) -> Forward:
        """Feed tokens after those already in the memory.

        Args:
            n_best: how many of the largest logits of each row are enough: others may be left out; 0 wants whole rows.

        Raises:
            Cancelled: ``interrupted`` was true; the memory holds the pieces that were done.
        """
        self._check_input(tokens)
        if n_best and self.finds_best and logits != "none" and len(tokens) <= N_UNINTERRUPTED:
            return self._feed(tokens, partial(self._decode_best, tokens, n_best, logits, None))
        pieces: list[Forward] = []
        while logits != "all" and len(tokens) > N_UNINTERRUPTED and self.interrupted is not None:
            piece, tokens = tokens[:N_UNINTERRUPTED], tokens[N_UNINTERRUPTED:]
            pieces.append(self._feed(piece, partial(self._decode, piece, "none")))
            if self.interrupted():
                raise Cancelled("decoding was stopped")
        forward = self._feed(tokens, partial(self._decode, tokens, logits))
        return joined([*pieces, forward]) if pieces else forward

    def decode_floats(
        self, rows: FloatArray, tokens: Sequence[int], logits: Wanted = "all", n_best: int = 0
    ) -> Forward:
        """Feed rows in the place of token embeddings.

        Args:
            rows: what the first block reads, float32 [n, n_embd], n at least 1.
            tokens: what ``tokens`` is to name each row, 0 or more; they need not be ids of this model.
            n_best: as for ``decode``.

        Raises:
            UsageError: the model cannot (``Capabilities.float_rows``), the shapes are wrong, or a row is not finite.
        """
        self._check_input(tokens, are_ids=False)
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

        Only such passes can follow, until ``truncate`` has dropped the rows; then the context behaves as if they had
        never been.

        Returns:
            No logits; ``hidden`` has the state after layer ``n_layers - 1``, which the context must have been made to
            return, and those before it that it returns, each with a row for every token.

        Raises:
            UsageError: the model cannot (``Capabilities.first_layers``), the context does not return that state, or the
                memory ends with rows of another number of layers.
        """
        self._check_input(tokens, n_layers)
        name = layer_name(n_layers - 1)
        if not self.model.capabilities.first_layers:
            raise UsageError(f"{self.model.engine} cannot end a pass early for {self.model.path.name}")
        if not 0 < n_layers < self.model.n_layers:
            raise UsageError(f"a pass can end after 1 to {self.model.n_layers - 1} layers, not after {n_layers}")
        if name not in self.hidden:
            raise UsageError(f"this context was not made to return {name!r}")
        first = self.n_whole
        forward = self._feed(tokens, partial(self._decode_first_layers, tokens, n_layers))
        self._partial = first, n_layers
        return forward

    def decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        """Feed tokens that branch behind the memory: each sees the memory and its own path.

        Each takes a place of the memory's room until the next call, which keeps a path (``keep``) or drops all.
        ``parents`` has for each the index of the token that it follows, which comes before it; -1 is the last token of
        the memory.

        Returns:
            A row of logits for each token, and of every hidden state: as ``decode`` gives it for that token's path.

        Raises:
            UsageError: the context cannot (``can_branch``), or parents do not come before.
        """
        self._check_input(tokens)
        if not self.can_branch:
            raise UsageError(self.model.why_no_trees() or "this context was not made for tokens that branch")
        if len(parents) != len(tokens) or any(not -1 <= parent < i for i, parent in enumerate(parents)):
            raise UsageError("each token of a tree follows one before it, or the memory")
        if self._tree is not None:
            self._cut(self.n_past)
        self._tree = list(tokens), list(parents)
        try:
            return self._decode_tree(tokens, parents)
        except BaseException:
            self._cut(self.n_past)
            raise

    def keep(self, path: Sequence[int]) -> None:
        """Make a path of the tree that was just fed part of the memory, and drop the rest of it.

        ``path`` has indices of its tokens, in order: the first follows the memory, each other one the one before it. An
        empty path leaves the memory as it was.

        Raises:
            UsageError: there is no such path, or other calls have come in between.
            EngineError: the engine failed; the memory is as it was.
        """
        self._check_open()
        if self._tree is None:
            raise UsageError("there is no tree to keep a path of")
        tokens, parents = self._tree
        if any(not 0 <= at < len(tokens) or parents[at] != before for before, at in zip([-1, *path], path)):  # noqa: B905
            raise UsageError(f"{list(path)} is not a path of the tree")
        if not path:
            self._cut(self.n_past)
            return
        try:
            self._keep(path)
        except BaseException:
            self._cut(self.n_past)
            raise
        self._tree = None
        self.tokens.extend(tokens[at] for at in path)

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens; then the context behaves as a fresh one that was fed just those."""
        self._check_open()
        if not 0 <= n <= self.n_past:
            raise UsageError(f"cannot truncate {self.n_past} tokens to {n}")
        if n < self.n_past or self._tree is not None:
            self._cut(n)
        if self._partial is not None and n <= self._partial[0]:
            self._partial = None

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of the memory and ``tokens``, drop the rest, and return its length."""
        n = shared_prefix(self.tokens, tokens)
        self.truncate(n)
        return n

    def export_state(self) -> ContextState:
        """A copy of what the memory holds, for ``import_state``.

        Raises:
            UsageError: the engine cannot (``Capabilities.saves_state``), or rows of ``decode_first_layers`` are there.
        """
        self._check_saves_state()
        if self._partial is not None:
            raise UsageError(f"the rows from {self._partial[0]} on have the first layers only: truncate them first")
        return ContextState(tuple(self.tokens), self._export() if self.tokens else {})

    @property
    def state_bytes(self) -> int:
        """Size of what ``export_state`` would give now, or an upper bound of it [bytes]."""
        self._check_saves_state()
        return self._state_bytes() if self.tokens else 0

    def import_state(self, state: ContextState) -> None:
        """Hold what was exported: then the context behaves as the exporting one did.

        The state must be of the same file, engine, version and type of cache; the context's size may differ.

        Raises:
            ContextFull: more tokens than this context has room for; it is left as it was.
            UsageError: the engine cannot.
            EngineError: the engine refuses the state; the context is then empty.
        """
        self._check_saves_state()
        if len(state.tokens) > self.n_ctx:
            raise ContextFull(f"the state holds {len(state.tokens)} tokens and the context has room for {self.n_ctx}")
        if self.cells is not None:
            self.cells.check(len(state.tokens), self.cells.n_own(self.number))
        try:
            if state.tokens:
                self._import(state)
            else:  # engines abort the whole process on the state of an empty memory
                self.truncate(0)
        except BaseException:
            self._forget()
            self._truncate(0)
            raise
        self._forget()
        self._add(state.tokens)

    def close(self) -> None:
        super().close()
        self._forget()

    def _feed(self, tokens: Sequence[int], compute: Callable[[], Forward]) -> Forward:
        if self._tree is not None:
            self._cut(self.n_past)
        if self.meanwhile is not None and not self.overlaps:  # its caller has to wait, so that is done now
            self.meanwhile()
        n_before = self.n_past
        try:
            forward = compute()
        except BaseException:
            # A pass that broke off (Ctrl-C lands between chunks) must not leave rows that `tokens` does not name.
            self._cut(n_before)
            raise
        self._add(tokens)
        return forward

    def _add(self, tokens: Sequence[int]) -> None:
        """Name what was put into the memory."""
        self.tokens.extend(tokens)
        if self.cells is not None:
            self.cells.take(self.number, len(tokens))

    def _cut(self, n: int) -> None:
        """Drop all rows from position n on, also those that ``tokens`` does not name: a tree's, for one."""
        self._tree = None
        try:
            self._truncate(n)
            del self.tokens[n:]
        finally:
            if self.cells is not None:
                self.cells.cut(self.number, self.n_past)

    def _forget(self) -> None:
        """Name nothing: the memory is empty, or holds what is not known."""
        self.tokens, self._partial, self._tree = [], None, None
        if self.cells is not None:
            self.cells.cut(self.number, 0)

    def _check_input(self, tokens: Sequence[int], n_layers: int | None = None, *, are_ids: bool = True) -> None:
        """Refuse what cannot be fed behind the memory, through the first ``n_layers`` or, if None, all."""
        self._check_open()
        n = len(tokens)
        if not n:
            raise UsageError("decode needs at least one token")
        if self.n_past + n > self.n_ctx:
            raise ContextFull(f"the context holds {self.n_ctx} tokens; {self.n_past} are used and {n} more do not fit")
        if self.cells is not None:
            self.cells.check(n)
        if are_ids and (min(tokens) < 0 or max(tokens) >= self.model.n_vocab):
            raise UsageError(f"token ids must lie in 0..{self.model.n_vocab - 1}")
        if self._partial is not None and self._partial[1] != n_layers:
            raise UsageError(f"the memory ends with rows of {self._partial[1]} layers: truncate them first")

    def _check_saves_state(self) -> None:
        self._check_open()
        if not self.model.capabilities.saves_state:
            raise UsageError(f"{self.model.engine} cannot save the state of a context")
        if self._tree is not None:
            self._cut(self.n_past)

    # What an engine implements; what is not abstract only where its capabilities promise it.

    @abstractmethod
    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward: ...

    @abstractmethod
    def _truncate(self, n: int) -> None:
        """Drop all rows from position n on, rows of a broken-off pass and of a tree included.

        If that fails, ``tokens`` must be left naming no more than what is still there.
        """

    def _decode_best(self, tokens: Sequence[int], n_best: int, logits: Wanted, rows: FloatArray | None) -> Forward:
        raise NotImplementedError

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        raise NotImplementedError

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        raise NotImplementedError

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        raise NotImplementedError

    def _keep(self, path: Sequence[int]) -> None:
        """Of the rows that ``_decode_tree`` put behind the memory keep these, at least one, in this order."""
        raise NotImplementedError

    def _export(self) -> Mapping[str, npt.NDArray[Any]]:
        raise NotImplementedError

    def _state_bytes(self) -> int:
        raise NotImplementedError

    def _import(self, state: ContextState) -> None:
        """Replace what the memory holds. Must refuse, with EngineError, arrays that cannot be right."""
        raise NotImplementedError


# -- the memory of several sequences -----------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What one sequence is fed in a pass: its number, its next tokens (at least one), which rows to return."""

    sequence: int
    tokens: Sequence[int]
    logits: Wanted = "all"


class SequenceBatch(_Closable):
    """The memories of several sequences, numbered from 0, in one room of ``n_cells`` tokens, fed in one pass.

    Each sequence is a ``Context`` too (``batch[i]``), with rollback, states and everything else but branches.
    """

    shares_prefix = False  # whether tokens that ``copy_prefix`` gives to a second sequence take no more room
    _closed_error = "this batch of sequences was closed"

    def __init__(self, sequences: Sequence[Context], n_cells: int) -> None:
        first = sequences[0]
        self.model = first.model
        self.n_sequences = len(sequences)
        self.n_cells = n_cells  # room of all together [tokens]
        self.n_ctx = first.n_ctx  # most tokens of one
        self.hidden = first.hidden
        self.cells = Cells(n_cells, len(sequences))
        self._sequences = sequences
        for i, sequence in enumerate(sequences):
            sequence.cells, sequence.number = self.cells, i
            sequence.can_branch = sequence.finds_best = sequence.overlaps = False

    def __getitem__(self, sequence: int) -> Context:
        """One of the sequences: the same object each time. Closing it empties it for good."""
        self._check_open()
        if not 0 <= sequence < self.n_sequences:
            raise UsageError(f"the sequence must be in 0..{self.n_sequences - 1}, not {sequence}")
        return self._sequences[sequence]

    @property
    def free_cells(self) -> int:
        """Tokens that still have room, of any sequence."""
        return self.cells.n_free

    def decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        """Feed the next tokens of some of the sequences, at most one piece of each, in one pass.

        Returns:
            What ``Context.decode`` would, for each piece; the logits are valid until the next pass of any sequence.

        Raises:
            UsageError: a sequence that does not exist or occurs twice, or as for a context.
            ContextFull, EngineError: as for a context; all memories are as before.
        """
        self._check_open()
        contexts = [self[piece.sequence] for piece in pieces]
        if not pieces or len({piece.sequence for piece in pieces}) < len(pieces):
            raise UsageError("decode needs at least one piece, and no two of one sequence")
        for context, piece in zip(contexts, pieces, strict=True):
            context._check_input(piece.tokens)
        self.cells.check(sum(len(piece.tokens) for piece in pieces))
        before = [context.n_past for context in contexts]
        try:
            return self._decode(pieces)
        except BaseException:
            for context, n in zip(contexts, before, strict=True):
                context._cut(min(n, context.n_past))  # which may have lost its memory
            raise

    def copy_prefix(self, source: int, target: int, n: int) -> None:
        """Let a sequence hold the first n tokens of another, and nothing else; they go on independently.

        Where sequences do not share rows (``shares_prefix``, or a window that moved on), the tokens are read again.

        Raises:
            UsageError: no such sequence, the two are one, or the source does not hold as many (``n_whole``).
            ContextFull, EngineError: there is no room for a copy, or the engine failed; the target is then empty.
        """
        if source == target:
            raise UsageError(f"sequence {source} cannot be copied to itself")
        first, second = self[source], self[target]
        if not 0 <= n <= first.n_whole:
            raise UsageError(f"cannot copy {n} of {first.n_whole} tokens")
        second.truncate(0)
        if not n:
            return
        if not self.shares_prefix:
            self.cells.check(n)
        try:
            self._copy_prefix(source, target, n)
        except BaseException:
            second._cut(0)
            raise

    def truncate(self, sequence: int, n: int) -> None:
        """Forget all but the first n tokens of a sequence; see ``Context.truncate``."""
        self[sequence].truncate(n)

    def close(self) -> None:
        if not self._closed:
            self._closed = True  # the memory goes as a whole: no sequence is taken out of it first
            for context in self._sequences:
                context.close()
            self._close()

    @abstractmethod
    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        """Feed pieces that were checked, and name them in their contexts."""

    @abstractmethod
    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        """Give the first n tokens to an empty sequence, and name them there."""


class Cells:
    """An account of a memory of ``n_cells`` tokens: how many are free; a shared prefix counts once.

    Engines have no function that says so, and end a pass, or the process, where nothing is free.
    """

    def __init__(self, n_cells: int, n_sequences: int) -> None:
        self.n_cells = n_cells
        self._held: list[list[int]] = [[] for _ in range(n_sequences)]
        self._holders: Counter[int] = Counter()
        self._next = 0

    @property
    def n_free(self) -> int:
        return self.n_cells - len(self._holders)

    def check(self, n: int, n_given_back: int = 0) -> None:
        """Raise ContextFull for n tokens that do not fit, once ``n_given_back`` are free that are not now."""
        if n > self.n_free + n_given_back:
            raise ContextFull(
                f"the memory of {len(self._held)} sequences holds {self.n_cells} tokens; {self.n_free} are free and "
                f"{n} more do not fit"
            )

    def n_own(self, sequence: int) -> int:
        """Tokens that would become free if a sequence were emptied."""
        return sum(self._holders[cell] == 1 for cell in self._held[sequence])

    def n_held(self, sequences: Iterable[int], source: int = 0, n: int = 0) -> int:
        """Room that sequences take together, and with them one that begins with the first n tokens of ``source``."""
        return len(set(self._held[source][:n]).union(*(self._held[each] for each in sequences)))

    def take(self, sequence: int, n: int) -> None:
        """A sequence has n tokens more."""
        self._hold(sequence, range(self._next, self._next + n))
        self._next += n

    def share(self, source: int, target: int, n: int) -> None:
        """An empty sequence has the first n tokens of another."""
        self._hold(target, self._held[source][:n])

    def cut(self, sequence: int, n: int) -> None:
        """A sequence has its first n tokens only."""
        held = self._held[sequence]
        for cell in held[n:]:
            self._holders[cell] -= 1
            if not self._holders[cell]:
                del self._holders[cell]
        del held[n:]

    def _hold(self, sequence: int, cells: Sequence[int]) -> None:
        self._held[sequence] += cells
        self._holders.update(cells)


class SequencesInTurn(SequenceBatch):
    """Contexts of one model, fed one after another: for engines that compute one sequence at a time.

    Each context has room for ``n_ctx`` tokens; ``n_cells`` is kept to nevertheless.
    """

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        forwards: list[Forward] = []
        for sequence, tokens, logits in pieces:
            context = self._sequences[sequence]
            stop, context.interrupted = context.interrupted, None  # the end of one answer is not that of all
            try:
                forwards.append(context.decode(tokens, logits))
            finally:
                context.interrupted = stop
        return forwards

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        self._sequences[target].decode(self._sequences[source].tokens[:n], "none")

    def _close(self) -> None:
        pass
