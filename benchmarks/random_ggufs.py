"""Writes GGUF files of real models' shapes with random weights, for timing passes where no weights can be had.

    python benchmarks/random_ggufs.py NAME [--out FILE] [--small] [--time ENGINE]

Names: qwen2.5-0.5b, -1.5b, -7b, -32b, qwen3-30b-a3b (a mixture of 128 experts, 8 of them used), with the types of
``Q4_K_M``: what a pass reads and computes is what it is with the real file, what it says is nonsense. Random blocks of
a pool of 16 MB are repeated, so a file is written as fast as the disk takes it. ``--small`` writes two layers of 256
channels. ``--time`` prints what passes over 1, 2, … tokens take in an engine, after 64 others, in rounds over all
widths: medians of five. A random mixture routes each token to experts of its own: at most as dear as a real one.

Scales are chosen so that a weight's mean is about 0 and its standard deviation 1/sqrt(columns), as at the beginning of
training; nothing overflows.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import backends
from localspec.model_files.gguf import TENSOR_TYPES, GGUFOutput, TensorInfo, new_tensor
from localspec.system.files import write_atomically
from tests.support.gguf_vocabs import bpe_vocab, vocab_metadata

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RealShape:
    """Sizes as the models' configurations have them; ``n_experts`` 0 is a dense model."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    n_ff: int
    n_vocab: int
    tied: bool = False
    n_experts: int = 0
    n_used: int = 0


SHAPES = {
    "qwen2.5-0.5b": RealShape("qwen2", 24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "qwen2.5-1.5b": RealShape("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "qwen2.5-7b": RealShape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-32b": RealShape("qwen2", 64, 5120, 40, 8, 128, 27648, 152064),
    "qwen3-30b-a3b": RealShape("qwen3moe", 48, 2048, 32, 4, 128, 768, 151936, n_experts=128, n_used=8),
}

_VALUES_PER_POOL = 1 << 25


def small(shape: RealShape) -> RealShape:
    """The same architecture, tiny."""
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "d_head": 64, "n_ff": 512}
    experts = {"n_experts": 4, "n_used": 2, "n_ff": 256} if shape.n_experts else {}
    return replace(shape, n_vocab=512, **(sizes | experts))


def tensors(shape: RealShape) -> list[TensorInfo]:
    """All tensors, with the types that ``Q4_K_M`` gives them."""
    n, kv, q = shape.n_embd, shape.n_head_kv * shape.d_head, shape.n_head * shape.d_head
    found: list[TensorInfo] = []

    def add(name: str, size: tuple[int, ...], kind: str) -> None:
        if kind != "F32" and size[-1] % 256:  # llama.cpp's choice where rows are not whole blocks
            kind = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[kind]
        found.append(new_tensor(name, size, kind))

    add("token_embd.weight", (shape.n_vocab, n), "Q6_K" if shape.tied else "Q4_K")
    for i in range(shape.n_layer):
        block, eighth = f"blk.{i}.", shape.n_layer // 8
        more = i < eighth or i >= 7 * shape.n_layer // 8 or (i - eighth) % 3 == 2
        better = "Q6_K" if more else "Q4_K"
        add(f"{block}attn_norm.weight", (n,), "F32")
        for letter, rows in (("q", q), ("k", kv), ("v", kv)):
            add(f"{block}attn_{letter}.weight", (rows, n), better if letter == "v" else "Q4_K")
            if shape.architecture == "qwen2":
                add(f"{block}attn_{letter}.bias", (rows,), "F32")
            elif letter != "v":
                add(f"{block}attn_{letter}_norm.weight", (shape.d_head,), "F32")
        add(f"{block}attn_output.weight", (n, q), "Q4_K")
        add(f"{block}ffn_norm.weight", (n,), "F32")
        each, suffix = ((shape.n_experts,), "_exps") if shape.n_experts else ((), "")
        if shape.n_experts:
            add(f"{block}ffn_gate_inp.weight", (shape.n_experts, n), "F32")
        for part in ("gate", "up"):
            add(f"{block}ffn_{part}{suffix}.weight", (*each, shape.n_ff, n), "Q4_K")
        add(f"{block}ffn_down{suffix}.weight", (*each, n, shape.n_ff), better)
    add("output_norm.weight", (n,), "F32")
    if not shape.tied:
        add("output.weight", (shape.n_vocab, n), "Q6_K")
    return found


def metadata(name: str, shape: RealShape) -> dict[str, Any]:
    """What the file says of itself, but for its tokens."""
    values: dict[str, Any] = {
        "block_count": shape.n_layer,
        "context_length": 32768,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.d_head,
        "attention.value_length": shape.d_head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
    }
    if shape.n_experts:
        values |= {"expert_count": shape.n_experts, "expert_used_count": shape.n_used}
        values["expert_feed_forward_length"] = shape.n_ff
    general = {"general.architecture": shape.architecture, "general.name": f"random {name}", "general.file_type": 15}
    return general | {f"{shape.architecture}.{key}": value for key, value in values.items()}


def _pool(kind: str, deviation: float, rng: np.random.Generator) -> Bytes:
    """Random blocks of a type, at most 2^25 values of this standard deviation."""
    block, n_bytes = next((block, size) for name, block, size in TENSOR_TYPES.values() if name == kind)
    n = max(1, _VALUES_PER_POOL // block // (8 if kind == "F32" else 1))
    if kind == "F32":
        return (rng.standard_normal(n, dtype=np.float32) * np.float32(deviation)).view(np.uint8)
    blocks = rng.integers(0, 256, (n, n_bytes), dtype=np.uint8)

    def put(at: int, value: float) -> None:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    # A value is d·q, with q of these deviations for uniform bits; Q4_K takes d·s·q - m·t with 6-bit s and t.
    if kind == "Q4_K":
        d = deviation / 258
        put(0, d)
        put(2, 7.5 * d)
    elif kind == "Q6_K":
        put(208, deviation / 1368)
    elif kind == "Q5_0":
        put(0, deviation / 9.2)
    else:
        assert kind == "Q8_0"
        put(0, deviation / 74)
    return blocks.reshape(-1)


def _data(tensor: TensorInfo, pools: dict[tuple[str, int], Bytes], rng: np.random.Generator) -> Iterator[Bytes]:
    """The bytes of a tensor, in pieces."""
    kind, n_bytes = TENSOR_TYPES[tensor.ggml_type][0], tensor.n_bytes
    if tensor.name.endswith("norm.weight"):
        yield np.ones(n_bytes // 4, np.float32).view(np.uint8)
        return
    if tensor.name.endswith(".bias"):
        yield np.zeros(n_bytes // 4, np.float32).view(np.uint8)
        return
    columns = tensor.shape[0]
    pool = pools.setdefault((kind, columns), np.empty(0, np.uint8))
    if not len(pool):
        pool = pools[kind, columns] = _pool(kind, columns**-0.5, rng)
    while n_bytes > 0:
        yield pool[:n_bytes]
        n_bytes -= len(pool)


def _strings(key: str, values: list[str]) -> bytes:
    raw = [text.encode() for text in (key, *values)]
    head = struct.pack("<Q", len(raw[0])) + raw[0] + struct.pack("<IIQ", 9, 8, len(values))
    return head + b"".join(struct.pack("<Q", len(text)) + text for text in raw[1:])


def write(path: Path, name: str, shape: RealShape, seed: int = 0) -> Path:
    """A file of such a shape; its vocabulary has as many tokens, of which the first few hundred mean something."""
    rng, pools = np.random.default_rng(seed), dict[tuple[str, int], Bytes]()
    fields = vocab_metadata(bpe_vocab(shape.n_vocab, pre="qwen2"))
    lists = [_strings(key, list(fields.pop(key))) for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")]
    fields["tokenizer.ggml.token_type"] = np.asarray(fields["tokenizer.ggml.token_type"], np.int32)
    listed = tensors(shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path, durable=False) as file:
        output = GGUFOutput(file, metadata(name, shape) | fields, listed, encoded=lists)
        for tensor in listed:
            for piece in _data(tensor, pools, rng):
                output.write(piece)
    return path


WIDTHS, PAST, ROUNDS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16), 64, 5


def times(path: Path, engine: str) -> dict[int, float]:
    """Medians of what passes take, by their width [ms]."""
    rng = np.random.default_rng(1)
    taken: dict[int, list[float]] = {width: [] for width in WIDTHS}
    with backends.load(path, engine, check=False) as model, model.new_context(PAST + max(WIDTHS)) as context:
        tokens = rng.integers(256, model.vocab.n_tokens, PAST + ROUNDS * max(WIDTHS)).tolist()
        context.decode(tokens[:PAST], "last")
        for first in range(PAST, len(tokens), max(WIDTHS)):
            for width in WIDTHS:
                started = time.perf_counter()
                context.decode(tokens[first : first + width], "all")
                taken[width].append((time.perf_counter() - started) * 1e3)
                context.truncate(PAST)
    return {width: round(statistics.median(ms), 1) for width, ms in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--time", metavar="ENGINE", help="time passes of this engine with the file")
    args = parser.parse_args()
    shape = small(SHAPES[args.name]) if args.small else SHAPES[args.name]
    path = write(args.out or Path(f"random-{args.name}.gguf"), args.name, shape)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")
    if args.time:
        print(" ".join(f"{width}={ms}" for width, ms in times(path, args.time).items()))


if __name__ == "__main__":
    main()
