"""GGUF files: the header, read lazily from a memory map; nothing is allocated by a number that the file names."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import ModelFileError, NotGGUF, UnsupportedModel

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMS = 100_000, 1_000_000, 4

_NOT_GENERATORS = {
    "bert": "an embedding model",
    "nomic-bert": "an embedding model",
    "nomic-bert-moe": "an embedding model",
    "modern-bert": "an embedding model",
    "neo-bert": "an embedding model",
    "jina-bert-v2": "an embedding model",
    "jina-bert-v3": "an embedding model",
    "eurobert": "an embedding model",
    "gemma-embedding": "an embedding model",
    "t5encoder": "an encoder",
    "clip": "an image projector",
    "wavtokenizer-dec": "an audio decoder",
    "whisper": "a speech recogniser",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: e.g. ``blk.0.attn_q.weight``.
        shape: sizes with the fastest-varying dimension first, as ggml counts them: ``shape[0]`` is the row length.
        ggml_type: number of the tensor type; ``type_name`` is its name.
        offset: from the start of the file, in bytes.
        n_bytes: size of the data.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    n_bytes: int

    @property
    def type_name(self) -> str:
        from gguf import GGMLQuantizationType

        try:
            return GGMLQuantizationType(self.ggml_type).name
        except ValueError:
            return f"type {self.ggml_type}"

    @property
    def n_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


class StringArray(Sequence[str]):
    """An array of strings in the file, decoded on access. The first access walks the array once."""

    def __init__(self, buffer: memoryview, start: int, count: int, end: int) -> None:
        self._buffer, self._start, self._count, self._end = buffer, start, count, end
        self._offsets: npt.NDArray[np.int64] | None = None

    @property
    def raw(self) -> memoryview:
        """The array's bytes: lengths and strings, one after the other."""
        return self._buffer[self._start : self._end]

    def __len__(self) -> int:
        return self._count

    def bytes_at(self, index: int) -> bytes:
        if self._offsets is None:
            offsets = np.empty(self._count, dtype=np.int64)
            at, unpack = self._start, struct.Struct("<Q").unpack_from
            for i in range(self._count):
                offsets[i] = at
                at += 8 + unpack(self._buffer, at)[0]
            self._offsets = offsets
        at = int(self._offsets[index])
        (length,) = struct.unpack_from("<Q", self._buffer, at)
        return bytes(self._buffer[at + 8 : at + 8 + length])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self.bytes_at(index % self._count).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        at, unpack, buffer = self._start, struct.Struct("<Q").unpack_from, self._buffer
        for _ in range(self._count):
            (length,) = unpack(buffer, at)
            yield bytes(buffer[at + 8 : at + 8 + length]).decode("utf-8", "replace")
            at += 8 + length


class GGUFFile:
    """The header of a GGUF file (versions 2 and 3, little-endian).

    Attributes:
        path: the file.
        version: GGUF version.
        metadata: key -> value. Arrays of numbers are NumPy views, arrays of strings ``StringArray``; both are read
            from the map only when used.
        tensors: name -> ``TensorInfo``; every one lies inside the file.
        header_end: offset of the end of the tensor list [bytes].
        kv_range: offsets of the metadata section [bytes].

    Raises:
        NotGGUF: empty, foreign, damaged or cut short.
        ModelFileError: the file cannot be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._open()
        try:
            self._parse()
        except (struct.error, IndexError, OverflowError, ValueError, MemoryError) as error:
            self.close()
            raise NotGGUF(f"{self.path.name} is damaged or cut short: its header cannot be read ({error})") from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._map: mmap.mmap | None = None
        self._buffer: memoryview | None = None
        try:
            with self.path.open("rb") as file:
                head = file.read(8)
                if not head:
                    raise NotGGUF(f"{self.path.name} is empty")
                if head[:4] != b"GGUF":
                    raise NotGGUF(f"{self.path.name} is not a GGUF file (it begins with {head[:4]!r})")
                if len(head) < 8:
                    raise NotGGUF(f"{self.path.name} is cut short: {len(head)} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"cannot read {self.path}: {error.strerror or error}") from None
        self._buffer = memoryview(self._map)

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            raise ModelFileError(f"{self.path.name} was closed")
        return self._buffer

    def _parse(self) -> None:
        self.n_bytes = len(self.buffer)
        (self.version,) = struct.unpack_from("<I", self.buffer, 4)
        if self.version not in (2, 3):
            if self.version & 0xFFFF == 0:
                raise NotGGUF(f"{self.path.name} is a big-endian GGUF, which is not supported")
            raise NotGGUF(f"{self.path.name} is GGUF version {self.version}; versions 2 and 3 are supported")
        n_tensors, n_keys = struct.unpack_from("<QQ", self.buffer, 8)
        if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
            raise NotGGUF(f"{self.path.name} is damaged: it claims {n_keys} keys and {n_tensors} tensors")
        at = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self.buffer, at)
            self.metadata[key], at = self._value(at + 4, kind)
        self.kv_range = (24, at)
        self.alignment = int(self.metadata.get("general.alignment", 32))
        if not 0 < self.alignment <= 1 << 20:
            raise NotGGUF(f"{self.path.name} is damaged: alignment {self.alignment}")
        infos = []
        for _ in range(n_tensors):
            name, at = self._string(at)
            (n_dims,) = struct.unpack_from("<I", self.buffer, at)
            if n_dims > _MAX_DIMS:
                raise NotGGUF(f"{self.path.name} is damaged: tensor {name[:60]!r} has {n_dims} dimensions")
            shape = struct.unpack_from(f"<{n_dims}Q", self.buffer, at + 4)
            at += 4 + 8 * n_dims
            kind, offset = struct.unpack_from("<IQ", self.buffer, at)
            at += 12
            infos.append((name, shape, kind, offset))
        self.header_end = at
        self._place(infos, -(-at // self.alignment) * self.alignment)

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], data: int) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        end = data
        for name, shape, kind, offset in infos:
            n_bytes = _tensor_bytes(shape, kind)
            if n_bytes is None:
                # An unknown type: its size is not ours to check; the engine will name it.
                n_bytes = 0
            end = max(end, data + offset + n_bytes)
            self.tensors[name] = TensorInfo(name, tuple(shape), kind, data + offset, n_bytes)
        if infos and end > self.n_bytes:
            raise NotGGUF(
                f"{self.path.name} is cut short: {end - self.n_bytes:,} of {end:,} bytes are missing; fetch it again"
            )

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self.buffer, at)
        end = at + 8 + length
        if end > self.n_bytes:
            raise ValueError(f"a string of {length} bytes")
        return bytes(self.buffer[at + 8 : end]).decode("utf-8", "replace"), end

    def _value(self, at: int, kind: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            (value,) = struct.unpack_from(_SCALARS[kind], self.buffer, at)
            return value, at + struct.calcsize(_SCALARS[kind])
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            raise ValueError(f"value type {kind}")
        item, count = struct.unpack_from("<IQ", self.buffer, at)
        at += 12
        if item in _SCALARS:
            dtype = np.dtype("<?" if item == 7 else _SCALARS[item].replace("<", "<"))
            end = at + count * dtype.itemsize
            if end > self.n_bytes:
                raise ValueError(f"an array of {count} items")
            return np.frombuffer(self.buffer[at:end], dtype=dtype), end
        if item == _STRING:
            if count * 8 > self.n_bytes - at:
                raise ValueError(f"an array of {count} strings")
            start, unpack, size = at, struct.Struct("<Q").unpack_from, self.n_bytes
            buffer = self.buffer
            for _ in range(count):
                at += 8 + unpack(buffer, at)[0]
                if at > size:
                    raise ValueError("a string beyond the end of the file")
            return StringArray(buffer, start, count, at), at
        raise ValueError(f"array of type {item}")

    # -- what it says --------------------------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def field(self, name: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<name>``."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @property
    def name(self) -> str:
        return str(self.metadata.get("general.name", "")) or self.path.stem

    @property
    def n_ctx_train(self) -> int:
        """Context length the model was trained for; 0 when the file does not say."""
        value = self.field("context_length", 0)
        return int(value) if isinstance(value, int) else 0

    @property
    def n_params(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors.values())

    def check_generates_text(self) -> None:
        """Refuse files that no engine can generate text with.

        Raises:
            UnsupportedModel: a tokenizer alone, an embedding model, an adapter, a projector, …
        """
        name, architecture = self.path.name, self.architecture
        kind = str(self.metadata.get("general.type", "model"))
        if kind == "adapter" or "adapter.type" in self.metadata:
            raise UnsupportedModel(f"{name} is a LoRA adapter, not a model")
        if kind == "mmproj" or architecture in _NOT_GENERATORS:
            what = _NOT_GENERATORS.get(architecture, "an image projector")
            raise UnsupportedModel(f"{name} is {what} ({architecture or kind}), which cannot generate text")
        if not self.tensors:
            raise UnsupportedModel(f"{name} holds a tokenizer but no weights")
        if not architecture:
            raise UnsupportedModel(f"{name} does not name its architecture")
        if "tokenizer.ggml.tokens" not in self.metadata:
            raise UnsupportedModel(f"{name} has no vocabulary")
        pooling = self.field("pooling_type", 0)
        if isinstance(pooling, int) and pooling not in (0, -1, 0xFFFFFFFF):
            raise UnsupportedModel(f"{name} is an embedding model ({architecture} with pooling), not a generator")

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's data as bytes [n_bytes], a view of the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self.buffer[tensor.offset : tensor.offset + tensor.n_bytes], dtype=np.uint8)

    def close(self) -> None:
        """Unmap the file, once nothing refers to it any more; safe to call twice."""
        self._buffer = None
        mapped, self._map = self._map, None
        if mapped is not None:
            try:
                mapped.close()
            except BufferError:
                return  # views of it are alive; the map goes with the last of them

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _tensor_bytes(shape: Mapping[int, int] | tuple[int, ...], kind: int) -> int | None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return None
    total = 1
    for each in tuple(shape):
        total *= each
    return total // block * size
