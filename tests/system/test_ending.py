"""A program that is done ends with what it meant to say: no abort, no traceback, and in good time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import TinyFiles, open_backend

PROGRAM = """
import sys, threading
from localspec import LLM, SamplingParams

llm = LLM(sys.argv[1], draft=None, backend=sys.argv[2], n_ctx=1024)
print(llm.generate("hello", SamplingParams(max_tokens=4)).stats["completion_tokens"])
if sys.argv[3] == "busy":  # the program ends while its model answers
    started = threading.Event()
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    threading.Thread(target=lambda: [started.set() for _ in llm.stream("hello", endless)], daemon=True).start()
    started.wait()
"""


@pytest.mark.parametrize("way", ["idle", "busy"])
@pytest.mark.parametrize("backend", ["ik-llama", "llama-cpp", "mlx", "reference"])
def test_nobody_closed_the_model(tiny: TinyFiles, backend: str, way: str) -> None:
    """Left alone, MLX aborts one process in three."""
    open_backend(backend)
    for _ in range(4 if backend == "mlx" else 1):
        command = [sys.executable, "-c", PROGRAM, str(tiny.quick.target), backend, way]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")
