"""GGUF files: header, tensors, and writing them. Nothing is allocated by a number that the file names."""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import tomllib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localspec.errors import ModelFileError, NotGGUF, UnsupportedModel, is_whole, shown
from localspec.model_files.catalog import part_names
from localspec.system.plugins import HEAD_KINDS, offered


def model_files(path: Path) -> tuple[Path, ...]:
    """The files of a model that are there: the one given, and the parts after it up to the first missing one."""
    found = [path]
    for name in part_names(path.name)[1:]:
        part = path.with_name(name)
        if not part.is_file():
            break
        found.append(part)
    return tuple(found)


def model_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in model_files(path))


def fingerprint(path: Path) -> str:
    """A digest of a model's size, its header and 64 samples of its data; quick on any size. Of all parts it has.

    Calibrations, verdicts and saved conversations are kept by it.
    """
    found = [_fingerprint_of(file) for file in model_files(path)]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()[:32]


def _fingerprint_of(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for i in range(64):
            file.seek(size * i // 64)
            digest.update(file.read(4096))
    return digest.hexdigest()[:32]


# What files mean by number and by name. Importing ``gguf`` for that would take 0.2 s.
KNOWN: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("known.toml").read_text("utf-8"))
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    number: (name, block, n_bytes) for name, (number, block, n_bytes) in KNOWN["tensor_types"].items()
}
"""Number -> (name, values in a block, bytes of a block)."""

_FILE_TYPES: dict[int, str] = {number: name for name, number in KNOWN["file_types"].items()}
_NOT_GENERATORS: dict[str, str] = {each: what for what, names in KNOWN["not_generators"].items() for each in names}

ROWS_ONLY = "localspec.head.engine_file"
"""Metadata key of a file whose contexts are fed with rows of floats: it has no tokens."""


def is_mtp_alone(tensors: Container[str], n_blocks: object, n_extra: object) -> bool:
    """Whether a file holds an MTP layer without its model: by tensor names, all layers, and MTP layers among these."""
    if not n_extra or not isinstance(n_blocks, int):
        return False
    return f"blk.{n_blocks - 1}.nextn.eh_proj.weight" in tensors and "blk.0.attn_norm.weight" not in tensors


def string_offsets(buffer: memoryview, start: int, count: int) -> npt.NDArray[np.int64]:
    """Where each of ``count`` strings (8 bytes of length, then the bytes) begins, and the end of the list [count + 1].
    ``struct.error``, ``OverflowError`` or ``ValueError`` where one reaches beyond the buffer."""
    unpack, at = struct.Struct("<Q").unpack_from, start
    offsets = [at]
    for _ in range(count):
        at += 8 + unpack(buffer, at)[0]
        offsets.append(at)
    if at > len(buffer):
        raise ValueError("a list of texts reaches beyond its end")
    return np.array(offsets, dtype=np.int64)


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
# Far beyond any real file (800,000 strings, 2,000 tensors); they bound the time that a hostile header can take.
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMS, _MAX_STRINGS = 1 << 16, 1 << 17, 4, 1 << 22


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]  # with the fastest-varying dimension first, as ggml counts: ``shape[0]`` is the row length
    ggml_type: int  # number of the tensor type; ``type_name`` is its name
    offset: int  # from the start of its file [bytes]
    n_bytes: int  # size of the data
    shard: int = 0  # which file of a split model holds it; 0 is the first

    @property
    def type_name(self) -> str:
        known = TENSOR_TYPES.get(self.ggml_type)
        return known[0] if known else f"type {self.ggml_type}"

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class StringArray(Sequence[str]):
    """An array of strings in the file, decoded on access: each 8 bytes of length and the string in ``raw``, beginning
    at ``offsets`` [n + 1], the last of which is the end."""

    def __init__(self, raw: memoryview, offsets: npt.NDArray[np.int64]) -> None:
        self.raw = raw
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def bytes_at(self, index: int) -> bytes:
        return bytes(self.raw[int(self.offsets[index]) + 8 : int(self.offsets[index + 1])])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.bytes_at(index % len(self)).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        raw, at = bytes(self.raw), 0
        for end in self.offsets[1:].tolist():
            yield raw[at + 8 : end].decode("utf-8", "replace")
            at = end

    def copy(self) -> StringArray:
        """The same strings, independent of the file."""
        return StringArray(memoryview(bytes(self.raw)), self.offsets)


class GGUFFile:
    """The header of a GGUF file (versions 2 and 3, little-endian), and of its other parts if not ``alone``.

    Attributes:
        metadata: key -> value. Arrays of numbers are NumPy views, arrays of strings ``StringArray``, read when used.
        kinds: key -> number of its value's type, as the format counts them.
        tensors: name -> ``TensorInfo``; every one lies inside its file.
        alignment: of the tensor data [bytes].
        kv_ranges: key -> where the key, its type and its value begin and end [bytes].
        n_bytes: size of all parts together.
        shards: the other parts, opened.

    Raises:
        NotGGUF: empty, foreign, damaged or cut short.
        ModelFileError: the file, or a part of the model, cannot be read.
    """

    def __init__(self, path: Path | str, *, alone: bool = False) -> None:
        self.path = Path(path)
        self.shards: list[GGUFFile] = []
        self._map: mmap.mmap | None = None
        self._buffer: memoryview | None = None
        self._n_strings = 0
        try:
            self._open()
            self._parse()
            if not alone:
                self._open_shards()
        except (struct.error, IndexError, OverflowError, ValueError, TypeError, MemoryError) as error:
            self.close()
            detail = "it ends inside its header" if isinstance(error, struct.error) else str(error)
            raise NotGGUF(f"{self.path.name} is damaged or cut short: {detail}; fetch it again") from None
        except BaseException:
            self.close()
            raise

    # -- reading -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            with self.path.open("rb") as file:
                head = file.read(8)
                if not head:
                    raise NotGGUF(f"{self.path.name} is empty")
                if head[:4] != b"GGUF":
                    raise NotGGUF(f"{self.path.name} is not a GGUF file (it begins with {head[:4]!r})")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"cannot read {self.path}: {error.strerror or error}") from None
        self._buffer = memoryview(self._map)
        self._size = self.n_bytes = len(self._buffer)

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            raise ModelFileError(f"{self.path.name} was closed")
        return self._buffer

    def _parse(self) -> None:
        (self.version,) = struct.unpack_from("<I", self.buffer, 4)
        if self.version not in (2, 3):
            if self.version & 0xFFFF == 0:
                raise NotGGUF(f"{self.path.name} is a big-endian GGUF; only little-endian files are supported")
            raise NotGGUF(f"{self.path.name} is GGUF version {self.version}; versions 2 and 3 are supported")
        n_tensors, n_keys = struct.unpack_from("<QQ", self.buffer, 8)
        # The shortest entry of each kind is 13 and 24 bytes long.
        if n_keys > min(_MAX_KEYS, self._size // 13) or n_tensors > min(_MAX_TENSORS, self._size // 24):
            raise ValueError(f"it claims {n_keys} keys and {n_tensors} tensors")
        at = 24
        self.metadata: dict[str, Any] = {}
        self.kv_ranges: dict[str, tuple[int, int]] = {}
        self.kinds: dict[str, int] = {}
        for _ in range(n_keys):
            start = at
            key, at = self._string(at)
            if key in self.metadata:
                raise ValueError(f"the key {key[:60]!r} occurs twice")
            (kind,) = struct.unpack_from("<I", self.buffer, at)
            self.kinds[key] = kind
            self.metadata[key], at = self._value(at + 4, kind)
            self.kv_ranges[key] = (start, at)
        self.alignment = int(self.metadata.get("general.alignment", 32))
        if self.kinds.get("general.alignment", _UINT32) != _UINT32:  # engines abort the process on that
            raise ValueError("its alignment is not a 32-bit number")
        if not 0 < self.alignment <= 1 << 20:
            raise ValueError(f"its alignment is {self.alignment}")
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(n_tensors):
            at = self._tensor(at)
        self._place(-(-at // self.alignment) * self.alignment)

    def _tensor(self, at: int) -> int:
        name, at = self._string(at)
        (n_dims,) = struct.unpack_from("<I", self.buffer, at)
        if n_dims > _MAX_DIMS or name in self.tensors:
            raise ValueError(f"tensor {name[:60]!r} has {n_dims} dimensions, or occurs twice")
        shape = struct.unpack_from(f"<{n_dims}Q", self.buffer, at + 4) or (1,)  # a single number, as ggml sees it
        if not 0 < math.prod(shape) < 1 << 62:  # engines abort the process on empty ones too
            raise ValueError(f"tensor {name[:60]!r} has the sizes {list(shape)}")
        at += 4 + 8 * n_dims
        kind, offset = struct.unpack_from("<IQ", self.buffer, at)
        _, block, n_bytes = TENSOR_TYPES.get(kind, ("", 1, 0))
        if shape and shape[0] % block:
            raise ValueError(f"tensor {name[:60]!r} has rows of {shape[0]}, not whole blocks of {block}")
        self.tensors[name] = TensorInfo(name, shape, kind, offset, math.prod(shape) // block * n_bytes)
        return at + 12

    def _place(self, data: int) -> None:
        """Turn offsets in the data section into offsets in the file, and check that all of it is there."""
        starts = sorted({tensor.offset for tensor in self.tensors.values()})
        following = dict(zip(starts, [*starts[1:], max(self._size - data, 0)], strict=False))
        end = data if self.tensors else 0
        for name, tensor in self.tensors.items():
            n_bytes, offset = tensor.n_bytes, data + tensor.offset
            if tensor.ggml_type not in TENSOR_TYPES:
                # A type of some fork: all we know is that it ends before the next one begins.
                n_bytes = max(following[tensor.offset] - tensor.offset, 0)
            end = max(end, offset + n_bytes)
            self.tensors[name] = replace(tensor, offset=offset, n_bytes=n_bytes)
        if end > self._size:
            raise NotGGUF(
                f"{self.path.name} is cut short: {end - self._size:,} of {end:,} bytes are missing; fetch it again"
            )

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self.buffer, at)
        end = at + 8 + length
        if end > self._size:
            raise ValueError(f"a text of {length} bytes reaches beyond its end")
        return bytes(self.buffer[at + 8 : end]).decode("utf-8", "replace"), end

    def _value(self, at: int, kind: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            (value,) = struct.unpack_from(_SCALARS[kind], self.buffer, at)
            return value, at + struct.calcsize(_SCALARS[kind])
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        item, count = struct.unpack_from("<IQ", self.buffer, at)
        at += 12
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            end = at + count * dtype.itemsize
            if end > self._size:
                raise ValueError(f"a list of {count} numbers reaches beyond its end")
            return np.frombuffer(self.buffer[at:end], dtype=dtype), end
        if item != _STRING:
            raise ValueError(f"a list has items of the unknown type {item}")
        self._n_strings += count
        if count * 8 > self._size - at or self._n_strings > _MAX_STRINGS:
            raise ValueError(f"it claims a list of {count} texts")
        offsets = string_offsets(self.buffer, at, count)
        end = int(offsets[-1])
        offsets -= at
        return StringArray(self.buffer[at:end], offsets), end

    def _open_shards(self) -> None:
        count = self.metadata.get("split.count", 1)
        if not isinstance(count, int) or count < 2 or self.metadata.get("split.no", 0) != 0:
            return
        names = part_names(self.path.name)
        if len(names) != count:
            raise ModelFileError(
                f"{self.path.name} is the first of {count} parts; name them …-00001-of-{count:05}.gguf to open them"
            )
        for i, name in enumerate(names[1:], 1):
            path = self.path.with_name(name)
            if not path.exists():
                raise ModelFileError(f"part {i + 1} of {count} is missing: {path}")
            # A part is never asked for parts of its own, whatever it says.
            self.shards.append(shard := GGUFFile(path, alone=True))
            if shard.metadata.get("split.no") != i or shard.metadata.get("split.count", count) != count:
                raise ModelFileError(f"{name} is not part {i + 1} of {count}, by its contents; fetch it again")
            self.n_bytes += shard.n_bytes
            for tensor in shard.tensors.values():
                if tensor.name in self.tensors:
                    raise ModelFileError(f"{name} holds {tensor.name[:60]!r}, which an earlier part holds too")
                self.tensors[tensor.name] = replace(tensor, shard=i)
        n_tensors = self.metadata.get("split.tensors.count", len(self.tensors))
        if n_tensors != len(self.tensors):
            raise ModelFileError(
                f"the {count} parts of {self.path.name} hold {len(self.tensors)} tensors instead of {n_tensors}; "
                "fetch them again"
            )

    # -- what it says --------------------------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def field(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def whole(self, name: str) -> int:
        """A field that is a whole number; 0 where the header has none."""
        value = self.field(name)
        return int(value) if isinstance(value, int) else 0

    @property
    def name(self) -> str:
        return str(self.metadata.get("general.name", "")) or self.path.stem

    @property
    def n_ctx_train(self) -> int:
        """Context length the model was trained for [tokens]; 0: unknown."""
        return self.whole("context_length")

    @property
    def n_params(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors.values())

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Tensor type -> bytes, the largest first."""
        totals: Counter[str] = Counter()
        for tensor in self.tensors.values():
            totals[tensor.type_name] += tensor.n_bytes
        return dict(totals.most_common())

    @property
    def has_rows_only(self) -> bool:
        return ROWS_ONLY in self.metadata

    @property
    def quantization(self) -> str:
        """The quantisation as people call it, e.g. ``Q4_K_M``."""
        declared = self.metadata.get("general.file_type")
        if isinstance(declared, int) and declared in _FILE_TYPES:
            return _FILE_TYPES[declared]
        return next(iter(self.bytes_by_type), "none")

    def check_generates_text(self) -> None:
        """Refuse (``UnsupportedModel``) tokenizers, embedding models, adapters, …"""
        name, architecture = self.path.name, self.architecture
        kind = str(self.metadata.get("general.type", "model"))
        if kind == "adapter" or "adapter.type" in self.metadata:
            raise UnsupportedModel(f"{name} is a LoRA adapter, not a model; merge it into its base model first")
        what = _NOT_GENERATORS.get(architecture, "an image projector" if kind == "mmproj" else "")
        if not what and architecture in offered(HEAD_KINDS):
            what = "a head that drafts for another model"
        if what:
            raise UnsupportedModel(f"{name} is {what} ({architecture or kind}), which cannot generate text")
        number = self.metadata.get("split.no", 0)
        if isinstance(number, int) and number > 0:
            total = self.metadata.get("split.count", "several")
            raise UnsupportedModel(f"{name} is part {number + 1} of {total}; give the first part instead")
        if not self.tensors:
            raise UnsupportedModel(f"{name} holds a tokenizer but no weights, so it cannot generate text")
        if not architecture:
            raise UnsupportedModel(f"{name} does not name its architecture, so no engine can load it")
        if "tokenizer.ggml.tokens" not in self.metadata or "token_embd.weight" not in self.tensors:
            raise UnsupportedModel(f"{name} ({architecture}) has no vocabulary, so it cannot generate text")
        n, n_mtp = self.field("block_count"), self.field("nextn_predict_layers", 0)
        none_left = isinstance(n, int) and isinstance(n_mtp, int) and n <= n_mtp
        if n == 0 or none_left or is_mtp_alone(self.tensors, n, n_mtp):
            raise UnsupportedModel(f"{name} has no layers of a whole model, so it cannot generate text")
        pooling = self.field("pooling_type", 0)
        if (isinstance(pooling, int) and pooling not in (0, -1, 0xFFFFFFFF)) or self.field("attention.causal") is False:
            raise UnsupportedModel(f"{name} is an embedding model ({architecture}), which cannot generate text")

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's data as bytes [n_bytes], a view of the file."""
        tensor = self.tensors[name]
        buffer = self._holding(tensor).buffer
        return np.frombuffer(buffer[tensor.offset : tensor.offset + tensor.n_bytes], dtype=np.uint8)

    def forget(self, name: str) -> None:
        """Tell the system that a tensor will not be read again soon: its pages no longer count as memory in use."""
        tensor = self.tensors[name]
        mapped = self._holding(tensor)._map
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if mapped is not None and end > start and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _holding(self, tensor: TensorInfo) -> GGUFFile:
        return self.shards[tensor.shard - 1] if tensor.shard else self

    def close(self) -> None:
        """Unmap the file, once nothing refers to it any more; safe to call twice."""
        for shard in self.shards:
            shard.close()
        self._buffer = None
        mapped, self._map = self._map, None
        if mapped is not None:
            with suppress(BufferError):  # views of it are alive; the map goes with the last of them
                mapped.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Writing: no more than a header and a piece of one tensor is ever in memory.

_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
_ITEMS = {"<i4": 5, "<f4": 6}  # Arrays that are written: NumPy's name of their items -> the format's number


def new_tensor(name: str, shape: tuple[int, ...], type_name: str) -> TensorInfo:
    """A tensor to be written; ``shape`` as NumPy counts sizes, (rows, columns), rows of whole blocks of the type."""
    number = _NUMBERS[type_name]
    _, block, n_bytes = TENSOR_TYPES[number]
    if shape[-1] % block:
        raise ValueError(f"{name} has rows of {shape[-1]}, not whole blocks of {block}")
    return TensorInfo(name, shape[::-1], number, 0, int(np.prod(shape)) // block * n_bytes)


class GGUFOutput:
    """A GGUF file being written: the header at once, then the data of its tensors in order.

    ``metadata`` has text, numbers, or arrays of int32 or float32; ``encoded`` are keys with values as bytes of another
    file; offsets of ``tensors`` are computed here, with ``alignment`` [bytes].
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
        """The next bytes: of the current tensor, or the first of the next one."""
        self._file.write(np.ascontiguousarray(data).data)
        self._since += data.nbytes
        if self._since == self._left[-1]:
            self._file.write(bytes(-self._since % self._alignment))
            self._left.pop()
            self._since = 0
        elif self._since > self._left[-1]:
            raise ValueError(f"a tensor of {self._left[-1]} bytes was given {self._since}")


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A value with the number of its type before it, in the narrowest type that readers expect."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _ITEMS[value.dtype.str], value.size) + value.tobytes()
    kind = 7 if isinstance(value, bool) else 6 if isinstance(value, float) else _UINT32
    if kind == _UINT32 and not 0 <= value < 1 << 32:
        kind = 11
    return struct.pack("<I" + _SCALARS[kind][1], kind, value)


Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def n_rows(file: GGUFFile, name: str) -> int:
    tensor = file.tensors[name]
    return tensor.n_elements // tensor.shape[0]


def tensor_rows(file: GGUFFile, name: str, rows: slice | Sequence[int] | npt.NDArray[np.int32]) -> Floats:
    """Some rows of a tensor, dequantised [n, columns]; a copy. ``UnsupportedModel`` for a type that the ``gguf``
    package cannot unpack, ``IndexError`` where there is no such row."""
    tensor = file.tensors[name]
    raw = file.tensor_bytes(name).reshape(n_rows(file, name), -1)[rows]
    try:
        return np.array(dequantised(raw, tensor), dtype=np.float32)
    except (NotImplementedError, ValueError):
        raise UnsupportedModel(
            f"{file.path.name}: the gguf package cannot unpack {tensor.type_name} ({name[:60]})"
        ) from None


def dequantised(raw: Bytes, tensor: TensorInfo) -> Floats:
    """Rows of a tensor [n, bytes of a row] as numbers [n, columns]; ``NotImplementedError`` or ``ValueError`` for a
    type that the ``gguf`` package cannot unpack."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(tensor.ggml_type))
    return values.reshape(len(raw), tensor.shape[0])


def as_type(values: Floats, type_name: str) -> Bytes:
    """Rows in a tensor type, as bytes [n, bytes of a row]; whole blocks. ``NotImplementedError`` for a type that the
    ``gguf`` package cannot write."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    quantised = quantize(np.ascontiguousarray(values, dtype=np.float32), GGMLQuantizationType[type_name])
    return np.ascontiguousarray(quantised).view(np.uint8)


# Checks of a header that engines would assert on.


def whole(file: GGUFFile, name: str, default: int | None = None) -> int:
    """A number over 0 of a header; ``ModelFileError``: there is none, or something else."""
    value = file.field(name, default)
    if not is_whole(value) or not 0 < value < 1 << 31:
        raise damaged(file, f"{file.architecture}.{name} is {shown(value)}")
    return int(value)


def check_shapes(file: GGUFFile, shapes: dict[str, tuple[int, ...]], optional: Sequence[str] = ()) -> None:
    """See that tensors have these shapes, (rows, columns) or the length of a vector; ``ModelFileError``: one has not,
    or is missing and not ``optional``."""
    for name, shape in shapes.items():
        tensor = file.tensors.get(name)
        if tensor is None and name not in optional:
            raise damaged(file, f"it lacks {name}")
        if tensor is not None and tensor.shape != shape[::-1]:
            raise damaged(file, f"{name} is {list(tensor.shape[::-1])} and should be {list(shape)}")


def width_of_heads(file: GGUFFile, usual: int | None = None, suffix: str = "") -> int:
    """Channels of an attention head, by settings whose names end so; ``usual`` where they do not say.
    ``ModelFileError``: they are missing, or keys, values and rotation do not fit together."""
    width = whole(file, f"attention.key_length{suffix}", usual)
    n_rotated = whole(file, f"rope.dimension_count{suffix}", width)
    if n_rotated % 2 or n_rotated > width:
        raise damaged(file, f"it rotates {n_rotated} of {width} channels")
    if whole(file, f"attention.value_length{suffix}", usual) != width:
        raise damaged(file, "its keys and values differ in width")
    return width


def attention_sizes(file: GGUFFile, n_embd: int) -> tuple[int, int, int]:
    """Query heads, key heads, and channels of each; ``ModelFileError``: they are missing, or do not fit together."""
    n_head = whole(file, "attention.head_count")
    n_head_kv = whole(file, "attention.head_count_kv", n_head)
    if n_head % n_head_kv:
        raise damaged(file, f"its {n_head} attention heads cannot share {n_head_kv} key heads")
    return n_head, n_head_kv, width_of_heads(file, n_embd // n_head)


def damaged(file: GGUFFile, what: str) -> ModelFileError:
    return ModelFileError(f"{file.path.name} is damaged: {what}; fetch it again")
