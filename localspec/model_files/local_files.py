"""The model files on this disk: which there are, and removing them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from localspec.errors import ModelFileError, UnknownModel
from localspec.model_files.catalog import Catalog, Entry
from localspec.system.files import home, models_dir


def known_entries() -> list[Entry]:
    return [*Catalog.load().values(), *_pulled_by_address()]


def _pulled_by_address() -> list[Entry]:
    """Models that were pulled as ``hf:OWNER/REPO/FILE.gguf``; of those in parts, the first part."""
    folder = models_dir() / "hf"
    found: list[Entry] = []
    for path in sorted(folder.glob("*/*/**/*.gguf")):
        try:
            entry = Catalog.load().entry(f"hf:{path.relative_to(folder).as_posix()}")
        except UnknownModel:
            continue  # a name that no hub file has: put there by hand
        if not any(path.name in other.files[1:] or entry.file in other.files for other in found):
            found.append(entry)
    return found


def remove(entry: Entry, made_of_it: Iterable[Path] = ()) -> int:
    """Remove an entry's files, what an interrupted pull left of them, and files ``made_of_it``. Returns the bytes that
    became free; ``ModelFileError``: they are being fetched right now, or cannot be removed."""
    from filelock import FileLock, Timeout

    from localspec.model_files.sources import parts_folder

    parts = parts_folder(entry)
    freed = 0
    if parts.parent.exists():
        try:
            with FileLock(parts.with_name(parts.name + ".lock"), timeout=0):
                freed += sum(path.stat().st_size for path in parts.rglob("*") if path.is_file())
                shutil.rmtree(parts, ignore_errors=True)
        except Timeout:
            raise ModelFileError(f"{entry.name} is being fetched by another process; stop it first") from None
    copies = [*(home() / "repacked").glob(f"{entry.path.stem}.*.gguf"), *made_of_it]
    try:
        for path in [*(models_dir() / file for file in entry.files), *copies]:
            if path.is_file():
                freed += path.stat().st_size
                path.unlink()
    except OSError as error:
        raise ModelFileError(f"cannot remove {error.filename}: {error.strerror}") from None
    return freed
