"""Numbers of a header out of their range, before the engines in C++: each is refused or computed, and none ends the
process.

One number of a valid file is changed, or added: to nothing, to the largest, to what is none, to one more than engines
have room for. Files of several architectures, as each asserts something else of its sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.engines import targets
from tests.fuzz.gguf_cases import SMALL, Header, number, take_apart
from tests.fuzz.target import table
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


class Numbers:
    """Writes the file of a case."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "case.gguf"
        self._raw = {name: write(folder / f"base-{i}.gguf").read_bytes() for i, (name, write) in enumerate(BASES.items())}

    def __call__(self, case: tuple[str, int, int, float]) -> Path:
        base, *change = case
        self.path.write_bytes(changed(self._raw[base], *change))
        return self.path


TARGETS = targets("hyperparameters", CASES, Numbers, 20, "ik-llama", "llama-cpp")
