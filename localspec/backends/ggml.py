"""ggml's devices and buffers, as llama-cpp-python's library has them."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU, GPU, INTEGRATED, ACCELERATOR = 0, 1, 2, 3
"""ggml's types of devices: GPUs with memory of their own, and with the machine's."""

_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "dev_count": ([], ctypes.c_size_t),
    "dev_get": ([ctypes.c_size_t], ctypes.c_void_p),
    "dev_name": ([ctypes.c_void_p], ctypes.c_char_p),
    "dev_description": ([ctypes.c_void_p], ctypes.c_char_p),
    "dev_type": ([ctypes.c_void_p], ctypes.c_int),
    "dev_memory": ([ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)], None),
    "dev_buffer_type": ([ctypes.c_void_p], ctypes.c_void_p),
    "dev_backend_reg": ([ctypes.c_void_p], ctypes.c_void_p),
    "buft_name": ([ctypes.c_void_p], ctypes.c_char_p),
    "reg_get_proc_address": ([ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """What ggml computes on.

    Attributes:
        handle: ggml's own.
        kind: ``CPU``, ``GPU``, ``INTEGRATED`` or ``ACCELERATOR``.
        name: ggml's, e.g. CUDA0.
        description: its product name.
        buffer: the kind of memory that tensors get there.
        splits_rows: whether matrices can be divided among it and others of its kind.
    """

    handle: int
    kind: int
    name: str
    description: str
    buffer: int
    splits_rows: bool


class Ggml:
    """The functions of ggml, bound.

    Raises:
        ImportError, OSError, AttributeError: another layout of the package, or none.
    """

    def __init__(self) -> None:
        import llama_cpp

        self._libraries = [llama_cpp.llama_cpp._lib]
        # Where a library does not show what those have that it needs, they are opened too: they are loaded already.
        if not hasattr(self._libraries[0], "ggml_backend_dev_count"):
            folder = Path(llama_cpp.__file__).parent / "lib"
            self._libraries += [_library(folder, name) for name in ("ggml", "ggml-base")]
        self._functions = {name: self.bind(f"ggml_backend_{name}", *types) for name, types in _FUNCTIONS.items()}

    def bind(self, name: str, arguments: list[Any], result: Any) -> Any:
        """A function by its name."""
        library = next((each for each in self._libraries if hasattr(each, name)), self._libraries[0])
        return ctypes.CFUNCTYPE(result, *arguments)((name, library))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None

    def devices(self) -> list[GgmlDevice]:
        """Those of this machine, the CPU too."""
        return [self.describe(self.dev_get(i)) for i in range(self.dev_count())]

    def describe(self, handle: int) -> GgmlDevice:
        """One by its handle."""
        name, description = (_text(read(handle)) for read in (self.dev_name, self.dev_description))
        registry = self.dev_backend_reg(handle)
        splits = bool(registry and self.reg_get_proc_address(registry, b"ggml_backend_split_buffer_type"))
        return GgmlDevice(
            handle, int(self.dev_type(handle)), name, description, self.dev_buffer_type(handle) or 0, splits
        )

    def memory(self, handle: int) -> tuple[int, int]:
        """Free and total memory of a device [bytes]."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        return int(free.value), int(total.value)

    def buffer_name(self, buffer: int) -> str:
        return _text(self.buft_name(buffer))


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def _library(folder: Path, name: str) -> ctypes.CDLL:
    names = {"darwin": f"lib{name}.dylib", "win32": f"{name}.dll"}
    return ctypes.CDLL(str(folder / names.get(sys.platform, f"lib{name}.so")))
