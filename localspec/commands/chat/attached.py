"""Files that go with the next message: their text is part of it, and n-grams draft from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.errors import UsageError
from localspec.system.files import decoded

MAX_BYTES = 16 << 20
"""More than the longest contexts hold (a million tokens, of four bytes in the mean), so no more is read."""


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A text file as it was when it was attached."""

    path: Path
    text: str

    def __str__(self) -> str:
        n_lines = self.text.count("\n") + (not self.text.endswith("\n"))
        return f"{self.path} ({n_lines:,} line{'s' if n_lines != 1 else ''})"


def read_file(path: Path) -> AttachedFile:
    """A file to attach.

    Raises:
        UsageError: it cannot be read, is no text, or is too large for any model.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES >> 20} MiB, too large for any context")
    try:
        text = decoded(data)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{path} is not UTF-8 text")
    if not text.strip():
        raise UsageError(f"{path} is empty")
    return AttachedFile(path, text.replace("\r\n", "\n"))


def with_files(question: str, files: Sequence[AttachedFile]) -> str:
    """The question with the files before it, each in a fence that is longer than those in it."""
    parts = []
    for file in files:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", file.text)), default=0))
        end = "" if file.text.endswith("\n") else "\n"
        parts.append(f"{file.path}:\n{fence}{file.path.suffix[1:]}\n{file.text}{end}{fence}")
    return "\n\n".join([*parts, question])


_FILE = re.compile(r"(?P<path>[^\n]+):\n(?P<fence>`{3,})[^`\n]*\n.*?\n(?P=fence)\n\n", re.DOTALL)


def without_files(text: str) -> str:
    """What ``with_files`` made, with the names of the files in place of their text."""
    names = []
    while found := _FILE.match(text):
        names.append(f"[{found['path']}] ")
        text = text[found.end() :]
    return "".join([*names, text])
