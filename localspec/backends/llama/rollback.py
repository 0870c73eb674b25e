"""How the memory of a llama.cpp context goes back: to a state it had, or from a tree of tokens to one path of it."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backends.llama.binding import MAX_SEQUENCES, N_BATCH, Binding, Bytes
from localspec.backends.llama.passes import RECURRENT, LlamaPasses, restore, save
from localspec.backends.llama.weights import LlamaWeights
from localspec.errors import EngineError, UsageError

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


def save_recurrent(model: LlamaWeights, ctx: int) -> Bytes:
    """What cannot be rewound of a sequence, which does not grow with the text; all where the engine saves only that."""
    return save(model, ctx, flags=RECURRENT if model.binding.saves_recurrent else 0)


class Rollback:
    """The states that a context can go back to; ``passes`` has an empty memory at first."""

    def __init__(self, model: LlamaWeights, passes: LlamaPasses) -> None:
        self._model, self._passes = model, passes
        self._checkpoint: tuple[int, Bytes] | None = None  # after how many tokens, and the state then
        self._n_undoable = 0  # tokens of the last pass that have snapshots

    def begin_pass(self, n_past: int, n: int) -> None:
        """n tokens will be fed behind ``n_past``."""
        self._n_undoable = min(self._passes.n_snapshots, (n - 1) % N_BATCH)
        start = self._checkpoint[0] if self._checkpoint is not None else 0
        if n > 1 and (n - 1 > self._n_undoable or n_past - start >= CHECKPOINT_EVERY):
            # An empty memory needs no copy: clearing leads back to it.
            self._checkpoint = (n_past, save_recurrent(self._model, self._passes.handle)) if n_past else None

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
        (n_past, state), binding, handle = self._checkpoint, self._model.binding, self._passes.handle
        if not binding.saves_recurrent:
            binding.clear(handle)
            restore(self._model, handle, state)
            return n_past
        restore(self._model, handle, state, flags=RECURRENT)
        if not binding.remove(handle, n_past):  # the keys and values after it
            raise EngineError(f"{self._model.engine} rejected the saved state of a context")
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
