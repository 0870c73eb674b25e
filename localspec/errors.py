"""Every error that localspec raises on purpose, and any exception as one readable line and an exit status.

::

    LocalspecError                  (one readable line; the CLI exits 1)
    ├── UsageError                  the request makes no sense (the CLI exits 2; also a ValueError)
    │   ├── PromptTooLong           the prompt does not fit into the context
    │   └── UnknownModel            no such catalogue name or file
    ├── ModelFileError              the file is not a usable model
    │   ├── NotGGUF                 empty, foreign or cut short
    │   └── UnsupportedModel        a GGUF, but not one this engine can generate text with
    ├── VocabularyMismatch          draft and target do not share a vocabulary
    ├── TemplateError               the file's chat template failed, or would not end
    ├── DownloadError               no source could deliver the file
    │   ├── DigestMismatch          what arrived is not what was promised
    │   └── NotEnoughSpace          the disk cannot hold the file
    ├── EngineError                 an inference engine failed
    │   ├── EngineUnavailable       not installed, or not for this machine
    │   ├── EngineMismatch          the engine computes this file wrongly (see ``backends.trust``)
    │   └── ContextFull             no room for the tokens to decode
    ├── QueueFull                   as many requests wait as may
    ├── Cancelled                   stopped before there was a result
    ├── SessionFileError            the file is not a saved session
    └── Closed                      used after ``close()``
"""

from __future__ import annotations


class LocalspecError(Exception):
    """Base class: ``str(error)`` is one line that says what is wrong and what to do.

    It may quote what files and clients say, so line breaks and control characters in it are made harmless.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        text = " ".join(text.split())
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UsageError(LocalspecError, ValueError):
    """The request itself is wrong: a value out of range, an impossible combination."""


class PromptTooLong(UsageError):
    """The prompt leaves no room in the context."""


class UnknownModel(UsageError):
    """The name is neither in the catalogue nor a file nor a hub address."""


class ModelFileError(LocalspecError):
    """The file cannot be used as a model."""


class NotGGUF(ModelFileError):
    """Empty, truncated, or another format."""


class UnsupportedModel(ModelFileError):
    """A valid GGUF that cannot generate text here."""


class VocabularyMismatch(LocalspecError):
    """Draft and target number their tokens differently."""


class TemplateError(LocalspecError):
    """The model's chat template could not be rendered."""


class DownloadError(LocalspecError):
    """No source could deliver the file."""


class DigestMismatch(DownloadError):
    """The bytes that arrived are not the ones the catalogue names."""


class NotEnoughSpace(DownloadError):
    """The disk has too little room."""


class EngineError(LocalspecError):
    """An inference engine failed."""


class EngineUnavailable(EngineError):
    """The engine is not installed or cannot run on this machine."""


class EngineMismatch(EngineError):
    """The engine's batched passes disagree with its single-token passes on this file."""


class ContextFull(EngineError):
    """The tokens do not fit into the context."""


class QueueFull(LocalspecError):
    """As many requests are waiting as may: ask again later."""


class Cancelled(LocalspecError):
    """The work was stopped, by its caller or its deadline, before it had a result."""


class SessionFileError(LocalspecError):
    """The file is not a saved session, or its text is damaged."""


class Closed(LocalspecError):
    """The object was used after it was closed."""


def status_of(error: Exception) -> int:
    """The exit status that goes with an error."""
    return 2 if isinstance(error, UsageError) else 1


def line_of(error: Exception) -> str:
    """What went wrong and, where we know, what to do."""
    if isinstance(error, LocalspecError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory: take a smaller model or a smaller --ctx"
    kind = type(error).__name__
    return f"internal error, please report it: {kind}: {error} (LOCALSPEC_DEBUG=1 shows where)"
