"""Numbers of a header out of their range, before the engines in C++: each is refused or computed, and none ends the
process.

One number of a valid file is changed, or added: to nothing, to the largest, to what is none, to one more than engines
have room for. Files of several architectures, as each asserts something else of its sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from localspec.backends import unavailable_reason
from tests.fuzz.engines import Engine
from tests.fuzz.gguf_cases import SMALL, Header, number, take_apart
from tests.fuzz.target import Check, Target, table
from tests.support import ggufs
from tests.support.gguf_vocabs import bpe_vocab

BASES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: ggufs.write_llama(path, SMALL, bpe_vocab(300)),
    "llama of experts": ggufs.write_experts,
    "gemma3": ggufs.write_sliding_window,
    "glm4moe": ggufs.write_glm,
    "mamba": ggufs.write_mamba,
    "qwen35": ggufs.write_hybrid,
}
WHOLE, FLOAT = 4, 6
_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12}
"""Types of values that are numbers."""

WHOLES = [0, 1, 3, 513, 1 << 31, (1 << 32) - 1]
FLOATS = [0.0, -1.0, 1e30, float("nan"), float("inf")]

MORE_WHOLES: list[str] = table("hyperparameters", "MORE_WHOLES")
MORE_FLOATS: list[str] = table("hyperparameters", "MORE_FLOATS")

CASES = st.tuples(st.sampled_from(sorted(BASES)), st.integers(0, 199), st.sampled_from(WHOLES), st.sampled_from(FLOATS))
"""Name of the base, which of its numbers, and what it becomes, by its type."""


def numbers(header: Header) -> list[tuple[bytes, int]]:
    """The numbers that a file has, and those it may have besides: key and type."""
    here = [(key, kind) for key, kind, _ in header.keys if kind in _NUMBERS]
    architecture = next(value[8:] for key, _, value in header.keys if key == b"general.architecture").decode()
    more = [(name, WHOLE) for name in MORE_WHOLES] + [(name, FLOAT) for name in MORE_FLOATS]
    known = {key for key, *_ in header.keys}
    return here + [(key, kind) for name, kind in more if (key := f"{architecture}.{name}".encode()) not in known]


def changed(raw: bytes, which: int, whole: int, real: float) -> bytes:
    """A valid file with one other number."""
    header = take_apart(raw)
    key, kind = numbers(header)[which % len(numbers(header))]
    value = struct.pack("<f", real) if kind == FLOAT else number(kind, real if kind == 12 else whole)
    header.keys = [each for each in header.keys if each[0] != key] + [(key, kind, value)]
    return header.encode()


@contextmanager
def _opened(backend: str, folder: Path) -> Iterator[Check]:
    raw = {name: write(folder / f"base-{i}.gguf").read_bytes() for i, (name, write) in enumerate(BASES.items())}
    engine, path = Engine(backend, folder / "engine.log"), folder / "case.gguf"

    def check(case: tuple[str, int, int, float]) -> None:
        base, *change = case
        path.write_bytes(changed(raw[base], *change))
        answer: dict[str, Any] = engine.ask(path)  # fails where the process ended
        if "error" in answer:
            assert {"ModelFileError", "EngineError"} & set(answer["kinds"]), answer
            assert answer["error"].isprintable(), answer

    try:
        yield check
    finally:
        engine.close()


TARGETS = [
    Target(
        f"hyperparameters in {name}",
        CASES,
        partial(_opened, name),
        in_suite=20,
        missing=partial(unavailable_reason, name),
    )
    for name in ("ik-llama", "llama-cpp")
]
