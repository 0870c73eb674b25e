"""Tiny models of the families whose files carry a layer for multi-token prediction, as ``ggufs`` writes them.

Their MTP layer goes by the last token, as ``Parts.mtp`` has it, and layers add little to the embedding, so that many of
its guesses are right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from localspec.model_files.gguf import GGUFFile
from tests.support.ggufs import (
    D_HEAD,
    DELTA_NET,
    EXPERTS,
    N_FF,
    N_HEAD,
    N_KV,
    N,
    Parts,
    Weights,
    metadata_of,
    norms,
    write_gguf,
    write_model,
)
from tests.support.published_heads import whole


def _write(path: Path, architecture: str, parts: Parts, layers: list[Weights], settings: dict[str, Any]) -> Path:
    """Write a model of some layers, the last of which becomes its MTP layer."""
    extra = parts.mtp()
    if "layer_output_norm.weight" in layers[-1]:  # which serves instead
        del extra["nextn.shared_head_norm.weight"]
    layers = [*layers[:-1], layers[-1] | extra]
    return write_model(path, architecture, parts, layers, EXPERTS | {"nextn_predict_layers": 1} | settings)


def write_hy(path: Path) -> Path:
    """A Hunyuan V3 in small: a dense layer, then experts."""
    parts = Parts()
    layers = [
        norms("attn_norm", "ffn_norm")
        | norms("attn_q_norm", "attn_k_norm", width=D_HEAD)
        | parts.attention()
        | (parts.dense() if i == 0 else parts.experts(bias="exp_probs_b"))
        for i in range(4)
    ]
    return _write(path, "hy_v3", parts, layers, {"expert_shared_feed_forward_length": N_FF})


def _compressed(parts: Parts) -> Weights:
    """Attention whose keys and values come from one compressed row (MLA)."""
    return norms("attn_q_a_norm", "attn_kv_a_norm", width=_RANK) | {
        "attn_q_a.weight": parts.matrix(_RANK, N),
        "attn_q_b.weight": parts.matrix(N_HEAD * 2 * _ROPE, _RANK, 2.0),
        "attn_kv_a_mqa.weight": parts.matrix(_RANK + _ROPE, N),
        "attn_k_b.weight": parts.stack(N_HEAD, _RANK, _ROPE),
        "attn_v_b.weight": parts.stack(N_HEAD, D_HEAD, _RANK),
        "attn_output.weight": parts.matrix(N, N_HEAD * D_HEAD, parts.residual),
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
    parts, n_indexer, d_indexer = Parts(), 2, 64
    indexer: Weights = {}
    if architecture != "deepseek2":
        indexer = norms("indexer.k_norm", width=d_indexer) | {
            "indexer.k_norm.bias": np.zeros(d_indexer, np.float32),
            "indexer.proj.weight": parts.matrix(n_indexer, N),
            "indexer.attn_k.weight": parts.matrix(d_indexer, N),
            "indexer.attn_q_b.weight": parts.matrix(n_indexer * d_indexer, _RANK),
        }
    layers = [
        norms("attn_norm", "ffn_norm") | _compressed(parts) | indexer | (parts.dense() if i == 0 else parts.experts())
        for i in range(4)
    ]
    sizes = {
        "attention.indexer.head_count": n_indexer,
        "attention.indexer.key_length": d_indexer,
        "attention.indexer.top_k": 2048,
    }
    return _write(path, architecture, parts, layers, _COMPRESSED | (sizes if indexer else {}))


def write_bailing(path: Path) -> Path:
    """A Ling 3 in small: two recurrent layers (KDA), one of compressed attention, experts in all but the first."""
    parts, kernel, inner = Parts(), 4, N_HEAD * D_HEAD

    def recurrent() -> Weights:
        weights = {f"ssm_conv1d_{part}.weight": parts.stack(inner, 1, kernel)[None] for part in "qkv"}
        weights |= {f"attn_{part}.weight": parts.matrix(inner, N) for part in "qkv"}
        weights |= {f"ssm_{part}.weight": parts.matrix(inner, N) for part in ("f_a", "g_a")}
        return weights | {
            "ssm_beta.weight": parts.matrix(N_HEAD, N),
            "ssm_a": -parts.uniform(0.1, 1.0, N_HEAD, 1),
            "ssm_dt.bias": parts.uniform(-3, 0, inner),
            "ssm_norm.weight": np.ones(D_HEAD, np.float32),
            "attn_output.weight": parts.matrix(N, inner, parts.residual),
        }

    def attention() -> Weights:
        return _compressed(parts) | {"attn_gate.weight": parts.matrix(N_HEAD, N)}

    layers = [recurrent() | parts.dense(), recurrent() | parts.experts(), attention() | parts.experts()]
    layers.append(attention() | parts.experts() | norms("layer_output_norm"))
    layers = [norms("attn_norm", "ffn_norm") | layer for layer in layers]
    sizes = _COMPRESSED | {
        "attention.head_count_kv": [0, 0, 1, 1],
        "ssm.conv_kernel": kernel,
        "kda.head_dim": D_HEAD,
        "kda.gate_lower_bound": -5.0,
    }
    return _write(path, "bailingmoe3", parts, layers, sizes)


def write_cohere(path: Path) -> Path:
    """A Cohere 2 MoE in small: attention and experts side by side, a window in most layers."""
    parts = Parts()
    layers = [
        norms("attn_norm") | parts.attention() | (parts.dense() if i == 0 else parts.experts(bias="")) for i in range(5)
    ]
    sizes = {
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": 4,
        "logit_scale": 1.0,
        "leading_dense_block_count": 1,
        "attention.head_count_kv": N_KV,
    }
    return _write(path, "cohere2moe", parts, layers, sizes)


def write_nemotron(path: Path) -> Path:
    """A Nemotron-H of experts in small: a recurrent layer, one of attention, one of experts, the MTP layer of both."""
    parts, n_state, n_group, n_ssm = Parts(), 16, 2, 4
    inner, kernel = 128, 4
    channels = inner + 2 * n_group * n_state
    recurrent: Weights = {
        "ssm_in.weight": parts.matrix(inner + channels + n_ssm, N),
        "ssm_conv1d.weight": parts.matrix(channels, kernel),
        "ssm_conv1d.bias": np.zeros(channels, np.float32),
        "ssm_dt.bias": parts.uniform(-3, 0, n_ssm),
        "ssm_a": -parts.uniform(0.1, 1.0, n_ssm, 1),
        "ssm_d": np.ones((n_ssm, 1), np.float32),
        "ssm_norm.weight": np.ones((n_group, inner // n_group), np.float32),
        "ssm_out.weight": parts.matrix(N, inner, parts.residual),
    }
    layers = [recurrent, parts.attention(), parts.experts(gated=False)]
    layers.append(parts.attention() | parts.experts(gated=False) | norms("post_attention_norm"))
    layers = [norms("attn_norm") | layer for layer in layers]
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
    return _write(path, "nemotron_h_moe", parts, layers, sizes)


def write_qwen_experts(path: Path, architecture: str = "qwen35moe") -> Path:
    """A Qwen of experts in small (3.5 and 3.6, or ``qwen3next``, which has two small matrices in one): three layers of
    four keep a state (gated delta net), the fourth keys and values."""
    parts = Parts()
    layers = [
        norms("attn_norm", "post_attention_norm")
        | (parts.gated_attention() if i >= 3 else parts.delta_net(together=architecture == "qwen3next"))
        | parts.experts(bias="")
        | {"ffn_gate_inp_shexp.weight": parts.matrix(1, N)[0]}
        for i in range(5)
    ]
    return _write(path, architecture, parts, layers, DELTA_NET | {"expert_shared_feed_forward_length": N_FF})


def write_apart(model: Path, trunk: Path, layer: Path) -> tuple[Path, Path]:
    """A model, without tensors of three dimensions, without its MTP layer; and the layer in a file of its own."""
    with GGUFFile(model) as file:
        metadata = metadata_of(file)
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
