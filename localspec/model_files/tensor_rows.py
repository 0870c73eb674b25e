"""Rows of a tensor as float32, and back: only the rows that are asked for are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile, TensorInfo

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def n_rows(file: GGUFFile, name: str) -> int:
    """Rows of a tensor; 1 for a vector."""
    tensor = file.tensors[name]
    return tensor.n_elements // tensor.shape[0]


def tensor_rows(file: GGUFFile, name: str, rows: slice | Sequence[int] | npt.NDArray[np.int32]) -> Floats:
    """Some rows of a tensor, dequantised [n, columns]; a copy.

    Raises:
        UnsupportedModel: a type that the ``gguf`` package cannot unpack.
        IndexError: there is no such row.
    """
    tensor = file.tensors[name]
    raw = file.tensor_bytes(name).reshape(n_rows(file, name), -1)[rows]
    try:
        return np.array(dequantised(raw, tensor), dtype=np.float32)
    except (NotImplementedError, ValueError):
        raise UnsupportedModel(
            f"{file.path.name}: the gguf package cannot unpack {tensor.type_name} ({name[:60]})"
        ) from None


def dequantised(raw: Bytes, tensor: TensorInfo) -> Floats:
    """Rows of a tensor [n, bytes of a row] as numbers [n, columns].

    Raises:
        NotImplementedError, ValueError: a type that the ``gguf`` package cannot unpack.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(tensor.ggml_type))
    return values.reshape(len(raw), tensor.shape[0])


def as_type(values: Floats, type_name: str) -> Bytes:
    """Rows in a tensor type of GGUF, as bytes [n, bytes of a row]; rows must be whole blocks.

    Raises:
        NotImplementedError: the ``gguf`` package cannot write that type.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    quantised = quantize(np.ascontiguousarray(values, dtype=np.float32), GGMLQuantizationType[type_name])
    return np.ascontiguousarray(quantised).view(np.uint8)
