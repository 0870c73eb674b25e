"""Every quantised type in MLX's format, against gguf-py's dequantiser."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

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
OTHER_SCALES = ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ4_XS")
"""Types whose scales are products, and no halves."""


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F32", "F16", "BF16"])
def test_a_tensor_is_read_as_exactly_as_its_type_and_a_precision_allow(kind: str, dtype: str, tmp_path: Path) -> None:
    path = TinyFile("llama", types={"attn_q.weight": kind}).write(tmp_path / "model.gguf")
    with GGUFFile(path) as file:
        info = file.tensors["blk.1.attn_q.weight"]
        stored = read_tensor(file, info, getattr(mx, dtype))
        want = values(kind, file.tensor_bytes(info.name).reshape(info.shape[1], -1))
    step = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[dtype]  # by which a number is rounded at most
    if stored.kind is None:
        got = np.array(stored.weight.astype(mx.float32))
        limit = 0.0 if dtype.upper().replace("FLOAT", "F") == kind else step
    else:
        scales = [each if kind == "MXFP4" else each.astype(mx.float32) for each in (stored.scales, stored.biases)]
        got = unpacked(stored.kind, stored.weight, *scales)
        exact = kind == "MXFP4" or (dtype == "float16" and kind not in OTHER_SCALES)
        # Biases, which are up to 8 times the weights' deviation, are rounded as scales are.
        limit = 0.0 if exact else ROUNDED.get(kind, 0.0) + 8 * step
    assert relative_error(got, want) <= limit


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
