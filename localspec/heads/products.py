"""Products of rows with a head's own matrices: by NumPy, or in 8 bits by the ggml of the engine that computes the head.

A step has a row or two, so a product takes as long as reading the matrix (``benchmarks/head_step.py``). One thread:
others would wait for each other where a core is taken by another program.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from localspec.backends.base import FloatArray, Model
from localspec.backends.llama.model import LlamaModel
from localspec.model_files.gguf import as_type

# Multiplications up to which OpenBLAS takes one thread for a product with a matrix, and with a vector
_ONE_THREAD, _ONE_THREAD_VECTOR = 1 << 18, 9216

# ggml's numbers of types, the same ones as in GGUF files, and the values of a block of Q8_0
_F32, _Q8_0, _BLOCK = 0, 8, 32

# Rows of a product; others are put together of these. Each is compared with NumPy's before any is used.
_PIECE_WIDTHS = (16, 8, 4, 2, 1)

_MOST_ERROR = 0.02  # root mean square of the difference from NumPy's product, over that of the product; 0.007 is usual
_GRAPH_SIZE = 16  # nodes; there is one
_SLACK = 1 << 16  # bytes, for what alignment takes


class Products:
    """By NumPy."""

    def __init__(self, matrices: Sequence[FloatArray]) -> None:
        self._matrices = matrices

    def __call__(self, which: int, rows: FloatArray) -> FloatArray:
        """``rows @ matrices[which].T``: rows [n, k] and a matrix [m, k] -> [n, m], a copy."""
        return product(rows, self._matrices[which])

    def close(self) -> None:
        """Free the matrices; safe to call twice."""
        self._matrices = ()


class GgmlProducts(Products):
    """In Q8_0, by ggml, on one thread; matrices [m, k].

    Raises:
        AttributeError: the library does not show all of ggml's functions.
        MemoryError: ggml gets no memory.
        ValueError: rows are no whole blocks, or it computes something else than NumPy does.
    """

    def __init__(self, library: ctypes.CDLL, matrices: Sequence[FloatArray]) -> None:
        if any(matrix.shape[1] % _BLOCK for matrix in matrices):
            raise ValueError("rows are no whole blocks")
        ggml = _Ggml(library)
        self._compute, self._free, self._lock = ggml.graph_compute, ggml.free, threading.Lock()
        sizes = [matrix.size * 34 // 32 + 4 * sum(_PIECE_WIDTHS) * sum(matrix.shape) for matrix in matrices]
        overhead = (1 + 2 * len(_PIECE_WIDTHS)) * ggml.tensor_overhead() + _SLACK
        overhead += len(_PIECE_WIDTHS) * ggml.graph_overhead_custom(_GRAPH_SIZE, False)
        self._context = ggml.init(_InitParams(sum(sizes) + len(matrices) * overhead, None, False))
        if not self._context:
            raise MemoryError("ggml has no memory for a head's matrices")
        self._products: list[dict[int, _Product]] = []
        for matrix in matrices:
            weights = ggml.new_tensor_2d(self._context, _Q8_0, matrix.shape[1], len(matrix))
            values = as_type(matrix, "Q8_0")
            ctypes.memmove(ggml.get_data(weights), values.ctypes.data, values.nbytes)
            self._products.append({n: _Product(ggml, self._context, weights, matrix.shape, n) for n in _PIECE_WIDTHS})
        try:
            self._check(matrices)
        except ValueError:
            self.close()
            raise

    def _check(self, matrices: Sequence[FloatArray]) -> None:
        rng = np.random.default_rng(0)
        for which, matrix in enumerate(matrices):
            rows = rng.standard_normal((sum(_PIECE_WIDTHS), matrix.shape[1])).astype(np.float32)
            expected = product(rows, matrix)
            error = np.sqrt(np.mean((self(which, rows) - expected) ** 2) / max(np.mean(expected**2), 1e-30))
            if not error <= _MOST_ERROR:
                raise ValueError(f"a product in 8 bits is off by {error:.2g}")

    def __call__(self, which: int, rows: FloatArray) -> FloatArray:
        widths = self._products[which]
        found: FloatArray = np.empty((len(rows), widths[1].result.shape[1]), dtype=np.float32)
        with self._lock:
            at = 0
            while at < len(rows):
                n = next(width for width in _PIECE_WIDTHS if width <= len(rows) - at)
                widths[n].rows[:] = rows[at : at + n]
                self._compute(widths[n].graph, ctypes.byref(widths[n].plan))
                found[at : at + n] = widths[n].result
                at += n
        return found

    def close(self) -> None:
        if self._context:
            self._products.clear()
            self._free(self._context)
            self._context = None


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """``ggml_cplan``: what comes after the first three fields differs between versions, and is left as it is."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("rest", ctypes.c_byte * 236),
    )


class _Ggml:
    def __init__(self, library: ctypes.CDLL) -> None:
        handle, number = ctypes.c_void_p, ctypes.c_int64

        def bind(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)((f"ggml_{name}", library))

        self.init = bind("init", handle, _InitParams)
        self.free = bind("free", None, handle)
        self.tensor_overhead = bind("tensor_overhead", ctypes.c_size_t)
        self.graph_overhead_custom = bind("graph_overhead_custom", ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool)
        self.new_tensor_2d = bind("new_tensor_2d", handle, handle, ctypes.c_int, number, number)
        self.get_data = bind("get_data", handle, handle)
        self.mul_mat = bind("mul_mat", handle, handle, handle, handle)
        self.new_graph_custom = bind("new_graph_custom", handle, handle, ctypes.c_size_t, ctypes.c_bool)
        self.build_forward_expand = bind("build_forward_expand", None, handle, handle)
        # ik_llama.cpp's takes no third argument, and does not look at it.
        self.graph_plan = bind("graph_plan", _Plan, handle, ctypes.c_int, handle)
        self.graph_compute = bind("graph_compute", ctypes.c_int, handle, ctypes.POINTER(_Plan))


class _Product:
    """A product of so many rows, ready to be computed: reads ``rows`` [n, k] and writes ``result`` [n, m]."""

    def __init__(self, ggml: _Ggml, context: int, weights: int, shape: tuple[int, ...], n: int) -> None:
        rows = ggml.new_tensor_2d(context, _F32, shape[1], n)
        result = ggml.mul_mat(context, weights, rows)
        self.graph = ggml.new_graph_custom(context, _GRAPH_SIZE, False)
        ggml.build_forward_expand(self.graph, result)
        self.plan = ggml.graph_plan(self.graph, 1, None)
        self._work = np.empty(max(1, self.plan.work_size), dtype=np.uint8)
        self.plan.work_data = self._work.ctypes.data
        self.rows, self.result = _at(ggml.get_data(rows), n, shape[1]), _at(ggml.get_data(result), n, shape[0])


def _at(address: int, n: int, k: int) -> FloatArray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (n, k))


def products(model: Model, matrices: Sequence[FloatArray]) -> Products:
    """The products with these matrices: by ggml where that is the engine's and can be used."""
    if matrices and isinstance(model, LlamaModel):
        try:
            return GgmlProducts(model.binding.tensors.library, matrices)
        except (AttributeError, MemoryError, ValueError):
            pass
    return Products(matrices)


def product(rows: FloatArray, matrix: FloatArray) -> FloatArray:
    """``rows @ matrix.T`` [n, m], in blocks that OpenBLAS computes in one thread: its threads wait by spinning."""
    n, k = rows.shape
    room = max(1, (_ONE_THREAD if n > 1 else _ONE_THREAD_VECTOR) // max(1, n * k))
    block = math.gcd(len(matrix), 1 << (room.bit_length() - 1))
    blocks: FloatArray = np.matmul(matrix.reshape(-1, block, k), rows.T)  # [m / block, block, n]
    return blocks.reshape(len(matrix), n).T
