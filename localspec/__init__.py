"""localspec: a large local model, answering faster with the same words, and every guess visible.

Names not in ``__all__`` are private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.backends.placement import Placement
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
    from localspec.llm import LLM
    from localspec.runtime.arguments import RequestOptions
    from localspec.runtime.stream import AsyncRoundStream, Reply, RoundStream
    from localspec.sampling.logprobs import ScoredToken, TokenLogprobs
    from localspec.sampling.sampling import SamplingParams
    from localspec.session import Session
    from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, Span, SpecStats, Verdict
    from localspec.training.distill import distill

__version__ = "0.1.0"

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
    "RequestOptions": "localspec.runtime.arguments",
    "Placement": "localspec.backends.placement",
    **dict.fromkeys(("AsyncRoundStream", "Reply", "RoundStream"), "localspec.runtime.stream"),
    **dict.fromkeys(
        ("Draft", "DraftToken", "EmittedToken", "Round", "Span", "SpecStats", "Verdict"), "localspec.spec_decode.rounds"
    ),
    **dict.fromkeys(("ScoredToken", "TokenLogprobs"), "localspec.sampling.logprobs"),
    "SamplingParams": "localspec.sampling.sampling",
    "Session": "localspec.session",
    "distill": "localspec.training.distill",
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
