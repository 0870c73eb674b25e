"""What llama.cpp and its forks have in common: a model and a context over a table of C functions.

The two engines differ in names and in a few semantics; each fills in a ``Binding`` and everything else is shared. Only
public C functions are called, through ctypes, which releases the GIL while they run.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Capabilities, Context, ContextState, FloatArray, Forward, Model, Progress
from localspec.backends.soundness import check_sound
from localspec.errors import EngineError
from localspec.model_files.gguf_file import GGUFFile, TensorInfo
from localspec.model_files.kv_memory import check_kv_type

Bytes = npt.NDArray[np.uint8]

N_BATCH = 512
"""Most tokens in one call of the engine; longer inputs are fed in pieces."""

N_UBATCH = 256
"""Tokens the engine computes together. Twice that costs 150 MB more for a 152k vocabulary and gains no prefill speed
on CPUs."""


class Binding(ABC):
    """The C functions of one engine. Handles are opaque integers; 0 or None means failure.

    Attributes:
        name: the engine's, in the catalogue.
        version: of the package, and a digest of its libraries: builds of one version differ in speed and in what they
            get wrong, so nothing that was found out about one may be taken for true of another.
        lib: the module or library that has the llama_* functions both engines share under one name.
        api: the module that has the structs and the functions that take them.
        gpu: whether it was built for one.
        state_flags: last arguments of the functions that save a sequence, for an engine that takes flags there.
        alignment: what tensors in the file must be aligned to [bytes]; more for an engine that computes from the mapped
            file.
        keeps_rows: see ``Capabilities``.
    """

    name: str
    version: str
    lib: Any
    api: Any
    gpu = False
    state_flags: tuple[int, ...] = ()
    alignment = 1
    keeps_rows = False

    @abstractmethod
    def set_model_options(self, params: Any) -> None:
        """Fill in what this engine alone has in ``llama_model_params``."""

    @abstractmethod
    def set_context_options(self, params: Any) -> None:
        """Fill in what this engine alone has in ``llama_context_params``."""

    def load_model(self, path: Path, n_gpu_layers: int, progress: Progress | None) -> int | None:
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        callback = self.api.llama_progress_callback(lambda fraction, _data: progress(fraction) if progress else True)
        params.progress_callback = callback
        self.set_model_options(params)
        handle: int | None = self.api.llama_model_load_from_file(os.fsencode(path), params)
        return handle

    @abstractmethod
    def free_model(self, model: int) -> None: ...

    def new_context(self, model: int, n_ctx: int, n_threads: int, kv_type: int) -> int | None:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, N_BATCH, N_UBATCH
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = params.type_v = kv_type
        self.set_context_options(params)
        handle: int | None = self.api.llama_init_from_model(model, params)
        return handle

    def free_context(self, ctx: int) -> None:
        self.api.llama_free(ctx)

    @abstractmethod
    def remove(self, ctx: int, start: int) -> bool:
        """Drop all rows from position ``start``; False when this memory cannot."""

    @abstractmethod
    def clear(self, ctx: int) -> None: ...

    @abstractmethod
    def is_recurrent(self, model: int) -> bool:
        """Whether the memory holds a state that cannot be rewound (recurrent and hybrid models)."""

    @abstractmethod
    def tokenizer(self, model: int) -> int:
        """The handle that ``llama_tokenize`` takes."""

    def tokenize(self, model: int, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        handle, size = self.tokenizer(model), len(text) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            n = self.lib.llama_tokenize(handle, text, len(text), buffer, size, add_special, parse_special)
            if n >= 0:
                return list(buffer[:n])
            size = -n

    @abstractmethod
    def n_vocab(self, model: int) -> int: ...

    def computes(self, tensor: TensorInfo) -> bool:
        """Whether the engine survives a tensor of this type and size; one that refuses the others itself says yes."""
        return True

    def device(self, n_gpu_layers: int) -> str:
        return "gpu" if self.gpu and n_gpu_layers else "cpu"


KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""ggml's numbers for the types a KV cache may have."""


class LlamaModel(Model):
    """Weights loaded by a llama.cpp engine; see ``backends.base.Model``."""

    def __init__(
        self,
        binding: Binding,
        path: Path,
        *,
        n_threads: int,
        n_gpu_layers: int = 0,
        kv_type: str = "f16",
        progress: Progress | None = None,
    ) -> None:
        with GGUFFile(path) as gguf:
            self._read_header(gguf)
            check_kv_type(gguf, kv_type)
            check_sound(gguf, self.vocab, binding.computes, binding.alignment)
        self.binding = binding
        self.backend = binding.name
        self.engine = f"{binding.name} {binding.version}"
        self.n_threads = n_threads
        self.kv_type = kv_type
        handle = binding.load_model(path, n_gpu_layers, progress)
        if not handle:
            raise EngineError(
                f"{self.engine} could not load {path.name} (architecture {self.architecture!r}); "
                "try another --backend, or --verbose for the engine's own words"
            )
        self._handle: int = handle
        self.n_vocab = binding.n_vocab(handle)
        self.capabilities = Capabilities(
            rollback="replay" if binding.is_recurrent(handle) else "exact",
            device=binding.device(n_gpu_layers),
            saves_state=True,
            keeps_rows=binding.keeps_rows,
        )

    @property
    def handle(self) -> int:
        self._check_open()
        return self._handle

    def _new_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> LlamaContext:
        return LlamaContext(self, n_ctx, n_threads)

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self.binding.tokenize(self._handle, text.encode(), add_special, parse_special)

    def _close(self) -> None:
        self.binding.free_model(self._handle)


class LlamaContext(Context):
    """One sequence's KV cache (or recurrent state) in a llama.cpp engine."""

    model: LlamaModel

    def __init__(self, model: LlamaModel, n_ctx: int, n_threads: int) -> None:
        super().__init__(model, n_ctx)
        self._binding = model.binding
        # Engines round the size up for their kernels; the extra room stays unused so that all count the same.
        handle = self._binding.new_context(model.handle, -(-n_ctx // 256) * 256, n_threads, KV_TYPES[model.kv_type])
        if not handle:
            raise EngineError(
                f"{model.engine} has not enough memory for a context of {n_ctx} tokens; use a smaller --ctx"
            )
        self._handle: int = handle
        self._batch = self._binding.lib.llama_batch_init(N_BATCH, 0, 1)
        as_array = np.ctypeslib.as_array
        self._batch_tokens = as_array(self._batch.token, (N_BATCH,))
        self._batch_pos = as_array(self._batch.pos, (N_BATCH,))
        self._batch_logits = as_array(self._batch.logits, (N_BATCH,))
        as_array(self._batch.n_seq_id, (N_BATCH,))[:] = 1
        for i in range(N_BATCH):
            self._batch.seq_id[i][0] = 0
        self._checkpoint: tuple[int, Bytes] | None = None

    def _decode(self, tokens: Sequence[int], logits: Literal["all", "last", "none"]) -> Forward:
        if self.model.capabilities.rollback == "replay" and len(tokens) > 1:
            # An empty memory needs no copy: clearing leads back to it.
            self._checkpoint = (self.n_past, self._save()) if self.n_past else None
        return self._compute(tokens, self.n_past, logits)

    def _compute(self, tokens: Sequence[int], n_past: int, logits: Literal["all", "last", "none"]) -> Forward:
        """Feed tokens after the first ``n_past`` of the memory, in as many calls of the engine as it takes."""
        rows: list[FloatArray] = []
        n_vocab = self.model.n_vocab
        for start in range(0, len(tokens), N_BATCH):
            piece = tokens[start : start + N_BATCH]
            n = len(piece)
            last = start + n == len(tokens)
            self._batch.n_tokens = n
            self._batch_tokens[:n] = piece
            self._batch_pos[:n] = range(n_past + start, n_past + start + n)
            self._batch_logits[:n] = logits == "all"
            if last and logits == "last":
                self._batch_logits[n - 1] = 1
            status = self._binding.lib.llama_decode(self._handle, self._batch)
            if status != 0:
                reason = "no room left in its cache" if status == 1 else f"status {status}"
                raise EngineError(f"{self.model.engine} failed to decode {n} tokens ({reason})")
            n_rows = n if logits == "all" else int(last and logits == "last")
            if n_rows:
                # This waits for a device to finish, so the time of the pass is the time until here.
                address = ctypes.cast(self._binding.lib.llama_get_logits(self._handle), ctypes.c_void_p).value
                if not address:
                    raise EngineError(f"{self.model.engine} returned no logits")
                rows_type = ctypes.c_float * n_vocab * n_rows
                view: FloatArray = np.ctypeslib.as_array(rows_type.from_address(address))
                rows.append(view if len(tokens) <= N_BATCH else view.copy())
        if not rows:
            return Forward(np.empty((0, n_vocab), dtype=np.float32))
        return Forward(rows[0] if len(rows) == 1 else np.concatenate(rows))

    def _truncate(self, n: int) -> None:
        if self._checkpoint is not None and self._checkpoint[0] > n:
            self._checkpoint = None  # what comes in the place of the tokens dropped is another text
        if self.model.capabilities.rollback == "exact" and self._binding.remove(self._handle, n):
            return
        # Nothing can be taken out of this memory: go back to a state it had, and feed the rest again.
        try:
            start = 0
            if self._checkpoint is not None:
                start, state = self._checkpoint
                self._restore(state)
            else:
                self._binding.clear(self._handle)
            if start < n:
                self._compute(self.tokens[start:n], start, "none")
        except BaseException:
            # How far it came is unknown. What `tokens` names must be in the memory, so it names nothing.
            self._binding.clear(self._handle)
            self._checkpoint = None
            self.tokens = []
            raise

    def _save(self) -> Bytes:
        state: Bytes = np.empty(self._state_bytes(), dtype=np.uint8)
        written = self._binding.lib.llama_state_seq_get_data(
            self._handle, _address(state), state.nbytes, 0, *self._binding.state_flags
        )
        if not written:
            raise EngineError(f"{self.model.engine} could not save the state of a context")
        return state[:written]

    def _restore(self, state: Bytes) -> None:
        self._binding.clear(self._handle)
        if not self._binding.lib.llama_state_seq_set_data(
            self._handle, _address(state), state.nbytes, 0, *self._binding.state_flags
        ):
            raise EngineError(f"{self.model.engine} refuses the saved state of a context")

    def _export(self) -> dict[str, Bytes]:
        return {"sequence": self._save()}

    def _state_bytes(self) -> int:
        return int(self._binding.lib.llama_state_seq_get_size(self._handle, 0, *self._binding.state_flags))

    def _import(self, state: ContextState) -> None:
        self._checkpoint = None
        sequence = state.arrays.get("sequence")
        if sequence is None or sequence.dtype != np.uint8 or sequence.ndim != 1:
            raise EngineError(f"the saved state does not fit {self.model.path.name}")
        self._restore(np.ascontiguousarray(sequence))

    def _close(self) -> None:
        self._binding.lib.llama_batch_free(self._batch)
        self._binding.free_context(self._handle)
        self._checkpoint = None


def _address(array: Bytes) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
