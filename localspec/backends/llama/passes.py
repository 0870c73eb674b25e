"""Passes of a llama.cpp engine: rows in, logits and hidden states out."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from localspec.backends.base import NEXTN, Context, ContextState, FloatArray, Forward, Model, TokenIds, Wanted, joined
from localspec.backends.best_rows import by_token, n_looked_for
from localspec.backends.llama.binding import MAX_SEQUENCES, MOST_ROWS, N_BATCH, N_UBATCH, Binding, Bytes
from localspec.backends.llama.ggml import Flags, StateTap, llama_gpus, rows_at
from localspec.backends.llama.staging import staging
from localspec.backends.llama.weights import LlamaWeights
from localspec.errors import EngineError

_MARGIN = 256 << 20


class BestLogits:
    """The largest logits of each row, found by llama.cpp where it computes them; see ``best_rows``. One sequence.

    A chain of samplers that is set for a sequence becomes part of the graph of its passes; here it is top-k alone.
    ``n_out`` of a row's ``n_vocab`` are logits of tokens, where the others are minus infinity; None is all.
    """

    def __init__(self, lib: Any, handle: int, n_vocab: int, device: str, n_out: int | None = None) -> None:
        self._lib, self._handle, self._device = lib, handle, device
        self._n_vocab, self._n_out = n_vocab, n_out or n_vocab
        self._chain: Any = None
        self._refused = False
        self.k = 0  # how many the passes give now; 0 is whole rows

    def enter(self, n_best: int, n_rows: int) -> bool:
        """Have the passes from here on give at least ``n_best`` logits of each row; returns whether they will."""
        k = n_looked_for(n_best, self._n_out)
        if self._refused or n_rows > MOST_ROWS or not k:
            return False
        if k > self.k:
            self.leave()
            if not self._has_room():
                return False
            chain = self._lib.llama_sampler_chain_init(self._lib.llama_sampler_chain_default_params())
            self._lib.llama_sampler_chain_add(chain, self._lib.llama_sampler_init_top_k(k))
            if not self._lib.llama_set_sampler(self._handle, 0, chain):
                self._refused = True
                self._lib.llama_sampler_free(chain)
                return False
            self._chain, self.k = chain, k
        return True

    def leave(self) -> None:
        """Have the passes from here on give whole rows."""
        if self._chain is not None:
            self._lib.llama_set_sampler(self._handle, 0, None)
            self.close()

    def _has_room(self) -> bool:
        """Whether the device has room for the buffer that the engine makes anew, which ends the process where not."""
        if self._device == "cpu":
            return True
        wanted = 2 * N_UBATCH * self._n_vocab * 4 + _MARGIN
        return all(gpu.free_bytes > wanted for gpu in llama_gpus() or [])

    def read(self, n_rows: int, first: int, n_best: int) -> tuple[FloatArray, TokenIds] | None:
        """``best_rows.by_token`` of the rows of the pass that was just run; the first is that of its token ``first``.

        None also where the device found none. After None passes give whole rows.
        """
        lib, n_vocab, k = self._lib, self._n_vocab, self.k
        found = rows_at(lib.llama_get_sampled_logits_ith(self._handle, first), n_rows, n_vocab)
        ids = rows_at(lib.llama_get_sampled_candidates_ith(self._handle, first), n_rows, n_vocab, ctypes.c_int32)
        if found is None or ids is None or lib.llama_get_sampled_candidates_count_ith(self._handle, first) != k:
            self._refused = True
            self.leave()
            return None
        best = by_token(found[:, :k], ids[:, :k], n_best)
        if best is None:
            self.leave()
        return best

    def close(self) -> None:
        """Give the chain back, once no pass uses it any more."""
        if self._chain is not None:
            self._lib.llama_sampler_free(self._chain)
            self._chain, self.k = None, 0


# -- rows in, logits and hidden states out -----------------------------------------------------------------------------

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}  # ggml's numbers for the types a KV cache may have

SOON_MS = 4.0
"""A pass is given to a device if the engine comes back this soon: text of the round before waits for that. A launch of
all kernels of a large model one by one takes some milliseconds."""

_SHORT = 16  # most rows of a pass whose time until the engine comes back counts

_NO_SLOT = 1  # what ``llama_decode`` returns when there are no free cells for the rows, or none side by side

_MOST_MOVES = 64  # times that a memory is put in order for one pass; each moves at least some hundreds of rows


@dataclass(frozen=True, slots=True)
class PassRows:
    """What a pass is fed, a row for each token."""

    rows: Sequence[int] | FloatArray  # token ids [n], or floats [n, n_embd] in the place of their embeddings
    positions: Sequence[int]  # in their sequences [n]
    wanted: Flags  # whether to return logits [n]
    # The sequences that each row belongs to [n]: to several, where they all begin with it. None: to the first alone.
    sequences: Sequence[Sequence[int]] | None = None

    @classmethod
    def behind(
        cls, n_past: int, rows: Sequence[int] | FloatArray, logits: Wanted, sequence: int | None = None
    ) -> PassRows:
        """The next rows of a sequence behind its first ``n_past``; None is the only sequence."""
        wanted = np.full(len(rows), logits == "all")
        wanted[-1] = logits != "none"
        of = None if sequence is None else [(sequence,)] * len(rows)
        return cls(rows, range(n_past, n_past + len(rows)), wanted, of)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, size: int) -> PassRows:
        part = slice(start, start + size)
        of = None if self.sequences is None else self.sequences[part]
        return PassRows(self.rows[part], self.positions[part], self.wanted[part], of)


class LlamaPasses:
    """A context of the engine, with room for n_ctx tokens of all sequences together, and what feeds it.

    Args:
        branches: whether it may be fed with tokens that branch; rows may then belong to any of ``MAX_SEQUENCES``.
        n_snapshots: how many tokens to be able to take back from a memory that cannot be rewound.

    Raises:
        EngineError: not enough memory.
    """

    def __init__(
        self,
        model: LlamaWeights,
        n_ctx: int,
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
        # Engines round the size up for their kernels; the extra room stays unused so that all count the same.
        fields: dict[str, Any] = {"n_ctx": -(-n_ctx // 256) * 256, "n_batch": N_BATCH, "n_ubatch": N_UBATCH}
        fields |= dict.fromkeys(("type_k", "type_v"), KV_TYPES[kv_type])
        fields |= {"cb_eval": self.tap.callback} if self.tap is not None else {}
        make = partial(
            self._binding.new_context, model.handle, model.n_threads, n_sequences, branches=branches, **fields
        )
        handle = make(n_rs_seq=n_snapshots) or make() if n_snapshots else make()
        if not handle:
            raise EngineError(
                f"{model.engine} does not have enough memory for a context of {n_ctx} tokens; use a smaller --ctx"
            )
        self.handle: int = handle  # for the engine's other functions; 0 once closed
        # 0 where the engine keeps none for this model, or has no room for them.
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
        self._n_elsewhere = N_BATCH  # rows of the batch, from the first, that may name other sequences than the first
        self.several = n_sequences > 1 or branches
        self._repeatable = model.capabilities.rollback == "exact"
        self._shapes: set[tuple[int, int, str | None]] = set()
        self._takes_floats = not model.binding.token_before_floats
        self._best: BestLogits | None = None
        self._ms_to_begin: deque[float] = deque(maxlen=5)  # lately
        self.n_gaps = 0  # cells of several sequences that were given back since rows were last moved together
        self._readers: dict[Model, Context] = {}

    @property
    def begins_soon(self) -> bool:
        """Whether the engine lately came back from short passes before a device had computed them.

        It does not for what is computed on the CPU, the first of several servers, and each state that is taken out.
        """
        is_far, lately = self._model.capabilities.device == "gpu" and self.tap is None, self._ms_to_begin
        return is_far and len(lately) == lately.maxlen and median(lately) < SOON_MS

    def run(
        self,
        rows: PassRows,
        *,
        last: str | None = None,
        n_best: int = 0,
        begun: Callable[[], None] | None = None,
    ) -> Forward:
        """Feed rows in as many calls of the engine as it takes.

        Args:
            last: the hidden state after which to end.
            n_best: how many of the largest logits of each row are enough; 0 wants whole rows. Of one sequence.
            begun: called after each call of the engine, which may still be computing on a device.

        Raises:
            EngineError: the engine failed; rows before the failure are in the memory.
        """
        if not self.handle:
            raise EngineError(f"{self._model.path.name} is not loaded: a device was lost")
        self.close_gaps()
        if n_best and (found := self._best_of(rows, n_best, begun)) is not None:
            return found
        if self._best is not None and rows.wanted.any():
            self._best.leave()
        if isinstance(rows.rows, np.ndarray) and not self._takes_floats:
            self._decode_a_token(rows.positions[0], rows.sequences[0][0] if rows.sequences is not None else 0)
        forwards: list[Forward] = []
        # Only what is computed together can be ended together, or be tried again whole.
        size = N_BATCH if last is None and not self.several else N_UBATCH
        try:
            for start in range(0, len(rows), size):
                forward = self._call(rows.part(start, size), last, begun)
                if len(rows) > size:
                    forward.logits = forward.logits.copy()
                forwards.append(forward)
        except BaseException:
            self.n_gaps += len(rows) if self.several else 0  # those that it came to will be removed
            raise
        return joined(forwards)

    def _best_of(self, rows: PassRows, n_best: int, begun: Callable[[], None] | None) -> Forward | None:
        """The pass with the largest logits of its rows; None, and the memory as before, where they have to be whole."""
        if self._best is None:
            model = self._model
            self._best = BestLogits(self._binding.lib, self.handle, model.n_vocab, model.capabilities.device)
        wanted = np.flatnonzero(rows.wanted)
        if len(rows) > N_UBATCH or not self._best.enter(n_best, len(wanted)):
            return None
        forward = self._call(rows, None, begun)
        if (found := self._best.read(len(wanted), int(wanted[0]), n_best)) is None:
            self._binding.remove(self.handle, rows.positions[0])
            return None
        return Forward(found[0], forward.hidden, found[1])

    def _call(self, rows: PassRows, last: str | None, begun: Callable[[], None] | None) -> Forward:
        n, n_rows = len(rows), int(np.count_nonzero(rows.wanted))
        batch = self._filled(rows)
        if self.tap is None:
            self._decode(batch)
            if begun is not None:
                begun()
            return Forward(self._logits(n_rows), self._nextn(n))
        shape = n, n_rows, last
        is_known = rows.sequences is None and self._repeatable and shape in self._shapes
        for search in (False, True) if is_known else (True,):
            with self.tap.armed(search=search, last=last):
                self._decode(batch)
                hidden = self.tap.states(rows.wanted, N_UBATCH)
            if hidden is not None:
                self._shapes.add(shape)
                return Forward(self._logits(n_rows), hidden | ({} if last else self._nextn(n)))
            if not search:
                self._binding.remove(self.handle, rows.positions[0])
        raise EngineError(f"{self._model.engine} did not hand out the hidden states of {n} tokens")

    def _filled(self, rows: PassRows) -> Any:
        n, batch = len(rows), self._batch
        if isinstance(rows.rows, np.ndarray):
            batch = type(batch).from_buffer_copy(batch)  # the same arrays, but for floats in the place of tokens
            batch.token, batch.embd = None, rows.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        else:
            self._tokens[:n] = rows.rows
        batch.n_tokens = n
        self._positions[:n] = rows.positions
        self._wanted_rows[:n] = rows.wanted
        sequences = rows.sequences
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
            if status != _NO_SLOT or not self.several or not self._binding.defragment(self.handle):
                break
        if self.tap is not None:
            self.tap.check()
        if status != 0:
            reason = "no room left in its cache" if status == _NO_SLOT else f"status {status}"
            raise EngineError(f"{self._model.engine} failed to decode {batch.n_tokens} tokens ({reason})")
        if batch.n_tokens <= _SHORT:
            self._ms_to_begin.append((time.perf_counter() - started) * 1e3)

    def _nextn(self, n: int) -> dict[str, FloatArray]:
        """What a layer for multi-token prediction reads, after each of the last n tokens fed [n, n_embd]."""
        return {NEXTN: staging().nextn(self.handle, n, self._model.n_embd)} if self._returns_nextn else {}

    def _logits(self, n_rows: int) -> FloatArray:
        n_vocab = self._model.n_vocab
        if not n_rows or (self._best is not None and self._best.k):  # those rows are not copied; see _best_of
            self._model.check_devices()
            return np.empty((0, n_vocab), dtype=np.float32)
        # This waits for a device to finish, so the time of the pass is the time until here.
        found = rows_at(self._binding.lib.llama_get_logits(self.handle), n_rows, n_vocab)
        self._model.check_devices()
        if found is None:
            raise EngineError(f"{self._model.engine} returned no logits")
        return found

    def _decode_a_token(self, position: int, sequence: int) -> None:
        """Have the engine count a pass of a single token: it does once it waited for that alone."""
        self._binding.lib.llama_synchronize(self.handle)
        self.run(PassRows.behind(position, [0], "none", sequence))
        self._binding.lib.llama_synchronize(self.handle)
        self._binding.remove(self.handle, position, sequence)
        self._takes_floats = True

    def close_gaps(self) -> None:
        """Move rows together, for an engine that needs it."""
        if self.n_gaps:
            self._binding.close_gaps(self.handle, self.n_gaps)
            self.n_gaps = 0

    def reader(self, model: Model, make: Callable[[int], Context]) -> Context:
        """The context of another model that reads this memory: ``make``, given the handle, makes it where there is
        none; closed before the memory is.

        llama.cpp empties the memory for which such a context is made, so what it holds is copied out and in.

        Raises:
            EngineError: ``make`` failed, or what the memory held is lost, and the memory closed.
        """
        if model not in self._readers:
            if not self.handle:
                raise EngineError(f"{self._model.path.name} is not loaded: a device was lost")
            lib = self._binding.lib
            held: Bytes = np.empty(lib.llama_state_get_size(self.handle), dtype=np.uint8)
            n_held = lib.llama_state_get_data(self.handle, _address(held), held.nbytes)
            try:
                self._readers[model] = make(self.handle)
            finally:
                if not n_held or not lib.llama_state_set_data(self.handle, _address(held), n_held):
                    self.close()
                    raise EngineError(f"{self._model.engine} lost the memory of {self._model.path.name}")
        return self._readers[model]

    def close_reader(self, model: Model) -> None:
        if model in self._readers:
            self._readers.pop(model).close()

    def close(self) -> None:
        for model in list(self._readers):
            self.close_reader(model)
        if self.handle:
            self._binding.lib.llama_batch_free(self._batch)
            self._binding.free_context(self.handle)
            if self._best is not None:
                self._best.close()
            self.handle = 0


# -- what the engine holds of a sequence, copied out and in; EngineError where it refuses ------------------------------

RECURRENT = 1  # llama.cpp's flag for what of a sequence cannot be rewound, without its keys and values


def _state(binding: Binding, what: str, *arguments: Any) -> int:
    return int(getattr(binding.lib, f"llama_state_seq_{what}{binding.state_suffix}")(*arguments))


def state_bytes(binding: Binding, ctx: int, sequence: int = 0, flags: int = 0) -> int:
    """Size of a record, or an upper bound of it [bytes]."""
    return _state(binding, "get_size", ctx, sequence, flags)


def save(model: LlamaWeights, ctx: int, sequence: int = 0, flags: int = 0) -> Bytes:
    """The engine's own record of a sequence."""
    state: Bytes = np.empty(state_bytes(model.binding, ctx, sequence, flags), dtype=np.uint8)
    n_written = _state(model.binding, "get_data", ctx, _address(state), state.nbytes, sequence, flags)
    model.check_devices()
    if not n_written:
        raise EngineError(f"{model.engine} could not save the state of a context")
    return state[:n_written]


def restore(model: LlamaWeights, ctx: int, state: Bytes, sequence: int = 0, flags: int = 0) -> None:
    """Put a record into an empty sequence."""
    if not _state(model.binding, "set_data", ctx, _address(state), state.nbytes, sequence, flags):
        raise EngineError(f"{model.engine} rejected the saved state of a context")
    model.check_devices()


def saved_sequence(state: ContextState, path: Path) -> Bytes:
    """The record in an exported state; EngineError where there is none."""
    sequence = state.arrays.get("sequence")
    if sequence is None or sequence.dtype != np.uint8 or sequence.ndim != 1:
        raise EngineError(f"the saved state does not fit {path.name}")
    return np.ascontiguousarray(sequence)


def _address(array: Bytes) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
