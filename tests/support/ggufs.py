"""Tiny but real GGUF files, written in milliseconds: random weights from a fixed seed, real tokenisers.

Every engine loads them. The weights are scaled so that predictions are peaked (1 to 3 nats) and depend on the context,
so a wrong position, a wrong row or a stale cache shows up as another answer. Nothing here is trained: text made with
these models is gibberish, complete with halves of multi-byte characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.gguf_vocabs import (
    TinyVocab,
    bpe_vocab,
    micro_vocab,
    spm_vocab,
    vocab_metadata,
)

Array = npt.NDArray[Any]
Weights = dict[str, Array]


@dataclass(frozen=True)
class Shape:
    """The sizes of a llama-architecture model, and how its random weights are scaled.

    ``sharpness`` is the standard deviation of the logits: about 2 to 4 gives an entropy of 3 to 1 nats.
    ``residual`` is how much each layer adds to the embedding: small, and fewer layers still predict much the same.
    """

    n_layer: int = 2
    n_embd: int = 128
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 256
    n_ctx: int = 2048
    sharpness: float = 3.0
    residual: float = 0.6
    tied: bool = False
    rope_base: float = 10000.0

    @property
    def d_head(self) -> int:
        return self.n_embd // self.n_head


def matrices(rng: np.random.Generator) -> Callable[..., Array]:
    """Draws matrices that make of a vector one whose elements are as large, or ``scale`` times as large."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        return (rng.standard_normal((rows, columns)) * (scale / np.sqrt(columns))).astype(np.float32)

    return matrix


def llama_weights(shape: Shape, n_vocab: int, seed: int = 0) -> Weights:
    """Random weights by GGUF tensor name; a matrix is [rows out, columns in]."""
    rng = np.random.default_rng(seed)
    matrix = matrices(rng)

    def norm() -> Array:
        return rng.uniform(0.8, 1.2, shape.n_embd).astype(np.float32)

    n, kv = shape.n_embd, shape.n_head_kv * shape.d_head
    weights: Weights = {"token_embd.weight": matrix(n_vocab, n, np.sqrt(n))}
    for i in range(shape.n_layer):
        weights |= {
            f"blk.{i}.attn_norm.weight": norm(),
            f"blk.{i}.attn_q.weight": matrix(n, n, 2.0),
            f"blk.{i}.attn_k.weight": matrix(kv, n),
            f"blk.{i}.attn_v.weight": matrix(kv, n, 2.0),
            f"blk.{i}.attn_output.weight": matrix(n, n, shape.residual),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": matrix(shape.n_ff, n),
            f"blk.{i}.ffn_up.weight": matrix(shape.n_ff, n),
            f"blk.{i}.ffn_down.weight": matrix(n, shape.n_ff, shape.residual * 2),
        }
    weights["output_norm.weight"] = norm()
    if not shape.tied:
        weights["output.weight"] = matrix(n_vocab, n, shape.sharpness)
    else:
        weights["token_embd.weight"] *= np.float32(shape.sharpness / np.sqrt(n))
    return weights


def perturbed(weights: Weights, n_layer: int, noise: float, seed: int = 1) -> Weights:
    """The same weights with relative noise, and only the first ``n_layer`` layers."""
    rng = np.random.default_rng(seed)
    result: Weights = {}
    for name, weight in weights.items():
        if name.startswith("blk.") and int(name.split(".")[1]) >= n_layer:
            continue
        scale = noise * float(weight.std()) if weight.ndim > 1 else 0.0
        result[name] = (weight + scale * rng.standard_normal(weight.shape)).astype(np.float32)
    return result


Stored = tuple[Array, gguf.GGMLQuantizationType | None]


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    weights: Weights,
    tensor_type: str = "F32",
    *,
    name: str = "",
    stored: Callable[[str, Array], Stored] | None = None,
) -> Path:
    """Write a file: matrices in ``tensor_type`` where their rows fill whole blocks, everything else as F32.

    ``stored``: (a tensor's name, its weights) -> its data and type, where it is not so.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name or f"tiny {architecture}")
    for key, value in metadata.items():
        add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[tensor_type]
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def usual(tensor: str, weight: Array) -> Stored:
        if weight.dtype == np.int64:
            return weight, None
        if weight.ndim < 2 or weight.shape[-1] % block or "conv1d" in tensor or "ssm_a" in tensor:
            return np.ascontiguousarray(weight, dtype=np.float32), None
        return gguf.quants.quantize(weight, kind), kind

    for tensor, weight in weights.items():
        data, raw_dtype = (stored or usual)(tensor, weight)
        writer.add_tensor(tensor, data, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", np.uint16: "uint16", np.int32: "int32", float: "float32", str: "string"}
    for kind, name in kinds.items():
        if isinstance(value, kind):
            getattr(writer, f"add_{name}")(key, kind(value))
            return
    writer.add_array(key, list(value))


def sizes(
    architecture: str,
    n_layer: int,
    n: int,
    n_ff: int,
    n_head: int,
    n_kv: int | Sequence[int] | None = None,
    d_head: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The keys that most architectures have; two underscores in a further name are a dot, and None is none."""
    values = {
        "block_count": n_layer,
        "context_length": 2048,
        "embedding_length": n,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.key_length": d_head,
        "attention.value_length": d_head,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {name.replace("__", "."): value for name, value in more.items()}
    return {f"{architecture}.{name}": value for name, value in values.items() if value is not None}


def llama_metadata(shape: Shape, n_vocab: int, n_layer: int | None = None) -> dict[str, Any]:
    """The ``llama.*`` keys."""
    return sizes(
        "llama",
        n_layer if n_layer is not None else shape.n_layer,
        shape.n_embd,
        shape.n_ff,
        shape.n_head,
        shape.n_head_kv,
        context_length=shape.n_ctx,
        rope__dimension_count=shape.d_head,
        rope__freq_base=shape.rope_base,
        vocab_size=n_vocab,
    )


def write_llama(
    path: Path,
    shape: Shape | None = None,
    vocab: TinyVocab | None = None,
    *,
    seed: int = 0,
    tensor_type: str = "F32",
    weights: Weights | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A llama-architecture model.

    Args:
        path: where to write it.
        shape: its sizes.
        vocab: its tokenizer; SentencePiece by default.
        seed: of the random weights.
        tensor_type: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1.
        weights: weights to use instead of random ones (the number of layers is taken from them).
        extra: metadata that replaces or adds to the usual.
    """
    shape, vocab = shape or Shape(), vocab or spm_vocab()
    weights = llama_weights(shape, len(vocab), seed) if weights is None else weights
    n_layer = len({name.split(".")[1] for name in weights if name.startswith("blk.")})
    metadata = llama_metadata(shape, len(vocab), n_layer) | vocab_metadata(vocab) | dict(extra or {})
    return write_gguf(path, "llama", metadata, weights, tensor_type)


def write_experts(path: Path, vocab: TinyVocab | None = None, *, n_expert: int = 4, seed: int = 0) -> Path:
    """A mixture of experts of the llama architecture (Mixtral's), two of which take part in a token."""
    shape, vocab = Shape(), vocab or spm_vocab()
    weights = llama_weights(shape, len(vocab), seed)
    rng = np.random.default_rng(seed + 1)
    for i in range(shape.n_layer):
        weights[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((n_expert, shape.n_embd)).astype(np.float32)
        for part in ("gate", "up", "down"):
            dense = weights.pop(f"blk.{i}.ffn_{part}.weight")
            noise = rng.standard_normal((n_expert, *dense.shape)).astype(np.float32)
            weights[f"blk.{i}.ffn_{part}_exps.weight"] = dense + dense.std() * noise
    experts = {"llama.expert_count": n_expert, "llama.expert_used_count": 2}
    return write_llama(path, shape, vocab, weights=weights, extra=experts)


def write_in_parts(
    folder: Path,
    vocab: TinyVocab | None = None,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    tensor_type: str = "F32",
    n_parts: int = 2,
) -> list[Path]:
    """A llama-architecture model in parts, the first without tensors: ``gguf-split --no-tensor-first-split``."""
    shape, vocab = shape or Shape(), vocab or bpe_vocab()
    weights = llama_weights(shape, len(vocab), seed)
    names, step = list(weights), -(-len(weights) // (n_parts - 1))
    paths = []
    for number in range(n_parts):
        split = {"split.no": np.uint16(number), "split.count": np.uint16(n_parts)}
        split["split.tensors.count"] = np.int32(len(weights))
        whole = llama_metadata(shape, len(vocab)) | vocab_metadata(vocab)
        held = {name: weights[name] for name in names[(number - 1) * step : number * step]} if number else {}
        path = folder / f"tiny-{number + 1:05}-of-{n_parts:05}.gguf"
        paths.append(write_gguf(path, "llama", split if number else whole | split, held, tensor_type))
    return paths


def write_trap(path: Path, vocab: TinyVocab | None = None) -> Path:
    """A sound file that ik-llama-cpp-python 0.1.5 computes wrongly in passes of more than one token.

    Its batched kernels for Q4_1 and Q5_1 fail where a row is no multiple of 128; every other engine is right.
    """
    shape = Shape(n_embd=96, n_head=3, n_head_kv=1)
    return write_llama(path, shape, vocab or bpe_vocab(), tensor_type="Q4_1")


@dataclass(frozen=True)
class Pair:
    """A target and a draft that often guesses it right."""

    target: Path
    draft: Path


def correlated_pair(
    folder: Path,
    vocab: TinyVocab | None = None,
    *,
    shape: Shape | None = None,
    draft_layers: int = 1,
    noise: float = 0.02,
    seed: int = 0,
    tensor_type: str = "F32",
    name: str = "pair",
) -> Pair:
    """A target of 4 layers and a draft of its first ``draft_layers``, slightly disturbed.

    With the defaults the draft's argmax is the target's about two times in three; fewer layers and more noise lower
    that.
    """
    shape, vocab = shape or Shape(n_layer=4, residual=0.1), vocab or bpe_vocab()
    weights = llama_weights(shape, len(vocab), seed)
    target = write_llama(folder / f"{name}-target.gguf", shape, vocab, weights=weights, tensor_type=tensor_type)
    small = perturbed(weights, draft_layers, noise, seed + 1)
    draft = write_llama(folder / f"{name}-draft.gguf", shape, vocab, weights=small, tensor_type=tensor_type)
    return Pair(target, draft)


def micro_model(path: Path, n_vocab: int = 6, *, seed: int = 0, sharpness: float = 1.0) -> Path:
    """A model over so few tokens that all continuations can be enumerated (reference backend only)."""
    shape = Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, n_ctx=64, sharpness=sharpness)
    return write_llama(path, shape, micro_vocab(n_vocab), seed=seed)


def write_tokenizer_only(path: Path, vocab: TinyVocab | None = None) -> Path:
    """Metadata and vocabulary but no weights, like the ``ggml-vocab-*.gguf`` files of llama.cpp."""
    vocab = vocab or spm_vocab()
    return write_gguf(path, "llama", llama_metadata(Shape(), len(vocab)) | vocab_metadata(vocab), {})


def write_mamba(path: Path, vocab: TinyVocab | None = None, *, seed: int = 0) -> Path:
    """A recurrent model: its memory is a state that cannot be rewound."""
    rng, vocab = np.random.default_rng(seed), vocab or bpe_vocab()
    n, inner, state, rank, kernel, n_layer = 64, 128, 16, 4, 4, 2
    matrix = matrices(rng)
    weights: Weights = {
        "token_embd.weight": matrix(len(vocab), n, 8.0),
        "output_norm.weight": np.ones(n, np.float32),
        "output.weight": matrix(len(vocab), n, 3.0),
    }
    for i in range(n_layer):
        weights |= {
            f"blk.{i}.attn_norm.weight": np.ones(n, np.float32),
            f"blk.{i}.ssm_in.weight": matrix(2 * inner, n),
            f"blk.{i}.ssm_conv1d.weight": matrix(inner, kernel),
            f"blk.{i}.ssm_conv1d.bias": np.zeros(inner, np.float32),
            f"blk.{i}.ssm_x.weight": matrix(rank + 2 * state, inner),
            f"blk.{i}.ssm_dt.weight": matrix(inner, rank),
            f"blk.{i}.ssm_dt.bias": rng.uniform(-3, 0, inner).astype(np.float32),
            f"blk.{i}.ssm_a": -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1)),
            f"blk.{i}.ssm_d": np.ones(inner, np.float32),
            f"blk.{i}.ssm_out.weight": matrix(n, inner),
        }
    ssm = {"conv_kernel": kernel, "inner_size": inner, "state_size": state, "time_step_rank": rank}
    metadata = sizes("mamba", n_layer, n, 0, 0) | {f"mamba.ssm.{name}": value for name, value in ssm.items()}
    return write_gguf(path, "mamba", metadata | vocab_metadata(vocab), weights)


def write_sliding_window(path: Path, window: int = 32, vocab: TinyVocab | None = None, *, seed: int = 0) -> Path:
    """A Gemma 3 in small: five layers of six see only the last ``window`` tokens."""
    rng, vocab = np.random.default_rng(seed), vocab or spm_vocab()
    n, n_head, n_kv, d_head, n_ff, n_layer = 128, 4, 1, 32, 256, 6
    matrix = matrices(rng)
    weights: Weights = {
        # Tied: the same matrix makes the logits, so its scale sets how peaked they are.
        "token_embd.weight": matrix(len(vocab), n, 3.0),
        "output_norm.weight": np.ones(n, np.float32),
    }
    for i in range(n_layer):
        weights |= {
            f"blk.{i}.attn_q.weight": matrix(n_head * d_head, n),
            f"blk.{i}.attn_k.weight": matrix(n_kv * d_head, n),
            f"blk.{i}.attn_v.weight": matrix(n_kv * d_head, n),
            f"blk.{i}.attn_output.weight": matrix(n, n_head * d_head),
            f"blk.{i}.ffn_gate.weight": matrix(n_ff, n),
            f"blk.{i}.ffn_up.weight": matrix(n_ff, n),
            f"blk.{i}.ffn_down.weight": matrix(n, n_ff),
        }
        weights |= {f"blk.{i}.{name}_norm.weight": np.ones(d_head, np.float32) for name in ("attn_q", "attn_k")}
        for name in ("attn", "post_attention", "ffn", "post_ffw"):
            # The embedding must not drown the layers, or every token predicts itself.
            scale = 6.0 if name.startswith("post") else 1.0
            weights[f"blk.{i}.{name}_norm.weight"] = np.full(n, scale, np.float32)
    metadata = sizes(
        "gemma3",
        n_layer,
        n,
        n_ff,
        n_head,
        n_kv,
        d_head,
        attention__layer_norm_rms_epsilon=1e-6,
        attention__sliding_window=window,
        rope__freq_base=1000000.0,
    )
    return write_gguf(path, "gemma3", metadata | vocab_metadata(vocab), weights)


def write_hybrid(
    path: Path,
    vocab: TinyVocab | None = None,
    *,
    seed: int = 0,
    residual: float = 3.0,
    mtp: int = 0,
    more: Mapping[str, Any] | None = None,
    stored: Callable[[str, Array], Stored] | None = None,
) -> Path:
    """A Qwen 3.5 in small: three layers of four keep a state that cannot be rewound, the fourth keys and values.

    Args:
        path: where to write it.
        vocab: its tokenizer.
        seed: of the random weights.
        residual: how much each layer adds to the embedding.
        mtp: layers for multi-token prediction besides; see ``mtp_weights``.
        more: ``qwen35.<key>`` beyond the usual, or other values for those.
        stored: see ``write_gguf``.
    """
    rng, vocab = np.random.default_rng(seed), vocab or bpe_vocab()
    n, n_head, n_kv, d_head, n_ff, n_layer = 128, 4, 2, 32, 256, 4
    d_state, n_group, n_value, kernel = 64, 2, 4, 4  # ik-llama's kernels are for states of 64 and 128
    inner, channels = d_state * n_value, d_state * (2 * n_group + n_value)
    matrix = matrices(rng)
    weights: Weights = {
        "token_embd.weight": matrix(len(vocab), n, 8.0),
        "output_norm.weight": np.ones(n, np.float32),
        "output.weight": matrix(len(vocab), n, 3.0),
    }
    for i in range(n_layer):
        layer: Weights = {name: np.ones(n, np.float32) for name in ("attn_norm.weight", "post_attention_norm.weight")}
        if (i + 1) % 4 == 0:
            layer |= {
                "attn_q.weight": matrix(2 * n_head * d_head, n),  # queries, and a gate for each
                "attn_k.weight": matrix(n_kv * d_head, n),
                "attn_v.weight": matrix(n_kv * d_head, n),
                "attn_output.weight": matrix(n, n_head * d_head, residual),
            }
            layer |= {f"{name}_norm.weight": np.ones(d_head, np.float32) for name in ("attn_q", "attn_k")}
        else:
            layer |= {
                "attn_qkv.weight": matrix(channels, n, 2.0),
                "attn_gate.weight": matrix(inner, n),
                "ssm_conv1d.weight": matrix(channels, kernel),
                "ssm_dt.bias": rng.uniform(-3, 0, n_value).astype(np.float32),
                "ssm_a": -rng.uniform(0.1, 1.0, n_value).astype(np.float32),
                "ssm_beta.weight": matrix(n_value, n),
                "ssm_alpha.weight": matrix(n_value, n),
                "ssm_norm.weight": np.ones(d_state, np.float32),
                "ssm_out.weight": matrix(n, inner, residual),
            }
        layer |= {"ffn_gate.weight": matrix(n_ff, n), "ffn_up.weight": matrix(n_ff, n)}
        layer["ffn_down.weight"] = matrix(n, n_ff, residual / 3)
        weights |= {f"blk.{i}.{name}": weight for name, weight in layer.items()}
        last = layer
    for i in range(n_layer, n_layer + mtp):
        weights |= {f"blk.{i}.{name}": weight for name, weight in (last | mtp_weights(n, rng)).items()}
    ssm = {"inner_size": inner, "state_size": d_state, "time_step_rank": n_value, "group_count": n_group}
    metadata = sizes(
        "qwen35",
        n_layer + mtp,
        n,
        n_ff,
        n_head,
        n_kv,
        d_head,
        nextn_predict_layers=mtp or None,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=10000.0,
        rope__dimension_count=d_head,
        rope__dimension_sections=[6, 5, 5, 0],
        full_attention_interval=4,
    ) | {f"qwen35.ssm.{name}": value for name, value in (ssm | {"conv_kernel": kernel}).items()}
    metadata |= {f"qwen35.{name}": value for name, value in (more or {}).items()}
    return write_gguf(path, "qwen35", metadata | vocab_metadata(vocab), weights, stored=stored)


def mtp_weights(n: int, rng: np.random.Generator) -> Weights:
    """What a layer for multi-token prediction has besides a block: it goes by the last token, and the state."""
    state = 0.3 * rng.standard_normal((n, n)) / np.sqrt(n)
    return {
        "nextn.eh_proj.weight": np.concatenate([np.eye(n), state], axis=1).astype(np.float32),
        "nextn.enorm.weight": np.ones(n, np.float32),
        "nextn.hnorm.weight": np.ones(n, np.float32),
        "nextn.shared_head_norm.weight": np.ones(n, np.float32),
    }


def write_glm(
    path: Path, vocab: TinyVocab | None = None, *, seed: int = 0, mtp: int = 1, drop: str = "", own: bool = False
) -> Path:
    """A GLM 4.5 in small: a dense layer, then two of experts, and layers for multi-token prediction.

    Args:
        path: where to write it.
        vocab: its tokenizer.
        seed: of the random weights.
        mtp: layers for multi-token prediction.
        drop: tensors with this in their name are left out.
        own: whether the layers have embeddings and an output matrix of their own, experts are chosen with a bias, and
            queries and keys are normalised.
    """
    rng, vocab = np.random.default_rng(seed), vocab or bpe_vocab()
    n, n_head, n_kv, d_head, n_ff, n_expert, n_layer, residual = 128, 4, 2, 32, 64, 4, 3, 0.15
    matrix = matrices(rng)

    def experts(rows: int, columns: int, scale: float = 1.0) -> Array:
        return np.stack([matrix(rows, columns, scale) for _ in range(n_expert)])

    weights: Weights = {
        "token_embd.weight": matrix(len(vocab), n, np.sqrt(n)),
        "output_norm.weight": np.ones(n, np.float32),
        "output.weight": matrix(len(vocab), n, 3.0),
    }
    for i in range(n_layer + mtp):
        layer: Weights = {name: np.ones(n, np.float32) for name in ("attn_norm.weight", "post_attention_norm.weight")}
        layer |= {
            "attn_q.weight": matrix(n_head * d_head, n, 2.0),
            "attn_k.weight": matrix(n_kv * d_head, n),
            "attn_v.weight": matrix(n_kv * d_head, n),
            "attn_output.weight": matrix(n, n_head * d_head, residual),
        }
        layer |= {f"attn_{part}.bias": rng.uniform(-0.1, 0.1, len(layer[f"attn_{part}.weight"])) for part in "qkv"}
        if i == 0:
            layer |= {"ffn_gate.weight": matrix(2 * n_ff, n), "ffn_up.weight": matrix(2 * n_ff, n)}
            layer["ffn_down.weight"] = matrix(n, 2 * n_ff, residual)
        else:
            layer |= {"ffn_gate_inp.weight": matrix(n_expert, n), "exp_probs_b.bias": np.zeros(n_expert, np.float32)}
            layer |= {"ffn_gate_exps.weight": experts(n_ff, n), "ffn_up_exps.weight": experts(n_ff, n)}
            layer |= {"ffn_gate_shexp.weight": matrix(n_ff, n), "ffn_up_shexp.weight": matrix(n_ff, n)}
            layer["ffn_down_exps.weight"] = experts(n, n_ff, residual)
            layer["ffn_down_shexp.weight"] = matrix(n, n_ff, residual)
        if i >= n_layer:
            layer |= mtp_weights(n, rng)
        if own:
            layer |= {f"attn_{part}_norm.weight": rng.uniform(0.7, 1.3, d_head) for part in "qk"}
            layer |= {name: rng.uniform(-0.3, 0.3, n_expert) for name in layer if name.startswith("exp_probs_b")}
        if own and i >= n_layer:
            scaled = {"embed_tokens": np.sqrt(n), "shared_head_head": 3.0}
            layer |= {f"nextn.{name}.weight": matrix(len(vocab), n, scale) for name, scale in scaled.items()}
        weights |= {f"blk.{i}.{name}": weight for name, weight in layer.items()}
    experts_of = {"count": n_expert, "used_count": 2, "shared_count": 1, "feed_forward_length": n_ff}
    experts_of |= {"gating_func": 2, "weights_scale": 1.0, "weights_norm": True}
    metadata = sizes(
        "glm4moe",
        n_layer + mtp,
        n,
        2 * n_ff,
        n_head,
        n_kv,
        d_head,
        nextn_predict_layers=mtp or None,
        rope__dimension_count=d_head // 2,
        rope__freq_base=10000.0,
        leading_dense_block_count=1,
    ) | {f"glm4moe.expert_{name}": value for name, value in experts_of.items()}
    kept = {name: weight for name, weight in weights.items() if not drop or drop not in name}
    return write_gguf(path, "glm4moe", metadata | vocab_metadata(vocab), kept)
