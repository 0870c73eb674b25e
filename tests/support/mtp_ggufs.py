"""Tiny models of the families whose files carry a layer for multi-token prediction, as ``ggufs`` writes them.

Their MTP layer goes by the last token, as ``ggufs.mtp_weights`` has it, and layers add little to the embedding, so that
many of its guesses are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from localspec.model_files.gguf import GGUFFile
from tests.support.gguf_vocabs import bpe_vocab, vocab_metadata
from tests.support.ggufs import Array, Weights, mtp_weights, write_gguf
from tests.support.published_heads import whole

N, N_FF, N_EXPERT, N_HEAD, N_KV, D_HEAD, RESIDUAL = 128, 64, 4, 4, 2, 32, 0.15


class _Random:
    """Random weights from a fixed seed."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> Array:
        return (self.rng.standard_normal((rows, columns)) * (scale / np.sqrt(columns))).astype(np.float32)

    def stack(self, n: int, rows: int, columns: int, scale: float = 1.0) -> Array:
        return np.stack([self.matrix(rows, columns, scale) for _ in range(n)])

    def attention(self) -> Weights:
        return {
            "attn_q.weight": self.matrix(N_HEAD * D_HEAD, N, 2.0),
            "attn_k.weight": self.matrix(N_KV * D_HEAD, N),
            "attn_v.weight": self.matrix(N_KV * D_HEAD, N),
            "attn_output.weight": self.matrix(N, N_HEAD * D_HEAD, RESIDUAL),
        }

    def dense(self) -> Weights:
        return {
            "ffn_gate.weight": self.matrix(2 * N_FF, N),
            "ffn_up.weight": self.matrix(2 * N_FF, N),
            "ffn_down.weight": self.matrix(N, 2 * N_FF, RESIDUAL),
        }

    def experts(self, *, gated: bool = True, bias: str = "exp_probs_b.bias") -> Weights:
        """Routed experts, and a shared one."""
        weights: Weights = {
            "ffn_gate_inp.weight": self.matrix(N_EXPERT, N),
            "ffn_up_exps.weight": self.stack(N_EXPERT, N_FF, N),
            "ffn_down_exps.weight": self.stack(N_EXPERT, N, N_FF, RESIDUAL),
            "ffn_up_shexp.weight": self.matrix(N_FF, N),
            "ffn_down_shexp.weight": self.matrix(N, N_FF, RESIDUAL),
        }
        if gated:
            weights["ffn_gate_exps.weight"] = self.stack(N_EXPERT, N_FF, N)
            weights["ffn_gate_shexp.weight"] = self.matrix(N_FF, N)
        return weights | ({bias: self.rng.uniform(-0.3, 0.3, N_EXPERT).astype(np.float32)} if bias else {})


def _norms(*names: str, width: int = N) -> Weights:
    return {f"{name}.weight": np.ones(width, np.float32) for name in names}


def _write(path: Path, architecture: str, random: _Random, layers: Iterable[Weights], metadata: dict[str, Any]) -> Path:
    """Write a model of some layers, the last of which becomes its MTP layer."""
    vocab, layers = bpe_vocab(), list(layers)
    extra = mtp_weights(N, random.rng)
    if "layer_output_norm.weight" in layers[-1]:  # which serves instead
        del extra["nextn.shared_head_norm.weight"]
    layers[-1] = layers[-1] | extra
    weights: Weights = {
        "token_embd.weight": random.matrix(len(vocab), N, np.sqrt(N)),
        "output_norm.weight": np.ones(N, np.float32),
        "output.weight": random.matrix(len(vocab), N, 3.0),
    }
    for i, layer in enumerate(layers):
        weights |= {f"blk.{i}.{name}": weight for name, weight in layer.items()}
    common = {
        "block_count": len(layers),
        "nextn_predict_layers": 1,
        "context_length": 2048,
        "embedding_length": N,
        "feed_forward_length": 2 * N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_KV,
        "attention.key_length": D_HEAD,
        "attention.value_length": D_HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": D_HEAD,
        "rope.freq_base": 10000.0,
        "expert_count": N_EXPERT,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": N_FF,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    }
    header = {f"{architecture}.{key}": value for key, value in (common | metadata).items()}
    return write_gguf(path, architecture, header | vocab_metadata(vocab), weights)


def write_hy(path: Path) -> Path:
    """A Hunyuan V3 in small: a dense layer, then experts."""
    random = _Random()
    bias = "exp_probs_b"
    layers = [
        _norms("attn_norm", "ffn_norm")
        | _norms("attn_q_norm", "attn_k_norm", width=D_HEAD)
        | random.attention()
        | (random.dense() if i == 0 else random.experts(bias=bias))
        for i in range(4)
    ]
    return _write(path, "hy_v3", random, layers, {"expert_shared_feed_forward_length": N_FF})


def _compressed(random: _Random) -> Weights:
    """Attention whose keys and values come from one compressed row (MLA)."""
    return _norms("attn_q_a_norm", "attn_kv_a_norm", width=_RANK) | {
        "attn_q_a.weight": random.matrix(_RANK, N),
        "attn_q_b.weight": random.matrix(N_HEAD * 2 * _ROPE, _RANK, 2.0),
        "attn_kv_a_mqa.weight": random.matrix(_RANK + _ROPE, N),
        "attn_k_b.weight": random.stack(N_HEAD, _RANK, _ROPE),
        "attn_v_b.weight": random.stack(N_HEAD, D_HEAD, _RANK),
        "attn_output.weight": random.matrix(N, N_HEAD * D_HEAD, RESIDUAL),
    }


_RANK, _ROPE = 32, 16
_COMPRESSED = {
    "attention.head_count_kv": 1,
    "attention.key_length": _RANK + _ROPE,
    "attention.value_length": _RANK,
    "attention.key_length_mla": 2 * _ROPE,
    "attention.value_length_mla": D_HEAD,
    "attention.q_lora_rank": _RANK,
    "attention.kv_lora_rank": _RANK,
    "rope.dimension_count": _ROPE,
    "leading_dense_block_count": 1,
}


def write_deepseek(path: Path, architecture: str = "deepseek2") -> Path:
    """A DeepSeek V3 in small, which GLM 4.7 Flash is too; or one that chooses what it attends to (``deepseek32``,
    ``glm-dsa``)."""
    random, n_indexer, d_indexer = _Random(), 2, 64
    indexer: Weights = {}
    if architecture != "deepseek2":
        indexer = _norms("indexer.k_norm", width=d_indexer) | {
            "indexer.k_norm.bias": np.zeros(d_indexer, np.float32),
            "indexer.proj.weight": random.matrix(n_indexer, N),
            "indexer.attn_k.weight": random.matrix(d_indexer, N),
            "indexer.attn_q_b.weight": random.matrix(n_indexer * d_indexer, _RANK),
        }
    layers = [
        _norms("attn_norm", "ffn_norm")
        | _compressed(random)
        | indexer
        | (random.dense() if i == 0 else random.experts())
        for i in range(4)
    ]
    sizes = {
        "attention.indexer.head_count": n_indexer,
        "attention.indexer.key_length": d_indexer,
        "attention.indexer.top_k": 2048,
    }
    return _write(path, architecture, random, layers, _COMPRESSED | (sizes if indexer else {}))


def write_bailing(path: Path) -> Path:
    """A Ling 3 in small: two recurrent layers (KDA), one of compressed attention, experts in all but the first."""
    random, kernel, inner = _Random(), 4, N_HEAD * D_HEAD

    def recurrent() -> Weights:
        weights = {f"ssm_conv1d_{part}.weight": random.stack(inner, 1, kernel)[None] for part in "qkv"}
        weights |= {f"attn_{part}.weight": random.matrix(inner, N) for part in "qkv"}
        weights |= {f"ssm_{part}.weight": random.matrix(inner, N) for part in ("f_a", "g_a")}
        return weights | {
            "ssm_beta.weight": random.matrix(N_HEAD, N),
            "ssm_a": -random.rng.uniform(0.1, 1.0, (N_HEAD, 1)).astype(np.float32),
            "ssm_dt.bias": random.rng.uniform(-3, 0, inner).astype(np.float32),
            "ssm_norm.weight": np.ones(D_HEAD, np.float32),
            "attn_output.weight": random.matrix(N, inner, RESIDUAL),
        }

    def attention() -> Weights:
        return _compressed(random) | {"attn_gate.weight": random.matrix(N_HEAD, N)}

    layers = [recurrent() | random.dense(), recurrent() | random.experts(), attention() | random.experts()]
    layers.append(attention() | random.experts() | _norms("layer_output_norm"))
    layers = [_norms("attn_norm", "ffn_norm") | layer for layer in layers]
    sizes = _COMPRESSED | {
        "attention.head_count_kv": [0, 0, 1, 1],
        "ssm.conv_kernel": kernel,
        "kda.head_dim": D_HEAD,
        "kda.gate_lower_bound": -5.0,
    }
    return _write(path, "bailingmoe3", random, layers, sizes)


def write_cohere(path: Path) -> Path:
    """A Cohere 2 MoE in small: attention and experts side by side, a window in most layers."""
    random = _Random()
    layers = [
        _norms("attn_norm") | random.attention() | (random.dense() if i == 0 else random.experts(bias=""))
        for i in range(5)
    ]
    sizes = {
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": 4,
        "logit_scale": 1.0,
        "leading_dense_block_count": 1,
        "attention.head_count_kv": N_KV,
    }
    return _write(path, "cohere2moe", random, layers, sizes)


def write_nemotron(path: Path) -> Path:
    """A Nemotron-H of experts in small: a recurrent layer, one of attention, one of experts, the MTP layer of both."""
    random, n_state, n_group, n_ssm = _Random(), 16, 2, 4
    inner, kernel = 128, 4
    channels = inner + 2 * n_group * n_state
    recurrent: Weights = {
        "ssm_in.weight": random.matrix(inner + channels + n_ssm, N),
        "ssm_conv1d.weight": random.matrix(channels, kernel),
        "ssm_conv1d.bias": np.zeros(channels, np.float32),
        "ssm_dt.bias": random.rng.uniform(-3, 0, n_ssm).astype(np.float32),
        "ssm_a": -random.rng.uniform(0.1, 1.0, (n_ssm, 1)).astype(np.float32),
        "ssm_d": np.ones((n_ssm, 1), np.float32),
        "ssm_norm.weight": np.ones((n_group, inner // n_group), np.float32),
        "ssm_out.weight": random.matrix(N, inner, RESIDUAL),
    }
    layers = [recurrent, random.attention(), random.experts(gated=False)]
    layers.append(random.attention() | random.experts(gated=False) | _norms("post_attention_norm"))
    layers = [_norms("attn_norm") | layer for layer in layers]
    sizes = {
        "attention.head_count_kv": [0, N_KV, 0, N_KV],
        "feed_forward_length": [0, 0, N_FF, N_FF],
        "attention.layer_norm_epsilon": 1e-5,
        "expert_shared_feed_forward_length": N_FF,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": n_ssm,
        "ssm.group_count": n_group,
    }
    return _write(path, "nemotron_h_moe", random, layers, sizes)


def write_qwen_experts(path: Path, architecture: str = "qwen35moe") -> Path:
    """A Qwen of experts in small (3.5 and 3.6, or ``qwen3next``, which has two small matrices in one): three layers of
    four keep a state (gated delta net), the fourth keys and values."""
    random, d_state, n_group, n_value, kernel = _Random(), 64, 2, 4, 4
    inner, channels = d_state * n_value, d_state * (2 * n_group + n_value)

    def recurrent() -> Weights:
        parts = {"ssm_ba.weight": 2} if architecture == "qwen3next" else {"ssm_beta.weight": 1, "ssm_alpha.weight": 1}
        return {name: random.matrix(n * n_value, N) for name, n in parts.items()} | {
            "attn_qkv.weight": random.matrix(channels, N, 2.0),
            "attn_gate.weight": random.matrix(inner, N),
            "ssm_conv1d.weight": random.matrix(channels, kernel),
            "ssm_dt.bias": random.rng.uniform(-3, 0, n_value).astype(np.float32),
            "ssm_a": -random.rng.uniform(0.1, 1.0, n_value).astype(np.float32),
            "ssm_norm.weight": np.ones(d_state, np.float32),
            "ssm_out.weight": random.matrix(N, inner, RESIDUAL),
        }

    def attention() -> Weights:
        queries = {"attn_q.weight": random.matrix(2 * N_HEAD * D_HEAD, N)}  # and a gate for each
        return random.attention() | queries | _norms("attn_q_norm", "attn_k_norm", width=D_HEAD)

    layers = [
        _norms("attn_norm", "post_attention_norm")
        | (attention() if i >= 3 else recurrent())
        | random.experts(bias="")
        | {"ffn_gate_inp_shexp.weight": random.matrix(1, N)[0]}
        for i in range(5)
    ]
    sizes = {
        "rope.dimension_sections": [6, 5, 5, 0],
        "full_attention_interval": 4,
        "expert_shared_feed_forward_length": N_FF,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": n_value,
        "ssm.group_count": n_group,
    }
    return _write(path, architecture, random, layers, sizes)


def write_apart(model: Path, trunk: Path, layer: Path) -> tuple[Path, Path]:
    """A model, without tensors of three dimensions, without its MTP layer; and the layer in a file of its own."""
    with GGUFFile(model) as file:
        kept = {key: value for key, value in file.metadata.items() if not key.startswith(("general.", "GGUF."))}
        metadata = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in kept.items()}
        weights = {name: whole(file, name) for name in file.tensors}
        architecture, n_blocks = file.architecture, int(metadata[f"{file.architecture}.block_count"])
    last = f"blk.{n_blocks - 1}."
    mine = {name: weight for name, weight in weights.items() if name.startswith(last) or not name.startswith("blk.")}
    theirs = {name: weight for name, weight in weights.items() if not name.startswith(last)}
    write_gguf(layer, architecture, metadata, mine)
    del metadata[f"{architecture}.nextn_predict_layers"]
    return write_gguf(trunk, architecture, metadata | {f"{architecture}.block_count": n_blocks - 1}, theirs), layer


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "hy": write_hy,
    "deepseek": write_deepseek,
    "deepseek that chooses": partial(write_deepseek, architecture="deepseek32"),
    "glm that chooses": partial(write_deepseek, architecture="glm-dsa"),
    "bailing": write_bailing,
    "cohere": write_cohere,
    "nemotron": write_nemotron,
    "qwen of experts": write_qwen_experts,
    "qwen3next": partial(write_qwen_experts, architecture="qwen3next"),
}
"""A short name -> what writes a model of the family, with one MTP layer."""
