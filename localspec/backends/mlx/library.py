"""MLX as it is installed here, and mlx-lm's model classes without the rest of mlx-lm."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from localspec.errors import EngineUnavailable

NAME = "mlx"

_NEEDS = ("mlx", "mlx-lm", "tokenizers")


class MLXLibrary:
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
        self.built_for = ["Metal"] if self.gpu else ["CPU: slow, for tests only"]


def runs_here() -> bool:
    """Whether there are builds of MLX for this kind of machine."""
    return sys.platform == "linux" or (sys.platform == "darwin" and platform.machine() == "arm64")


@cache
def binding() -> MLXLibrary:
    """MLX, imported once per process.

    Raises:
        EngineUnavailable: not installed, not for this machine, or its library does not load here.
    """
    return MLXLibrary()


def defer_mlx_lm() -> None:
    """Make ``import mlx_lm.models.…`` skip the package's own imports until something asks for them.

    Its ``__init__`` brings in transformers, for 2 seconds of a CPU's time; the model classes and caches need none of
    that. The package stays whole: the first look at any other of its names imports all of it.

    Raises:
        EngineUnavailable: mlx-lm is not installed.
    """
    if "mlx_lm" in sys.modules:
        return
    spec = find_spec("mlx_lm")
    if spec is None or spec.loader is None:
        raise EngineUnavailable("mlx-lm is not installed; install it with: pip install 'localspec[mlx]'")
    package: ModuleType = module_from_spec(spec)
    loader = spec.loader

    def load_then_get(name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            # The import system asks for names that a module may lack; those are no reason to import anything.
            raise AttributeError(f"module 'mlx_lm' has no attribute {name!r}")
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = load_then_get
    sys.modules["mlx_lm"] = package
