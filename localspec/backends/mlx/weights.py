"""Tensors of a GGUF as MLX arrays in an mlx-lm model, one at a time: only the model and one tensor are in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from localspec.backends.base import Progress
from localspec.backends.mlx.architecture import Architecture, Header
from localspec.errors import EngineError, UnsupportedModel
from localspec.model_files.gguf import GGUFFile, TensorInfo, dequantised

# GGML's quantised blocks rewritten as MLX's affine groups: ``value = scale * code + bias``. MXFP4 both have.
#
# A ggml row is a chain of blocks, each with its own scales; MLX keeps the codes of a row in one little-endian bit
# stream, and the scale and bias of every group of 32, 64 or 128 values apart. Most of ggml's types are affine in groups
# of 32 and change their layout only:
#
# =========  ====  =====  =================================================================================
# type       bits  group  why
# =========  ====  =====  =================================================================================
# Q4_0       4     32     d(q - 8), so the bias is -8d
# Q4_1       4     32     dq + m
# Q5_0       5     32     d(q - 16)
# Q5_1       5     32     dq + m
# Q8_0       8     32     dq with q in -128..127, stored as q + 128
# Q4_K       4     32     (d·s)q - dmin·m: products of a half and 6 bits, exact in float32
# Q5_K       5     32     as Q4_K
# Q3_K       8     128    d·(s·q): s·q is an integer in -124..128, which is 8 bits for the whole group
# IQ4_NL     8     32     d·v, with v one of 16 values in -127..113
# IQ4_XS     8     32     (d·s)v, as IQ4_NL
# MXFP4      4     32     MLX's mode of that name: the same codes in another order, and the same power of two
# Q6_K       8     32     not exact: scales for 16 values each. See ``_q6_k``
# Q2_K       8     32     not exact: as Q6_K. See ``_q2_k``
# =========  ====  =====  =================================================================================
#
# The exact ones are the dequantised values to the last bit when computed in float32. ggml's reference is
# ``ggml-quants.c`` of llama.cpp; the tests hold all of this against gguf-py's dequantiser.

# NumPy's annotations take `uint8_array & 15` for signed numbers of any width, so these say less than they mean.
Bytes = npt.NDArray[Any]  # uint8
Floats = npt.NDArray[Any]  # float32
# Codes [n_blocks, block], scales and biases [n_blocks, block / group]; MXFP4's scales are exponents, without biases.
Unpacked = tuple[Bytes, Floats | Bytes, Floats | None]

_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16
)  # fmt: skip
_CHUNK = 1 << 18
"""Values unpacked at a time by a thread: the working memory, some 20 bytes for each, stays in the CPU's caches."""
_N_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a quantised ggml type is represented."""

    name: str  # ggml's name
    block: int  # values in a block
    n_bytes: int  # of a block
    bits: int  # of a code in MLX
    group: int  # values that share a scale and a bias in MLX
    unpack: Callable[[Bytes], Unpacked]  # blocks [n_blocks, n_bytes] -> ``Unpacked``
    mode: str = "affine"  # MLX's name of what codes and scales mean


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


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """32 single bits from 4 bytes, each as 0 or 16 [n_blocks, 32]."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little") << 4


def _q4_0(blocks: Bytes) -> Unpacked:
    d = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), d, -8 * d


def _q4_1(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Unpacked:
    d = _halves(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), d, -16 * d


def _q5_1(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Unpacked:
    d = _halves(blocks, 0)
    return blocks[:, 2:] ^ 128, d, -128 * d  # flipping the sign bit adds 128


def _iq4_nl(blocks: Bytes) -> Unpacked:
    d = _halves(blocks, 0)
    return _iq4_codes(blocks[:, 2:]), d, -128 * d


def _mxfp4(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 1:]), blocks[:, :1], None


def _iq4_codes(nibble_pairs: Bytes) -> Bytes:
    return (_IQ4_VALUES + 128).astype(np.uint8)[_nibbles(nibble_pairs)]


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
    return _iq4_codes(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256), d, -128 * d


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


def _table(*rows: tuple[Any, ...]) -> dict[str, BlockType]:
    return {row[0]: BlockType(*row) for row in rows}


BLOCK_TYPES = _table(
    ("Q4_0", 32, 18, 4, 32, _q4_0),
    ("Q4_1", 32, 20, 4, 32, _q4_1),
    ("Q5_0", 32, 22, 5, 32, _q5_0),
    ("Q5_1", 32, 24, 5, 32, _q5_1),
    ("Q8_0", 32, 34, 8, 32, _q8_0),
    ("Q2_K", 256, 84, 8, 32, _q2_k),
    ("Q3_K", 256, 110, 8, 128, _q3_k),
    ("Q4_K", 256, 144, 4, 32, _q4_k),
    ("Q5_K", 256, 176, 5, 32, _q5_k),
    ("Q6_K", 256, 210, 8, 32, _q6_k),
    ("IQ4_NL", 32, 18, 8, 32, _iq4_nl),
    ("IQ4_XS", 256, 136, 8, 32, _iq4_xs),
    ("MXFP4", 32, 17, 4, 32, _mxfp4, "mxfp4"),
)
"""ggml's name -> how its blocks are represented. Types of plain numbers (F32, F16, BF16) need no repacking."""


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
        UnsupportedModel: its type cannot be represented, or its numbers do not fit into ``dtype``.
    """
    shape = info.shape[::-1]  # ggml counts the fastest-varying dimension first
    if info.type_name in PLAIN_TYPES:
        raw = file.tensor_bytes(info.name)
        if PLAIN_TYPES[info.type_name] == dtype != mx.float32 and convert is None:
            array = mx.array(raw.view(np.uint16).reshape(shape)).view(dtype)
            mx.eval(array)
        else:
            numbers = dequantised(raw.reshape(info.n_elements // info.shape[0], -1), info).reshape(shape)
            array = _to_dtype(numbers if convert is None else convert(numbers), dtype, file, info)
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
    scale, bias = (_to_dtype(each, dtype, file, info).reshape(*shape[:-1], -1) for each in (scales, biases))
    return Stored(codes, scale, bias, kind)


def _to_dtype(numbers: npt.NDArray[Any], dtype: mx.Dtype, file: GGUFFile, info: TensorInfo) -> mx.array:
    """Numbers as an evaluated MLX array."""
    array = mx.array(np.asarray(numbers, dtype=np.float32)).astype(dtype)
    mx.eval(array)
    if dtype != mx.float32 and not mx.isfinite(array).all().item() and np.isfinite(numbers).all():
        name = str(dtype).removeprefix("mlx.core.")
        raise UnsupportedModel(f"{file.path.name}: {info.name} holds numbers too large for {name}; compute in float32")
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
    infos = [info for info in file.tensors.values() if blocks is None or block_of(info.name) in (None, *blocks)]
    first = blocks.start if blocks is not None else 0
    if first:  # what the blocks share is another module's
        infos = [info for info in infos if block_of(info.name) is not None]
    places = {info.name: place_of(first, architecture, module, info) for info in infos}
    places = {name: place for name, place in places.items() if name not in (*ROPE_TENSORS, *architecture.no_parameters)}
    lost = [name for name, place in places.items() if place is None]
    if lost:
        raise UnsupportedModel(
            f"{file.path.name}: the mlx backend does not use {_some(lost)} in a {file.architecture} model; "
            "use --backend llama-cpp"
        )
    _check_complete(file, architecture, module, {place for place in places.values() if place is not None})

    total, done = sum(info.n_bytes for info in file.tensors.values()), 0
    for info in sorted(file.tensors.values(), key=lambda one: (one.shard, one.offset)):
        if progress is not None and not progress(done / max(total, 1)):
            raise EngineError(f"loading {file.path.name} was cancelled")
        place = places.get(info.name)
        if place is not None:
            _put(file, architecture, module, info, place, dtype)
        file.forget(info.name)
        done += info.n_bytes
    if progress is not None:
        progress(1.0)


def block_of(tensor: str) -> int | None:
    """Which block a tensor is in; None for those outside of blocks."""
    kind, _, rest = tensor.partition(".")
    number = rest.partition(".")[0]
    return int(number) if kind == "blk" and number.isdecimal() else None


def place_of(first: int, architecture: Architecture, module: nn.Module, info: TensorInfo) -> str | None:
    """The dotted path of the parameter that a tensor is; None for none. Block ``first`` is the module's first layer."""
    trunk = architecture.trunk
    top = {
        "token_embd": f"{trunk}.{architecture.embedding}",
        "output_norm": f"{trunk}.{architecture.norm}",
        "output": "lm_head",
    } | {name: f"{trunk}.{path}" for name, path in architecture.top.items()}
    stem, _, suffix = info.name.rpartition(".")
    if stem in top:
        path = top[stem]
    elif info.name.startswith("blk."):
        block, key = block_of(info.name), info.name.split(".", 2)[-1]
        # Parameters that belong to no submodule are stored without a suffix.
        stem, _, suffix = key.rpartition(".") if key not in architecture.blocks else (key, "", "")
        if stem not in architecture.blocks or block is None or not 0 <= block - first < len(module.layers):
            return None
        path = f"{trunk}.layers.{block - first}.{architecture.blocks[stem]}"
    else:
        return None
    if not suffix:
        owner, _, suffix = path.rpartition(".")
        return path if suffix in (_submodule(module, owner) or {}) else None
    found = _submodule(module, path)
    if found is None or suffix not in ("weight", "bias"):
        return None
    return f"{path}.{suffix}" if suffix in found or isinstance(found, nn.Linear) else None


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path; None where there is none."""
    current: Any = module
    for part in path.split("."):
        if isinstance(current, list):
            current = current[int(part)]
        elif isinstance(current, nn.Module) and part in current:
            current = current[part]
        else:
            return None
    return current if isinstance(current, nn.Module) else None


def _check_complete(file: GGUFFile, architecture: Architecture, module: nn.Module, filled: set[str]) -> None:
    missing = []
    for name, _ in tree_flatten(module.parameters()):
        if name in filled:
            continue
        owner = _submodule(module, name.rpartition(".")[0])
        if name.endswith(".bias") and isinstance(owner, nn.Linear):
            del owner["bias"]  # the class has one, this model does without, as in llama.cpp
            continue
        missing.append(_tensor_name(architecture, name))
    if missing:
        raise UnsupportedModel(f"{file.path.name} lacks {_some(missing)}")


def _tensor_name(architecture: Architecture, parameter: str) -> str:
    """The name that a GGUF tensor for a parameter would have."""
    prefix = f"{architecture.trunk}.layers."
    if not parameter.startswith(prefix):
        return {f"{architecture.trunk}.{architecture.norm}.weight": "output_norm.weight"}.get(parameter, parameter)
    layer, _, rest = parameter.removeprefix(prefix).partition(".")
    for key, path in architecture.blocks.items():
        if rest == path or rest.rpartition(".")[0] == path:
            return f"blk.{layer}.{key}{rest.removeprefix(path)}"
    return parameter


def _put(
    file: GGUFFile, architecture: Architecture, module: nn.Module, info: TensorInfo, place: str, dtype: mx.Dtype
) -> None:
    path, _, parameter = place.rpartition(".")
    owner = cast(nn.Module, _submodule(module, path))
    key = info.name.split(".", 2)[-1] if info.name.startswith("blk.") else info.name
    convert = architecture.converted.get(key)
    if architecture.shifted_norms and info.name.endswith("norm.weight"):
        convert = lambda stored: stored - 1  # noqa: E731
    can_be_packed = parameter == "weight" and hasattr(owner, "to_quantized")
    dtype = mx.float32 if key in architecture.precise else dtype
    stored = read_tensor(file, info, dtype, convert=convert, plain=not can_be_packed)
    if key in architecture.rearranged:
        axis, order = architecture.rearranged[key]
        stored = _rearranged(file, info, stored, axis, order(Header(file)))
    expected = _expected_shape(owner, parameter)
    if expected is not None and stored.shape != expected:
        raise UnsupportedModel(
            f"{file.path.name}: {info.name} has the shape {'x'.join(map(str, stored.shape))}, "
            f"but {'x'.join(map(str, expected))} is needed"
        )
    if stored.kind is None:
        owner[parameter] = stored.weight
    else:
        parent, _, name = path.rpartition(".")
        cast(nn.Module, _submodule(module, parent) if parent else module)[name] = _packed(owner, stored, stored.kind)


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


def _expected_shape(owner: nn.Module, parameter: str) -> tuple[int, ...] | None:
    if parameter in owner:
        return tuple(owner[parameter].shape)
    # A bias that the class has no place for by itself; the weight may be packed by now, but has its rows.
    return (owner["weight"].shape[0],) if parameter == "bias" else None


def _packed(owner: nn.Module, stored: Stored, kind: BlockType) -> nn.Module:
    """The quantised counterpart of a module, holding what was read."""
    bias = owner.get("bias")
    # mlx makes it by quantising the random weights it was built with; they are never computed.
    packed: nn.Module = owner.to_quantized(group_size=kind.group, bits=kind.bits, mode=kind.mode)
    packed.weight, packed.scales, packed.biases = stored.weight, stored.scales, stored.biases
    if bias is not None:
        packed.bias = bias
    return packed


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
