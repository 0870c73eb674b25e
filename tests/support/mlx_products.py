"""MLX's matrix products on a CPU, replaced: by a BLAS, which is fifty times as fast, and with llama.cpp's rounding.

MLX's CPU kernels take 0.1 to 2 seconds a token for the real models. With the very weights that they would multiply
(``mx.dequantize``), NumPy makes the same products at the speed of a BLAS.

llama.cpp computes less precisely than float32: it rounds what enters a product with quantised weights to 8 bits, in
blocks, and attention to float16. Doing the same here shows how large the difference between the two engines has to be
if nothing but rounding differs: the bound that the tests hold the real difference against.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from localspec.backends.mlx.architecture import ARCHITECTURES
from localspec.backends.mlx.network import Network
from localspec.backends.mlx.weights import place_of
from localspec.model_files.gguf import GGUFFile

Array = npt.NDArray[Any]
_ROWS = 1 << 14


def rounded_to_8_bits(x: Array, block: int) -> Array:
    """Rows [n, m] as llama.cpp rounds activations: 255 levels around zero for each ``block`` values.

    Blocks of 32 (for weights with blocks of 32) keep their step as float16, blocks of 256 (K-quants) as float32.
    """
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    codes = np.rint(blocks * np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0))
    step = largest / 127
    step = step.astype(np.float16).astype(np.float32) if block == 32 else step
    return np.asarray((codes * step).reshape(x.shape), dtype=np.float32)


@contextmanager
def numpy_products(network: Network, file: GGUFFile, *, as_llama_cpp: bool = False) -> Iterator[None]:
    """Within it, the network's products with quantised weights are NumPy's.

    Args:
        network: the model.
        file: what it was loaded from.
        as_llama_cpp: round as llama.cpp's CPU kernels do.
    """
    parameters = dict(tree_flatten(network.module.parameters()))
    # K-quants have blocks of 256, and activations are rounded in blocks of that size to match.
    block_of: dict[int, int] = {}
    for info in file.tensors.values():
        place = place_of(0, ARCHITECTURES[network.architecture], network.module, info)
        if place is not None:
            block_of[id(parameters[place])] = 256 if info.type_name.endswith(("_K", "_XS")) else 32

    def quantized_matmul(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        transpose: bool,
        **options: Any,
    ) -> mx.array:
        assert transpose
        inputs = np.array(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        if as_llama_cpp:
            inputs = rounded_to_8_bits(inputs, block_of[id(w)])
        parts = []
        for start in range(0, w.shape[0], _ROWS):
            part = slice(start, start + _ROWS)
            of_part = None if biases is None else biases[part]
            weights = mx.dequantize(w[part], scales[part], of_part, **options)
            parts.append(inputs @ np.array(weights.astype(mx.float32)).T)
        return mx.array(np.concatenate(parts, axis=1)).reshape(*x.shape[:-1], -1)

    gather_qmm = mx.gather_qmm

    def rounded_gather_qmm(x: mx.array, w: mx.array, *arrays: mx.array, **options: Any) -> mx.array:
        inputs = rounded_to_8_bits(np.array(x).reshape(-1, x.shape[-1]), block_of[id(w)])
        return gather_qmm(mx.array(inputs).reshape(x.shape), w, *arrays, **options)

    attention = mx.fast.scaled_dot_product_attention

    def scaled_dot_product_attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        q, k, v = (each.astype(mx.float16).astype(mx.float32) for each in (q, k, v))
        return attention(q, k, v, **options)

    with patch.object(mx, "quantized_matmul", quantized_matmul):
        if not as_llama_cpp:
            yield
            return
        with (
            patch.object(mx, "gather_qmm", rounded_gather_qmm),
            patch.object(mx.fast, "scaled_dot_product_attention", scaled_dot_product_attention),
        ):
            yield
