"""Tiny but real GGUF files, written in milliseconds: random weights from a fixed seed, real tokenisers.

Every engine loads them. The weights are scaled so that predictions are peaked (1 to 3 nats) and depend on the context,
so a wrong position, a wrong row or a stale cache shows up as another answer. Nothing here is trained: text made with
these models is gibberish, complete with halves of multi-byte characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from localspec.model_files.gguf import GGUFFile
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


QUICK = Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)
"""For the reference engine, which takes 0.1 ms a token."""


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
    n_layer: int, n: int, n_ff: int, n_head: int, n_kv: int | Sequence[int] | None = None, d_head: int | None = None
) -> dict[str, Any]:
    """The keys that most architectures have, without its name."""
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
    }
    return {key: value for key, value in values.items() if value is not None}


def named(architecture: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with the name of the architecture; None is none."""
    return {f"{architecture}.{key}": value for key, value in settings.items() if value is not None}


def llama_metadata(shape: Shape, n_vocab: int, n_layer: int | None = None) -> dict[str, Any]:
    """The ``llama.*`` keys."""
    n_layer = shape.n_layer if n_layer is None else n_layer
    more = {
        "context_length": shape.n_ctx,
        "rope.dimension_count": shape.d_head,
        "rope.freq_base": shape.rope_base,
        "vocab_size": n_vocab,
    }
    return named("llama", sizes(n_layer, shape.n_embd, shape.n_ff, shape.n_head, shape.n_head_kv) | more)


def write_llama(
    path: Path,
    shape: Shape | None = None,  # its sizes
    vocab: TinyVocab | None = None,  # its tokenizer; SentencePiece by default
    *,
    seed: int = 0,  # of the random weights
    tensor_type: str = "F32",  # F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1
    weights: Weights | None = None,  # weights to use instead of random ones (the number of layers is taken from them)
    extra: Mapping[str, Any] | None = None,  # metadata that replaces or adds to the usual
) -> Path:
    """A llama-architecture model."""
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
    folder: Path, shape: Shape | None = None, *, seed: int = 0, tensor_type: str = "F32", n_parts: int = 2
) -> list[Path]:
    """A llama-architecture model in parts, the first without tensors: ``gguf-split --no-tensor-first-split``."""
    shape, vocab = shape or Shape(), bpe_vocab()
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


def micro_model(
    path: Path, n_vocab: int = 6, *, seed: int = 0, sharpness: float = 1.0, vocab: TinyVocab | None = None
) -> Path:
    """A model over so few tokens that all continuations can be enumerated (reference backend only)."""
    shape = Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, n_ctx=64, sharpness=sharpness)
    return write_llama(path, shape, vocab or micro_vocab(n_vocab), seed=seed)


def write_tokenizer_only(path: Path, vocab: TinyVocab | None = None) -> Path:
    """Metadata and vocabulary but no weights, like the ``ggml-vocab-*.gguf`` files of llama.cpp."""
    vocab = vocab or spm_vocab()
    return write_gguf(path, "llama", llama_metadata(Shape(), len(vocab)) | vocab_metadata(vocab), {})


N, N_FF, N_EXPERT, N_HEAD, N_KV, D_HEAD = 128, 64, 4, 4, 2, 32
D_STATE, N_GROUP, N_VALUE, KERNEL = 64, 2, 4, 4  # ik-llama's kernels are for states of 64 and 128


def norms(*names: str, width: int = N, scale: float = 1.0) -> Weights:
    return {f"{name}.weight": np.full(width, scale, np.float32) for name in names}


class Parts:
    """Draws the parts of layers from one seed; what they add to the embedding is ``residual`` times as large."""

    def __init__(self, seed: int = 0, residual: float = 0.15, n: int = N) -> None:
        self.rng, self.residual, self.n = np.random.default_rng(seed), residual, n
        self.matrix = matrices(self.rng)

    def trunk(self, n_vocab: int, embedding: float = N**0.5) -> Weights:
        """What there is beside layers."""
        return {
            "token_embd.weight": self.matrix(n_vocab, self.n, embedding),
            "output_norm.weight": np.ones(self.n, np.float32),
            "output.weight": self.matrix(n_vocab, self.n, 3.0),
        }

    def stack(self, n: int, rows: int, columns: int, scale: float = 1.0) -> Array:
        return np.stack([self.matrix(rows, columns, scale) for _ in range(n)])

    def uniform(self, low: float, high: float, *shape: int) -> Array:
        return self.rng.uniform(low, high, shape).astype(np.float32)

    def attention(self, n_kv: int = N_KV, query: float = 2.0, n_query: int = N_HEAD * D_HEAD) -> Weights:
        return {
            "attn_q.weight": self.matrix(n_query, N, query),
            "attn_k.weight": self.matrix(n_kv * D_HEAD, N),
            "attn_v.weight": self.matrix(n_kv * D_HEAD, N),
            "attn_output.weight": self.matrix(N, N_HEAD * D_HEAD, self.residual),
        }

    def gated_attention(self) -> Weights:
        """Qwen's: a gate for each query."""
        return self.attention(query=1.0, n_query=2 * N_HEAD * D_HEAD) | norms(
            "attn_q_norm", "attn_k_norm", width=D_HEAD
        )

    def delta_net(self, *, together: bool = False) -> Weights:
        """Qwen's gated delta net, which keeps a state; with its two small matrices in one."""
        inner, channels = D_STATE * N_VALUE, D_STATE * (2 * N_GROUP + N_VALUE)
        small = {"ssm_ba": 2} if together else {"ssm_beta": 1, "ssm_alpha": 1}
        return {f"{name}.weight": self.matrix(n * N_VALUE, N) for name, n in small.items()} | {
            "attn_qkv.weight": self.matrix(channels, N, 2.0),
            "attn_gate.weight": self.matrix(inner, N),
            "ssm_conv1d.weight": self.matrix(channels, KERNEL),
            "ssm_dt.bias": self.uniform(-3, 0, N_VALUE),
            "ssm_a": -self.uniform(0.1, 1.0, N_VALUE),
            "ssm_norm.weight": np.ones(D_STATE, np.float32),
            "ssm_out.weight": self.matrix(N, inner, self.residual),
        }

    def dense(self, n_ff: int = 2 * N_FF, residual: float | None = None) -> Weights:
        return {
            "ffn_gate.weight": self.matrix(n_ff, N),
            "ffn_up.weight": self.matrix(n_ff, N),
            "ffn_down.weight": self.matrix(N, n_ff, self.residual if residual is None else residual),
        }

    def experts(self, *, gated: bool = True, bias: str = "exp_probs_b.bias") -> Weights:
        """Routed experts, and a shared one."""
        weights: Weights = {
            "ffn_gate_inp.weight": self.matrix(N_EXPERT, N),
            "ffn_up_exps.weight": self.stack(N_EXPERT, N_FF, N),
            "ffn_down_exps.weight": self.stack(N_EXPERT, N, N_FF, self.residual),
            "ffn_up_shexp.weight": self.matrix(N_FF, N),
            "ffn_down_shexp.weight": self.matrix(N, N_FF, self.residual),
        }
        if gated:
            weights["ffn_gate_exps.weight"] = self.stack(N_EXPERT, N_FF, N)
            weights["ffn_gate_shexp.weight"] = self.matrix(N_FF, N)
        return weights | ({bias: self.uniform(-0.3, 0.3, N_EXPERT)} if bias else {})

    def mtp(self) -> Weights:
        """What a layer for multi-token prediction has besides a block: it goes by the last token, and the state."""
        return norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm") | {
            "nextn.eh_proj.weight": np.concatenate([np.eye(N), self.matrix(N, N, 0.3)], axis=1).astype(np.float32)
        }


DELTA_NET = {
    "rope.dimension_sections": [6, 5, 5, 0],
    "full_attention_interval": 4,
    "ssm.conv_kernel": KERNEL,
    "ssm.inner_size": D_STATE * N_VALUE,
    "ssm.state_size": D_STATE,
    "ssm.time_step_rank": N_VALUE,
    "ssm.group_count": N_GROUP,
}
EXPERTS = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": N_FF,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
}


def write_model(
    path: Path,
    architecture: str,  # its name
    parts: Parts,  # what the layers were drawn with
    layers: Iterable[Weights],  # the weights of each
    settings: Mapping[str, Any],  # metadata beyond the usual, or in its place; None leaves a key out
    vocab: TinyVocab | None = None,  # byte-level BPE by default
    *,
    trunk: Weights | None = None,  # of ``Parts.trunk``, where that was drawn first
    embedding: float = N**0.5,  # how large the elements of embeddings are
    drop: str = "",  # tensors with this in their name are left out
    tied: bool = False,  # whether embeddings are the output matrix too
    stored: Callable[[str, Array], Stored] | None = None,  # see ``write_gguf``
) -> Path:
    """A model of some layers."""
    vocab, n, layers = vocab or bpe_vocab(), parts.n, list(layers)
    weights = dict(trunk or parts.trunk(len(vocab), embedding))
    for i, layer in enumerate(layers):
        weights |= {f"blk.{i}.{name}": weight for name, weight in layer.items()}
    usual = sizes(len(layers), n, 2 * N_FF, N_HEAD, N_KV, D_HEAD)
    usual |= {"rope.dimension_count": D_HEAD, "rope.freq_base": 10000.0}
    kept = {name: weight for name, weight in weights.items() if not drop or drop not in name}
    if tied:
        del kept["output.weight"]
    metadata = named(architecture, usual | dict(settings)) | vocab_metadata(vocab)
    return write_gguf(path, architecture, metadata, kept, stored=stored)


def metadata_of(file: GGUFFile) -> dict[str, Any]:
    """What a file says of its model, to be written again."""
    kept = {key: value for key, value in file.metadata.items() if not key.startswith(("general.", "GGUF."))}
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in kept.items()}


def write_unpacked(path: Path, out: Path) -> Path:
    """The same model with all of its weights in F32."""
    tensors = gguf.GGUFReader(path).tensors
    weights = {each.name: np.asarray(gguf.quants.dequantize(each.data, each.tensor_type)) for each in tensors}
    with GGUFFile(path) as file:
        return write_gguf(out, file.architecture, metadata_of(file), weights)


def write_mamba(path: Path, vocab: TinyVocab | None = None, *, seed: int = 0) -> Path:
    """A recurrent model: its memory is a state that cannot be rewound."""
    n, inner, state, rank = 64, 128, 16, 4
    parts = Parts(seed, n=n)

    def layer() -> Weights:
        return norms("attn_norm", width=n) | {
            "ssm_in.weight": parts.matrix(2 * inner, n),
            "ssm_conv1d.weight": parts.matrix(inner, KERNEL),
            "ssm_conv1d.bias": np.zeros(inner, np.float32),
            "ssm_x.weight": parts.matrix(rank + 2 * state, inner),
            "ssm_dt.weight": parts.matrix(inner, rank),
            "ssm_dt.bias": parts.uniform(-3, 0, inner),
            "ssm_a": -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1)),
            "ssm_d": np.ones(inner, np.float32),
            "ssm_out.weight": parts.matrix(n, inner),
        }

    none = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    settings: dict[str, Any] = sizes(2, n, 0, 0) | dict.fromkeys((*none, "rope.dimension_count", "rope.freq_base"))
    settings |= {"ssm.conv_kernel": KERNEL, "ssm.inner_size": inner, "ssm.state_size": state}
    settings["ssm.time_step_rank"] = rank
    return write_model(path, "mamba", parts, [layer(), layer()], settings, vocab, embedding=8.0)


def write_sliding_window(path: Path, window: int = 32, vocab: TinyVocab | None = None, *, seed: int = 0) -> Path:
    """A Gemma 3 in small: five layers of six see only the last ``window`` tokens."""
    parts = Parts(seed, residual=1.0)

    def layer() -> Weights:
        # The embedding must not drown the layers, or every token predicts itself.
        return (
            norms("attn_norm", "ffn_norm")
            | norms("post_attention_norm", "post_ffw_norm", scale=6.0)
            | norms("attn_q_norm", "attn_k_norm", width=D_HEAD)
            | parts.attention(n_kv=1, query=1.0)
            | parts.dense(256)
        )

    settings = {"attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": window}
    settings |= {"feed_forward_length": 256, "attention.head_count_kv": 1, "rope.freq_base": 1000000.0}
    settings["rope.dimension_count"] = None
    layers, vocab = [layer() for _ in range(6)], vocab or spm_vocab()
    # Tied: the same matrix makes the logits, so its scale sets how peaked they are.
    return write_model(path, "gemma3", parts, layers, settings, vocab, embedding=3.0, tied=True)


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

    ``residual`` is how much each layer adds to the embedding; ``mtp`` layers for multi-token prediction come besides;
    ``more`` are settings beyond the usual, or other values for those.
    """
    parts, n_ff = Parts(seed, residual), 256

    def layer(i: int) -> Weights:
        block = parts.gated_attention() if i == 3 else parts.delta_net()
        return norms("attn_norm", "post_attention_norm") | block | parts.dense(n_ff, residual / 3)

    layers = [layer(i) for i in range(4)]
    layers += [layers[-1] | parts.mtp() for _ in range(mtp)]
    settings = DELTA_NET | {"attention.layer_norm_rms_epsilon": 1e-6, "feed_forward_length": n_ff}
    settings |= {"nextn_predict_layers": mtp or None} | dict(more or {})
    return write_model(path, "qwen35", parts, layers, settings, vocab, embedding=8.0, stored=stored)


def write_glm(
    path: Path, vocab: TinyVocab | None = None, *, seed: int = 0, mtp: int = 1, drop: str = "", own: bool = False
) -> Path:
    """A GLM 4.5 in small: a dense layer, then two of experts, and layers for multi-token prediction.

    ``own``: whether these have embeddings and an output matrix of their own, and queries and keys are normalised.
    """
    parts, vocab = Parts(seed), vocab or bpe_vocab()
    trunk = parts.trunk(len(vocab))

    def layer(i: int) -> Weights:
        block = norms("attn_norm", "post_attention_norm") | parts.attention()
        block |= {f"attn_{part}.bias": parts.uniform(-0.1, 0.1, len(block[f"attn_{part}.weight"])) for part in "qkv"}
        block |= (parts.experts() if i else parts.dense()) | (parts.mtp() if i >= 3 else {})
        if own:
            block |= {f"attn_{part}_norm.weight": parts.uniform(0.7, 1.3, D_HEAD) for part in "qk"}
        if own and i >= 3:
            scaled = {"embed_tokens": N**0.5, "shared_head_head": 3.0}
            block |= {f"nextn.{name}.weight": parts.matrix(len(vocab), N, scale) for name, scale in scaled.items()}
        return block

    settings = EXPERTS | {"nextn_predict_layers": mtp or None, "leading_dense_block_count": 1}
    settings["rope.dimension_count"] = D_HEAD // 2
    layers = map(layer, range(3 + mtp))
    return write_model(path, "glm4moe", parts, layers, settings, vocab, trunk=trunk, drop=drop)
