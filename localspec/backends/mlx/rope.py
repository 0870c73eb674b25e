"""Rotary position embeddings as llama.cpp computes them, with every kind of scaling that a GGUF can ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched (llama.cpp: ``ggml_rope_ext``).

    Attributes:
        factor: linear interpolation: positions are divided by it.
        factors: divisors for each frequency [dims / 2], from the file (Llama 3's, Phi 3's); None for none.
        magnitude: queries and keys are multiplied by it.
        yarn: whether high frequencies are left alone, by YaRN's ramp (arXiv:2309.00071, section 3.2).
        n_ctx_original: the context length before stretching; YaRN's ramp depends on it.
        beta_fast: rotations over the original context above which a frequency is left alone.
        beta_slow: rotations below which it is fully interpolated.
    """

    factor: float = 1.0
    factors: npt.NDArray[np.float32] | None = None
    magnitude: float = 1.0
    yarn: bool = False
    n_ctx_original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class Rope(nn.Module):  # type: ignore[misc]
    """A drop-in for mlx-lm's rotary embeddings.

    Args:
        dims: how many of a head's channels rotate.
        base: the base of the frequencies.
        interleaved: neighbouring channels are a pair (llama.cpp's NORM) instead of i and i + dims/2 (NEOX).
        scaling: see ``RopeScaling``.
    """

    def __init__(self, dims: int, base: float, *, interleaved: bool, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        scaling = scaling or RopeScaling()
        self.dims = dims
        self.interleaved = interleaved
        self.magnitude = scaling.magnitude * _yarn_magnitude(scaling)
        # The underscore keeps it out of the module's parameters.
        self._periods = mx.array(periods(dims, base, scaling).astype(np.float32))
        self._depths: mx.array | None = None

    def branch(self, depths: Sequence[int] | None) -> None:
        """The rows of the passes to come stand so far behind ``offset``, and not one behind the other; None ends it."""
        self._depths = None if depths is None else mx.array(list(depths), mx.int32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Turn x [1, n_heads, n, width] by the positions from ``offset`` on."""
        if self._depths is not None:  # each row is a batch of its own
            rows = self._turned(x.swapaxes(0, 2), offset + self._depths)
            return rows.swapaxes(0, 2)
        return self._turned(x, offset)

    def _turned(self, x: mx.array, offset: int | mx.array) -> mx.array:
        if self.magnitude != 1.0:
            if self.dims == x.shape[-1]:
                x = x * self.magnitude
            else:
                x = mx.concatenate([x[..., : self.dims] * self.magnitude, x[..., self.dims :]], axis=-1)
        return mx.fast.rope(
            x, self.dims, traditional=self.interleaved, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


def periods(dims: int, base: float, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Positions per radian for each pair of channels [dims / 2]."""
    plain = base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    if scaling.factors is not None:
        plain = plain * scaling.factors
    stretched = plain * scaling.factor
    if not scaling.yarn:
        return np.asarray(stretched)

    def channel(rotations: float) -> float:
        """The pair of channels that turns so often over the original context."""
        return dims * math.log(scaling.n_ctx_original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(channel(scaling.beta_fast)))
    high = min(dims - 1.0, math.ceil(channel(scaling.beta_slow)))
    kept = 1 - np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0, 1)
    return np.asarray(1 / ((1 - kept) / stretched + kept / plain))


def _yarn_magnitude(scaling: RopeScaling) -> float:
    return 1 + 0.1 * math.log(scaling.factor) if scaling.yarn and scaling.factor > 1 else 1.0
