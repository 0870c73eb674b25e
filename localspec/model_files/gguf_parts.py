"""Models in several files: what the others are called, as ``gguf-split`` names them."""

from __future__ import annotations

import re
from pathlib import Path

_FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.DOTALL)


def part_names(first: str) -> tuple[str, ...]:
    """The names of all files of a model, given that of the first; that name alone where it is no such one."""
    match = _FIRST.fullmatch(first)
    rest = range(2, int(match[2]) + 1) if match else ()
    return (first, *(f"{match[1]}-{i:05}-of-{match[2]}.gguf" for i in rest if match))


def model_files(path: Path) -> tuple[Path, ...]:
    """The files of a model that are there: the one given, and the parts that follow it up to the first missing one."""
    found = [path]
    for name in part_names(path.name)[1:]:
        part = path.with_name(name)
        if not part.is_file():
            break
        found.append(part)
    return tuple(found)


def model_bytes(path: Path) -> int:
    """What the files of a model take together [bytes].

    Raises:
        OSError: the first cannot be looked at.
    """
    return sum(file.stat().st_size for file in model_files(path))
