"""MLX: the same GGUF files on Apple's GPUs (Metal), and on Linux CPUs, where the very same code can be tested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localspec.backends.base import Progress
from localspec.backends.mlx.library import NAME, binding

if TYPE_CHECKING:
    from localspec.backends.mlx.model import MLXModel

__all__ = ["NAME", "binding", "load"]


def load(
    path: Path | str,
    *,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    kv_type: str = "f16",
    progress: Progress | None = None,
) -> MLXModel:
    """Load a GGUF with MLX; see ``backends.registry``.

    A model is not divided between GPU and CPU: ``n_gpu_layers`` is None, 0 or all of them. ``q8_0`` and ``q4_0`` keep
    keys and values in MLX's 8 and 4 bits with a scale and an offset for every 32 of them; with ``f16`` and ``f32`` they
    stay in the type that the model computes in (float32 on a CPU; see ``network.default_dtype``).
    """
    binding()
    from localspec.backends.mlx.model import MLXModel

    return MLXModel(Path(path), n_gpu_layers=n_gpu_layers, kv_type=kv_type, progress=progress)
