"""Files that are complete under their name or not there; folders of localspec; small facts kept as JSON."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, TypeVar

from localspec.errors import UsageError

# Virus scanners and indexers hold a file that was just written for some milliseconds, and it cannot be replaced then.
_TRIES = 20

_STALE_SECONDS = 3600.0  # Age of a temporary file that a killed process must have left: no write takes an hour


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two names stand for one place, by a link too, or with other capitals where those make no difference."""
    with suppress(OSError):  # one is not there, or is gone meanwhile
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def private_folder(path: Path) -> None:
    """Make a folder that only this user may read, or make an existing one so."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        with suppress(OSError):  # another user's
            path.chmod(0o700)


def decoded(data: bytes) -> str:
    """The text of a user's file, without byte order mark: UTF-8, or UTF-16 with its mark, as on Windows."""
    return data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")


@contextmanager
def write_atomically(path: Path, *, private: bool = False, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes its name, or the place of an older one, when the block ends; its folder must exist.

    If the block raises, Ctrl-C included, the older file stays as it was. A link keeps its target. ``private``: readable
    by this user alone. ``durable``: survives a power failure that comes right after; takes milliseconds. ``OSError``:
    the disk refuses; ``ValueError``: no file can have this name.
    """
    path = Path(os.path.realpath(path))
    with suppress(OSError):
        for stale in path.parent.glob(f".{glob.escape(path.name)}-*.tmp"):
            if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                stale.unlink()
    temporary = path.with_name(f".{path.name}-{token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        _replace(temporary, path)
    except BaseException:
        with suppress(OSError, ValueError):
            temporary.unlink()
        raise
    if durable:
        with suppress(OSError):  # the new name survives a power failure too, where folders can be opened
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _replace(temporary: Path, path: Path) -> None:
    """Give a file its name; on Windows again and again for a second, while another program has the older one open."""
    for _ in range(_TRIES if sys.platform == "win32" else 0):
        with suppress(PermissionError):
            os.replace(temporary, path)
            return
        time.sleep(1 / _TRIES)
    os.replace(temporary, path)


SOURCES = ("hf", "wheels")  # Kinds of places that files come from, in the order in which ``pull`` tries them


def home() -> Path:
    """The folder for all that is kept: ``LOCALSPEC_HOME``, or the platform's cache folder; it may not be there yet."""
    chosen = os.environ.get("LOCALSPEC_HOME", "").strip()
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("localspec", appauthor=False)


def models_dir() -> Path:
    return home() / "models"


def offline() -> bool:
    return os.environ.get("LOCALSPEC_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def source_order() -> tuple[str, ...]:
    """The kinds of sources, the one that ``LOCALSPEC_SOURCE`` names first; ``UsageError``: there is no such kind."""
    first = os.environ.get("LOCALSPEC_SOURCE", "").strip().lower()
    if not first:
        return SOURCES
    if first not in SOURCES:
        raise UsageError(f"LOCALSPEC_SOURCE={first!r} is not one of: {', '.join(SOURCES)}")
    return (first, *(name for name in SOURCES if name != first))


def printable(name: str) -> str:
    """A file's name as text: invalid UTF-8 in it becomes U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")


Key = Mapping[str, str]


class JsonStore:
    """Small facts kept between runs, one JSON file per key, which is stored too; losing one only costs time."""

    def __init__(self, folder: Path, format: int) -> None:
        self.folder = folder
        self.format = format

    def get(self, key: Key) -> dict[str, Any] | None:
        """The stored value; None: none that can be read."""
        try:
            stored = json.loads(self._path(key).read_text())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(stored, dict) or stored.get("format") != self.format or stored.get("key") != dict(key):
            return None
        value = stored.get("value")
        return value if isinstance(value, dict) else None

    def items(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """All keys with values that can be read."""
        for path in sorted(self.folder.glob("*.json")):
            with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
                key = json.loads(path.read_text())["key"]
                if self._path(key) == path and (value := self.get(key)) is not None:
                    yield key, value

    def put(self, key: Key, value: Mapping[str, Any]) -> None:
        """Store a value. A full or read-only disk only means that it will be found out again."""
        text = json.dumps({"format": self.format, "key": dict(key), "value": value})
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            # After a power failure an empty file counts as none, and waiting for the disk would delay an answer.
            with write_atomically(self._path(key), private=True, durable=False) as file:
                file.write(text.encode())

    def _path(self, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:20]
        return self.folder / f"{digest}.json"


V = TypeVar("V", bound=dict[str, Any] | None)


def remembered(store: JsonStore, key: Key, examine: Callable[[], V]) -> dict[str, Any] | V:
    """What is stored under a key; where nothing is, what ``examine`` finds, stored unless it is None."""
    known = store.get(key)
    if known is not None:
        return known
    found = examine()
    if found is not None:
        store.put(key, found)
    return found
