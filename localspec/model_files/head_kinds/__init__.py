"""Heads that models are published with, by what their files say: a module of this folder for every kind."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from localspec.errors import ModelFileError, UnsupportedModel
from localspec.model_files.gguf import HEADS, GGUFFile
from localspec.model_files.head_kinds import mtp
from localspec.model_files.head_kinds.base import PublishedHead

KINDS: dict[str, Callable[[GGUFFile], PublishedHead]] = {
    architecture: import_module(f"{__name__}.{module}").read for architecture, module in HEADS.items()
}
"""The architecture that a file of a published head names -> what reads and checks its header."""


def is_published_head(file: GGUFFile) -> bool:
    """Whether an open file is such a head, and no model of its own."""
    return file.architecture in KINDS or mtp.is_alone(file)


def names_published_head(path: Path) -> bool:
    """Whether a path is that of such a file; of what is no readable GGUF it is not."""
    try:
        with GGUFFile(path, alone=True) as file:
            return is_published_head(file)
    except ModelFileError:
        return False


def read_mtp(path: Path) -> PublishedHead:
    """The header of the layer for multi-token prediction in a model's file.

    Raises:
        UnsupportedModel: it has none that the engine computes; says why.
        ModelFileError: it is damaged.
    """
    with GGUFFile(path) as file:
        return mtp.read(file)


def read_published(path: Path) -> PublishedHead:
    """The header of a published head's file.

    Raises:
        UnsupportedModel: it is not a published head, or the engine cannot compute it.
        ModelFileError: it is damaged; says what is wrong, in a line.
    """
    with GGUFFile(path) as file:
        return read_open(file)


def read_open(file: GGUFFile) -> PublishedHead:
    """The same of an open file."""
    if file.architecture not in KINDS and not mtp.is_alone(file):
        raise UnsupportedModel(f"{file.path.name} is not a published head")
    return KINDS.get(file.architecture, mtp.read)(file)
