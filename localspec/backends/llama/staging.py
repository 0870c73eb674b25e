"""llama.cpp's functions for the heads that models are published with, found by name in the installed version.

They are staging functions: C++ symbols that move between versions (``src/llama-ext.h`` of llama.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from localspec.backends.base import FloatArray
from localspec.errors import EngineError

NEEDED = "0.3.36"
"""The version of llama-cpp-python whose functions these are."""

_PLAIN = (
    "llama_batch_ext_init",
    "llama_batch_ext_free",
    "llama_batch_ext_clear",
    "llama_batch_ext_add_token",
    "llama_batch_ext_add_embd",
    "llama_batch_ext_set_embd_token",
    "llama_batch_ext_set_pos",
    "llama_batch_ext_set_output_logits",
    "llama_process",
    "llama_embd",
    "LLAMA_CONTEXT_TYPE_MTP",
)
_STAGED = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn")

ENCODE, DECODE = 0, 1
"""What ``llama_process`` computes: a model's encoder, or its decoder."""


class Staging:
    """The functions, by ``find``, which raises AttributeError where there is none of a name."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        (
            self.batch_init,
            self.batch_free,
            self.clear,
            self.add_token,
            self.add_floats,
            self.set_floats,
            self.set_position,
            self.set_output,
            self.process,
            self._floats,
            self.mtp,
            self.set_nextn,
            self.get_nextn,
        ) = map(find, (*_PLAIN, *_STAGED))

    def floats(self, row: FloatArray) -> Any:
        """A contiguous row [n] as an argument, which functions copy."""
        return self._floats(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, row.size)

    def nextn(self, handle: int, n: int, width: int) -> FloatArray:
        """A copy of the states that a context's last pass left for the next head [n, width]; EngineError: none."""
        address = ctypes.cast(self.get_nextn(handle), ctypes.c_void_p).value
        if not address:
            raise EngineError("llama.cpp handed out no states")
        view: FloatArray = np.ctypeslib.as_array((ctypes.c_float * width * n).from_address(address)).copy()
        return view


@cache
def staging() -> Staging:
    """The functions of the installed version, which is loaded already.

    Raises:
        EngineError: it lacks one, and says which.
    """
    import llama_cpp

    version = llama_cpp.__version__
    try:
        from llama_cpp import llama_cpp_ext
    except (ImportError, AttributeError) as error:
        raise EngineError(_lacks(version, error)) from None

    def find(name: str) -> Any:
        return getattr(llama_cpp_ext if name in _STAGED else llama_cpp, name)

    try:
        return Staging(find)
    except AttributeError as error:
        raise EngineError(_lacks(version, error)) from None


def _lacks(version: str, error: Exception) -> str:
    what = " ".join(str(error).split())[:160]
    return f"llama-cpp-python {version} cannot run published heads, as version {NEEDED} can: {what}"
