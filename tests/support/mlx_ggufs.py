"""Tiny random files of every architecture and tensor type that the MLX loader knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support import ggufs, mtp_ggufs
from tests.support.gguf_vocabs import TinyVocab, bpe_vocab, vocab_metadata

Array = npt.NDArray[Any]

_WIDE = {"attention.key_length": 96, "attention.value_length": 96}
"""A head wider than n_embd / n_head, as Gemma and Qwen 3 have it."""

_EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
_CONVOLUTIONS = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2]}

# Where the halves d and, for some, the minimum's factor lie in a block, and how many d's the factor is so that values
# centre on zero.
_HALVES: dict[str, tuple[int, int | None, float]] = {
    "Q4_0": (0, None, 0), "Q4_1": (0, 2, -7.5), "Q5_0": (0, None, 0), "Q5_1": (0, 2, -15.5), "Q8_0": (0, None, 0),
    "Q2_K": (80, 82, 1.5), "Q3_K": (108, None, 0), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5), "Q6_K": (208, None, 0),
    "IQ4_NL": (0, None, 0), "IQ4_XS": (0, None, 0),
}  # fmt: skip


def random_blocks(kind: str, n_rows: int, n_columns: int, rng: np.random.Generator, std: float = 1.0) -> Array:
    """Rows of random blocks [n_rows, bytes], every bit of every code and scale in use, with about this deviation."""
    type_ = gguf.GGMLQuantizationType[kind]
    block, n_bytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = rng.integers(0, 256, (n_rows * n_columns // block, n_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # a power of two, 127 for 1, and codes of deviation 2.1 to 4.3 for two of them
        blocks[:, 0] = np.round(np.log2(std / 3.3)) + 127 + rng.integers(0, 2, len(blocks))
        return blocks.reshape(n_rows, -1)
    at, minimum, factor = _HALVES[kind]
    d = rng.uniform(0.5, 1.5, (len(blocks), 1)) * rng.choice([-1, 1], (len(blocks), 1))
    scale = 1.0
    for _ in range(2):  # once to see the deviation, once to have it
        blocks[:, at : at + 2] = (d * scale).astype(np.float16).view(np.uint8)
        if minimum is not None:
            blocks[:, minimum : minimum + 2] = (d * scale * factor).astype(np.float16).view(np.uint8)
        scale *= std / float(gguf.quants.dequantize(blocks[:1000], type_).std())
    return blocks.reshape(n_rows, -1)


def values(kind: str, rows: Array) -> Array:
    """What gguf-py says that blocks mean."""
    return np.asarray(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))


Sizes = partial(ggufs.Shape, n_layer=4, n_embd=256, n_ff=512)
"""The sizes of a model; rows of 256 values and more, as the K-quants need them."""


@dataclass(frozen=True)
class TinyFile:
    """A file of one architecture."""

    architecture: str  # its name
    # ``<architecture>.<key>`` beyond the usual, or other values for those
    settings: Mapping[str, Any] = field(default_factory=dict)
    # tensor name or ``blk`` key -> tensor type, where it is not F32
    types: Mapping[str, str] = field(default_factory=dict)
    omit: tuple[str, ...] = ()  # tensors that are left out
    extra: Mapping[str, Array] = field(default_factory=dict)  # tensors that are added
    sizes: ggufs.Shape | None = None  # see ``Sizes``

    def write(self, path: Path, *, vocab: TinyVocab | None = None, seed: int = 0) -> Path:
        vocab = vocab or bpe_vocab()
        if self.architecture == "mamba":
            return ggufs.write_mamba(path, vocab, seed=seed)
        if self.architecture == "glm4moe":
            return ggufs.write_glm(path, vocab, seed=seed, own=True)
        if self.architecture == "qwen35moe":
            return mtp_ggufs.write_qwen_experts(path)
        rng = np.random.default_rng(seed + 1)

        def stored(name: str, weight: Array) -> ggufs.Stored:
            kind = self.types.get(name, self.types.get(name.split(".", 2)[-1], "F32"))
            type_ = gguf.GGMLQuantizationType[kind]
            if kind not in (*_HALVES, "MXFP4"):
                return gguf.quants.quantize(weight, type_), type_
            rows = random_blocks(kind, weight.size // weight.shape[-1], weight.shape[-1], rng, float(weight.std()))
            return rows.reshape(*weight.shape[:-1], -1), type_

        if self.architecture == "qwen35":
            return ggufs.write_hybrid(path, vocab, seed=seed, more=self.settings, stored=stored)
        sizes = self.sizes or (Sizes(n_layer=6) if self.architecture == "gemma3" else Sizes())
        usual = ggufs.sizes(sizes.n_layer, sizes.n_embd, sizes.n_ff, sizes.n_head, sizes.n_head_kv)
        settings = usual | {"rope.freq_base": 10000.0} | _SETTINGS.get(self.architecture, {}) | dict(self.settings)
        weights = _weights(self.architecture, sizes, settings, len(vocab), np.random.default_rng(seed))
        for name in self.omit:
            del weights[name]
        metadata = ggufs.named(self.architecture, settings) | vocab_metadata(vocab)
        weights |= dict(self.extra)
        return ggufs.write_gguf(path, self.architecture, metadata, weights, name="tiny", stored=stored)


_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma": _WIDE,
    # A base far from the 10000 of the layers with a window.
    "gemma3": _WIDE | {"attention.sliding_window": 16, "rope.freq_base": 100.0},
    "qwen3": _WIDE,
    "qwen3moe": _WIDE | _EXPERTS,
    "granite": {"attention.scale": 0.05, "embedding_scale": 6.0, "residual_scale": 0.4, "logit_scale": 2.0},
    "gpt-oss": _EXPERTS
    | {
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.sliding_window": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 512,
    },
    "lfm2": _CONVOLUTIONS,
    "lfm2moe": _CONVOLUTIONS | _EXPERTS | {"leading_dense_block_count": 1, "expert_gating_func": 2},
    "llama": {"rope.dimension_count": 64},
    "phi3": {"rope.dimension_count": 48},
}


def _weights(
    architecture: str, sizes: ggufs.Shape, settings: Mapping[str, Any], n_vocab: int, rng: np.random.Generator
) -> dict[str, Array]:
    n, n_ff = sizes.n_embd, sizes.n_ff
    d_head = settings.get("attention.key_length", n // sizes.n_head)
    n_q, n_kv = sizes.n_head * d_head, sizes.n_head_kv * d_head
    matrix = ggufs.matrices(rng)

    def norm(size: int = n) -> Array:
        return rng.uniform(0.7, 1.3, size).astype(np.float32)

    # What layers add must not drown in Gemma's enlarged embedding, or every token predicts itself.
    added = 5.0 if architecture == "gemma" else 1.0
    weights = {"token_embd.weight": matrix(n_vocab, n, 3.0 if architecture.startswith("gemma") else 8.0)}
    weights["output_norm.weight"] = norm()
    if not architecture.startswith("gemma"):
        weights["output.weight"] = matrix(n_vocab, n, 3.0)
    for i in range(sizes.n_layer):
        layer: dict[str, Array] = {}
        if architecture == "phi3":
            layer["attn_qkv.weight"] = np.concatenate([matrix(n_q, n, 2.0), matrix(n_kv, n, 2.0), matrix(n_kv, n, 2.0)])
        else:
            for part, rows in (("q", n_q), ("k", n_kv), ("v", n_kv)):
                layer[f"attn_{part}.weight"] = matrix(rows, n, 2.0)
                if architecture == "qwen2":
                    layer[f"attn_{part}.bias"] = 0.3 * rng.standard_normal(rows).astype(np.float32)
        layer["attn_output.weight"] = matrix(n, n_q, added)
        if architecture in ("gemma3", "qwen3", "qwen3moe"):
            layer |= {"attn_q_norm.weight": norm(d_head), "attn_k_norm.weight": norm(d_head)}
        if architecture == "gpt-oss":
            layer |= {"attn_norm.weight": norm(), "post_attention_norm.weight": norm()}
            layer["attn_sinks.weight"] = rng.standard_normal(sizes.n_head).astype(np.float32)
            for part, rows in (("q", n_q), ("k", n_kv), ("v", n_kv), ("output", n)):
                layer[f"attn_{part}.bias"] = 0.3 * rng.standard_normal(rows).astype(np.float32)
        elif architecture == "olmo2":
            layer |= {"attn_q_norm.weight": norm(n_q), "attn_k_norm.weight": norm(n_kv)}
        else:
            layer |= {"attn_norm.weight": norm(), "ffn_norm.weight": norm()}
        if architecture in ("olmo2", "gemma3"):
            layer |= {"post_attention_norm.weight": 4 * norm(), "post_ffw_norm.weight": 4 * norm()}
        if architecture in ("qwen3moe", "gpt-oss"):
            layer |= _experts(settings, n, rng, biases=architecture == "gpt-oss")
        elif architecture == "phi3":
            layer |= {"ffn_up.weight": matrix(2 * n_ff, n), "ffn_down.weight": matrix(n, n_ff, 2.0)}
        else:
            layer |= {"ffn_gate.weight": matrix(n_ff, n), "ffn_up.weight": matrix(n_ff, n)}
            layer["ffn_down.weight"] = matrix(n, n_ff, 2 * added)
        if architecture.startswith("lfm2"):
            _as_lfm2(layer, i, sizes, settings, rng)
        weights |= {f"blk.{i}.{key}": weight for key, weight in layer.items()}
    if architecture.startswith("lfm2"):
        weights["token_embd_norm.weight"] = weights.pop("output_norm.weight")
        weights["token_embd.weight"] = weights.pop("output.weight")  # one for both, and small beside what layers add
    return weights


def _as_lfm2(
    layer: dict[str, Array], i: int, sizes: ggufs.Shape, settings: Mapping[str, Any], rng: np.random.Generator
) -> None:
    """Make a layer one of LFM2: of short convolutions, where the settings count no key heads."""
    n, d_head, matrix = sizes.n_embd, sizes.n_embd // sizes.n_head, ggufs.matrices(rng)
    layer |= {f"attn_{part}_norm.weight": rng.uniform(0.7, 1.3, d_head).astype(np.float32) for part in "qk"}
    if not settings["attention.head_count_kv"][i]:
        for name in [name for name in layer if name.startswith("attn_") and name != "attn_norm.weight"]:
            del layer[name]
        layer["shortconv.in_proj.weight"] = matrix(3 * n, n, 2.0)
        layer["shortconv.conv.weight"] = rng.standard_normal((n, settings["shortconv.l_cache"])).astype(np.float32)
        layer["shortconv.out_proj.weight"] = matrix(n, n, 2.0)
    n_expert = settings.get("expert_count", 0)
    if n_expert and i >= settings["leading_dense_block_count"]:
        del layer["ffn_gate.weight"], layer["ffn_up.weight"], layer["ffn_down.weight"]
        layer |= _experts(settings, n, rng)
        layer["exp_probs_b.bias"] = rng.uniform(-0.3, 0.3, n_expert).astype(np.float32)


def _experts(
    settings: Mapping[str, Any], n: int, rng: np.random.Generator, *, biases: bool = False
) -> dict[str, Array]:
    n_expert, n_ff, matrix = settings["expert_count"], settings["expert_feed_forward_length"], ggufs.matrices(rng)
    experts = {"ffn_gate_inp.weight": matrix(n_expert, n, 2.0)}
    for part, rows, columns in (("gate", n_ff, n), ("up", n_ff, n), ("down", n, n_ff)):
        experts[f"ffn_{part}_exps.weight"] = np.stack([matrix(rows, columns, 2.0) for _ in range(n_expert)])
        if biases:
            experts[f"ffn_{part}_exps.bias"] = rng.standard_normal((n_expert, rows)).astype(np.float32)
    if biases:
        experts["ffn_gate_inp.bias"] = rng.standard_normal(n_expert).astype(np.float32)
    return experts
