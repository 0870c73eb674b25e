"""The GPUs that engines compute on, with their memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GPU, _INTEGRATED = 1, 2
"""ggml's types of devices that are GPUs: with memory of their own, and with the machine's."""


@dataclass(frozen=True, slots=True)
class Device:
    """What an engine can compute on."""

    name: str  # as the engine calls it, e.g. CUDA0
    description: str  # its product name
    free_bytes: int  # memory free now
    total_bytes: int  # memory it has
    shared: bool  # whether this is the machine's own memory


def metal_gpu() -> list[Device] | None:
    """The GPU that MLX computes on, whose memory is the machine's; None where it does not say."""
    try:
        import mlx.core as mx

        info = mx.device_info()
        free = int(info["max_recommended_working_set_size"]) - mx.get_active_memory()
        return [Device("Metal", str(info["device_name"]), max(0, free), int(info["memory_size"]), True)]
    except (ImportError, AttributeError, KeyError, RuntimeError):
        return None


def used_gpus(devices: Sequence[tuple[int, Device]]) -> list[Device]:
    """Those of ggml's devices that llama.cpp puts layers on."""
    # Where there is a GPU with memory of its own, it leaves the one in the processor alone.
    chosen = [found for kind, found in devices if kind == _GPU] or [f for kind, f in devices if kind == _INTEGRATED]
    return [found for found in chosen if found.total_bytes > 0]


def ggml_devices() -> list[tuple[int, Device]] | None:
    """All devices of ggml in llama-cpp-python, the CPU too, with ggml's number for their type."""
    try:
        import llama_cpp

        folder = Path(llama_cpp.__file__).parent / "lib"
        registry, base = (_library(folder, name) for name in ("ggml", "ggml-base"))
        registry.ggml_backend_dev_count.restype = ctypes.c_size_t
        registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
        registry.ggml_backend_dev_get.restype = ctypes.c_void_p
        for function, restype in (("name", ctypes.c_char_p), ("description", ctypes.c_char_p), ("type", ctypes.c_int)):
            bound = getattr(base, f"ggml_backend_dev_{function}")
            bound.argtypes, bound.restype = [ctypes.c_void_p], restype
        size = ctypes.POINTER(ctypes.c_size_t)
        base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
        base.ggml_backend_dev_memory.restype = None
        return [_device(base, registry.ggml_backend_dev_get(i)) for i in range(registry.ggml_backend_dev_count())]
    except (ImportError, OSError, AttributeError):
        return None  # another layout of the package: the GPU works, only its memory stays unknown


def _library(folder: Path, name: str) -> ctypes.CDLL:
    """One of ggml's libraries, which the engine has loaded already."""
    names = {"darwin": f"lib{name}.dylib", "win32": f"{name}.dll"}
    return ctypes.CDLL(str(folder / names.get(sys.platform, f"lib{name}.so")))


def _device(base: ctypes.CDLL, device: int) -> tuple[int, Device]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    kind = int(base.ggml_backend_dev_type(device))
    name, description = (
        (function(device) or b"").decode("utf-8", "replace")
        for function in (base.ggml_backend_dev_name, base.ggml_backend_dev_description)
    )
    shared = kind == _INTEGRATED or name.startswith("Metal") or (sys.platform == "darwin" and kind == _GPU)
    return kind, Device(name, description, int(free.value), int(total.value), shared)
