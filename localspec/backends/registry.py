"""The engines by name, and which of them can be used here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from localspec.errors import EngineUnavailable, UsageError
from localspec.values import shown

BACKENDS = {
    "ik-llama": "localspec.backends.ik_llama",
    "llama-cpp": "localspec.backends.llama_cpp",
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
    """Refuse a backend that does not exist.

    Raises:
        UsageError: it does not.
    """
    if not isinstance(backend, str) or backend not in ("auto", *BACKENDS):
        raise UsageError(f"unknown backend {shown(backend)}: use auto, {', '.join(BACKENDS)}")


def engine_module(backend: str) -> Any:
    """The module of an engine: ``load`` and, where the engine may be missing, ``binding``."""
    return import_module(BACKENDS[backend])
