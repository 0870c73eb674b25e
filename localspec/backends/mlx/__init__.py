"""MLX: the same GGUF files on Apple's GPUs (Metal), and on Linux CPUs, where the very same code can be tested."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.backends.base import Progress
from localspec.errors import EngineUnavailable

if TYPE_CHECKING:
    from localspec.backends.mlx.model import MLXModel

NAME = "mlx"

_NEEDS = ("mlx", "mlx-lm", "tokenizers")


class Binding:
    """MLX as it is installed here.

    Attributes:
        version: of MLX, and of mlx-lm, whose model classes are used.
        gpu: whether it computes on a GPU.
        built_for: what it computes on, for people.
    """

    def __init__(self) -> None:
        if not runs_here():
            raise EngineUnavailable("MLX runs on Apple silicon, and on Linux for tests")
        if sys.platform != "darwin":
            # The CPU build compiles fused kernels with a C++ compiler that need not be there, and gains little.
            os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
        try:
            versions = {name: metadata.version(name) for name in _NEEDS}
            import mlx.core as mx
        except metadata.PackageNotFoundError as error:
            raise EngineUnavailable(
                f"{error.name} is not installed; install it with: pip install 'localspec[mlx]'"
            ) from None
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineUnavailable(
                f"MLX cannot load its library ({error}); install it with: pip install 'localspec[mlx]'"
            ) from None
        self.version = f"{versions['mlx']} (mlx-lm {versions['mlx-lm']})"
        self.gpu = bool(mx.metal.is_available())
        self.built_for = ["Metal"] if self.gpu else ["CPU, to test with: slow"]


def runs_here() -> bool:
    """Whether there are builds of MLX for this kind of machine."""
    return sys.platform == "linux" or (sys.platform == "darwin" and platform.machine() == "arm64")


@cache
def binding() -> Binding:
    """MLX, imported once per process.

    Raises:
        EngineUnavailable: not installed, not for this machine, or its library does not load here.
    """
    return Binding()


def load(
    path: Path | str,
    *,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    kv_type: str = "f16",
    progress: Progress | None = None,
) -> MLXModel:
    """Load a GGUF with MLX.

    Args:
        path: the file.
        n_threads: accepted for symmetry with the other backends; MLX decides.
        n_gpu_layers: None takes the GPU if there is one, 0 the CPU, and a number that covers all layers the GPU: a
            model is not divided between the two.
        kv_type: of the KV cache. ``q8_0`` and ``q4_0`` keep keys and values in MLX's 8 and 4 bits with a scale and an
            offset for every 32 of them; with ``f16`` and ``f32`` they stay in the type that the model computes in
            (float32 on a CPU; see ``network.default_dtype``).
        progress: see ``backends.base.Progress``.

    Raises:
        ModelFileError: the file is damaged, or of a kind that this backend does not compute.
        EngineUnavailable: MLX cannot be used here, or not with a GPU.
        UsageError: an unknown type of cache, or layers on both CPU and GPU.
    """
    binding()
    from localspec.backends.mlx.library import defer_mlx_lm

    defer_mlx_lm()
    from localspec.backends.mlx.model import MLXModel

    return MLXModel(Path(path), n_gpu_layers=n_gpu_layers, kv_type=kv_type, progress=progress)
