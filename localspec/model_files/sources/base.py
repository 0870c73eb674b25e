"""What sources of model files share: progress, digests, room on the disk."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, ParamSpec

from localspec.errors import DigestMismatch, NotEnoughSpace
from localspec.model_files.catalog import free_bytes

P = ParamSpec("P")

# Progress: what is being done, bytes done, bytes in all (0 if unknown). Raising from it stops the work.
Watch = Callable[[str, int, int], None]

# Error numbers of a disk, quota or file system that cannot hold the file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RaisedByCaller(BaseException):
    """Carries an exception of a caller's function past handlers for a source's or the disk's errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def unmistakable(function: Callable[P, None]) -> Callable[P, None]:
    """A caller's function, whose exceptions come as ``RaisedByCaller``."""

    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            raise RaisedByCaller(error) from None

    return called


class Hashing:
    """Writes to a file and computes its SHA-256 on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest(data)

    def digest(self, data: bytes) -> None:
        """Count data that is in the file already."""
        self._digest.update(data)
        self.n_bytes += len(data)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.n_bytes = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Have the bytes on the disk, so that a crash after the renaming cannot leave a hollow file."""
        self._file.flush()
        os.fsync(self._file.fileno())


def mismatch(label: str, expected: str, found: str) -> DigestMismatch:
    return DigestMismatch(
        f"{label} arrived with the wrong digest ({found[:12]}…, not {expected[:12]}…); it was deleted"
    )


def check_space(folder: Path, needed: int, label: str) -> None:
    """Refuse (``NotEnoughSpace``) ``needed`` bytes for ``label`` that the disk of a folder cannot hold."""
    free = free_bytes(folder)
    if needed > free:
        raise NotEnoughSpace(
            f"{label} needs {size_text(needed)} on the disk of {folder}, which has {size_text(free)} free; "
            "make room, or set LOCALSPEC_HOME to a folder on a larger disk"
        )


def size_text(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5 or unit == "GB":
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    raise AssertionError
