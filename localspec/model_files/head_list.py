"""The heads on this disk, for a list of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localspec.errors import ModelFileError
from localspec.model_files.head_file import read_card
from localspec.model_files.head_folders import find_heads
from localspec.model_files.head_kinds import names_published_head, read_published
from localspec.system.files import models_dir


def described_heads() -> list[dict[str, Any]]:
    """Facts of heads made here and shipped, then of those among the model files that models are published with."""
    published = [path for path in sorted(models_dir().rglob("*.gguf")) if names_published_head(path)]
    return [head_facts(path) for path in [*find_heads(), *published]]


def head_facts(path: Path) -> dict[str, Any]:
    """A head's facts, ready for JSON; those of a damaged one are None, and ``error`` says why."""
    facts: dict[str, Any] = {"path": str(path), "bytes": path.stat().st_size, "kind": None, "target": None}
    try:
        if names_published_head(path):
            head = read_published(path)
            of = f"a model with {head.n_vocab:,} tokens and states of {head.n_target:,}"
            return facts | {"kind": head.kind, "target": of}
        card = read_card(path)
    except ModelFileError as error:
        return facts | {"error": str(error)}
    return facts | {"kind": card.kind, "target": card.target.name, "target_fingerprint": card.target.fingerprint}
