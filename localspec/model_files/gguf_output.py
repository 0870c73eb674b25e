"""Writing GGUF files piece by piece: nothing but a header and a piece of one tensor is ever in memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localspec.model_files.gguf_file import TensorInfo
from localspec.model_files.gguf_types import TENSOR_TYPES

_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
_ITEMS = {"<i4": 5, "<f4": 6}
"""Arrays that are written: NumPy's name of their items -> the format's number."""


def new_tensor(name: str, shape: tuple[int, ...], type_name: str) -> TensorInfo:
    """A tensor to be written.

    Args:
        name: e.g. ``blk.0.attn_q.weight``.
        shape: sizes as NumPy counts them: a matrix is (rows, columns).
        type_name: e.g. ``Q8_0``; rows must be whole blocks of it.
    """
    number = _NUMBERS[type_name]
    _, block, n_bytes = TENSOR_TYPES[number]
    if shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]}, not whole blocks of {block}")
    return TensorInfo(name, shape[::-1], number, 0, int(np.prod(shape)) // block * n_bytes)


class GGUFOutput:
    """A GGUF file being written: the header at once, then the data of its tensors in order.

    Args:
        file: where it goes; a file of ``write_atomically``.
        metadata: key -> text, number, or array of int32 or float32.
        tensors: what will follow; their places in the file are worked out here.
        encoded: keys that are written as they are, as they stood in another file.
        alignment: of the tensors [bytes].
    """

    def __init__(
        self,
        file: BinaryIO,
        metadata: Mapping[str, Any],
        tensors: Iterable[TensorInfo],
        *,
        encoded: Sequence[bytes | memoryview] = (),
        alignment: int = 32,
    ) -> None:
        self._file, self._alignment = file, alignment
        tensors = list(tensors)
        self._left = [tensor.n_bytes for tensor in reversed(tensors)]
        self._since = 0  # bytes of the tensor that is being written
        header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(encoded) + len(metadata))
        header += b"".join([*encoded, *(_text(key) + _value(value) for key, value in metadata.items())])
        offset = 0
        for tensor in tensors:
            n_dims = len(tensor.shape)
            header += _text(tensor.name) + struct.pack(f"<I{n_dims}Q", n_dims, *tensor.shape)
            header += struct.pack("<IQ", tensor.ggml_type, offset)
            offset += -(-tensor.n_bytes // alignment) * alignment
        file.write(header + bytes(-len(header) % alignment))

    def write(self, data: npt.NDArray[Any]) -> None:
        """The next bytes: of the tensor that was begun, or the first of the next one."""
        self._file.write(np.ascontiguousarray(data).data)
        self._since += data.nbytes
        if self._since == self._left[-1]:
            self._file.write(bytes(-self._since % self._alignment))
            self._left.pop()
            self._since = 0
        elif self._since > self._left[-1]:
            raise ValueError(f"a tensor of {self._left[-1]} bytes was given {self._since}")

    @property
    def complete(self) -> bool:
        """Whether every tensor has all its data."""
        return not self._left


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A value with the number of its type before it, in the narrowest type that readers expect."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 1 << 32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    array = np.ascontiguousarray(value)
    return struct.pack("<IIQ", 9, _ITEMS[array.dtype.str], array.size) + array.tobytes()
