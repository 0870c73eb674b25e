"""localspec: a large local model, answering faster with the same words, and every guess visible.

Names not in ``__all__`` are private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.errors import (
        Closed,
        ContextFull,
        DownloadError,
        EngineError,
        EngineMismatch,
        EngineUnavailable,
        LocalspecError,
        ModelFileError,
        PromptTooLong,
        TemplateError,
        UnknownModel,
        UsageError,
        VocabularyMismatch,
    )
    from localspec.llm import LLM
    from localspec.rounds import Draft, DraftToken, EmittedToken, Round, Span, SpecStats, Verdict
    from localspec.sampling import SamplingParams
    from localspec.stream import Reply, RoundStream

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Closed",
    "ContextFull",
    "DownloadError",
    "Draft",
    "DraftToken",
    "EmittedToken",
    "EngineError",
    "EngineMismatch",
    "EngineUnavailable",
    "LocalspecError",
    "ModelFileError",
    "PromptTooLong",
    "Reply",
    "Round",
    "RoundStream",
    "SamplingParams",
    "Span",
    "SpecStats",
    "TemplateError",
    "UnknownModel",
    "UsageError",
    "Verdict",
    "VocabularyMismatch",
    "__version__",
]

_HOMES = {
    "LLM": "localspec.llm",
    **dict.fromkeys(("Reply", "RoundStream"), "localspec.stream"),
    **dict.fromkeys(
        ("Draft", "DraftToken", "EmittedToken", "Round", "Span", "SpecStats", "Verdict"), "localspec.rounds"
    ),
    "SamplingParams": "localspec.sampling",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `localspec --help` must not pay for NumPy and the engines.
    if name not in __all__:
        raise AttributeError(f"module 'localspec' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "localspec.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
