"""What drafters are called."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

NGRAM = "ngram"
AUTOMATIC = (NGRAM,)  # what ``auto`` takes of those that need no file
CORPUS = "corpus"  # ``corpus:PATH``: files and folders to copy from
PARD = "pard"  # ``pard:FILE``: a draft model that fills in mask tokens
CHATS = "chats"  # ``corpus:chats``: the chats saved in this home

# What people read for a kind of drafter; plugins add theirs.
SHOWN = {
    NGRAM: "copying from the text",
    CORPUS: "copying from your files",
    "model": "draft model",
    "grammar": "grammar",
}


def shown(drafter: str) -> str:
    """A drafter's source, or its name for ``--draft``, as people read it; a model's own name stays."""
    if is_corpus(drafter) and drafter != CORPUS:
        return f"copying from {drafter.partition(':')[2]}"
    kind = kind_of(drafter)
    number = drafter.removeprefix(kind)
    return f"{SHOWN[kind]} {number}".rstrip() if kind in SHOWN else drafter


def is_corpus(name: str) -> bool:
    return name.partition(":")[0] == CORPUS


def kind_of(source: str) -> str:
    """The kind of a drafter, by its source: of several of a kind the second is ``model2``."""
    return source.rstrip("0123456789")


def source_of(kind: str, n_before: int) -> str:
    """The source of a drafter that has so many of its kind before it."""
    return f"{kind}{n_before + 1}" if n_before else kind


def names_of_files(paths: Sequence[Path], taken: Collection[str] = ()) -> list[str]:
    """A name for each of several model files: its own, with as many folders before it as tell it from the others.

    Args:
        paths: the files, all different.
        taken: names that mean something else.
    """
    absolute = [Path(os.path.abspath(path)) for path in paths]

    def name(path: Path) -> str:
        for n in range(1, len(path.parts)):
            ends = ["/".join(each.parts[-n:]).removesuffix(".gguf") for each in (path, *absolute)]
            if ends[0] not in taken and ends.count(ends[0]) == 2:
                return ends[0]
        return str(path)

    return [name(path) for path in absolute]
