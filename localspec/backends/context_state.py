"""What a context held, as arrays that can be written to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ContextState:
    """What a context held at some moment, copied out of the engine.

    Attributes:
        tokens: what was in the memory, in order.
        arrays: the memory itself, in whatever arrays the engine needs; opaque to everyone else. Contiguous, of dtypes
            that NumPy has, so that they can be written to a file (view what it lacks, such as bfloat16, as integers).
    """

    tokens: tuple[int, ...]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def n_bytes(self) -> int:
        """Size of the arrays [bytes]."""
        return sum(array.nbytes for array in self.arrays.values())
