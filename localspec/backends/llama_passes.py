"""Passes of a llama.cpp engine: rows in, logits and hidden states out."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from localspec.backends.best_logits import BestLogits
from localspec.backends.forward import NEXTN, FloatArray, Forward, joined
from localspec.backends.llama_binding import MAX_SEQUENCES, N_BATCH, N_UBATCH
from localspec.backends.llama_staging import staging
from localspec.backends.state_tap import Flags, StateTap
from localspec.errors import Cancelled, EngineError

if TYPE_CHECKING:
    from localspec.backends.llama_family import LlamaModel

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""ggml's numbers for the types a KV cache may have."""

_NO_SLOT = 1
"""What ``llama_decode`` returns when there are no free cells for the rows, or none side by side."""

SOON_MS = 4.0
"""A pass is given to a device if the engine comes back this soon: text of the round before waits for that, which nobody
sees yet. A launch of all kernels of a large model one by one takes some milliseconds. Set by hand."""

_SHORT = 16
"""Rows of a pass of which it counts how soon."""

_MOST_MOVES = 64
"""Times that a memory is put in order for one pass; each moves at least some hundreds of rows."""


class LlamaPasses:
    """A context of the engine, and what feeds it.

    Args:
        model: the weights.
        n_ctx: room for all sequences together [tokens].
        n_threads: that it computes with.
        kv_type: type of the attention cache.
        hidden: names of the states to return.
        n_sequences: how many sequences its memory may hold.
        n_snapshots: how many tokens to be able to take back from a memory that cannot be rewound.
        branches: whether it may be fed with tokens that branch; rows may then belong to any of ``MAX_SEQUENCES``.

    ``sequences`` below: to which ones each row belongs; a row that several begin with belongs to all of them.

    Attributes:
        handle: the engine's, for its other functions.
        n_snapshots: how many it is; 0 where the engine keeps none for this model, or has no room for them.

    Raises:
        EngineError: not enough memory.
    """

    def __init__(
        self,
        model: LlamaModel,
        n_ctx: int,
        n_threads: int,
        kv_type: str,
        hidden: Sequence[str] = (),
        n_sequences: int = 1,
        *,
        branches: bool = False,
        n_snapshots: int = 0,
    ) -> None:
        self._binding, self._model = model.binding, model
        tapped = [name for name in hidden if name != NEXTN]
        self.tap = StateTap(model.binding.tensors, tapped, model.n_layers, model.n_embd) if tapped else None
        evaluate = self.tap.callback if self.tap is not None else None
        # Engines round the size up for their kernels; the extra room stays unused so that all count the same.
        size = -(-n_ctx // 256) * 256
        of = model.handle, size, n_threads, KV_TYPES[kv_type], n_sequences
        new_context = partial(self._binding.new_context, *of, branches=branches, evaluate=evaluate)
        handle = new_context(n_snapshots=n_snapshots) or (new_context() if n_snapshots else None)
        if not handle:
            raise EngineError(
                f"{model.engine} does not have enough memory for a context of {n_ctx} tokens; use a smaller --ctx"
            )
        self.handle: int = handle
        self.n_snapshots = self._binding.n_snapshots(handle) if n_snapshots else 0
        self._returns_nextn = NEXTN in hidden
        if self._returns_nextn:
            staging().set_nextn(handle, True, False)  # of every token, not only of those with logits
        self._batch: Any = self._binding.lib.llama_batch_init(N_BATCH, 0, MAX_SEQUENCES if branches else 1)
        as_array = np.ctypeslib.as_array
        self._tokens = as_array(self._batch.token, (N_BATCH,))
        self._positions = as_array(self._batch.pos, (N_BATCH,))
        self._wanted_rows = as_array(self._batch.logits, (N_BATCH,))
        self._counts = as_array(self._batch.n_seq_id, (N_BATCH,))
        self._n_elsewhere = N_BATCH
        """Of how many rows of the batch, from the first, the sequences may be others than the first one alone."""
        self._one_sequence = n_sequences == 1 and not branches
        self._repeatable = model.capabilities.rollback == "exact"
        self._shapes: set[tuple[int, int, str | None]] = set()
        self._takes_floats = not model.binding.token_before_floats
        self._best: BestLogits | None = None
        self._ms_to_begin: deque[float] = deque(maxlen=5)  # lately

    @property
    def begins_soon(self) -> bool:
        """Whether the engine lately came back from short passes before a device had computed them.

        It waits for a GPU, or a server, only where logits are asked for; but for what is computed on the CPU, for the
        first of several servers, and for each state that is taken out, while the pass runs.
        """
        is_far, lately = self._model.capabilities.device == "gpu" and self.tap is None, self._ms_to_begin
        return is_far and len(lately) == lately.maxlen and median(lately) < SOON_MS

    def run(
        self,
        rows: Sequence[int] | FloatArray,
        positions: Sequence[int],
        wanted_rows: Flags,
        *,
        sequences: Sequence[Sequence[int]] | None = None,
        last: str | None = None,
        interrupted: Callable[[], bool] | None = None,
        n_best: int = 0,
        begun: Callable[[], None] | None = None,
    ) -> Forward:
        """Feed rows in as many calls of the engine as it takes.

        Args:
            rows: token ids [n], or floats [n, n_embd] in the place of their embeddings.
            positions: of the rows in their sequences [n].
            wanted_rows: of which rows to return logits [n].
            sequences: to which each belongs [n]; None is the first.
            last: the hidden state after which to end.
            interrupted: asked between calls.
            n_best: how many of the largest logits of each row are enough; 0 wants whole rows. Of one sequence.
            begun: called after each call of the engine, which may still be computing on a device.

        Raises:
            EngineError: the engine failed; rows before the failure are in the memory.
            Cancelled: ``interrupted`` was true; rows before that are in the memory.
        """
        if not self.handle:
            raise EngineError(f"{self._model.path.name} is not loaded: a device was lost")
        if n_best:
            found = self._best_of(rows, positions, wanted_rows, n_best, begun)
            if found is not None:
                return found
        if self._best is not None and wanted_rows.any():
            self._best.leave()
        if isinstance(rows, np.ndarray) and not self._takes_floats:
            self._decode_a_token(positions[0], sequences[0][0] if sequences is not None else 0)
        forwards: list[Forward] = []
        # Only what is computed together can be ended together, or be tried again whole.
        size = N_BATCH if last is None and self._one_sequence else N_UBATCH
        for start in range(0, len(rows), size):
            if start and interrupted is not None and interrupted():
                raise Cancelled("decoding was stopped")
            part = slice(start, start + size)
            of = sequences[part] if sequences is not None else None
            forward = self._call(rows[part], positions[part], wanted_rows[part], of, last, begun)
            if len(rows) > size:
                forward.logits = forward.logits.copy()
            forwards.append(forward)
        return joined(forwards)

    def _best_of(
        self,
        rows: Sequence[int] | FloatArray,
        positions: Sequence[int],
        wanted_rows: Flags,
        n_best: int,
        begun: Callable[[], None] | None,
    ) -> Forward | None:
        """The pass with the largest logits of its rows; None, and the memory as before, where they have to be whole."""
        if self._best is None:
            model = self._model
            self._best = BestLogits(self._binding.lib, self.handle, model.n_vocab, model.capabilities.device)
        n_rows = int(np.count_nonzero(wanted_rows))
        if len(rows) > N_UBATCH or not self._best.enter(n_best, n_rows):
            return None
        forward = self._call(rows, positions, wanted_rows, None, None, begun)
        if (found := self._best.read(n_rows, int(np.flatnonzero(wanted_rows)[0]), n_best)) is None:
            self._binding.remove(self.handle, positions[0])
            return None
        return Forward(found[0], forward.hidden, found[1])

    def _call(
        self,
        rows: Sequence[int] | FloatArray,
        positions: Sequence[int],
        wanted_rows: Flags,
        sequences: Sequence[Sequence[int]] | None,
        last: str | None,
        begun: Callable[[], None] | None,
    ) -> Forward:
        n, n_rows = len(rows), int(np.count_nonzero(wanted_rows))
        batch = self._filled(rows, positions, wanted_rows, sequences)
        if self.tap is None:
            self._decode(batch)
            if begun is not None:
                begun()
            return Forward(self._logits(n_rows), self._nextn(n))
        shape = (n, n_rows, last)
        search = sequences is not None or not self._repeatable or shape not in self._shapes
        hidden = self._decode_tapped(self.tap, batch, wanted_rows, search, last)
        if hidden is None and not search:
            self._binding.remove(self.handle, positions[0])
            hidden = self._decode_tapped(self.tap, batch, wanted_rows, True, last)
        if hidden is None:
            raise EngineError(f"{self._model.engine} did not hand out the hidden states of {n} tokens")
        self._shapes.add(shape)
        return Forward(self._logits(n_rows), hidden | ({} if last else self._nextn(n)))

    def _filled(
        self,
        rows: Sequence[int] | FloatArray,
        positions: Sequence[int],
        wanted_rows: Flags,
        sequences: Sequence[Sequence[int]] | None,
    ) -> Any:
        n = len(rows)
        batch = self._batch
        if isinstance(rows, np.ndarray):
            batch = type(batch).from_buffer_copy(batch)  # the same arrays, but for floats in the place of tokens
            batch.token, batch.embd = None, rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        else:
            self._tokens[:n] = rows
        batch.n_tokens = n
        self._positions[:n] = positions
        self._wanted_rows[:n] = wanted_rows
        if sequences is not None:
            self._n_elsewhere = max(self._n_elsewhere, n)
        else:
            sequences, self._n_elsewhere = [(0,)] * self._n_elsewhere, 0
        for i, mine in enumerate(sequences):
            self._counts[i] = len(mine)
            for j, sequence in enumerate(mine):
                batch.seq_id[i][j] = sequence
        return batch

    def _decode(self, batch: Any) -> None:
        started = time.perf_counter()
        for _ in range(_MOST_MOVES):
            status = self._binding.lib.llama_decode(self.handle, batch)
            if status != _NO_SLOT or self._one_sequence or not self._binding.defragment(self.handle):
                break
        if self.tap is not None:
            self.tap.check()
        if status != 0:
            reason = "no room left in its cache" if status == _NO_SLOT else f"status {status}"
            raise EngineError(f"{self._model.engine} failed to decode {batch.n_tokens} tokens ({reason})")
        if batch.n_tokens <= _SHORT:
            self._ms_to_begin.append((time.perf_counter() - started) * 1e3)

    def _decode_tapped(
        self, tap: StateTap, batch: Any, wanted_rows: Flags, search: bool, last: str | None
    ) -> dict[str, FloatArray] | None:
        """The states, or None where one of them was missed."""
        with tap.armed(search=search, last=last):
            self._decode(batch)
            return tap.states(wanted_rows, N_UBATCH)

    def _nextn(self, n: int) -> dict[str, FloatArray]:
        """What a layer for multi-token prediction goes on from, after each of the last n tokens fed [n, n_embd]."""
        return {NEXTN: staging().nextn(self.handle, n, self._model.n_embd)} if self._returns_nextn else {}

    def _logits(self, n_rows: int) -> FloatArray:
        n_vocab = self._model.n_vocab
        if not n_rows:
            self._model.check_devices()
            return np.empty((0, n_vocab), dtype=np.float32)
        if self._best is not None and self._best.k:
            self._model.check_devices()
            return np.empty((0, n_vocab), dtype=np.float32)  # the rows were not copied; see _best_of
        # This waits for a device to finish, so the time of the pass is the time until here.
        address = ctypes.cast(self._binding.lib.llama_get_logits(self.handle), ctypes.c_void_p).value
        self._model.check_devices()
        if not address:
            raise EngineError(f"{self._model.engine} returned no logits")
        view: FloatArray = np.ctypeslib.as_array((ctypes.c_float * n_vocab * n_rows).from_address(address))
        return view

    def _decode_a_token(self, position: int, sequence: int) -> None:
        """Have the engine count a pass of a single token: it does once it waited for that alone."""
        self._binding.lib.llama_synchronize(self.handle)
        self.run([0], [position], np.zeros(1, dtype=bool), sequences=[(sequence,)])
        self._binding.lib.llama_synchronize(self.handle)
        self._binding.remove(self.handle, position, sequence)
        self._takes_floats = True

    def close(self) -> None:
        if self.handle:
            self._binding.lib.llama_batch_free(self._batch)
            self._binding.free_context(self.handle)
            if self._best is not None:
                self._best.close()
            self.handle = 0
