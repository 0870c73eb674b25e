"""The engines by name, and which of them can be used here.

The module of an engine has ``binding()``, which raises EngineUnavailable where the engine may be missing, and
``load(path, *, n_threads=None, n_gpu_layers=None, kv_type="f16", progress=None) -> Model``:

- ``path``: a GGUF file.
- ``n_threads``: CPU threads; None takes the physical cores. Not every engine has a setting for it.
- ``n_gpu_layers``: layers on the GPU; None puts all there if the engine has a GPU, 0 keeps all on the CPU.
- ``kv_type``: type of the KV cache: f32, f16, q8_0 or q4_0, as far as the engine has it.
- ``progress``: see ``base.Progress``.
- ``placement``: where the weights go; only of the engines in ``Placement.engines``.

It raises ModelFileError (the file is damaged), UnsupportedModel (a kind that this engine does not compute),
EngineUnavailable, UsageError (a type of cache or a place for layers that the engine does not have) and EngineError
(loading failed or was cancelled).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from localspec.errors import EngineUnavailable, UsageError, shown

BACKENDS = {
    "ik-llama": "localspec.backends.llama.ik_llama",
    "llama-cpp": "localspec.backends.llama.llama_cpp",
    "mlx": "localspec.backends.mlx",
    "reference": "localspec.backends.reference",
}
"""Backend name -> module with ``load`` and, where the engine may be missing, ``binding``."""


def unavailable_reason(backend: str) -> str | None:
    """Why an engine cannot be used here, in one line; None when it can."""
    try:
        module = import_module(BACKENDS[backend])
        if hasattr(module, "binding"):
            module.binding()
    except EngineUnavailable as error:
        return str(error)
    return None


def check_name(backend: str) -> None:
    """Raise UsageError for a backend that does not exist."""
    if not isinstance(backend, str) or backend not in ("auto", *BACKENDS):
        raise UsageError(f"unknown backend {shown(backend)}: use auto, {', '.join(BACKENDS)}")


def engine_module(backend: str) -> Any:
    """The module of an engine: ``load`` and, where the engine may be missing, ``binding``."""
    return import_module(BACKENDS[backend])
