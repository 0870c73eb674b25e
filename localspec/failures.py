"""Any exception as one readable line and an exit status."""

from __future__ import annotations

from localspec.errors import LocalspecError, UsageError

FAILED, BAD_USAGE = 1, 2


def status_of(error: Exception) -> int:
    """The exit status that goes with an error."""
    return BAD_USAGE if isinstance(error, UsageError) else FAILED


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
