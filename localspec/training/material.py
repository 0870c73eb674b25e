"""What a head is trained on besides the target's own prompts: the user's prompts, texts and chats.

Nothing that heads are tested with may be among it, nor among the prompts that the target writes: see ``Overlap``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from localspec.errors import UsageError
from localspec.system.files import decoded

MOST_BYTES = 64 << 20
"""Of texts that are read [bytes]: about 15 million tokens, days of work on a laptop."""

_WORD = re.compile(r"\w+")
_N_WORDS = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """Something that the target is to answer.

    Attributes:
        name: unique among the material.
        category: kind of work.
        turns: what the user says, one after the other.
    """

    name: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Something that the target is to read.

    Attributes:
        name: unique among the material.
        category: ``text`` or ``chat``.
        content: a text, or messages for the chat template.
    """

    name: str
    category: str
    content: str | Sequence[dict[str, Any]]

    @property
    def text(self) -> str:
        """All that is said in it."""
        if isinstance(self.content, str):
            return self.content
        return "\n\n".join(str(message.get("content") or "") for message in self.content)


@dataclass(frozen=True, slots=True)
class Material:
    """The user's own.

    Attributes:
        asked, read: see ``Asked`` and ``Read``.
        remarks: what was left out, a line each.
    """

    asked: Sequence[Asked] = ()
    read: Sequence[Read] = ()
    remarks: list[str] = field(default_factory=list)


class Overlap:
    """Whether a text has eight words in a row in common with one of some others; a shorter one, all of its words.

    Args:
        texts: the others.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._known: dict[int, set[tuple[str, ...]]] = {}
        for words in map(_words, texts):
            n = min(_N_WORDS, len(words))
            if n:
                self._known.setdefault(n, set()).update(_runs(words, n))

    def __call__(self, text: str) -> bool:
        words = _words(text)
        return any(run in known for n, known in self._known.items() for run in _runs(words, n))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(islice(words, i, None) for i in range(n)), strict=False)


def without(material: Material, overlap: Overlap) -> Material:
    """The material but for what heads are tested with.

    Raises:
        UsageError: nothing of it is left.
    """
    asked = [each for each in material.asked if not any(map(overlap, each.turns))]
    read = [each for each in material.read if not overlap(each.text)]
    n = len(material.asked) + len(material.read) - len(asked) - len(read)
    if n and not asked and not read:
        raise UsageError("all of these prompts and texts are among the questions that heads are tested with")
    remarks = list(material.remarks)
    if n:
        remarks.append(
            f"{n} prompts or texts are left out: they have words of the questions that heads are tested with"
        )
    return Material(asked, read, remarks)


def read_texts(paths: Sequence[Path], chat_in: Callable[[Path], Read | None] = lambda path: None) -> Material:
    """The text files among some files and in some folders; what begins with a dot is passed over in folders.

    Args:
        paths: files and folders.
        chat_in: the chat that a file holds, or None.

    Raises:
        UsageError: there is no such file or folder, or no text in any.
    """
    found: list[Read] = []
    remarks: list[str] = []
    room, n_other = MOST_BYTES, 0
    for path in _files(paths):
        if (chat := chat_in(path)) is not None:
            found.append(chat)
            continue
        try:
            with path.open("rb") as file:
                data = file.read(room + 1)
        except OSError as error:
            remarks.append(f"{path} cannot be read: {error.strerror or error}")
            continue
        if len(data) > room:
            remarks.append(f"of these texts the first {MOST_BYTES >> 20} MB are read")
            break
        text = _as_text(data)
        if text is None:
            n_other += 1
        elif text.strip():
            room -= len(data)
            found.append(Read(hashlib.sha256(text.encode()).hexdigest()[:16], "text", text))
    if n_other:
        remarks.append(f"{n_other} files are no text in UTF-8")
    if not found:
        raise UsageError(f"there is no text to read in {', '.join(map(str, paths))}")
    return Material((), list({each.name: each for each in found}.values()), remarks)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            for folder, below, names in os.walk(path):
                below[:] = sorted(name for name in below if not name.startswith("."))
                yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        elif path.exists():
            yield path
        else:
            raise UsageError(f"there is no file or folder {path}")


def _as_text(data: bytes) -> str | None:
    try:
        text = decoded(data)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
