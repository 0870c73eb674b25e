"""Fixtures of the tests of drafters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import open_backend
from tests.support import ggufs
from tests.support.gguf_vocabs import bpe_vocab


@pytest.fixture(autouse=True)
def measured(measured_home: Path) -> None:
    """Tiny files are measured and checked once."""


@pytest.fixture
def llama_cpp(measured_home: Path) -> Path:
    """A home where the tiny files are measured once, on a machine that has the engine."""
    open_backend("llama-cpp")
    return measured_home


@pytest.fixture
def quick(tmp_path: Path) -> ggufs.Pair:
    """A small pair with layers enough for three states."""
    shape = ggufs.Shape(n_layer=4, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.15)
    return ggufs.correlated_pair(tmp_path, bpe_vocab(300), shape=shape, name="quick4")
