"""llama.cpp's functions for the heads that models are published with, found by name in the installed version.

They are staging functions: C++ symbols that move between versions (``src/llama-ext.h`` of llama.cpp).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from localspec.backends.base import FloatArray
from localspec.backends.llama.ggml import rows_at
from localspec.errors import EngineError

NEEDED = "0.3.36"  # the version of llama-cpp-python whose functions these are

_FUNCTIONS = {
    "batch_init": "llama_batch_ext_init",
    "batch_free": "llama_batch_ext_free",
    "clear": "llama_batch_ext_clear",
    "add_token": "llama_batch_ext_add_token",
    "add_floats": "llama_batch_ext_add_embd",
    "set_floats": "llama_batch_ext_set_embd_token",
    "set_position": "llama_batch_ext_set_pos",
    "set_output": "llama_batch_ext_set_output_logits",
    "process": "llama_process",
    "row": "llama_embd",
    "mtp": "LLAMA_CONTEXT_TYPE_MTP",
    "set_nextn": "llama_set_embeddings_nextn",
    "get_nextn": "llama_get_embeddings_nextn",
}

ENCODE, DECODE = 0, 1  # what ``llama_process`` computes: a model's encoder, or its decoder


class Staging:
    """The functions, in the modules that may have them; EngineError where one is in none."""

    def __init__(self, version: str, *modules: Any) -> None:
        self._found: dict[str, Any] = {}
        for short, name in _FUNCTIONS.items():
            module = next((module for module in modules if hasattr(module, name)), None)
            if module is None:
                raise EngineError(_lacks(version, f"there is no {name}"))
            self._found[short] = getattr(module, name)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_found"][name]

    def floats(self, row: FloatArray) -> Any:
        """A contiguous row [n] as an argument, which functions copy."""
        return self.row(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, row.size)

    def nextn(self, handle: int, n: int, width: int) -> FloatArray:
        """A copy of the states that a context's last pass left for the next head [n, width]; EngineError: none."""
        found = rows_at(self.get_nextn(handle), n, width)
        if found is None:
            raise EngineError("llama.cpp handed out no states")
        return found.copy()


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
    return Staging(version, llama_cpp, llama_cpp_ext)


def _lacks(version: str, error: object) -> str:
    what = " ".join(str(error).split())[:160]
    return f"llama-cpp-python {version} cannot run published heads, as version {NEEDED} can: {what}"
