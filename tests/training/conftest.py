"""What the tests of training have in common."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import ggufs

# Compiling takes most of the time of these tests, and their batches are small.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = ggufs.Shape(n_layer=5, n_embd=64, n_head=4, n_head_kv=2, n_ff=96, residual=0.4)
    return ggufs.write_llama(tmp_path_factory.mktemp("target") / "tiny target.gguf", shape, ggufs.bpe_vocab(300))
