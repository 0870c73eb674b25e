"""Damaged model files before the engines, each in a process of its own: never an abort, a hang, or much memory."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from localspec.backends import unavailable_reason
from tests.fuzz.engine_child import begin, verdict
from tests.fuzz.gguf_cases import BASES, CASES, SHARES, Builder
from tests.fuzz.target import Check, Target
from tests.support import ggufs

MAX_PEAK_KB = 2 << 20

_TELLING = re.compile(r"ASSERT|what\(\)|terminate|abort|rror:")


class Engine:
    """A child that loads files, started again when it died."""

    def __init__(self, backend: str, log: Path) -> None:
        self.backend, self._log = backend, log
        self._child: ProcessPoolExecutor | None = None

    def ask(self, path: Path) -> dict[str, Any]:
        """The child's verdict on a file; ``AssertionError``: it died."""
        if self._child is None:
            spawning = multiprocessing.get_context("spawn")
            self._child = ProcessPoolExecutor(1, spawning, initializer=begin, initargs=(self._log,))
        try:
            return self._child.submit(verdict, self.backend, path).result()
        except BrokenProcessPool:
            self.close()
            raise AssertionError(f"{self.backend} ended its process: {self._last_words()}") from None

    def _last_words(self) -> str:
        """Why it aborted, of what it printed; a debugger's stack may follow."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        telling = [line for line in lines if _TELLING.search(line) and not line.startswith("#")]
        return " / ".join(telling[-2:] or lines[-3:])[-300:]

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.shutdown()


@contextmanager
def opened(builder: Callable[[Path], Callable[[Any], Path]], backend: str, folder: Path) -> Iterator[Check]:
    """Check what an engine makes of files that are built from cases."""
    build, engine = builder(folder), Engine(backend, folder / "engine.log")

    def check(case: Any) -> None:
        answer = engine.ask(build(case))
        if "error" in answer:
            # What an engine refuses beyond what we see ourselves is its failure, told in one line.
            known = {"ModelFileError", "EngineError"} & set(answer["kinds"])
            assert known, f"{answer['kinds'][0]}: {answer['error']}"
            assert answer["error"].isprintable(), answer
        peak = answer["peak_kb"]
        if peak >= MAX_PEAK_KB:
            engine.close()  # the peak of a process never goes down
        assert peak < MAX_PEAK_KB, f"{backend} took {peak >> 10} MB"

    try:
        yield check
    finally:
        engine.close()


def targets(what: str, cases: Any, builder: Any, n: int, *engines: str) -> list[Target]:
    return [
        Target(f"{what} in {name}", cases, partial(opened, builder, name), n, partial(unavailable_reason, name))
        for name in engines
    ]


ARCHITECTURES: dict[str, Callable[[Path], Path]] = {
    "llama": BASES["bpe"],
    "llama of experts": ggufs.write_experts,
    "gemma3": ggufs.write_sliding_window,
    "glm4moe": ggufs.write_glm,
    "mamba": ggufs.write_mamba,
    "qwen35": ggufs.write_hybrid,
}
"""Each asserts something else of its sizes."""

OTHER_NUMBERS = st.tuples(
    st.just("a number"),
    SHARES,
    st.sampled_from([0, 1, 3, 513, 1 << 31, (1 << 32) - 1]),  # 513 layers are one more than engines have room for
    st.sampled_from([0.0, -1.0, 1e30, float("nan"), float("inf")]),
)

TARGETS = [
    *targets("gguf", CASES, Builder, 40, "ik-llama", "llama-cpp", "mlx"),
    *targets(
        "hyperparameters",
        st.tuples(st.sampled_from(sorted(ARCHITECTURES)), st.tuples(OTHER_NUMBERS)),
        partial(Builder, bases=ARCHITECTURES),
        12,
        "ik-llama",
        "llama-cpp",
    ),
]
