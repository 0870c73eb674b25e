"""How a memory that cannot be rewound goes back: the recurrent states of Mamba, Qwen 3.5 and others.

For some architectures llama.cpp keeps what such a memory was after each of the last tokens of a pass (``n_rs_seq``):
then a rejected draft is taken back at once. Where there are no such snapshots its state is copied out before a pass,
without keys and values where the engine can (such a copy does not grow with the text), and what was accepted is fed
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from localspec.backends.llama_binding import N_BATCH, Bytes
from localspec.backends.llama_passes import LlamaPasses
from localspec.backends.llama_state import restore_recurrent, save_recurrent

if TYPE_CHECKING:
    from localspec.backends.llama_family import LlamaModel

MAX_SNAPSHOTS = 16
"""Tokens that are taken back at once, where there is room for the snapshots: as long as the drafts of ``auto`` are."""

SNAPSHOT_SHARE = 1 / 8
"""Memory for snapshots, of what the weights take; set by hand. Qwen 3.5's are some tens of MB each."""

CHECKPOINT_EVERY = 32
"""Tokens between two copies, where snapshots serve most rejections; set by hand: so many are fed again in the time of a
few tokens."""


def n_snapshots(model: LlamaModel) -> int:
    """Of how many tokens snapshots are to be kept; 0 where the engine keeps none for the architecture.

    Args:
        model: whose memory cannot be rewound.
    """
    if not model.binding.saves_recurrent:
        return 0
    passes = LlamaPasses(model, 2, model.n_threads, model.kv_type, n_snapshots=1)
    try:
        if not passes.n_snapshots:
            return 0
        passes.run([0], [0], np.zeros(1, dtype=bool))
        n_bytes = save_recurrent(model, passes.handle).nbytes
    finally:
        passes.close()
    return min(MAX_SNAPSHOTS, int(SNAPSHOT_SHARE * model.size_bytes / n_bytes))


class Rollback:
    """The states that a context can go back to.

    Args:
        model: the context's.
        passes: the context's, whose memory is empty.
    """

    def __init__(self, model: LlamaModel, passes: LlamaPasses) -> None:
        self._model, self._passes = model, passes
        self._checkpoint: tuple[int, Bytes] | None = None  # after how many tokens, and the state then
        self._n_kept = self._n_undoable = 0  # tokens whose snapshots the next pass leaves, and the last one left

    def begin_pass(self, n_past: int, n: int) -> None:
        """Tokens are about to be fed.

        Args:
            n_past: tokens in the memory.
            n: tokens to feed.
        """
        self._n_kept, self._n_undoable = min(self._passes.n_snapshots, (n - 1) % N_BATCH), 0
        start = self._checkpoint[0] if self._checkpoint is not None else 0
        if n > 1 and (n - 1 > self._n_kept or n_past - start >= CHECKPOINT_EVERY):
            # An empty memory needs no copy: clearing leads back to it.
            self._checkpoint = (n_past, save_recurrent(self._model, self._passes.handle)) if n_past else None

    def end_pass(self) -> None:
        """They were fed."""
        self._n_undoable = self._n_kept

    def take_back(self, n_past: int, n: int) -> bool:
        """Drop all but the first n of the memory's tokens, if the engine has that snapshot.

        Once only: another one is there after the next pass.
        """
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
