"""mlx-lm's model classes without the rest of mlx-lm."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from localspec.errors import EngineUnavailable


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
