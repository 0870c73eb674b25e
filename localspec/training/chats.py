"""Chats that were saved in this home, as texts to learn from: the target reads them as it did when it answered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from localspec.errors import SessionFileError, UsageError
from localspec.runtime import session_file
from localspec.system.home import home
from localspec.training.material import Material, Read

_OTHERS = ("models", "heads", "distill", "repacked", "engines")
"""Folders of a home with large files that are no chats."""


def saved_chats() -> Material:
    """All chats of the home.

    Raises:
        UsageError: there is none.
    """
    found = [chat for path in _files(home()) if (chat := chat_in(path)) is not None]
    if not found:
        raise UsageError(f"no chat was saved in {home()}; --text takes those that were saved elsewhere")
    return Material((), list({each.name: each for each in found}.values()))


def chat_in(path: Path) -> Read | None:
    """The chat that was saved in a file; None if it is no such file, or damaged."""
    try:
        with path.open("rb") as file:
            if file.read(len(session_file.MAGIC)) != session_file.MAGIC:
                return None
        messages = session_file.read(path, memory=False)[0].get("messages")
    except (OSError, SessionFileError):
        return None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        return None
    return Read(hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16], "chat", messages)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and path.name not in _OTHERS:
            yield from _files(path)
        elif path.is_file():
            yield path
