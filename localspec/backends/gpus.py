"""The GPUs that engines compute on, with their memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.backends.ggml import GPU, INTEGRATED, Ggml, GgmlDevice


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
    chosen = [found for kind, found in devices if kind == GPU] or [f for kind, f in devices if kind == INTEGRATED]
    return [found for found in chosen if found.total_bytes > 0]


def ggml_devices() -> list[tuple[int, Device]] | None:
    """All devices of ggml in llama-cpp-python, the CPU too, with ggml's number for their type."""
    try:
        ggml = Ggml()
        return [(each.kind, _device(ggml, each)) for each in ggml.devices()]
    except (ImportError, OSError, AttributeError):
        return None  # another layout of the package: the GPU works, only its memory stays unknown


def _device(ggml: Ggml, found: GgmlDevice) -> Device:
    shared = (
        found.kind == INTEGRATED or found.name.startswith("Metal") or (sys.platform == "darwin" and found.kind == GPU)
    )
    return Device(found.name, found.description, *ggml.memory(found.handle), shared)
