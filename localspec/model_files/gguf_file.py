"""GGUF files: the header, read from a memory map. Nothing is allocated by a number that the file names."""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import ModelFileError, NotGGUF, UnsupportedModel
from localspec.model_files.gguf_parts import part_names
from localspec.model_files.gguf_types import FILE_TYPES, NOT_GENERATORS, TENSOR_TYPES, is_mtp_alone, string_offsets

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
# Far beyond any real file (the largest have some 800,000 strings and 2,000 tensors); they bound the time that a hostile
# header can take.
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMS, _MAX_STRINGS = 1 << 16, 1 << 17, 4, 1 << 22


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: e.g. ``blk.0.attn_q.weight``.
        shape: sizes with the fastest-varying dimension first, as ggml counts them: ``shape[0]`` is the row length.
        ggml_type: number of the tensor type; ``type_name`` is its name.
        offset: from the start of its file, in bytes.
        n_bytes: size of the data.
        shard: which file of a split model holds it; 0 is the first.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    n_bytes: int
    shard: int = 0

    @property
    def type_name(self) -> str:
        known = TENSOR_TYPES.get(self.ggml_type)
        return known[0] if known else f"type {self.ggml_type}"

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class StringArray(Sequence[str]):
    """An array of strings in the file, decoded on access.

    Attributes:
        raw: the array's bytes: 8 bytes of length and the string, one after the other.
        offsets: where each string's length begins in ``raw``, and the end [n + 1].
    """

    def __init__(self, raw: memoryview, offsets: npt.NDArray[np.int64]) -> None:
        self.raw = raw
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def bytes_at(self, index: int) -> bytes:
        """The string as stored, undecoded."""
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
    """The header of a GGUF file (versions 2 and 3, little-endian); of all parts, if it is the first of several.

    Opening costs milliseconds, with a vocabulary of 262,144 tokens too.

    Args:
        path: the file.
        alone: open no other part.

    Attributes:
        path: the file.
        version: GGUF version.
        metadata: key -> value. Arrays of numbers are NumPy views, arrays of strings ``StringArray``; both are read
            from the map only when used.
        kinds: key -> number of its value's type, as the format counts them.
        tensors: name -> ``TensorInfo``; every one lies inside its file.
        alignment: of the tensor data [bytes].
        header_end: offset of the end of the tensor list [bytes].
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
                if len(head) < 8:
                    raise NotGGUF(f"{self.path.name} is cut short: it has {len(head)} bytes; fetch it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"cannot read {self.path}: {error.strerror or error}") from None
        self._buffer = memoryview(self._map)
        self._size = self.n_bytes = len(self._buffer)

    @property
    def buffer(self) -> memoryview:
        """The file's bytes."""
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
        self.header_end = at
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
        """Turn offsets in the data section into offsets in the file, and see that all of it is there."""
        starts = sorted({tensor.offset for tensor in self.tensors.values()})
        following = dict(zip(starts, [*starts[1:], max(self._size - data, 0)], strict=False))
        end = data if self.tensors else 0
        for name, tensor in self.tensors.items():
            n_bytes = tensor.n_bytes
            if tensor.ggml_type not in TENSOR_TYPES:
                # A type of some fork: all we know is that it ends before the next one begins.
                n_bytes = max(following[tensor.offset] - tensor.offset, 0)
            end = max(end, data + tensor.offset + n_bytes)
            self.tensors[name] = TensorInfo(name, tensor.shape, tensor.ggml_type, data + tensor.offset, n_bytes)
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
                where = (tensor.offset, tensor.n_bytes, i)
                self.tensors[tensor.name] = TensorInfo(tensor.name, tensor.shape, tensor.ggml_type, *where)
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
        """The value of ``<architecture>.<name>``."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @property
    def name(self) -> str:
        return str(self.metadata.get("general.name", "")) or self.path.stem

    @property
    def n_ctx_train(self) -> int:
        """Context length the model was trained for [tokens]; 0 when the file does not say."""
        value = self.field("context_length", 0)
        return int(value) if isinstance(value, int) else 0

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
    def quantization(self) -> str:
        """The quantisation as people call it, e.g. ``Q4_K_M``."""
        declared = self.metadata.get("general.file_type")
        if isinstance(declared, int) and declared in FILE_TYPES:
            return FILE_TYPES[declared]
        return next(iter(self.bytes_by_type), "none")

    def check_generates_text(self) -> None:
        """Refuse files that no engine can generate text with.

        Raises:
            UnsupportedModel: a tokenizer alone, an embedding model, an adapter, a projector, …
        """
        name, architecture = self.path.name, self.architecture
        kind = str(self.metadata.get("general.type", "model"))
        if kind == "adapter" or "adapter.type" in self.metadata:
            raise UnsupportedModel(f"{name} is a LoRA adapter, not a model; merge it into its base model first")
        if kind == "mmproj" or architecture in NOT_GENERATORS:
            what = NOT_GENERATORS.get(architecture, "an image projector")
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
        if (n := self.field("block_count")) == 0 or is_mtp_alone(self.tensors, n, self.field("nextn_predict_layers")):
            raise UnsupportedModel(f"{name} has no layers of a whole model, so it cannot generate text")
        pooling = self.field("pooling_type", 0)
        if (isinstance(pooling, int) and pooling not in (0, -1, 0xFFFFFFFF)) or self.field("attention.causal") is False:
            raise UnsupportedModel(f"{name} is an embedding model ({architecture}), which cannot generate text")

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's data as bytes [n_bytes], a view of the file."""
        tensor = self.tensors[name]
        file = self.shards[tensor.shard - 1] if tensor.shard else self
        return np.frombuffer(file.buffer[tensor.offset : tensor.offset + tensor.n_bytes], dtype=np.uint8)

    def forget(self, name: str) -> None:
        """Tell the system that a tensor will not be read again soon: its pages no longer count as memory in use.

        Reading it again is allowed and costs a trip to the disk or its cache. Does nothing where systems lack the call.
        """
        tensor = self.tensors[name]
        file = self.shards[tensor.shard - 1] if tensor.shard else self
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if file._map is not None and end > start and hasattr(mmap, "MADV_DONTNEED"):
            file._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap the file, once nothing refers to it any more; safe to call twice."""
        for shard in self.shards:
            shard.close()
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
