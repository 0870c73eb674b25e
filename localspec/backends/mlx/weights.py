"""Tensors of a GGUF as MLX arrays in an mlx-lm model, one at a time: only the model and one tensor are in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from localspec.backends.base import Progress
from localspec.backends.mlx.architecture import Architecture, Header, unsupported
from localspec.errors import EngineError, UnsupportedModel
from localspec.model_files.gguf import TENSOR_TYPES, GGUFFile, TensorInfo, dequantised

# GGML's quantised blocks rewritten as MLX's affine groups: ``value = scale * code + bias``. MXFP4 both have.
#
# A ggml row is a chain of blocks, each with its own scales; MLX keeps the codes of a row in one little-endian bit
# stream, and the scale and bias of every group of 32, 64 or 128 values apart. Most of ggml's types are affine in groups
# of 32 and change their layout only: the dequantised values are the same to the last bit when computed in float32.
# ggml's reference is ``ggml-quants.c`` of llama.cpp; the tests hold all of this against gguf-py's dequantiser.

# NumPy's annotations take `uint8_array & 15` for signed numbers of any width, so these say less than they mean.
Bytes = npt.NDArray[Any]  # uint8
Floats = npt.NDArray[Any]  # float32
# Codes [n_blocks, block], scales and biases [n_blocks, block / group]; MXFP4's scales are exponents, without biases.
Unpacked = tuple[Bytes, Floats | Bytes, Floats | None]

_IQ4_CODES = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=np.uint8)
"""What IQ4's codes stand for, plus 128."""
_CHUNK = 1 << 18
"""Values unpacked at a time by a thread: the working memory, some 20 bytes for each, stays in the CPU's caches."""
_N_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a quantised ggml type is represented."""

    block: int  # values in a block
    n_bytes: int  # of a block
    bits: int  # of a code in MLX
    group: int  # values that share a scale and a bias in MLX
    unpack: Callable[[Bytes], Unpacked]  # blocks [n_blocks, n_bytes] -> ``Unpacked``
    mode: str  # MLX's name of what codes and scales mean


def repack(kind: BlockType, rows: Bytes) -> tuple[npt.NDArray[np.uint32], Floats | Bytes, Floats | None]:
    """Rewrite a matrix of blocks of a kind: rows [n_rows, n_columns / block * n_bytes].

    Returns:
        The codes of each row as one bit stream [n_rows, n_columns * bits / 32], scales [n_rows, n_columns / group], and
        biases as these for the affine mode.
    """
    n_rows, row_bytes = rows.shape
    n_columns = row_bytes // kind.n_bytes * kind.block
    codes = np.empty((n_rows, n_columns * kind.bits // 8), dtype=np.uint8)
    is_affine = kind.mode == "affine"
    scales = np.empty((n_rows, n_columns // kind.group), dtype=np.float32 if is_affine else np.uint8)
    biases = np.empty_like(scales) if is_affine else None
    step = max(1, _CHUNK // n_columns)

    def rewrite(start: int) -> None:
        part = slice(start, start + step)
        blocks = np.ascontiguousarray(rows[part]).reshape(-1, kind.n_bytes)
        part_codes, part_scales, part_biases = kind.unpack(blocks)
        codes[part] = pack(part_codes, kind.bits).reshape(-1, codes.shape[1])
        scales[part] = part_scales.reshape(-1, scales.shape[1])
        if biases is not None and part_biases is not None:
            biases[part] = part_biases.reshape(-1, scales.shape[1])

    with ThreadPoolExecutor(_N_THREADS) as pool:
        for _ in pool.map(rewrite, range(0, n_rows, step)):
            pass  # only to raise what was raised
    return codes.view(np.uint32), scales, biases


def pack(codes: Bytes, bits: int) -> Bytes:
    """Codes [n, m], m a multiple of 8, as little-endian bit streams [n, m * bits / 8]."""
    if bits == 8:
        return codes
    if bits == 4:
        pairs: Bytes = codes[:, 0::2] | codes[:, 1::2] << 4
        return pairs
    if bits != 5:
        raise ValueError(f"packing codes of {bits} bits is not supported")
    c = codes.reshape(len(codes), -1, 8)
    packed = np.empty((*c.shape[:2], 5), dtype=np.uint8)
    # Shifts of uint8 drop what is carried out of the byte, which is what the next byte takes up.
    packed[..., 0] = c[..., 0] | c[..., 1] << 5
    packed[..., 1] = c[..., 1] >> 3 | c[..., 2] << 2 | c[..., 3] << 7
    packed[..., 2] = c[..., 3] >> 1 | c[..., 4] << 4
    packed[..., 3] = c[..., 4] >> 4 | c[..., 5] << 1 | c[..., 6] << 6
    packed[..., 4] = c[..., 6] >> 2 | c[..., 7] << 3
    return packed.reshape(len(codes), -1)


# -- types with one scale for 32 values ------------------------------------------------------------------------------


def _halves(blocks: Bytes, at: int, count: int = 1) -> Floats:
    """``count`` float16 numbers at a byte offset of every block, as float32 [n_blocks, count]."""
    return np.ascontiguousarray(blocks[:, at : at + 2 * count]).view(np.float16).astype(np.float32)


def _nibbles(bytes_: Bytes) -> Bytes:
    """The low halves of bytes [..., m], then the high halves: [..., 2m]."""
    halves = np.empty((*bytes_.shape[:-1], 2, bytes_.shape[-1]), dtype=np.uint8)
    np.bitwise_and(bytes_, 15, out=halves[..., 0, :])
    np.right_shift(bytes_, 4, out=halves[..., 1, :])
    return halves.reshape(*bytes_.shape[:-1], -1)


def _q4_or_q5(zero: int, *, fifth: bool) -> Callable[[Bytes], Unpacked]:
    """Values d(q - zero), or dq + m where ``zero`` is 0; ``fifth`` bits lie in 4 bytes before the nibbles."""

    def unpack(blocks: Bytes) -> Unpacked:
        d, at = _halves(blocks, 0), 2 if zero else 4
        codes = _nibbles(blocks[:, at + 4 * fifth :])
        if fifth:
            bits = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")
            codes |= bits << 4
        return codes, d, -zero * d if zero else _halves(blocks, 2)

    return unpack


def _q8_0(blocks: Bytes) -> Unpacked:
    d = _halves(blocks, 0)
    return blocks[:, 2:] ^ 128, d, -128 * d  # flipping the sign bit adds 128


def _iq4_nl(blocks: Bytes) -> Unpacked:
    d = _halves(blocks, 0)
    return _IQ4_CODES[_nibbles(blocks[:, 2:])], d, -128 * d


def _mxfp4(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 1:]), blocks[:, :1], None


# -- types with blocks of 256, scaled by 16 or 32 ---------------------------------------------------------------------


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes: [n, 12] -> two of [n, 8].

    The first four of each lie in the low 6 bits of bytes 0-3 and 4-7. The last four have their low halves in bytes 8-11
    and their top two bits above the first four's.
    """
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, high & 15 | (low >> 6) << 4), axis=1)
    minima = np.concatenate((middle & 63, high >> 4 | (middle >> 6) << 4), axis=1)
    return scales, minima


def _q4_k(blocks: Bytes) -> Unpacked:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _q5_k(blocks: Bytes) -> Unpacked:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Byte i of the next 32 holds the fifth bits of the i-th values of the eight groups.
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (codes | fifth << 4).reshape(-1, 256), _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _pairs(blocks: Bytes) -> Bytes:
    """Two-bit numbers from 64 bytes; each half of 32 bytes holds four layers of 32: [n, 64] -> [n, 256]."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (blocks.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Unpacked:
    # 16 scales of 6 bits: low halves in 8 bytes (two layers), top two bits in the 4 that follow (four layers).
    low = _nibbles(blocks[:, 96:104])
    top = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | top << 4).astype(np.int16) - 32
    # A third bit that is not set subtracts 4.
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = _pairs(blocks[:, 32:96]).astype(np.int16) + (third.astype(np.int16) * 4 - 4).reshape(-1, 256)
    product = (q.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)  # in -124..128
    # Negated, the range is one that starts at a power of two, so that the bias needs no more digits than the scale.
    d = np.repeat(_halves(blocks, 108), 2, axis=1)
    return (128 - product).astype(np.uint8), -d, 128 * d


def _iq4_xs(blocks: Bytes) -> Unpacked:
    n = len(blocks)
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(n, 8)
    top = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | top.astype(np.uint8) << 4).astype(np.float32) - 32
    d = _halves(blocks, 0) * scales
    return _IQ4_CODES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256), d, -128 * d


def _q6_k(blocks: Bytes) -> Unpacked:
    """Values d·s·q with q in -32..31 and a scale s in -128..127 for each 16 of them; MLX's groups are 32 wide.

    Of the two scales in a group the larger in magnitude, S, is kept: codes count steps of d·S/4, so its 16 values are
    represented as they are, and those of the other are rounded to a step: an error of at most d·|S|/8.
    """
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 256)
    q = (low | _pairs(blocks[:, 128:192]) << 4).astype(np.float32).reshape(n, 8, 2, 16) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32).reshape(n, 8, 2)
    first, second = scales[..., 0], scales[..., 1]
    larger = np.where(np.abs(first) >= np.abs(second), first, second)
    step = _halves(blocks, 208) * larger / 4
    ratio = 4 * scales / np.where(larger == 0, 1, larger)[..., None]
    # Opposite signs and q = -32 would give 256.
    codes = np.minimum(np.rint(q * ratio[..., None]) + 128, 255).astype(np.uint8)
    return codes.reshape(n, 256), step, -128 * step


def _q2_k(blocks: Bytes) -> Unpacked:
    """Values d·s·q - dmin·m with q in 0..3 and 4-bit s and m for each 16 of them; MLX's groups are 32 wide.

    The 256 codes are spread over what the two blocks of a group can hold, and the values rounded to them: an error of
    at most half a step, a 510th of that range.
    """
    n = len(blocks)
    scale = (_halves(blocks, 80) * (blocks[:, :16] & 15)).reshape(n, 8, 2, 1)
    minimum = (-_halves(blocks, 82) * (blocks[:, :16] >> 4)).reshape(n, 8, 2, 1)
    values = scale * _pairs(blocks[:, 16:80]).reshape(n, 8, 2, 16) + minimum
    ends = np.concatenate((minimum, minimum + 3 * scale), axis=2)
    low, high = ends.min(axis=(2, 3)), ends.max(axis=(2, 3))
    step = (high - low) / np.float32(255)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    codes = np.rint((values - low[..., None, None]) * inverse[..., None, None])
    return np.minimum(codes, 255).astype(np.uint8).reshape(n, 256), step, low


# ggml's name -> bits of a code and values of a group in MLX, and how blocks are unpacked
_UNPACKED: dict[str, tuple[int, int, Callable[[Bytes], Unpacked]]] = {
    "Q4_0": (4, 32, _q4_or_q5(8, fifth=False)),
    "Q4_1": (4, 32, _q4_or_q5(0, fifth=False)),
    "Q5_0": (5, 32, _q4_or_q5(16, fifth=True)),
    "Q5_1": (5, 32, _q4_or_q5(0, fifth=True)),
    "Q8_0": (8, 32, _q8_0),  # d(q - 128) with q of 8 bits
    "Q2_K": (8, 32, _q2_k),  # not exact
    "Q3_K": (8, 128, _q3_k),  # d(sq): sq is an integer in -124..128, which is 8 bits for the whole group
    "Q4_K": (4, 32, _q4_k),  # (ds)q - dmin m: products of a half and 6 bits, exact in float32
    "Q5_K": (5, 32, _q5_k),  # as Q4_K
    "Q6_K": (8, 32, _q6_k),  # not exact
    "IQ4_NL": (8, 32, _iq4_nl),  # dv, with v one of 16 values in -127..113
    "IQ4_XS": (8, 32, _iq4_xs),  # (ds)v, as IQ4_NL
    "MXFP4": (4, 32, _mxfp4),  # the same codes in another order, and the same power of two
}
BLOCK_TYPES = {
    name: BlockType(block, n_bytes, *_UNPACKED[name], "mxfp4" if name == "MXFP4" else "affine")
    for name, block, n_bytes in TENSOR_TYPES.values()
    if name in _UNPACKED
}
"""How blocks are represented. Types of plain numbers (F32, F16, BF16) need no repacking."""


PLAIN_TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as MLX arrays."""

    weight: mx.array  # plain numbers, or codes as uint32 [..., n_columns * bits / 32]
    scales: mx.array | None = None  # [..., n_columns / group], or None for plain numbers
    biases: mx.array | None = None  # as ``scales``, or None where these are enough
    kind: BlockType | None = None  # None for plain numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers that are stored."""
        if self.kind is None:
            return self.weight.shape
        return (*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.kind.bits)


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
        dtype: of plain numbers, scales and biases.
        convert: applied to the numbers [rows, columns] of a plain tensor.
        plain: whether the tensor has to be plain numbers.

    Raises:
        UnsupportedModel: its type cannot be represented.
    """
    shape = info.shape[::-1]  # ggml counts the fastest-varying dimension first
    if info.type_name in PLAIN_TYPES:
        raw = file.tensor_bytes(info.name)
        if PLAIN_TYPES[info.type_name] == dtype != mx.float32 and convert is None:
            array = mx.array(raw.view(np.uint16).reshape(shape)).view(dtype)
            mx.eval(array)
        else:
            numbers = dequantised(raw.reshape(info.n_elements // info.shape[0], -1), info).reshape(shape)
            array = _evaluated(numbers if convert is None else convert(numbers), dtype)
        return Stored(array)
    kind = BLOCK_TYPES.get(info.type_name)
    if kind is None or plain or convert is not None:
        wanted = ", ".join(PLAIN_TYPES if kind else (*BLOCK_TYPES, *PLAIN_TYPES))
        raise UnsupportedModel(
            f"{file.path.name}: the mlx backend cannot read {info.name} as {info.type_name}, only as {wanted}; "
            "use --backend llama-cpp or another quantisation of the model"
        )
    rows = file.tensor_bytes(info.name).reshape(-1, shape[-1] // kind.block * kind.n_bytes)
    packed, scales, biases = repack(kind, rows)
    codes = mx.array(packed).reshape(*shape[:-1], -1)
    if biases is None:
        exponents = mx.array(scales).reshape(*shape[:-1], -1)
        mx.eval(codes, exponents)
        return Stored(codes, exponents, None, kind)
    scale, bias = (_evaluated(each, dtype).reshape(*shape[:-1], -1) for each in (scales, biases))
    return Stored(codes, scale, bias, kind)


def _evaluated(numbers: npt.NDArray[Any], dtype: mx.Dtype) -> mx.array:
    array = mx.array(np.asarray(numbers, dtype=np.float32)).astype(dtype)
    mx.eval(array)
    return array


# -- where each tensor belongs in an mlx-lm model, and putting it there ------------------------------------------------

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are no parameter: they set the rotary embedding's frequencies."""


def fill(
    file: GGUFFile,
    architecture: Architecture,
    module: nn.Module,
    dtype: mx.Dtype,
    progress: Progress | None,
    blocks: range | None = None,
) -> None:
    """Put every tensor of the file into the model, in the file's order.

    Args:
        dtype: of plain numbers and scales.
        blocks: of the file that are the module's layers; others are left out. None is all, which have to be.

    Raises:
        UnsupportedModel: a tensor has no place, or a wrong shape, or a parameter is left without one.
    """
    first = blocks.start if blocks is not None else 0
    modules = dict(module.named_modules())
    places = _places(architecture, module, modules, first)
    lost = file.tensors.keys() - places.keys() - {*ROPE_TENSORS, *architecture.no_parameters}
    if blocks is not None:  # what blocks share, in none, is placed with the first ones
        wanted = (*blocks,) if first else (None, *blocks)
        lost = {name for name in lost if block_of(name) in wanted}
    if lost:
        raise unsupported(file, f"the mlx backend does not use {_some(lost)} in a {file.architecture} model")
    missing = places.keys() - file.tensors.keys()
    for name in [*missing]:
        owner, parameter, _ = places[name]
        if parameter == "bias" and isinstance(modules[owner], nn.Linear):
            modules[owner].pop("bias", None)  # where the class has one, this model does without, as in llama.cpp
            missing.remove(name)
    if missing:
        raise UnsupportedModel(f"{file.path.name} lacks {_some(missing)}")
    total, done = sum(info.n_bytes for info in file.tensors.values()), 0
    for info in sorted(file.tensors.values(), key=lambda one: (one.shard, one.offset)):
        if progress is not None and not progress(done / max(total, 1)):
            raise EngineError(f"loading {file.path.name} was cancelled")
        if info.name in places:
            _put(file, architecture, modules, info, places[info.name], dtype)
        file.forget(info.name)
        done += info.n_bytes
    if progress is not None:
        progress(1.0)


def block_of(tensor: str) -> int | None:
    """Which block a tensor is in; None for those outside of blocks."""
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match else None


class _Place(NamedTuple):
    owner: str  # dotted path of the module
    parameter: str  # its name there
    shape: tuple[int, ...]


def _places(
    architecture: Architecture, module: nn.Module, modules: Mapping[str, nn.Module], first: int
) -> dict[str, _Place]:
    """The tensor that each parameter is in a file -> its place, and those of biases that a class may do without. Block
    ``first`` is the module's first layer."""
    trunk = architecture.trunk
    keys = {path: key for key, path in architecture.blocks.items()}
    top = {architecture.embedding: "token_embd", architecture.norm: "output_norm"}
    top = {f"{trunk}.{path}": name for path, name in (top | {v: k for k, v in architecture.top.items()}).items()}
    top["lm_head"] = "output"
    in_layer = re.compile(rf"{re.escape(trunk)}\.layers\.(\d+)\.(.+)")

    def tensor(path: str) -> str | None:
        """The name of a module's or parameter's tensors, without a suffix."""
        match = in_layer.fullmatch(path)
        if match is None:
            return top.get(path)
        return f"blk.{first + int(match[1])}.{keys[match[2]]}" if match[2] in keys else None

    places: dict[str, _Place] = {}
    for path, array in tree_flatten(module.parameters()):
        owner, _, parameter = path.rpartition(".")
        stem = tensor(owner)
        # Parameters that the table itself names are stored without a suffix, or with one of their own.
        name = tensor(path) or (path if stem is None else f"{stem}.{parameter}")
        places[name] = _Place(owner, parameter, array.shape)
        if stem is not None and parameter == "weight" and isinstance(modules[owner], nn.Linear):
            places[f"{stem}.bias"] = _Place(owner, "bias", array.shape[:1])
    return places


def _put(
    file: GGUFFile,
    architecture: Architecture,
    modules: dict[str, nn.Module],
    info: TensorInfo,
    place: _Place,
    dtype: mx.Dtype,
) -> None:
    owner = modules[place.owner]
    key = info.name.split(".", 2)[-1] if info.name.startswith("blk.") else info.name
    convert = architecture.converted.get(key)
    if architecture.shifted_norms and info.name.endswith("norm.weight"):
        convert = lambda stored: stored - 1  # noqa: E731
    can_be_packed = place.parameter == "weight" and hasattr(owner, "to_quantized")
    dtype = mx.float32 if key in architecture.precise else dtype
    stored = read_tensor(file, info, dtype, convert=convert, plain=not can_be_packed)
    if key in architecture.rearranged:
        axis, order = architecture.rearranged[key]
        stored = _rearranged(file, info, stored, axis, order(Header(file)))
    if stored.shape != place.shape:
        raise UnsupportedModel(
            f"{file.path.name}: {info.name} has the shape {'x'.join(map(str, stored.shape))}, "
            f"but {'x'.join(map(str, place.shape))} is needed"
        )
    if stored.kind is None:
        owner[place.parameter] = stored.weight
        return
    # mlx makes it by quantising the random weights it was built with; they are never computed.
    packed: nn.Module = owner.to_quantized(stored.kind.group, stored.kind.bits, stored.kind.mode)
    packed.weight, packed.scales, packed.biases = stored.weight, stored.scales, stored.biases
    if "bias" in owner:
        packed.bias = owner["bias"]
    parent, _, name = place.owner.rpartition(".")
    modules[parent][name] = modules[place.owner] = packed


def _rearranged(file: GGUFFile, info: TensorInfo, stored: Stored, axis: int, order: list[int]) -> Stored:
    """With the equal parts of an axis in another order."""
    if order == sorted(order):
        return stored
    kind = stored.kind
    if stored.shape[axis] % (len(order) * (kind.group if kind is not None and axis == -1 else 1)):
        raise UnsupportedModel(
            f"{file.path.name}: {info.name} cannot be cut into {len(order)} heads as {info.type_name}; "
            "use --backend llama-cpp or another quantisation of the model"
        )

    def moved(array: mx.array) -> mx.array:
        at = axis % array.ndim
        found = mx.take(mx.unflatten(array, at, (len(order), -1)), mx.array(order), axis=at).reshape(array.shape)
        mx.eval(found)
        return found

    scales, biases = (None if array is None else moved(array) for array in (stored.scales, stored.biases))
    return Stored(moved(stored.weight), scales, biases, kind)


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
