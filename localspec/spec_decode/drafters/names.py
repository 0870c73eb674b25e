"""What draft models are called, and whether two names are one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path


def same_file(path: Path, known: Iterable[str]) -> str | None:
    """Which of the known paths is this file too: by a link, or with other capitals where those make no difference."""
    for each in known:
        with suppress(OSError):  # gone meanwhile: then it is another
            if path.samefile(each):
                return each
    return None


def names_of_files(paths: Sequence[Path], taken: Iterable[str] = ()) -> list[str]:
    """A name for each of several model files: its own, with as many folders before it as tell it from the others.

    Args:
        paths: the files, all different.
        taken: names that mean something else.
    """
    reserved = set(taken)
    absolute = [Path(os.path.abspath(path)) for path in paths]
    names = []
    for path in absolute:
        for n in range(1, len(path.parts)):
            name = _end(path, n)
            if name not in reserved and sum(_end(each, n) == name for each in absolute) == 1:
                break
        else:
            name = str(path)
        names.append(name)
    return names


def _end(path: Path, n: int) -> str:
    return "/".join(path.parts[-n:]).removesuffix(".gguf")
