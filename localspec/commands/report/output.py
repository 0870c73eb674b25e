"""Files that results go to: refused before anything takes time, written complete or not at all."""

from __future__ import annotations

from pathlib import Path

from localspec.errors import LocalspecError, UsageError
from localspec.system.files import write_atomically

STREAM = "-"
"""The name of standard input and standard output."""


class OutputError(LocalspecError):
    """A file cannot be written."""


def checked_output(name: str, *, force: bool, otherwise: str = "") -> Path:
    """A file that a result may go to.

    Args:
        name: as given.
        force: whether a file that is there may be replaced.
        otherwise: what else to do where one is there, as a clause.

    Raises:
        UsageError: it is a folder, there is none for it, or it would be replaced.
    """
    path = Path(name)
    if not name or path.is_dir():
        raise UsageError(f"{name or 'an empty name'} is a folder or not a file name")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file; {STREAM} stands for standard output")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; use --force to overwrite it{otherwise}")
    return path


def write_output(path: Path, text: str) -> None:
    """Write a file that this user alone can read: results name files and prompts, and pages hold answers.

    Raises:
        OutputError: the disk refuses.
    """
    try:
        with write_atomically(path, private=True) as file:
            file.write(text.encode())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
