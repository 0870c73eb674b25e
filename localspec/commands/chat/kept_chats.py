"""The conversations that are kept in the home while they go on, so that one can come back to them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localspec.commands.chat.attached import without_files
from localspec.errors import SessionFileError
from localspec.runtime import session_file
from localspec.system.files import private_folder
from localspec.system.home import home
from localspec.terminal.text import on_one_line

MOST = 50
"""Conversations that are kept; the one that was not used for the longest time goes first."""


@dataclass(frozen=True, slots=True)
class KeptChat:
    """A conversation on the disk.

    Attributes:
        path: its file.
        when: when something was said in it last, in this machine's time.
        question: its first.
        n_turns: how many questions were answered.
        model: what its model is called.
        file: where that was loaded from.
    """

    path: Path
    when: str
    question: str
    n_turns: int
    model: str
    file: Path


def new_file() -> Path:
    """Where a conversation that begins now is kept."""
    return _folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}-{os.getpid()}.chat"


def stamp(path: Path) -> int | None:
    """What another chat changes by writing to a file; None where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def make_room() -> None:
    """Have the folder, and room in it for one more conversation."""
    folder = _folder()
    private_folder(folder)
    for path in _files()[MOST - 1 :]:
        with suppress(OSError):
            path.unlink()


def kept_chats() -> Iterator[KeptChat]:
    """Those that can be read, the latest first."""
    for path in _files():
        try:
            text = session_file.read(path, memory=False)[0]
            questions = [message["content"] for message in text["messages"] if message["role"] == "user"]
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
            first, file = on_one_line(without_files(questions[0])), Path(text["notes"].get("file", ""))
            yield KeptChat(path, when, first, len(questions), text["model"], file)
        except (SessionFileError, OSError, LookupError, TypeError, AttributeError):
            continue


def forget_all() -> int:
    """Remove all; how many there were."""
    files = _files()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _folder() -> Path:
    return home() / "chats"


def _files() -> list[Path]:
    found = []
    for path in _folder().glob("*.chat"):
        with suppress(OSError):  # removed by another chat meanwhile
            found.append((path.stat().st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]
