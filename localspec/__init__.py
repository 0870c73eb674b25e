"""localspec: a large local model, answering faster with the same words, and every guess visible.

Names not in ``__all__`` are private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from localspec._version import __version__

if TYPE_CHECKING:
    from localspec.backends.placement import Placement
    from localspec.engine.request import AsyncRoundStream, Reply, RequestOptions, RoundStream
    from localspec.errors import (
        Cancelled,
        Closed,
        ContextFull,
        DownloadError,
        EngineError,
        EngineMismatch,
        EngineUnavailable,
        LocalspecError,
        ModelFileError,
        PromptTooLong,
        QueueFull,
        SessionFileError,
        TemplateError,
        UnknownModel,
        UsageError,
        VocabularyMismatch,
    )
    from localspec.heads.training.distill import distill
    from localspec.llm import LLM, Session
    from localspec.sampling.sampling import SamplingParams, ScoredToken, TokenLogprobs
    from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, Span, SpecStats, Verdict


__all__ = [
    "LLM",
    "AsyncRoundStream",
    "Cancelled",
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
    "Placement",
    "PromptTooLong",
    "QueueFull",
    "Reply",
    "RequestOptions",
    "Round",
    "RoundStream",
    "SamplingParams",
    "ScoredToken",
    "Session",
    "SessionFileError",
    "Span",
    "SpecStats",
    "TemplateError",
    "TokenLogprobs",
    "UnknownModel",
    "UsageError",
    "Verdict",
    "VocabularyMismatch",
    "__version__",
    "distill",
]

_HOMES = {
    "LLM": "localspec.llm",
    "Placement": "localspec.backends.placement",
    **dict.fromkeys(("AsyncRoundStream", "Reply", "RequestOptions", "RoundStream"), "localspec.engine.request"),
    **dict.fromkeys(
        ("Draft", "DraftToken", "EmittedToken", "Round", "Span", "SpecStats", "Verdict"), "localspec.spec_decode.rounds"
    ),
    **dict.fromkeys(("ScoredToken", "TokenLogprobs"), "localspec.sampling.sampling"),
    "SamplingParams": "localspec.sampling.sampling",
    "Session": "localspec.llm",
    "distill": "localspec.heads.training.distill",
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
