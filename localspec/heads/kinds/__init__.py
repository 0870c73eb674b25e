"""Kinds of published heads: entry points of the group ``localspec.head_kinds``.

The name of an entry point is the architecture that files of a kind name, its object a function that reads and checks an
open file's header and returns a ``PublishedHead``.
"""

from __future__ import annotations

from pathlib import Path

from localspec.errors import ModelFileError, UnsupportedModel
from localspec.heads.kinds import mtp
from localspec.heads.kinds.base import PublishedHead
from localspec.model_files import nextn
from localspec.model_files.gguf import GGUFFile
from localspec.system.plugins import HEAD_KINDS, load, offered


def is_published_head(file: GGUFFile) -> bool:
    """Whether an open file is such a head, and no model of its own."""
    return file.architecture in offered(HEAD_KINDS) or nextn.is_alone(file)


def names_published_head(path: Path) -> bool:
    """The same of a path; False for what is no readable GGUF."""
    try:
        with GGUFFile(path, alone=True) as file:
            return is_published_head(file)
    except ModelFileError:
        return False


def read_mtp(path: Path) -> PublishedHead:
    """The header of the layer for multi-token prediction in a model's file; UnsupportedModel says why it has none."""
    with GGUFFile(path) as file:
        return mtp.read(file)


def read_published(path: Path) -> PublishedHead:
    """The header of a published head's file.

    Raises:
        UnsupportedModel: it is not a published head, or the engine cannot compute it.
        ModelFileError: it is damaged.
    """
    with GGUFFile(path) as file:
        return read_open(file)


def read_open(file: GGUFFile) -> PublishedHead:
    if not is_published_head(file):
        raise UnsupportedModel(f"{file.path.name} is not a published head")
    if file.architecture not in offered(HEAD_KINDS):  # MTP layers in files of their own name that of their target
        return mtp.read(file)
    found: PublishedHead = load(HEAD_KINDS, file.architecture)(file)
    return found
