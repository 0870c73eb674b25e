"""Heads of real models, trained once by the command and kept beside the folder of models; too large to be committed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.system.files import home
from tests.conftest import REAL_FOLDER


def trained_head(target: Path, minutes: float) -> Path:
    """The head of a real model; where there is none, ``localspec distill`` trains it in so many minutes."""
    place = REAL_FOLDER.parent / "heads-for-tests" / target.stem / "chained.gguf"
    if not place.exists():
        pytest.importorskip("jax", reason="heads are trained with JAX")
        command = [sys.executable, "-m", "localspec", "distill", str(target), "--minutes", str(minutes)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, done.stderr
        (made,) = (home() / "distill").glob("*/head.gguf")
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(".part")
        part.write_bytes(made.read_bytes())
        os.replace(part, place)
    return place
