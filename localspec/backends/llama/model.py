"""A model, its contexts and batches over the C functions (``Binding``) of llama.cpp or ik_llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakSet

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
from localspec.backends.best_rows import best_pays
from localspec.backends.llama.binding import MAX_SEQUENCES, Bytes
from localspec.backends.llama.passes import (
    LlamaPasses,
    PassRows,
    restore,
    save,
    saved_sequence,
    state_bytes,
)
from localspec.backends.llama.rollback import MAX_SNAPSHOTS, SNAPSHOT_SHARE, LeafSequences, Rollback, save_recurrent
from localspec.backends.llama.rpc import ask
from localspec.backends.llama.weights import LlamaWeights
from localspec.errors import EngineError, UnsupportedModel, UsageError


class LlamaModel(LlamaWeights):
    """Weights, and the contexts and batches over them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.contexts: WeakSet[LlamaContext] = WeakSet()
        self._batches: WeakSet[LlamaSequences] = WeakSet()
        self._known_states: set[str] = set()

    def recover(self) -> None:
        if self.placed is None or (self._handle and self.placed.lost is None):
            return
        for link in self.placed.links:
            if link.lost is not None:
                ask(link.address)
        for batch in list(self._batches):
            batch.close()
        for context in list(self.contexts):
            if context.cells is None:
                context.release()
            else:  # others than its own answer would go on from nothing
                context.close()
        with self._in_use.alone():  # other threads tokenize
            self._close()
            self._handle = 0
            self._handle = self._load(self.path)
        for context in list(self.contexts):
            context.reset()

    @cached_property
    def finds_best(self) -> bool:
        """Whether contexts have the engine look for the largest logits: where that takes less time."""
        return self.binding.finds_best and self.on_gpus and self.capabilities.rollback == "exact" and best_pays(self)

    @cached_property
    def n_snapshots(self) -> int:
        """How many tokens of a pass a context takes back at once, though its memory cannot be rewound."""
        if self.capabilities.rollback == "exact" or not self.binding.saves_recurrent:
            return 0
        passes = LlamaPasses(self, 2, self.kv_type, n_snapshots=1)
        try:
            if not passes.n_snapshots:
                return 0  # the engine keeps none for this architecture
            passes.run(PassRows.behind(0, [0], "none"))
            n_bytes = save_recurrent(self, passes.handle).nbytes
        finally:
            passes.close()
        return min(MAX_SNAPSHOTS, int(SNAPSHOT_SHARE * self.size_bytes / n_bytes))

    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> LlamaContext:
        self._check_states(hidden)
        return LlamaContext(self, n_ctx, hidden)

    def _new_branching_context(self, n_ctx: int, hidden: tuple[str, ...]) -> LlamaContext:
        self._check_states(hidden)
        return LlamaContext(self, n_ctx, hidden, branches=self.why_no_trees() is None)

    def why_no_trees(self) -> str | None:
        what = f"{self.engine} does not take tokens that branch for {self.path.name}"
        if self.capabilities.rollback == "replay":
            return f"{what}: its memory is a state of all that was read, and of one text"
        if self.architecture in self.binding.unshared:
            return f"{what}: texts cannot share rows of a memory of {self.architecture!r} models"
        if not self.binding.takes_several(self.kv_type):
            return f"{what}: a {self.kv_type} cache needs flash attention, with which they come out wrong"
        if not self.survives_several():
            return f"{what}: another process that tried did not live through it"
        return None

    def _new_batch(self, n_sequences: int, n_cells: int, n_ctx: int, hidden: tuple[str, ...]) -> SequenceBatch:
        if not self.capabilities.batches:
            return super()._new_batch(n_sequences, n_cells, n_ctx, hidden)
        if not self.survives_several():
            raise UnsupportedModel(
                f"{self.path.name}: {self.engine} does not compute several sequences of this {self.architecture!r} "
                "model in one pass; answer one at a time, or use --backend llama-cpp"
            )
        self._check_states(hidden)
        # A context of one sequence takes what a memory of several holds only if both are of one type.
        lies_apart = not self.binding.batches_kv_types and self.capabilities.keeps_kv_type and n_sequences > 1
        make = SequencesOrOne if lies_apart else LlamaSequences
        batch = make(self, n_sequences, n_cells, n_ctx, hidden)
        self._batches.add(batch)
        return batch

    def _check_states(self, hidden: tuple[str, ...]) -> None:
        """Refuse states that this architecture's graph does not name in this engine."""
        if self._known_states.issuperset(hidden):
            return
        with LlamaContext(self, 2, hidden) as context:
            try:
                context.decode([0, 0])
            except EngineError as error:
                raise UsageError(
                    f"{self.engine} returns not all of {', '.join(hidden)} for {self.path.name}: {error}"
                ) from None
        self._known_states.update(hidden)


class LlamaContext(Context):
    """One sequence's KV cache (or recurrent state): a memory of the engine of its own, or a sequence in a batch's."""

    model: LlamaModel

    def __init__(
        self,
        model: LlamaModel,
        n_ctx: int,
        hidden: tuple[str, ...] = (),
        *,
        branches: bool = False,
        batch: LlamaSequences | None = None,
    ) -> None:
        super().__init__(model, n_ctx, hidden)
        self._binding, self._batch = model.binding, batch
        self._rollback: Rollback | None = None
        self._leaves: LeafSequences | None = None
        self.can_branch = branches
        if batch is not None:
            self.passes: LlamaPasses = batch.passes  # what computes it now
            return
        self.finds_best = not branches and model.finds_best
        self.reset()
        model.contexts.add(self)

    @property
    def _is_shared(self) -> bool:
        """Whether its rows lie among those of other sequences now."""
        return self._batch is not None and self.passes.several

    @property
    def sequence(self) -> int:
        """Its number in the engine's memory."""
        return self.number if self._is_shared else 0

    def release(self) -> None:
        """Give the engine's memory back before its model is freed."""
        self.passes.close()
        self._forget()
        self._leaves = None

    def reset(self) -> None:
        """Be empty, in a model that was loaded, perhaps again."""
        model = self.model
        options: dict[str, Any] = {"branches": self.can_branch, "n_snapshots": model.n_snapshots}
        self.passes = LlamaPasses(model, self.n_ctx, model.kv_type, self.hidden, **options)
        self._rollback = Rollback(model, self.passes) if model.capabilities.rollback == "replay" else None
        self._set_leaves()

    def _set_leaves(self) -> None:
        self.passes.n_gaps = 0
        self._leaves = LeafSequences(self._binding, self.passes, self._handle) if self.can_branch else None

    @property
    def _handle(self) -> int:
        if not self.passes.handle:
            raise EngineError(f"{self.model.path.name} is not loaded: {self.model.lost or 'loading it again failed'}")
        return self.passes.handle

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        if self._rollback is not None:
            self._rollback.begin_pass(self.n_past, len(tokens))
        return self._next(tokens, logits)

    def _decode_best(self, tokens: Sequence[int], n_best: int, logits: Wanted, rows: FloatArray | None) -> Forward:
        return self._next(tokens if rows is None else rows, logits, n_best=n_best)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._next(rows, logits)

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._next(tokens, "none", layer_name(n_layers - 1))

    def _next(
        self, rows: Sequence[int] | FloatArray, logits: Wanted, last: str | None = None, n_best: int = 0
    ) -> Forward:
        """Feed rows behind the memory."""
        if self._batch is not None:
            self._batch.before_one(self)
        return self._run(self._behind(self.n_past, rows, logits), last, n_best)

    def _behind(self, n_past: int, rows: Sequence[int] | FloatArray, logits: Wanted) -> PassRows:
        return PassRows.behind(n_past, rows, logits, self.number if self._is_shared else None)

    def _run(self, rows: PassRows, last: str | None = None, n_best: int = 0) -> Forward:
        forward = self.passes.run(rows, last=last, n_best=n_best, begun=self.meanwhile)
        self.overlaps = self.cells is None and self.passes.begins_soon
        return forward

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        if self._leaves is None:
            self._set_leaves()  # which says what was lost
        assert self._leaves is not None
        self.passes.close_gaps()
        sequences = self._leaves.begin(parents, self.n_past)
        positions: list[int] = []
        for parent in parents:
            positions.append(self.n_past if parent < 0 else positions[parent] + 1)
        return self._run(PassRows(tokens, positions, np.ones(len(tokens), dtype=bool), sequences))

    def _keep(self, path: Sequence[int]) -> None:
        assert self._leaves is not None
        assert self._tree is not None
        if not self._leaves.keep(path, self.n_past):
            tokens = self._tree[0]
            self._truncate(self.n_past)  # which reads again what a window let go of
            self._run(self._behind(self.n_past, [tokens[at] for at in path], "none"))

    def _truncate(self, n: int) -> None:
        if self._leaves is not None:
            self._leaves.cut(n, self.n_past)
        if self._is_shared:
            self.passes.n_gaps += max(0, self.n_past - n)
        if self._rollback is None and self._binding.remove(self._handle, n, self.sequence):
            return
        if self._rollback is None or not self._rollback.take_back(self.n_past, n):
            self.go_back(n)

    def go_back(self, n: int) -> None:
        """Go to a state that the memory had, or empty it, and feed the rest of the first n tokens again: nothing else
        can be taken out, or a window that moved on has lost rows that they look at.

        Raises:
            ContextFull: there is no room for what they shared with other sequences.
        """
        try:
            start = 0 if self._rollback is None else self._rollback.go_back()
            if not start:
                self.empty()
            if start < n:
                if self.cells is not None:
                    self.cells.cut(self.number, 0)
                    self.cells.check(n)
                    self.cells.take(self.number, n)
                self._run(self._behind(start, self.tokens[start:n], "none"))
        except BaseException:
            # How far it came is unknown. What `tokens` names must be in the memory, so it names nothing.
            self.empty()
            self._forget()
            raise

    def empty(self) -> None:
        """Take all of the sequence out of the engine's memory."""
        if self._is_shared:
            self.passes.n_gaps += self.n_past
            self._binding.remove(self._handle, 0, self.number)
        else:
            self._binding.clear(self._handle)
            self._set_leaves()
        if self._rollback is not None:
            self._rollback.forget()

    def record(self) -> Bytes:
        """What the engine holds of it, as a memory of one sequence has it."""
        state = save(self.model, self._handle, self.sequence)
        return self._binding.by_rows(state) if self.passes.several else state

    def restore(self, record: Bytes) -> None:
        """Put a record into the emptied memory."""
        self.passes.close_gaps()
        record = self._binding.by_columns(record) if self.passes.several else record
        restore(self.model, self._handle, record, self.sequence)

    def _export(self) -> dict[str, Bytes]:
        return {"sequence": self.record()}

    def _state_bytes(self) -> int:
        return state_bytes(self._binding, self._handle, self.sequence)

    def _import(self, state: ContextState) -> None:
        record = saved_sequence(state, self.model.path)
        self.empty()
        if self._batch is not None:
            self._batch.before_import(self)
        self.restore(record)

    def _close(self) -> None:
        if self._batch is None:
            self.model.contexts.discard(self)
            self.passes.close()
        elif self.passes.handle and not self._batch.closed:
            self.empty()


# -- several sequences in one memory -----------------------------------------------------------------------------------


class LlamaSequences(SequenceBatch):
    """See ``SequenceBatch``. Each token is one cell of the engine's memory, whichever sequences have it."""

    model: LlamaModel
    shares_prefix = True
    _sequences: Sequence[LlamaContext]

    def __init__(self, model: LlamaModel, n_sequences: int, n_cells: int, n_ctx: int, hidden: tuple[str, ...]) -> None:
        if n_sequences > MAX_SEQUENCES:
            raise UsageError(f"{model.engine} takes at most {MAX_SEQUENCES} sequences, not {n_sequences}")
        kv_type = model.kv_type if model.binding.batches_kv_types else "f16"
        self.passes = LlamaPasses(model, n_cells, kv_type, hidden, n_sequences)
        super().__init__([LlamaContext(model, n_ctx, hidden, batch=self) for _ in range(n_sequences)], n_cells)

    def before_one(self, context: LlamaContext) -> None:
        """Called before a pass over one sequence."""

    def before_import(self, context: LlamaContext) -> None:
        """Called before a state is put into an emptied sequence."""

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        contexts = [self._sequences[piece.sequence] for piece in pieces]
        if len(pieces) == 1:
            forwards = [contexts[0]._decode(*pieces[0][1:])]
        else:
            parts = [PassRows.behind(self._sequences[i].n_past, tokens, logits, i) for i, tokens, logits in pieces]
            rows = PassRows(
                [token for piece in pieces for token in piece.tokens],
                [position for part in parts for position in part.positions],
                np.concatenate([part.wanted for part in parts]),
                [(piece.sequence,) for piece in pieces for _ in piece.tokens],
            )
            forwards = _divided(self.passes.run(rows), pieces, self.model.n_layers)
        for context, piece in zip(contexts, pieces, strict=True):
            context._add(piece.tokens)
        return forwards

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        first, second = self._sequences[source], self._sequences[target]
        self.cells.share(source, target, n)
        second.tokens = first.tokens[:n]
        self.model.binding.copy(self.passes.handle, source, target, n)
        if not self.model.binding.holds(self.passes.handle, n, target):
            second.go_back(n)

    def _close(self) -> None:
        self.passes.close()


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
    is kept and computed in a memory of its own. Before the next pass over several it is copied back."""

    def __init__(self, model: LlamaModel, n_sequences: int, n_cells: int, n_ctx: int, hidden: tuple[str, ...]) -> None:
        self._own = LlamaPasses(model, n_ctx, model.kv_type, hidden)
        try:
            super().__init__(model, n_sequences, n_cells, n_ctx, hidden)
        except BaseException:
            self._own.close()
            raise
        self.apart: LlamaContext | None = None  # the sequence that is in ``_own``
        self._n_alone = 0  # passes over one sequence, lately

    def before_one(self, context: LlamaContext) -> None:
        if context is self.apart:
            return
        if self._others_hold_tokens(context):
            self._n_alone = 0
            return
        self._n_alone += 1
        if context.n_past and self._n_alone < N_ALONE:
            return
        self._empty_own()
        if context.n_past:
            restore(self.model, self._own.handle, context.record())
            context.empty()
        context.passes, self.apart = self._own, context

    def before_import(self, context: LlamaContext) -> None:
        if not self._others_hold_tokens(context):
            self._empty_own()
            context.passes, self.apart = self._own, context

    def _others_hold_tokens(self, context: LlamaContext) -> bool:
        return any(each.n_past for each in self._sequences if each is not context)

    def _empty_own(self) -> None:
        if self.apart is not None:
            self.apart.passes, self.apart = self.passes, None
        self.model.binding.clear(self._own.handle)

    def _join(self) -> None:
        """Copy the sequence that is apart back, rows of the first layers too. On EngineError it stays where it is."""
        context = self.apart
        assert context is not None
        if context.n_past:
            record, apart = context.record(), context.passes
            context.passes = self.passes
            try:
                context.empty()
                context.restore(record)
            except BaseException:
                context.passes = apart
                raise
        self._empty_own()
        self._n_alone = 0

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        if len(pieces) > 1 and any(self._sequences[piece.sequence] is self.apart for piece in pieces):
            self._join()
        return super()._decode(pieces)

    def _copy_prefix(self, source: int, target: int, n: int) -> None:
        if self.apart in (self._sequences[source], self._sequences[target]):
            self._join()
        super()._copy_prefix(source, target, n)

    def _close(self) -> None:
        self._own.close()
        super()._close()
