"""A model and a context over the C functions (``Binding``) of llama.cpp or ik_llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np

from localspec.backends.base import Context, ContextState, FloatArray, Forward, SequenceBatch, Wanted, layer_name
from localspec.backends.best_rows import best_pays
from localspec.backends.llama.batch import LlamaSequences, SequencesOrOne
from localspec.backends.llama.binding import MAX_SEQUENCES, N_BATCH, Binding, Bytes
from localspec.backends.llama.passes import (
    LlamaPasses,
    PassRows,
    restore,
    restore_recurrent,
    save,
    save_recurrent,
    saved_sequence,
    state_bytes,
)
from localspec.backends.llama.rpc import ask
from localspec.backends.llama.weights import LlamaWeights
from localspec.errors import EngineError, UnsupportedModel, UsageError

# -- how a memory that cannot be rewound goes back ---------------------------------------------------------------------
#
# For some architectures llama.cpp keeps what such a memory was after each of the last tokens of a pass (``n_rs_seq``):
# a rejected draft is then taken back at once. Elsewhere the state is copied out before a pass, without keys and values
# where the engine can, and what was accepted is fed again.

MAX_SNAPSHOTS = 16
"""Tokens that are taken back at once, where there is room for the snapshots: as long as the drafts of ``auto`` are."""

SNAPSHOT_SHARE = 1 / 8
"""Memory for snapshots, of what the weights take; set by hand. Qwen 3.5's are some tens of MB each."""

CHECKPOINT_EVERY = 32
"""Most tokens that are fed again where snapshots serve most rejections: a few tokens' time; set by hand."""


class Rollback:
    """The states that a context can go back to; ``passes`` has an empty memory at first."""

    def __init__(self, model: LlamaModel, passes: LlamaPasses) -> None:
        self._model, self._passes = model, passes
        self._checkpoint: tuple[int, Bytes] | None = None  # after how many tokens, and the state then
        self._n_kept = self._n_undoable = 0  # tokens whose snapshots the next pass leaves, and the last one left

    def begin_pass(self, n_past: int, n: int) -> None:
        """n tokens will be fed behind ``n_past``."""
        self._n_kept, self._n_undoable = min(self._passes.n_snapshots, (n - 1) % N_BATCH), 0
        start = self._checkpoint[0] if self._checkpoint is not None else 0
        if n > 1 and (n - 1 > self._n_kept or n_past - start >= CHECKPOINT_EVERY):
            # An empty memory needs no copy: clearing leads back to it.
            self._checkpoint = (n_past, save_recurrent(self._model, self._passes.handle)) if n_past else None

    def end_pass(self) -> None:
        self._n_undoable = self._n_kept

    def take_back(self, n_past: int, n: int) -> bool:
        """Drop all but the first n of ``n_past`` tokens, if the engine has that snapshot; once after a pass."""
        if self._checkpoint is not None and self._checkpoint[0] > n:
            self._checkpoint = None  # what comes in the place of the tokens dropped is another text
        is_undoable, self._n_undoable = 0 < n_past - n <= self._n_undoable, 0
        return bool(n) and is_undoable and self._model.binding.remove(self._passes.handle, n)

    def go_back(self) -> int:
        """Go back to the last copy; returns after how many tokens it was made, 0 where there is none.

        Raises:
            EngineError: the engine refuses it.
        """
        if self._checkpoint is None:
            return 0
        n_past, state = self._checkpoint
        restore_recurrent(self._model, self._passes.handle, state, n_past)
        return n_past

    def forget(self) -> None:
        """The memory was emptied, or holds another text."""
        self._checkpoint, self._n_undoable = None, 0


# -- tokens that branch, in one pass: each path of the tree is a sequence of its own -----------------------------------
#
# The engine shows a row the cells that one of the row's sequences has. So every leaf of the tree gets a sequence, the
# first leaf that of the text itself; the text before the tree belongs to all of them, and a token of the tree to those
# of the leaves below it. Afterwards the path that is kept is given to the text's sequence, and taken from the others.
#
# What the others have of the text they keep for the next tree: then only what came since has to be given to them.


def leaf_sequences(parents: Sequence[int]) -> list[list[int]]:
    """For each token of a tree (see ``Context.decode_tree``) the leaves below it, itself included: numbers from 0."""
    below: list[list[int]] = [[] for _ in parents]
    n_leaves = 0
    inner = set(parents)
    for at in range(len(parents)):
        if at in inner:
            continue
        above = at
        while above >= 0:
            below[above].append(n_leaves)
            above = parents[above]
        n_leaves += 1
    return below


class LeafSequences:
    """The sequences of a memory after the first, which is that of its text."""

    def __init__(self, binding: Binding, passes: LlamaPasses, handle: int) -> None:
        self._binding, self._passes, self._handle = binding, passes, handle
        # A memory that gives away what lies before its window does so only where one sequence alone has it.
        self._keeps = not binding.window(handle)
        self._held = [0] * MAX_SEQUENCES  # how much of the text each sequence has; of the first it does not matter
        self._tree: list[list[int]] = []
        self._is_known = True  # ``_held`` is right, and no sequence but the first has more than that of the text
        self._is_ordered = True

    def begin(self, parents: Sequence[int], n: int) -> list[list[int]]:
        """Let a tree follow the first n tokens, which are all there are; the sequences of its tokens.

        Raises:
            UsageError: it has more leaves than there are sequences.
        """
        tree = leaf_sequences(parents)
        n_leaves = 1 + max(map(max, tree))
        if n_leaves > MAX_SEQUENCES:
            raise UsageError(f"a tree may have {MAX_SEQUENCES} leaves, not {n_leaves}")
        if not self._is_known:
            self.forget()
        self._is_known = False
        self._tree = tree
        for sequence in range(1, n_leaves):
            if self._held[sequence] < n:
                self._binding.copy(self._handle, 0, sequence, n, self._held[sequence])
                self._held[sequence] = n
        return tree

    def keep(self, path: Sequence[int], n: int) -> bool:
        """Have the text, of n tokens before the tree, go on with a path of it.

        Returns:
            Whether the memory has all that the next token looks at.
        """
        binding, handle, tree = self._binding, self._handle, self._tree
        sequence = tree[path[-1]][0]
        if sequence:
            binding.remove(handle, n)
            binding.copy(handle, sequence, 0, n + len(path), n)
        for other in range(1, 1 + max(map(max, tree))):
            binding.remove(handle, n if self._keeps else 0, other)
            self._held[other] = n if self._keeps else 0
        self._is_ordered &= list(path) == list(range(len(path)))
        if not self._is_ordered:
            self._passes.n_gaps += len(tree) - len(path)
        self._tree, self._is_known = [], True
        return binding.remove(handle, n + len(path))

    def cut(self, n: int, n_before: int) -> None:
        """The text, of ``n_before`` tokens, will be cut to n; a tree that is there is dropped."""
        if not self._is_ordered:
            self._passes.n_gaps += n_before - n + len(self._tree)
        if not self._is_known:
            self.forget()
        for sequence, held in enumerate(self._held):
            if held > n:
                self._is_known = False
                self._binding.remove(self._handle, n, sequence)
                self._held[sequence] = n
        self._is_known = True

    def forget(self) -> None:
        """Empty all sequences but the first."""
        self._is_known = False
        for sequence in range(1, MAX_SEQUENCES):
            self._binding.remove(self._handle, 0, sequence)
        self._held = [0] * MAX_SEQUENCES
        self._tree, self._is_known = [], True


# -- the model and its contexts ----------------------------------------------------------------------------------------


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
            context.release()
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
        passes = LlamaPasses(self, 2, self.n_threads, self.kv_type, n_snapshots=1)
        try:
            if not passes.n_snapshots:
                return 0  # the engine keeps none for this architecture
            passes.run(PassRows.behind(0, [0], "none"))
            n_bytes = save_recurrent(self, passes.handle).nbytes
        finally:
            passes.close()
        return min(MAX_SNAPSHOTS, int(SNAPSHOT_SHARE * self.size_bytes / n_bytes))

    def _new_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> LlamaContext:
        self._check_states(hidden)
        return LlamaContext(self, n_ctx, n_threads, hidden)

    def _new_branching_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> LlamaContext:
        self._check_states(hidden)
        return LlamaContext(self, n_ctx, n_threads, hidden, branches=self.why_no_trees() is None)

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

    def _new_batch(
        self, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> SequenceBatch:
        if not self.capabilities.batches:
            return super()._new_batch(n_sequences, n_cells, n_ctx, n_threads, hidden)
        if not self.survives_several():
            raise UnsupportedModel(
                f"{self.path.name}: {self.engine} does not compute several sequences of this {self.architecture!r} "
                "model in one pass; answer one at a time, or use --backend llama-cpp"
            )
        self._check_states(hidden)
        # A context of one sequence takes what a memory of several holds only if both are of one type.
        lies_apart = not self.binding.batches_kv_types and self.capabilities.keeps_kv_type and n_sequences > 1
        make = SequencesOrOne if lies_apart else LlamaSequences
        batch = make(self, n_sequences, n_cells, n_ctx, n_threads, hidden)
        self._batches.add(batch)
        return batch

    def _check_states(self, hidden: tuple[str, ...]) -> None:
        """Refuse states that this architecture's graph does not name in this engine."""
        if self._known_states.issuperset(hidden):
            return
        with LlamaContext(self, 2, self.n_threads, hidden) as context:
            try:
                context.decode([0, 0])
            except EngineError as error:
                raise UsageError(
                    f"{self.engine} returns not all of {', '.join(hidden)} for {self.path.name}: {error}"
                ) from None
        self._known_states.update(hidden)


class LlamaContext(Context):
    """One sequence's KV cache (or recurrent state) in a llama.cpp engine."""

    model: LlamaModel

    def __init__(
        self, model: LlamaModel, n_ctx: int, n_threads: int, hidden: tuple[str, ...] = (), *, branches: bool = False
    ) -> None:
        super().__init__(model, n_ctx, hidden)
        self._binding = model.binding
        self._n_threads, self.can_branch = n_threads, branches
        self._leaves: LeafSequences | None = None
        self.finds_best = not branches and model.finds_best
        self.reset()
        model.contexts.add(self)

    @property
    def passes(self) -> LlamaPasses:
        return self._passes

    def release(self) -> None:
        """Give the engine's memory back before its model is freed."""
        self._passes.close()
        self.tokens, self._partial, self._tree, self._leaves = [], None, None, None

    def reset(self) -> None:
        """Be empty, in a model that was loaded, perhaps again."""
        model = self.model
        options: dict[str, Any] = {"branches": self.can_branch, "n_snapshots": model.n_snapshots}
        self._passes = LlamaPasses(model, self.n_ctx, self._n_threads, model.kv_type, self.hidden, **options)
        self._rollback = Rollback(model, self._passes) if model.capabilities.rollback == "replay" else None
        self._set_leaves()

    def _set_leaves(self) -> None:
        self._passes.n_gaps = 0
        self._leaves = LeafSequences(self._binding, self._passes, self._handle) if self.can_branch else None

    @property
    def _handle(self) -> int:
        if not self._passes.handle:
            raise EngineError(f"{self.model.path.name} is not loaded: {self.model.lost or 'loading it again failed'}")
        return self._passes.handle

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        if self._rollback is not None:
            self._rollback.begin_pass(self.n_past, len(tokens))
        forward = self._compute(tokens, self.n_past, logits)
        if self._rollback is not None:
            self._rollback.end_pass()
        return forward

    def _decode_best(self, tokens: Sequence[int], n_best: int, logits: Wanted, rows: FloatArray | None) -> Forward:
        return self._compute(tokens if rows is None else rows, self.n_past, logits, n_best=n_best)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._compute(rows, self.n_past, logits)

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._compute(tokens, self.n_past, "none", last=layer_name(n_layers - 1))

    def _compute(
        self, rows: Sequence[int] | FloatArray, n_past: int, logits: Wanted, last: str | None = None, n_best: int = 0
    ) -> Forward:
        """Feed rows after the first ``n_past`` of the memory."""
        return self._run(PassRows.behind(n_past, rows, logits), last, n_best)

    def _run(self, rows: PassRows, last: str | None = None, n_best: int = 0) -> Forward:
        forward = self._passes.run(rows, last=last, n_best=n_best, begun=self.meanwhile)
        self.overlaps = self._passes.begins_soon
        return forward

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        if self._leaves is None:
            self._set_leaves()  # which says what was lost
        assert self._leaves is not None
        self._passes.close_gaps()
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
            self._compute([tokens[at] for at in path], self.n_past, "none")

    def _truncate(self, n: int) -> None:
        if self._leaves is not None:
            self._leaves.cut(n, self.n_past)
        if self._rollback is None and self._binding.remove(self._handle, n):
            return
        if self._rollback is not None and self._rollback.take_back(self.n_past, n):
            return
        # Nothing else can be taken out of this memory: go back to a state it had, and feed the rest again.
        try:
            start = 0 if self._rollback is None else self._rollback.go_back()
            if not start:
                self._clear()
            if start < n:
                self._compute(self.tokens[start:n], start, "none")
        except BaseException:
            # How far it came is unknown. What `tokens` names must be in the memory, so it names nothing.
            self._clear()
            self._forget()
            self.tokens = []
            raise

    def _forget(self) -> None:
        if self._rollback is not None:
            self._rollback.forget()

    def _clear(self) -> None:
        self._binding.clear(self._handle)
        self._set_leaves()

    def _export(self) -> dict[str, Bytes]:
        state = save(self.model, self._handle)
        return {"sequence": self._binding.by_rows(state) if self.can_branch else state}

    def _state_bytes(self) -> int:
        return state_bytes(self._binding, self._handle)

    def _import(self, state: ContextState) -> None:
        self._forget()
        self._clear()
        sequence = saved_sequence(state, self.model.path)
        restore(self.model, self._handle, self._binding.by_columns(sequence) if self.can_branch else sequence)

    def _close(self) -> None:
        self.model.contexts.discard(self)
        self._passes.close()
        self._forget()
