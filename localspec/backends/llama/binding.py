"""The C functions of a llama.cpp engine: public ones only, through ctypes, which releases the GIL while they run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Progress
from localspec.backends.llama.ggml import TensorFunctions
from localspec.backends.llama.rpc import Link
from localspec.backends.placement import Placement
from localspec.errors import UsageError
from localspec.model_files.gguf import GGUFFile, TensorInfo

Bytes = npt.NDArray[np.uint8]

N_BATCH = 512  # most tokens in one call of the engine; longer inputs are fed in pieces

N_UBATCH = 256
"""Tokens the engine computes together. Twice that costs 150 MB more for a 152k vocabulary and gains no prefill speed
on CPUs."""

MOST_ROWS = 64  # most rows of a pass whose largest logits can be had; llama.cpp wants to know when a context is made

MAX_SEQUENCES = 64  # llama.cpp takes 64 without saying that it was compiled for more

# -- a placement in the words of ``llama_model_params`` ----------------------------------------------------------------

_SPLIT = {"none": 0, "layer": 1, "row": 2}


@dataclass(frozen=True, slots=True)
class Place:
    """A device other than the CPU that an engine can put weights on."""

    name: str  # the engine's, e.g. CUDA0
    handle: int  # for ``llama_model_params.devices``; 0 where an engine takes none
    buffer: str  # the name of its memory
    splits_rows: bool  # whether ``--split-mode row`` works on it


@dataclass(frozen=True, slots=True)
class Places:
    """Where an engine can put weights."""

    devices: Sequence[Place]  # all but the CPU, in the engine's order
    usual: Sequence[Place]  # those that it takes when none are named
    buffers: Mapping[str, int]  # name -> kind of memory, the CPU's too
    most: int  # how many shares its ``tensor_split`` has
    links: Sequence[Link] = ()  # of the RPC servers among them


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


class Placed:
    """What ``llama_model_params`` takes for a placement, and keeps alive what it points to; UsageError for names of
    nothing, and for what would abort the process."""

    def __init__(self, placement: Placement, places: Places, gguf: GGUFFile, engine: str) -> None:
        placement.check_file(gguf)
        self.placement, self.links = placement, places.links
        self.used = _used(placement, places, engine)  # devices that the model will use
        overrides = placement.overrides(gguf.whole("block_count"))
        reached = {"CPU", *(place.buffer for place in self.used)}
        for pattern, buffer in overrides:
            if buffer not in places.buffers or buffer not in reached:
                names = ", ".join(name for name in places.buffers if name in reached)
                raise UsageError(f"--override-tensor {pattern}={buffer}: the model uses the buffers {names}")
        # Fields of ``llama_model_params``; a pointer keeps what it points to.
        one = {"split_mode": placement.split_mode and _SPLIT[placement.split_mode], "main_gpu": placement.main_gpu}
        self._params: dict[str, Any] = {name: value for name, value in one.items() if value is not None}
        if placement.device is not None or placement.rpc:
            handles = [place.handle for place in self.used]
            devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
            self._params["devices"] = ctypes.cast(devices, ctypes.c_void_p)
        if overrides:
            rows = [_Override(pattern.encode(), places.buffers[buffer]) for pattern, buffer in overrides]
            table = (_Override * (len(rows) + 1))(*rows, _Override(None, None))
            self._params["tensor_buft_overrides"] = ctypes.cast(table, ctypes.c_void_p)
        if shares := placement.tensor_split:
            split = (ctypes.c_float * max(places.most, len(shares)))(*shares)
            self._params["tensor_split"] = ctypes.cast(split, ctypes.POINTER(ctypes.c_float))
        self.keeps_some = bool(overrides)  # whether some tensors were told to stay on the CPU

    @property
    def lost(self) -> str | None:
        """Why a device is gone; None while all are there."""
        return next((link.lost for link in self.links if link.lost is not None), None)

    def fill(self, params: Any) -> None:
        for name, value in self._params.items():
            setattr(params, name, value)


def _used(placement: Placement, places: Places, engine: str) -> list[Place]:
    """The devices that a model will use, in the order in which they are filled."""
    used = list(places.usual)
    if placement.device is not None:
        by_name = {place.name: place for place in places.devices}
        for name in placement.device:
            if name not in by_name and name != "none":
                raise UsageError(f"--device {name}: {engine} only has {', '.join(by_name) or 'the CPU'} here")
        used = [by_name[name] for name in placement.device if name != "none"]
    splits = [each for each in placement.asked if each in ("--split-mode", "--tensor-split", "--main-gpu")]
    if splits and not used:
        raise UsageError(f"{' and '.join(splits)}: {engine} only has the CPU here")
    if len(placement.tensor_split or ()) > len(used):
        names = ", ".join(place.name for place in used)
        raise UsageError(
            f"--tensor-split has {len(placement.tensor_split or ())} shares for {len(used)} devices: {names}"
        )
    if placement.split_mode == "row" and (stiff := [place.name for place in used if not place.splits_rows]):
        raise UsageError(f"--split-mode row: {stiff[0]} cannot divide matrices; use --split-mode layer")
    if placement.split_mode == "none" and (placement.main_gpu or 0) >= len(used):
        raise UsageError(f"--main-gpu {placement.main_gpu}: the devices are numbered 0 to {len(used) - 1}")
    if placement.split_mode == "none":
        used = [used[placement.main_gpu or 0]]
    return used


# -- the functions -----------------------------------------------------------------------------------------------------


class Binding:
    """The C functions of one engine, by llama.cpp's names; ik_llama.cpp, which keeps an older API, overrides some.

    Handles are opaque integers; 0 or None means failure.
    """

    name: str  # the engine's, in the catalogue
    # Of the package, and a digest of its libraries: builds of one version differ in speed and in what they get wrong.
    version: str
    lib: Any  # the module or library that has the llama_* functions both engines share under one name
    api: Any  # the module that has the structs and the functions that take them
    tensors: TensorFunctions
    gpu = False  # whether it was built for one
    state_suffix = ""  # of the functions that save a sequence, whose last arguments are flags
    saves_recurrent = False  # whether what cannot be rewound can be saved without keys and values
    alignment = 1  # of tensors in the file [bytes]; more for an engine that computes from the mapped file
    keeps_rows = False  # see ``Capabilities``
    finds_best = False
    token_before_floats = False  # whether a context must have decoded a single token before it is fed with floats
    batches_kv_types = True  # whether a memory of several sequences may be of any type; else it is f16
    refusal: str  # what is said of a file that a process which tried it did not live through
    tries_several = False  # whether several sequences, and trees, of unfamiliar files have to be tried too
    unshared: frozenset[str] = frozenset()  # architectures whose memory can be cut, but its rows not be shared

    def set_model_options(self, params: Any) -> None:
        """Fill in what this engine alone has in ``llama_model_params``."""

    def set_context_options(self, params: Any, n_sequences: int, branches: bool = False) -> None:
        """Fill in what this engine alone has in ``llama_context_params``."""
        params.n_seq_max = MAX_SEQUENCES if branches else n_sequences
        # Else rows are computed in another order than they are fed in, and no sequence may have the room of another.
        params.kv_unified = n_sequences > 1 or branches
        params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        # A sliding-window cache that keeps only its window cannot take rejected tokens back out.
        params.swa_full = True
        params.no_perf = True
        if self.finds_best and n_sequences == 1:
            params.n_outputs_max_per_seq = MOST_ROWS

    def check_room(self) -> None:
        """EngineError where the engine can hold no more weights or contexts in this process, whatever the memory."""

    def places(self, placement: Placement) -> Places:
        """Where weights can be put, the servers that a placement names among them."""
        raise NotImplementedError

    def load_model(
        self,
        path: Path,
        n_gpu_layers: int,
        progress: Progress | None,
        placed: Placed | None = None,
        *,
        mtp: bool = False,
    ) -> int | None:
        """The weights, with ``mtp`` those of the file's layer for multi-token prediction too."""
        self.check_room()
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        callback = self.api.llama_progress_callback(lambda fraction, _data: progress(fraction) if progress else True)
        params.progress_callback = callback
        self.set_model_options(params)
        if placed is not None:
            placed.fill(params)
        if mtp:
            params.load_mtp = True
        handle: int | None = self.api.llama_model_load_from_file(os.fsencode(path), params)
        return handle

    def free_model(self, model: int) -> None:
        self.api.llama_model_free(model)

    def new_context(
        self, model: int, n_threads: int, n_sequences: int = 1, *, branches: bool = False, **fields: Any
    ) -> int | None:
        """A context for so many sequences, or with ``branches`` for ``MAX_SEQUENCES``.

        ``fields`` are further ones of ``llama_context_params``; what they point to must live as long as the context.
        """
        self.check_room()
        params = self.api.llama_context_default_params()
        params.n_threads = params.n_threads_batch = n_threads
        self.set_context_options(params, n_sequences, branches)
        for name, value in fields.items():
            setattr(params, name, value)
        handle: int | None = self.api.llama_init_from_model(model, params)
        return handle

    def free_context(self, ctx: int) -> None:
        self.api.llama_free(ctx)

    def n_snapshots(self, ctx: int) -> int:
        """How many tokens of a pass, but for its first, can be taken back from a memory that cannot be rewound."""
        return int(self.lib.llama_n_rs_seq(ctx))

    def remove(self, ctx: int, start: int, sequence: int = 0) -> bool:
        """Drop all rows of a sequence from position ``start``; False when this memory cannot, or has lost rows that
        the next one looks at."""
        removed = self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(ctx), sequence, start, -1)
        return bool(removed) and self.holds(ctx, start, sequence)

    def copy(self, ctx: int, source: int, target: int, n: int, start: int = 0) -> None:
        """Let a sequence have the rows of another from position ``start`` to n, too."""
        self.lib.llama_memory_seq_cp(self.lib.llama_get_memory(ctx), source, target, start, n)

    def holds(self, ctx: int, n: int, sequence: int = 0) -> bool:
        """Whether a sequence of n rows has all that the next one looks at: layers with a window leave out of a saved
        state what lies before it, and give such cells to other sequences."""
        window = self.window(ctx)
        if not window or not n:
            return True
        first = self.lib.llama_memory_seq_pos_min(self.lib.llama_get_memory(ctx), sequence)
        return bool(0 <= first <= max(0, n - window))

    def window(self, ctx: int) -> int:
        """Positions that a layer looks back over, where the memory gives away what lies before; else 0."""
        return int(self.lib.llama_model_n_swa(self.lib.llama_get_model(ctx)))

    def clear(self, ctx: int) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(ctx), True)

    def is_familiar(self, gguf: GGUFFile) -> bool:
        """Whether the engine is known to live through a file of its kind; others are tried first, see ``trial``."""
        raise NotImplementedError

    def has_mtp(self, gguf: GGUFFile) -> bool:
        """Whether a file has a layer for multi-token prediction that this engine computes."""
        return False

    def has_nextn(self, architecture: str) -> bool:
        """Whether models of an architecture hand out the state that such a layer reads."""
        return False

    def defragment(self, ctx: int) -> bool:
        """Have the next pass first move rows together; False for an engine that needs no free cells side by side."""
        return False

    def close_gaps(self, ctx: int, n: int) -> None:
        """Move rows together after n were taken from a memory of several sequences, where an engine needs that."""

    def takes_several(self, kv_type: str) -> bool:
        """Whether a memory of several sequences may be of this type."""
        return self.batches_kv_types or kv_type == "f16"

    def by_rows(self, state: Bytes) -> Bytes:
        """The record of one of several sequences as a context of one has it."""
        return state

    def by_columns(self, state: Bytes) -> Bytes:
        """Undo ``by_rows``."""
        return state

    def is_recurrent(self, model: int) -> bool:
        """Whether the memory holds a state that cannot be rewound (recurrent and hybrid models)."""
        return bool(self.lib.llama_model_is_recurrent(model) or self.lib.llama_model_is_hybrid(model))

    def tokenizer(self, model: int) -> int:
        """The handle that ``llama_tokenize`` takes."""
        return int(self.lib.llama_model_get_vocab(model))

    def tokenize(self, model: int, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        handle, size = self.tokenizer(model), len(text) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            n = self.lib.llama_tokenize(handle, text, len(text), buffer, size, add_special, parse_special)
            if n >= 0:
                return list(buffer[:n])
            size = -n

    def n_vocab(self, model: int) -> int:
        return int(self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model)))

    def computes(self, tensor: TensorInfo) -> bool:
        """Whether the engine survives a tensor of this type and size; one that refuses the others itself says yes."""
        return True

    def device(self, n_gpu_layers: int, placed: Placed | None = None, n_layers: int = 0) -> str:
        """Where the weights are: ``cpu``, ``gpu``, or ``mixed``, where some work is left to the CPU.

        ``n_gpu_layers`` counts the output as a layer; negative is all. A server on this machine computes on its CPU.
        """
        if not n_gpu_layers or not (self.gpu if placed is None else placed.used):
            return "cpu"
        is_shared = placed is not None and (placed.keeps_some or any(link.is_near for link in placed.links))
        return "mixed" if is_shared or 0 < n_gpu_layers <= n_layers else "gpu"
