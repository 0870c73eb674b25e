"""Heads of real models, trained once in minutes and kept beside the folder of models; too large to be committed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec.training.distill import distill
from tests.conftest import REAL_FOLDER

MINUTES = 15.0
"""Of training, where there is no head yet. On two busy cores SmolLM2 135M then wrote 20,000 tokens of examples."""


def trained_head(target: Path, kind: str) -> Path:
    """The head of a real model, whose file is named after its kind; trains it where there is none.

    Args:
        target: the model.
        kind: see ``localspec distill``.
    """
    place = REAL_FOLDER.parent / "heads-for-tests" / target.stem / f"{kind}.gguf"
    if not place.exists():
        pytest.importorskip("jax", reason="heads are trained with JAX")
        made = distill(target, kind=kind, minutes=MINUTES)
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(".part")
        part.write_bytes(made.path.read_bytes())
        os.replace(part, place)
    return place
