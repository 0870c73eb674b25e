"""Tensors of a GGUF as MLX arrays, one at a time: nothing but the finished model and one tensor is in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from localspec.backends.mlx.blocks import BLOCK_TYPES, repack
from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile, TensorInfo

PLAIN_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Format:
    """How a tensor is stored in memory.

    Attributes:
        ggml_type: its type in the file.
        bits: bits of a code; 0 for plain numbers.
        group: values that share a scale and a bias; 0 for plain numbers.
        dtype: of the numbers, or of scales and biases: ``float32``, ``float16`` or ``bfloat16``.
        exact: whether it holds the file's values to the last bit.
        n_bytes: bytes in memory.
        parameter: the path of the model's parameter that holds it.
    """

    ggml_type: str
    bits: int
    group: int
    dtype: str
    exact: bool
    n_bytes: int
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as MLX arrays.

    Attributes:
        weight: plain numbers, or codes as uint32 [..., n_columns * bits / 32].
        scales: [..., n_columns / group], or None for plain numbers.
        biases: as ``scales``.
        format: see ``Format``.
    """

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    format: Format


def read_tensor(
    file: GGUFFile,
    info: TensorInfo,
    dtype: mx.Dtype,
    *,
    convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None,
    plain: bool = False,
) -> Stored:
    """Read and repack one tensor.

    Args:
        file: where it is.
        info: which it is.
        dtype: of plain numbers, scales and biases.
        convert: applied to the numbers [rows, columns] of a plain tensor.
        plain: whether the tensor has to be plain numbers.

    Raises:
        UnsupportedModel: its type cannot be represented, or its numbers do not fit into ``dtype``.
    """
    shape = info.shape[::-1]  # ggml counts the fastest-varying dimension first
    if info.type_name in PLAIN_TYPES:
        return _read_plain(file, info, shape, dtype, convert)
    kind = BLOCK_TYPES.get(info.type_name)
    if kind is None or plain or convert is not None:
        wanted = ", ".join(PLAIN_TYPES if kind else (*BLOCK_TYPES, *PLAIN_TYPES))
        raise UnsupportedModel(
            f"{file.path.name}: the mlx backend cannot read {info.name} as {info.type_name}, only as {wanted}; "
            "use --backend llama-cpp or another quantisation of the model"
        )
    matrix = repack(kind, file.tensor_bytes(info.name).reshape(-1, shape[-1] // kind.block * kind.n_bytes))
    exact = kind.exact
    numbers = []
    for each in (matrix.scales, matrix.biases):
        array, kept = _to_dtype(each, dtype, file, info)
        exact &= kept
        numbers.append(array.reshape(*shape[:-1], -1))
    codes = mx.array(matrix.codes).reshape(*shape[:-1], -1)
    n_bytes = codes.nbytes + numbers[0].nbytes + numbers[1].nbytes
    format_ = Format(info.type_name, matrix.bits, matrix.group, _dtype_name(dtype), exact, n_bytes)
    return Stored(codes, numbers[0], numbers[1], format_)


def _read_plain(
    file: GGUFFile,
    info: TensorInfo,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None,
) -> Stored:
    raw = file.tensor_bytes(info.name)
    if info.type_name == "BF16" and dtype == mx.bfloat16 and convert is None:
        array, exact = mx.array(raw.view(np.uint16).reshape(shape)).view(mx.bfloat16), True
    elif info.type_name == "F16" and dtype == mx.float16 and convert is None:
        array, exact = mx.array(raw.view(np.float16).reshape(shape)), True
    else:
        array, exact = _to_dtype(_plain_numbers(info, raw, shape, convert), dtype, file, info)
    mx.eval(array)
    return Stored(array, None, None, Format(info.type_name, 0, 0, _dtype_name(dtype), exact, array.nbytes))


def _plain_numbers(
    info: TensorInfo,
    raw: npt.NDArray[np.uint8],
    shape: tuple[int, ...],
    convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None,
) -> npt.NDArray[np.float32]:
    if info.type_name == "BF16":
        numbers = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = raw.view(np.float32 if info.type_name == "F32" else np.float16).astype(np.float32, copy=False)
    numbers = numbers.reshape(shape)
    return numbers if convert is None else np.asarray(convert(numbers), dtype=np.float32)


def _to_dtype(
    numbers: npt.NDArray[np.float32], dtype: mx.Dtype, file: GGUFFile, info: TensorInfo
) -> tuple[mx.array, bool]:
    """Numbers as an evaluated MLX array, and whether none was rounded."""
    if dtype == mx.float32:
        return mx.array(numbers), True
    narrow = mx.array(numbers).astype(dtype)
    back = np.array(narrow.astype(mx.float32))
    if not np.isfinite(back).all() and np.isfinite(numbers).all():
        raise UnsupportedModel(
            f"{file.path.name}: {info.name} holds numbers too large for {_dtype_name(dtype)}; compute in float32"
        )
    return narrow, bool(np.array_equal(back, numbers))


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
