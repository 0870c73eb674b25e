"""Which files of a folder are text that may be read, and their text."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.errors import UsageError
from localspec.system.steps import Steps

MOST_FILE_BYTES = 16 << 20
"""A larger file in a folder is data or a log; one that is named itself is read."""

DEEPEST = 100
"""Folders within folders that are gone into."""

SCAN_STEP = 200
"""Entries of folders that are looked at in a step: some milliseconds."""

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_PEEK = 8192
_NOT_OURS = getattr(stat, "FILE_ATTRIBUTE_HIDDEN", 2) | getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 1024)
"""What Windows calls hidden, and links of its own kinds."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file as it was found.

    Attributes:
        name: its path within the source, with ``/``.
        size: bytes.
        mtime_ns: when it was changed last.
    """

    name: str
    size: int
    mtime_ns: int


class TextSource(ABC):
    """What a corpus is made of.

    Attributes:
        key: what tells it from others, across runs.
    """

    key: str

    @abstractmethod
    def files(self) -> Steps[list[TextFile]]:
        """Its files as they are now.

        Raises:
            OSError: they cannot be looked at.
        """

    @abstractmethod
    def text(self, name: str) -> str | None:
        """The text of a file; None if it is not a text file or cannot be read."""


class PathSource(TextSource):
    """A file, or the text files of a folder: nothing hidden, binary, ignored by Git's rules or behind a link.

    Args:
        path: the file or folder; this one may be a link.

    Raises:
        UsageError: there is no such thing.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.root = path.expanduser().resolve(strict=True)
            self._is_file = self.root.is_file()
            if not self._is_file:
                os.scandir(self.root).close()
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"corpus {path}: {getattr(error, 'strerror', None) or 'no such path'}") from None
        self.key = str(self.root)

    def files(self) -> Steps[list[TextFile]]:
        if self._is_file:
            found = self.root.stat()
            return [TextFile(self.root.name, found.st_size, found.st_mtime_ns)]
        files: list[TextFile] = []
        for n, file in enumerate(_walk(self.root, "", _rules_above(self.root))):
            if file is not None:
                files.append(file)
            if n % SCAN_STEP == SCAN_STEP - 1:
                yield
        return files

    def text(self, name: str) -> str | None:
        most = None if self._is_file else MOST_FILE_BYTES
        return read_text(self.root if self._is_file else self.root / name, most)


def read_text(path: Path, most_bytes: int | None) -> str | None:
    """The text of a regular file in UTF-8 that is no link; None for anything else.

    Args:
        path: the file.
        most_bytes: a larger one is None too; None is any size.
    """
    try:
        # What became a link or a pipe since it was found must neither be followed nor waited for.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or (most_bytes is not None and found.st_size > most_bytes):
                return None
            start = file.read(_PEEK)
            if b"\0" in start:
                return None
            rest = file.read() if most_bytes is None else file.read(most_bytes)
            text = (start + rest).decode("utf-8-sig")
    except (OSError, ValueError):
        return None
    return None if "\0" in text else text


# -- what a folder holds -----------------------------------------------------------------------------------------------

_Rules = tuple[tuple[Path, "GitIgnoreSpec"], ...]
"""Rules of ``.gitignore`` files and the folders that they hold for, the innermost last."""


def _walk(folder: Path, name: str, rules: _Rules) -> Iterator[TextFile | None]:
    """The text files under a folder; None for every other entry, so that the time of it can be shared out."""
    if name.count("/") >= DEEPEST:
        return
    rules = (*rules, *_rules_in(folder))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # gone meanwhile, or not ours to read
        if not name:  # a disk that is not there must not look like an empty folder
            raise
        return
    for entry in entries:
        yield None
        try:
            entry.name.encode()
            found = entry.stat(follow_symlinks=False)
        except (OSError, ValueError):
            continue
        path, inner = folder / entry.name, f"{name}/{entry.name}" if name else entry.name
        is_folder = stat.S_ISDIR(found.st_mode)
        if entry.name.startswith(".") or getattr(found, "st_file_attributes", 0) & _NOT_OURS:
            continue
        if not (is_folder or (stat.S_ISREG(found.st_mode) and 0 < found.st_size <= MOST_FILE_BYTES)):
            continue
        if _is_ignored(path, is_folder, rules):
            continue
        if is_folder:
            yield from _walk(path, inner, rules)
        else:
            yield TextFile(inner, found.st_size, found.st_mtime_ns)


def _is_ignored(path: Path, is_folder: bool, rules: _Rules) -> bool:
    for folder, spec in reversed(rules):
        verdict = spec.check_file(path.relative_to(folder).as_posix() + "/" * is_folder).include
        if verdict is not None:
            return verdict
    return False


def _rules_in(folder: Path) -> _Rules:
    return _rules_of(folder, folder / ".gitignore")


def _rules_of(folder: Path, path: Path) -> _Rules:
    """The rules in a file for a folder; a line that is none is left out, as Git does."""
    from pathspec import GitIgnoreSpec

    text, lines = read_text(path, 1 << 20), []
    for line in (text or "").splitlines():
        with suppress(ValueError):
            GitIgnoreSpec.from_lines([line])
            lines.append(line)
    return ((folder, GitIgnoreSpec.from_lines(lines)),) if lines else ()


def _rules_above(folder: Path) -> _Rules:
    """The rules of the repository that a folder lies in, down to the folder above it, and the repository's own."""
    above = [folder, *folder.parents]
    for n, each in enumerate(above):
        if (each / ".git").exists():
            own = _rules_of(each, each / ".git" / "info" / "exclude")
            return sum((_rules_in(parent) for parent in reversed(above[1 : n + 1])), own)
    return ()
