"""``close()`` gives the memory back: opened, asked and closed many times, the process does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyFiles, open_backend
from tests.support.heads import write_random_head
from tests.support.memory import growth_per_cycle

CYCLES = """
import gc, sys
from localspec import LLM, SamplingParams

def resident():  # [MB]
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:")) / 1e3

backend, cycles, n_ctx, target, *draft = sys.argv[1:]
for i in range(int(cycles) + 1):
    with LLM(target, draft=["ngram", *draft], backend=backend, n_ctx=int(n_ctx), idle=False) as llm:
        for j in range(2):
            session = llm.session(f"number {j} of cycle {i}. " * 10)
            session.chat("Count to ten.", SamplingParams(max_tokens=12), draft_length=3)
        assert llm.cache_info()["bytes"] > 0
        inside = resident()
    del llm, session
    gc.collect()
    print(round(resident(), 1), round(inside, 1), flush=True)
"""


def residents(backend: str, cycles: int, n_ctx: int, target: Path, *drafts: Path | str) -> tuple[list[float], float]:
    """Resident memory after each close, and before the first [MB]."""
    command = [sys.executable, "-c", CYCLES, *map(str, (backend, cycles, n_ctx, target, *drafts))]
    # glibc gives back the free end of its main arena only. In a thread's arena it stays in RAM, 0 to 7 MB seen here,
    # and which thread is given which arena depends on how busy the machine is: with one arena there is no such chance.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    after, inside = zip(*(map(float, line.split()) for line in done.stdout.splitlines()), strict=True)
    print(backend, target.name, "after close:", *after, "| open:", inside[0])
    return list(after), inside[0]


LIMIT_MB = 0.5
"""Per cycle. Measured: 0.0 to 0.1; with a model of the reference engine left open 0.85 to 1.4 each."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("backend", ["reference", "ik-llama", "llama-cpp"])
def test_cycles_on_a_tiny_pair(tiny: TinyFiles, backend: str, tmp_path: Path) -> None:
    open_backend(backend)
    pair = tiny.quick if backend == "reference" else tiny.pair
    head = write_random_head(pair.target, tmp_path / "head.gguf", taps=("layer:0", "norm"))
    after, inside = residents(backend, 8, 1024, pair.target, pair.draft, f"head:{head}", "early-exit:1")
    assert growth_per_cycle(after) < LIMIT_MB
    if backend != "reference":
        assert inside - after[0] > 15  # which a leak would leave there
