"""Every quantised type in MLX's format, against gguf-py's dequantiser."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from mlx.utils import tree_flatten  # noqa: E402

from localspec.backends.mlx.network import load_network  # noqa: E402
from localspec.backends.mlx.weights import _N_THREADS, BLOCK_TYPES, BlockType, read_tensor, repack  # noqa: E402
from localspec.model_files.gguf import GGUFFile  # noqa: E402
from tests.conftest import TinyFiles  # noqa: E402
from tests.support.mlx_ggufs import Sizes, TinyFile, random_blocks, values  # noqa: E402

# Relative root mean square error on random blocks, where every bit of every code and scale is in use.
ROUNDED = {"Q6_K": 4e-3, "Q2_K": 3e-3}
EXACT = [name for name in BLOCK_TYPES if name not in ROUNDED]


def as_mlx_sees_it(kind: str, rows: np.ndarray) -> np.ndarray:
    """Blocks repacked, and unpacked again by MLX."""
    codes, scales, biases = repack(BLOCK_TYPES[kind], rows)
    return unpacked(BLOCK_TYPES[kind], mx.array(codes), mx.array(scales), None if biases is None else mx.array(biases))


def unpacked(kind: BlockType, codes: mx.array, scales: mx.array, biases: mx.array | None) -> np.ndarray:
    sizes: dict[str, Any] = {"group_size": kind.group, "bits": kind.bits, "mode": kind.mode}
    return np.array(mx.dequantize(codes, scales, biases, **sizes, dtype=mx.float32))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.square(got - want).sum() / np.square(want).sum()))


@pytest.mark.parametrize("kind", EXACT)
def test_exact_types_keep_every_bit(kind: str) -> None:
    """In rows of any width, and at the ends of what a block can hold."""
    n_bytes = BLOCK_TYPES[kind].n_bytes
    rng = np.random.default_rng(0)
    extreme = np.concatenate([np.full((8, n_bytes), fill, np.uint8) for fill in (0, 255, 128, 127, 15, 240)])
    # Whatever the codes are, scales run from the smallest subnormal half to the largest.
    scales = np.array([0, 1, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0x8001], np.uint16)
    if kind == "MXFP4":  # a byte of exponent: as far as the products with codes up to 6 are finite
        extreme[:, 0] = np.tile([0, 1, 2, 126, 127, 128, 251, 252], 6)
    for at in {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2), "MXFP4": ()}.get(
        kind, (0,)
    ):
        extreme[:, at : at + 2] = rng.permuted(np.tile(scales, 6)).reshape(-1, 1).view(np.uint8)
    extremes = np.concatenate([extreme] * (256 // BLOCK_TYPES[kind].block), axis=1)
    random = [random_blocks(kind, 96, n_columns, np.random.default_rng(n_columns)) for n_columns in (256, 768, 4096)]
    for rows in (extremes, *random):
        got, want = as_mlx_sees_it(kind, rows), values(kind, rows)
        assert np.isfinite(want).all()
        assert np.array_equal(got, want)


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_types_err_by_no_more_than_stated(kind: str) -> None:
    rows = random_blocks(kind, 256, 4096, np.random.default_rng(1))
    got, want = as_mlx_sees_it(kind, rows), values(kind, rows)
    error = relative_error(got, want)
    assert ROUNDED[kind] / 3 < error < ROUNDED[kind]


@pytest.mark.parametrize(
    ("kind", "exact"),
    [(kind, kind not in ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ4_XS")) for kind in BLOCK_TYPES],
)
def test_half_precision_scales_are_exact_where_the_file_has_halves(kind: str, exact: bool, tmp_path: Path) -> None:
    path = TinyFile("llama", types={"attn_q.weight": kind}).write(tmp_path / "model.gguf")
    with GGUFFile(path) as file:
        info = file.tensors["blk.0.attn_q.weight"]
        stored = read_tensor(file, info, mx.float16)
        want = values(kind, file.tensor_bytes(info.name).reshape(info.shape[1], -1))
    arrays = (stored.scales, stored.biases)
    scales = [each if kind == "MXFP4" else each.astype(mx.float32) for each in arrays]
    got = unpacked(stored.kind, stored.weight, *scales)
    # A scale is rounded by at most 2^-11 of it, and so are biases, which are up to 8 times the weights' deviation.
    limit = 0.0 if exact else ROUNDED.get(kind, 0.0) + 8 * 2**-11
    assert relative_error(got, want) <= limit


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_numbers(kind: str, dtype: str, tmp_path: Path) -> None:
    path = TinyFile("llama", types={"attn_q.weight": kind}).write(tmp_path / "model.gguf")
    with GGUFFile(path) as file:
        info = file.tensors["blk.1.attn_q.weight"]
        stored = read_tensor(file, info, getattr(mx, dtype))
        raw = file.tensor_bytes(info.name).reshape(info.shape[1], -1)
        want = np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
        # float16 has room for bfloat16's digits, but not for all of its range: these weights lie inside.
        fits = dtype == "float32" or dtype.upper().replace("FLOAT", "F") == kind
    got = np.array(stored.weight.astype(mx.float32))
    assert np.array_equal(got, want) or not fits
    assert relative_error(got, want) < 2**-8


def mapped_bytes() -> int:
    """Of files, those that are in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_the_model_and_one_tensor(tiny: TinyFiles, tmp_path: Path) -> None:
    types = dict.fromkeys(("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"), "Q5_0")
    types |= {"ffn_gate.weight": "Q4_K", "ffn_up.weight": "Q4_K", "ffn_down.weight": "Q6_K"}
    path = TinyFile("llama", types=types, sizes=Sizes(n_layer=12, n_embd=1024, n_ff=2048)).write(
        tmp_path / "model.gguf"
    )
    with GGUFFile(tiny.bpe) as file:
        load_network(file)  # what is allocated once and kept, by imports for example, is there now
    mx.clear_cache()
    mx.reset_peak_memory()
    tracemalloc.start()
    active, before, mapped = mx.get_active_memory(), mapped_bytes(), list[int]()
    with GGUFFile(path) as file:
        network = load_network(file, lambda done: mapped.append(mapped_bytes()) or True)
    in_mlx, in_numpy = mx.get_peak_memory() - active, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [array.nbytes for _, array in tree_flatten(network.module.parameters())]
    size, largest = sum(sizes), max(sizes)
    # NumPy's copy of a tensor lives beside the model's while it is handed over, and each thread has working memory.
    working = _N_THREADS * (8 << 20)
    assert in_mlx + in_numpy < size + largest + working
    assert max(mapped) - before < largest + (8 << 20)
    if _N_THREADS <= 2:
        assert size > 2 * (largest + working)  # or this would show little
