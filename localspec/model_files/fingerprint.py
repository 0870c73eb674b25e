"""What a model's file is known by: calibrations, verdicts and saved conversations are kept by it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from localspec.model_files.gguf import model_files


def fingerprint(path: Path) -> str:
    """A digest of a model's size, its header and 64 samples of its data; quick on any size. Of all parts it has."""
    found = [_of_one(file) for file in model_files(path)]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()[:32]


def _of_one(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for i in range(64):
            file.seek(size * i // 64)
            digest.update(file.read(4096))
    return digest.hexdigest()[:32]
