"""What files say of heads: those on this disk, and any file from its header alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from localspec.errors import ModelFileError, UnsupportedModel
from localspec.heads.card import ARCHITECTURE
from localspec.heads.file import check_head, find_heads, read_card
from localspec.heads.kinds import is_published_head, names_published_head, read_open, read_published
from localspec.heads.kinds.base import PublishedHead
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.inspection import file_facts, model_facts
from localspec.system.files import models_dir


def described_heads() -> list[dict[str, Any]]:
    """Facts of heads made here, then of those among the model files that models are published with."""
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


def inspect(path: Path) -> dict[str, Any]:
    """Facts of a model file, or of a head, ready for JSON; a head's are without those of models only.

    Raises:
        ModelFileError: it is not a readable GGUF, or a damaged head.
    """
    with GGUFFile(path) as gguf:
        facts = file_facts(gguf)
        if gguf.architecture == ARCHITECTURE:
            card = check_head(gguf)
            head = {name: value for name, value in asdict(card).items() if name not in ("token_map", "license")}
            return facts | {"head": head | {"n_out": card.n_out}}
        if is_published_head(gguf):
            try:
                return facts | {"published_head": _published(read_open(gguf))}
            except UnsupportedModel as error:
                facts["cannot_generate_text"] = str(error)
        return facts | model_facts(gguf)


def _published(head: PublishedHead) -> dict[str, Any]:
    return {
        "kind": head.kind,
        "title": head.title,
        "taps": list(head.taps),
        "target_embedding_length": head.n_target,
        "embedding_length": head.n_embd,
        "n_vocab": head.n_vocab,
        "n_out": len(head.ids),
        "engines": list(head.engines),
        "borrows": list(head.borrows),
        "block": {"rows": head.block.size, "guesses": head.block.n_guesses} if head.block else None,
    }
