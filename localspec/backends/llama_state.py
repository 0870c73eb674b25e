"""What a llama.cpp engine holds of a sequence, copied out and in."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localspec.backends.context_state import ContextState
from localspec.backends.llama_binding import Binding, Bytes
from localspec.errors import EngineError

if TYPE_CHECKING:
    from localspec.backends.llama_family import LlamaModel


_RECURRENT = 1
"""llama.cpp's flag for what of a sequence cannot be rewound, without its keys and values."""


def save_recurrent(model: LlamaModel, ctx: int) -> Bytes:
    """Of a sequence whose model keeps a state what cannot be rewound; all of it where an engine saves only that.

    It does not grow with the text, as keys and values do.

    Raises:
        EngineError: the engine saves none.
    """
    if not model.binding.saves_recurrent:
        return save(model, ctx)
    lib = model.binding.lib
    state: Bytes = np.empty(lib.llama_state_seq_get_size_ext(ctx, 0, _RECURRENT), dtype=np.uint8)
    written = lib.llama_state_seq_get_data_ext(ctx, _address(state), state.nbytes, 0, _RECURRENT)
    model.check_devices()
    if not written:
        raise EngineError(f"{model.engine} could not save the state of a context")
    return state[:written]


def restore_recurrent(model: LlamaModel, ctx: int, state: Bytes, n: int) -> None:
    """Go back to what ``save_recurrent`` made when a sequence had its first n tokens, which it still has.

    Raises:
        EngineError: the engine refuses it.
    """
    binding = model.binding
    if not binding.saves_recurrent:
        binding.clear(ctx)
        restore(model, ctx, state)
        return
    fits = binding.lib.llama_state_seq_set_data_ext(ctx, _address(state), state.nbytes, 0, _RECURRENT)
    if not fits or not binding.remove(ctx, n):  # the keys and values after it
        raise EngineError(f"{model.engine} rejected the saved state of a context")
    model.check_devices()


def save(model: LlamaModel, ctx: int, sequence: int = 0) -> Bytes:
    """The engine's own record of a sequence.

    Raises:
        EngineError: it makes none.
    """
    binding = model.binding
    state: Bytes = np.empty(state_bytes(binding, ctx, sequence), dtype=np.uint8)
    written = binding.lib.llama_state_seq_get_data(ctx, _address(state), state.nbytes, sequence, *binding.state_flags)
    model.check_devices()
    if not written:
        raise EngineError(f"{model.engine} could not save the state of a context")
    return state[:written]


def state_bytes(binding: Binding, ctx: int, sequence: int = 0) -> int:
    """Size of such a record, or an upper bound of it [bytes]."""
    return int(binding.lib.llama_state_seq_get_size(ctx, sequence, *binding.state_flags))


def restore(model: LlamaModel, ctx: int, state: Bytes, sequence: int = 0) -> None:
    """Put a record into an empty sequence.

    Raises:
        EngineError: the engine refuses it.
    """
    binding = model.binding
    if not binding.lib.llama_state_seq_set_data(ctx, _address(state), state.nbytes, sequence, *binding.state_flags):
        raise EngineError(f"{model.engine} rejected the saved state of a context")
    model.check_devices()


def saved_sequence(state: ContextState, path: Path) -> Bytes:
    """The record in an exported state.

    Raises:
        EngineError: there is none.
    """
    sequence = state.arrays.get("sequence")
    if sequence is None or sequence.dtype != np.uint8 or sequence.ndim != 1:
        raise EngineError(f"the saved state does not fit {path.name}")
    return np.ascontiguousarray(sequence)


def _address(array: Bytes) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
