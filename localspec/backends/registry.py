"""The engines by name, and which of them can be used here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from localspec.backends.base import Model, Progress
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
    """Refuse a backend that does not exist.

    Raises:
        UsageError: it does not.
    """
    if not isinstance(backend, str) or backend not in ("auto", *backend_names()):
        raise UsageError(f"unknown backend {shown(backend)}: use auto, {', '.join(backend_names())}")


def engine_module(backend: str) -> Any:
    """The module of an engine: ``load`` and, where the engine may be missing, ``binding``.

    Raises:
        PluginError: it cannot be imported.
    """
    return load(BACKENDS, backend)


class LoadEngine(Protocol):
    """What a backend's ``load`` is.

    Args:
        path: a GGUF file.
        n_threads: CPU threads; None takes the physical cores. Not every engine has a setting for it.
        n_gpu_layers: layers on the GPU; None puts all there if the engine has a GPU, 0 keeps all on the CPU.
        kv_type: type of the KV cache: f32, f16, q8_0 or q4_0, as far as the engine has it.
        progress: see ``base.Progress``.
        placement: where the weights go; only engines of ``Placement.engines`` are asked.

    Raises:
        ModelFileError: the file is damaged, or of a kind that this engine does not compute.
        EngineUnavailable: the engine cannot be used here.
        UsageError: a type of cache or a place for layers that the engine does not have.
        EngineError: loading failed or was cancelled.
    """

    def __call__(
        self,
        path: Path | str,
        *,
        n_threads: int | None = None,
        n_gpu_layers: int | None = None,
        kv_type: str = "f16",
        progress: Progress | None = None,
    ) -> Model: ...
