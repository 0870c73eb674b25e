"""Conversations that were saved in this home."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from localspec.engine import saved
from localspec.errors import SessionFileError
from localspec.spec_decode.drafters.corpus import TextFile, TextSource
from localspec.system.files import home
from localspec.system.steps import Steps

CONVERSATIONS = "conversations"
"""The folder of a home in which the server keeps its page's conversations, each a JSON file named by its id."""

_CONVERSATION = re.compile(r"[0-9a-f]{16}\.json")

_OTHERS = ("models", "heads", "distill", "repacked", "engines", "corpora", "prompts")
"""Folders of a home with large files that are no chats."""


def chat_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and path.name not in _OTHERS:
            yield from chat_files(path)
        elif path.is_file() and _is_session(path):
            yield path


def messages_in(path: Path) -> list[dict[str, Any]] | None:
    """The messages that were saved in a file; None if it is no such file, or damaged."""
    try:
        messages = saved.read(path, memory=False)[0].get("messages")
    except (OSError, SessionFileError):
        return None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        return None
    return messages


def _is_session(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(saved.MAGIC)) == saved.MAGIC
    except OSError:
        return False


def conversation_files(folder: Path) -> Iterator[Path]:
    """The page's conversations in a home."""
    kept = folder / CONVERSATIONS
    for path in sorted(kept.iterdir()) if kept.is_dir() else ():
        if _CONVERSATION.fullmatch(path.name) and path.is_file():
            yield path


def said_in(path: Path) -> list[str]:
    """The texts of a chat or a conversation, those of its files too; none if it is neither, or damaged."""
    try:
        messages = json.loads(path.read_bytes())["messages"] if path.suffix == ".json" else messages_in(path)
        messages = [message for message in messages or () if isinstance(message, dict)]
        files = [file for message in messages for file in message.get("files") or ()]
        texts = [message.get("content") for message in messages] + [file.get("text") for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [text for text in texts if isinstance(text, str)]


class SavedChats(TextSource):
    """What was said in the chats saved in this home and in the conversations of the page, as text for a corpus."""

    def __init__(self) -> None:
        self._home = home()
        self.key = f"chats in {self._home}"

    def files(self) -> Steps[list[TextFile]]:
        found = []
        for path in (*chat_files(self._home), *conversation_files(self._home)):
            with suppress(FileNotFoundError):  # somebody has just deleted it
                facts = path.stat()
                found.append(TextFile(path.relative_to(self._home).as_posix(), facts.st_size, facts.st_mtime_ns))
            yield
        return found

    def text(self, name: str) -> str | None:
        text = "\n".join(said_in(self._home / name))
        return text.encode(errors="replace").decode() or None  # JSON can hold half a character
