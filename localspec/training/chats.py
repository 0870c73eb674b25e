"""Chats that were saved in this home, as texts to learn from: the target reads them as it did when it answered."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from localspec.errors import UsageError
from localspec.runtime.saved_chats import chat_files, messages_in
from localspec.system.home import home
from localspec.training.material import Material, Read


def saved_chats() -> Material:
    """All chats of the home.

    Raises:
        UsageError: there is none.
    """
    found = [chat for path in chat_files(home()) if (chat := chat_in(path)) is not None]
    if not found:
        raise UsageError(f"no chat was saved in {home()}; --text takes those that were saved elsewhere")
    return Material((), list({each.name: each for each in found}.values()))


def chat_in(path: Path) -> Read | None:
    """The chat that was saved in a file; None if it is no such file, or damaged."""
    messages = messages_in(path)
    if messages is None:
        return None
    return Read(hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16], "chat", messages)
