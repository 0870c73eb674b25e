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

from typing import Any

from localspec.errors import EngineUnavailable, PluginError, UsageError, shown
from localspec.system.plugins import BACKENDS, load, offered


def backend_names() -> list[str]:
    """The engines that ``--backend`` takes: plugins of the group ``localspec.backends``."""
    return list(offered(BACKENDS))


def unavailable_reason(backend: str) -> str | None:
    """Why an engine cannot be used here, in one line; None when it can."""
    try:
        module = engine_module(backend)
        if hasattr(module, "binding"):
            module.binding()
    except (EngineUnavailable, PluginError) as error:
        return str(error)
    return None


def check_name(backend: str) -> None:
    """Raise UsageError for a backend that does not exist."""
    if not isinstance(backend, str) or backend not in ("auto", *backend_names()):
        raise UsageError(f"unknown backend {shown(backend)}: use auto, {', '.join(backend_names())}")


def engine_module(backend: str) -> Any:
    """The module of an engine; PluginError where it cannot be imported."""
    return load(BACKENDS, backend)
