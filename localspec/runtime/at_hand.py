"""What ``--draft auto`` loads besides what is free: asked here by whatever has to know it, loaded or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from localspec.backends.base import Model
from localspec.backends.heads import heads_for
from localspec.backends.published_heads import heads_beside
from localspec.errors import LocalspecError
from localspec.model_files.catalog import Catalog
from localspec.spec_decode.drafters.names import HEAD, MTP


def head_files(target: Path, backend: str | None) -> Iterator[Path]:
    """The heads on this disk that ``auto`` takes for a target: one that was trained here or ships, and a published one.

    Of either kind the first: those trained for that very file, and those that the catalogue has for it, come first.
    Which of the two pays is for the controller to find out; more of a kind would take memory for states and weights
    each, and read the same states.

    Args:
        target: its file.
        backend: the engine that it runs on; see ``heads_beside``.
    """
    for find in (heads_for, lambda path: heads_beside(path, backend)):
        try:
            yield from find(target)[:1]
        except LocalspecError:  # of the target, whose loading says it
            continue


def heads_at_hand(target: Path, backend: str | None, *, mtp: bool) -> Iterator[str]:
    """What drafts from the target's states, as ``--draft`` takes it, found one by one.

    Args:
        target, backend: as for ``head_files``.
        mtp: whether the target's own layer for multi-token prediction is computed.
    """
    if mtp:
        yield MTP
    yield from (f"{HEAD}:{path}" for path in head_files(target, backend))


def heads_of(target: Model) -> Iterator[str]:
    """The same for a loaded target."""
    return heads_at_hand(target.path, target.backend, mtp=target.capabilities.mtp)


def drafts_at_hand(target: Model) -> Iterator[str]:
    """All that ``auto`` loads for a loaded target, found one by one: heads as above, and a draft model's path."""
    yield from heads_of(target)
    draft = Catalog.load().draft_for(target.path)
    if draft is not None:
        yield str(draft)
