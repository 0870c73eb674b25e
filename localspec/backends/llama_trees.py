"""Tokens that branch, in one pass of a llama.cpp engine: each path of the tree is a sequence of its own.

The engine shows a row the cells that one of the row's sequences has. So every leaf of the tree gets a sequence, the
first leaf that of the text itself; the text before the tree belongs to all of them, and a token of the tree to those of
the leaves below it: what the row sees is the text and its own path. Afterwards the path that is kept is given to the
text's sequence, and taken from the others.

What the others have of the text they keep for the next tree: then only what came since has to be given to them, rather
than the whole of a long conversation for each leaf of each tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backends.llama_binding import MAX_SEQUENCES, Binding
from localspec.errors import UsageError


def leaf_sequences(parents: Sequence[int]) -> list[list[int]]:
    """For each token of a tree which leaves lie below it, a leaf below itself: numbers, from 0.

    Args:
        parents: see ``Context.decode_tree``.
    """
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
    """The sequences of a memory beside that of its text, which is the first.

    Args:
        binding: the engine.
        handle: its context.
    """

    def __init__(self, binding: Binding, handle: int) -> None:
        self._binding, self._handle = binding, handle
        # A memory that gives away what lies before its window does so only where one sequence alone has it.
        self._keeps = not binding.window(handle)
        self._held = [0] * MAX_SEQUENCES
        """How much of the text each sequence has; of the first it does not matter."""
        self._tree: list[list[int]] = []
        self._is_known = True
        """Whether ``_held`` is right, and no sequence but the first has more than that of the text."""
        self._is_ordered = True
        self._n_gaps = 0

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
        """Have the text go on with a path of the tree; whether the memory has all that the next token looks at.

        Args:
            path: indices of its tokens.
            n: length of the text before the tree.
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
            self._n_gaps += len(tree) - len(path)
        self._tree, self._is_known = [], True
        return binding.remove(handle, n + len(path))

    def cut(self, n: int, n_before: int) -> None:
        """The text, of ``n_before`` tokens, will be cut to n; a tree that is there is dropped."""
        if not self._is_ordered:
            self._n_gaps += n_before - n + len(self._tree)
        if not self._is_known:
            self.forget()
        for sequence, held in enumerate(self._held):
            if held > n:
                self._is_known = False
                self._binding.remove(self._handle, n, sequence)
                self._held[sequence] = n
        self._is_known = True

    def forget(self) -> None:
        """Take everything from the sequences beside the first."""
        self._is_known = False
        for sequence in range(1, MAX_SEQUENCES):
            self._binding.remove(self._handle, 0, sequence)
        self._held = [0] * MAX_SEQUENCES
        self._tree, self._is_known = [], True

    def close_gaps(self) -> None:
        """Before a pass: move rows together, for an engine that needs it."""
        if self._n_gaps:
            self._binding.close_gaps(self._handle, self._n_gaps)
            self._n_gaps = 0
