"""What drafters learned of a target, across runs: one file for each, readable by this user alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from localspec.backends.trust import fingerprint
from localspec.runtime.state import DecodingState
from localspec.spec_decode.drafters.base import Drafter
from localspec.system.files import private_folder, write_atomically
from localspec.system.home import home

MOST_BYTES = 64 << 20
"""A larger file is none of ours, and not read."""


def recall(drafter: Drafter, target: Path) -> None:
    """Have a new drafter go on from what an earlier run learned, if one did."""
    with suppress(OSError):
        path = _path(drafter, target)
        if path.stat().st_size <= MOST_BYTES:
            drafter.restore(path.read_bytes())


def keep(state: DecodingState) -> None:
    """Write what the drafters learned that cost nothing. A full or read-only disk only means that it is learned again.

    Where two processes write, what the last one knows stays.
    """
    for drafter in state.free:
        if learned := drafter.learned():
            with suppress(OSError):
                path = _path(drafter, state.target.path)
                private_folder(path.parent)
                with write_atomically(path, private=True, durable=False) as file:
                    file.write(learned)


def _path(drafter: Drafter, target: Path) -> Path:
    return home() / drafter.source / fingerprint(target)
