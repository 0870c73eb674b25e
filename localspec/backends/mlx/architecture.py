"""Which mlx-lm model class computes a GGUF architecture, with which arguments, and where each tensor belongs.

Adding one means an entry in ``ARCHITECTURES`` and a tiny random file in ``tests/support/mlx_ggufs.py`` on which its
logits must be those of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel, is_number
from localspec.model_files.gguf import GGUFFile

_WITHOUT_EFFECT = {
    "vocab_size",
    "context_length",
    "embedding_length_out",
    "feed_forward_length",
    "tensor_data_layout",
    "use_parallel_residual",
    "attention.causal",
    "attention.max_alibi_bias",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
    "rope.scaling.finetuned",
    "classifier.output_labels",
    "pard_token",  # of a drafter, see spec_decode.drafters.pard
}
"""Settings that follow from others, or that llama.cpp does not look at for these architectures."""


def unsupported(file: GGUFFile, what: str) -> UnsupportedModel:
    """The error for a file that this backend cannot compute, and llama.cpp may."""
    return UnsupportedModel(f"{file.path.name}: {what}; use --backend llama-cpp")


class Header:
    """``<architecture>.<key>`` settings of a file, which remembers the keys that were read.

    A setting that was not read may change what the model computes, so ``refuse_unread`` is called last.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None, *, but: int | None = None) -> int:
        """A whole number; a list with one number for each layer must repeat a single one, where it is not ``but``."""
        value = self.real(key, default, but=but)
        if value != int(value):
            raise self.refusal(key, f"is {value!r}, not a whole number")
        return int(value)

    def real(self, key: str, default: float | None = None, *, but: int | None = None) -> float:
        """Likewise a number."""
        value = self.field(key, default)
        if isinstance(value, np.ndarray):
            value = value[value != but] if but is not None else value
            if len(value) == 0 or (value != value[0]).any():
                raise self.refusal(key, "differs between layers, which the mlx backend cannot compute")
            value = value[0]
        if not is_number(value):
            raise self.refusal(key, "is missing" if value is None else f"is {value!r}, not a number")
        return float(value)

    def refusal(self, key: str, what: str) -> UnsupportedModel:
        return unsupported(self.file, f"{self.file.architecture}.{key} {what}")

    def field(self, key: str, default: Any = None) -> Any:
        """A setting as it is stored."""
        self._read.add(key)
        return self.file.field(key, default)

    def list_or_integer(self, key: str, default: int) -> int | list[int]:
        value = self.field(key, default)
        return [int(item) for item in value] if isinstance(value, np.ndarray) else int(value)

    def attending(self) -> list[int]:
        """The layers that have keys and values, where the header counts 0 key heads in the others."""
        n_layer = self.integer("block_count")
        counts = self.list_or_integer("attention.head_count_kv", 1)
        counts = counts if isinstance(counts, list) else [counts] * n_layer
        found = [i for i, count in enumerate(counts[:n_layer]) if count]
        if not 0 < len(found) < n_layer:
            raise unsupported(self.file, f"{len(found)} of {n_layer} layers have attention; mlx-lm needs both kinds")
        return found

    def expect(self, key: str, *accepted: float) -> None:
        """Refuse a setting whose value would need code that is not there."""
        value = self.field(key)
        if value is not None and not any(np.isclose(value, one) for one in accepted):
            raise self.refusal(key, f"= {value} is not handled by the mlx backend")

    def ignore(self, keys: Iterable[str]) -> None:
        self._read.update(keys)

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel where a setting was not read."""
        prefix = self.file.architecture + "."
        found = {key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)}
        unread = sorted(found - self._read - _WITHOUT_EFFECT)
        if unread:
            what = f"the {self.file.architecture} setting{'s' * (len(unread) > 1)} {', '.join(unread)}"
            raise unsupported(self.file, f"the mlx backend does not know {what}")


Array = npt.NDArray[Any]

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORM = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _feed_forward(path: str, suffix: str = "") -> dict[str, str]:
    return {f"ffn_{part}{suffix}": f"{path}.{part}_proj" for part in ("gate", "up", "down")}


MLP = _feed_forward("mlp")
_LLAMA = ATTENTION | MLP | _NORMS
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | _feed_forward("mlp.switch_mlp", "_exps")

_SHORT_CONVOLUTIONS = ATTENTION | {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}


def _as_kernels(stored: Array) -> Array:
    """Stored as [channels, kernel]."""
    return stored[:, :, None]


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture."""

    module: str  # of ``mlx_lm.models``
    blocks: Mapping[str, str]  # ``blk.N.<key>.weight`` or ``.bias`` -> path of the submodule or parameter in layer N
    # Settings -> arguments of the class beyond ``common_arguments``, which they replace.
    arguments: Callable[[Header], dict[str, Any]] = lambda header: {}
    attention: bool = True  # whether it has attention heads and a rotary embedding
    # The rotary embedding turns neighbouring channels (llama.cpp's NORM): query and key rows were permuted for that.
    interleaved: bool = False
    shifted_norms: bool = False  # norm weights are stored one too large for the class, which adds 1
    # ``blk`` key and suffix -> function from the stored array to the parameter.
    converted: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    # ``blk`` key and suffix -> an axis, and in which order its equal parts are wanted: heads, for example.
    rearranged: Mapping[str, tuple[int, Callable[[Header], list[int]]]] = field(default_factory=dict)
    precise: tuple[str, ...] = ()  # ``blk`` keys and suffixes of what stays in float32 whatever else is computed in
    prefix: str = ""  # of the names ``Model`` and ``ModelArgs`` in the module
    trunk: str = "model"  # attribute of the model up to and including the last norm
    embedding: str = "embed_tokens"  # of the trunk
    norm: str = "norm"  # the last one, of the trunk
    ignored: tuple[str, ...] = ()  # settings that llama.cpp does not look at either
    stretched_windows: bool = False  # whether positions are scaled in layers that see a window too
    without_rope: Callable[[int], bool] = lambda layer: False  # whether a layer (numbered from 0) does not rotate
    # Tensors outside of layers, but for embedding, last norm and output matrix -> path in the trunk.
    top: Mapping[str, str] = field(default_factory=dict)
    no_parameters: tuple[str, ...] = ()  # tensors that are none, and are read by others


@dataclass(frozen=True)
class Attention:
    """What the attention layers have in common."""

    n_head: int  # query heads
    n_head_kv: int  # key and value heads
    d_head: int  # channels of a head
    d_rope: int  # channels of a head that rotate


def read_attention(header: Header) -> Attention:
    """The head counts and sizes; UnsupportedModel where they are missing or contradict each other."""
    n_embd, n_head = header.integer("embedding_length"), header.integer("attention.head_count")
    if n_head <= 0:
        raise unsupported(header.file, f"it has {n_head} attention heads")
    d_head = header.integer("attention.key_length", n_embd // n_head)
    if header.integer("attention.value_length", d_head) != d_head:
        raise unsupported(header.file, "keys and values differ in size")
    n_head_kv = header.integer("attention.head_count_kv", n_head, but=0)  # layers without attention have none
    d_rope = header.integer("rope.dimension_count", d_head)
    if n_head_kv <= 0 or n_head % n_head_kv or not 0 < d_rope <= d_head or d_rope % 2:
        heads = f"{n_head} query heads, {n_head_kv} key heads, {d_rope} of {d_head} channels rotating"
        raise unsupported(header.file, f"{heads}: these do not fit together")
    return Attention(n_head, n_head_kv, d_head, d_rope)


def common_arguments(header: Header, architecture: Architecture, n_vocab: int, tied: bool) -> dict[str, Any]:
    """Arguments that nearly every class takes; those it does not take are dropped by mlx-lm."""
    arguments: dict[str, Any] = {
        "model_type": architecture.module,
        "hidden_size": header.integer("embedding_length"),
        "num_hidden_layers": header.integer("block_count"),
        "vocab_size": n_vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": header.real("attention.layer_norm_rms_epsilon"),
    }
    if architecture.attention:
        attention = read_attention(header)
        arguments |= {
            # Models of experts alone may have none.
            "intermediate_size": header.integer(
                "feed_forward_length", 0 if header.file.field("expert_count") else None
            ),
            "num_attention_heads": attention.n_head,
            "num_key_value_heads": attention.n_head_kv,
            "head_dim": attention.d_head,
            "max_position_embeddings": header.file.n_ctx_train,
            "rope_theta": header.real("rope.freq_base", 10000.0),
        }
    return arguments | architecture.arguments(header)


def _gemma3(header: Header) -> dict[str, Any]:
    n_layer, d_head = header.integer("block_count"), read_attention(header).d_head
    window = header.integer("attention.sliding_window", 0)
    pattern = header.list_or_integer("attention.sliding_window_pattern", 6) if window else 1
    if isinstance(pattern, list):
        # One flag for each layer, 1 where it sees the window only.
        every = pattern.index(0) + 1 if 0 in pattern else n_layer + 1
        if [int((i + 1) % every != 0) for i in range(n_layer)] != pattern[:n_layer]:
            raise unsupported(header.file, "its sliding-window layers are in an order that mlx-lm cannot compute")
        pattern = every
    if pattern < 1 or n_layer < pattern:
        raise unsupported(header.file, f"a global layer every {pattern} layers, but it has {n_layer}")
    header.expect("final_logit_softcapping", 0.0)
    n_embd, n_head = header.integer("embedding_length"), header.integer("attention.head_count")
    return {
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": header.real("rope.freq_base_swa", 10000.0),
        # As llama.cpp: the 27B, known by its 62 layers, divides by the width per head.
        "query_pre_attn_scalar": n_embd // n_head if n_layer == 62 else d_head,
    }


def _granite(header: Header) -> dict[str, Any]:
    header.expect("expert_count", 0)
    # Zero stands for "none" in llama.cpp.
    return {
        "attention_multiplier": header.real("attention.scale", 0.0) or read_attention(header).d_head ** -0.5,
        "embedding_multiplier": header.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": header.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": header.real("logit_scale"),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _gpt_oss(header: Header) -> dict[str, Any]:
    header.expect("expert_weights_scale", 0, 1)
    header.expect("rope.freq_base_swa", header.real("rope.freq_base", 10000.0))
    n_layer = header.integer("block_count")
    pattern = header.list_or_integer("attention.sliding_window_pattern", 2)
    if isinstance(pattern, int):
        pattern = [int((i + 1) % pattern != 0) for i in range(n_layer)]
    if {bool(each) for each in pattern[:n_layer]} != {True, False}:
        raise unsupported(header.file, "mlx-lm needs layers with a sliding window and others without")
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern[:n_layer]],
        "sliding_window": header.integer("attention.sliding_window"),
        "num_local_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "intermediate_size": header.integer("expert_feed_forward_length"),
    }


def _lfm2(header: Header) -> dict[str, Any]:
    return {
        "norm_eps": header.real("attention.layer_norm_rms_epsilon"),
        "full_attn_idxs": header.attending(),
        "conv_L_cache": header.integer("shortconv.l_cache"),
        "conv_bias": False,
        # The width is the adjusted one.
        "block_dim": header.integer("embedding_length"),
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
    }


def _lfm2moe(header: Header) -> dict[str, Any]:
    header.expect("expert_gating_func", 2)  # sigmoid
    n_dense = header.integer("leading_dense_block_count")
    return _lfm2(header) | _experts(header) | {"num_dense_layers": n_dense, "use_expert_bias": True}


def _llama(header: Header) -> dict[str, Any]:
    header.expect("expert_count", 0)
    header.expect("expert_used_count", 0)
    return {"attention_bias": False, "mlp_bias": False}


def _olmo2(header: Header) -> dict[str, Any]:
    header.expect("attention.sliding_window", 0)
    return {"attention_bias": False, "mlp_bias": False}


def _experts(header: Header) -> dict[str, Any]:
    return {
        "num_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3moe(header: Header) -> dict[str, Any]:
    header.expect("expert_weights_norm", 1)
    header.expect("expert_weights_scale", 0, 1)
    header.expect("expert_gating_func", 1)  # softmax
    header.expect("expert_shared_count", 0)
    return _experts(header) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _glm4moe(header: Header) -> dict[str, Any]:
    header.expect("expert_gating_func", 0, 2)  # sigmoid, which is the default too
    header.expect("expert_group_count", 0, 1)
    header.expect("expert_group_used_count", 0, 1)
    return {
        "num_hidden_layers": header.integer("block_count") - header.integer("nextn_predict_layers", 0),
        "n_routed_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "n_shared_experts": header.integer("expert_shared_count") or None,
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
        "first_k_dense_replace": header.integer("leading_dense_block_count", 0),
        "norm_topk_prob": bool(header.field("expert_weights_norm")),
        "routed_scaling_factor": header.real("expert_weights_scale", 0.0) or 1.0,  # llama.cpp: zero is none
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.file.tensors,
        "attention_bias": True,
        "partial_rotary_factor": 1.0,  # the rotary embedding is put in its place
        "rope_scaling": None,
    }


def _mamba(header: Header) -> dict[str, Any]:
    header.ignore(("attention.head_count",))
    return {
        "intermediate_size": header.integer("ssm.inner_size"),
        "state_size": header.integer("ssm.state_size"),
        "conv_kernel": header.integer("ssm.conv_kernel"),
        "time_step_rank": header.integer("ssm.time_step_rank"),
        "use_bias": False,
        "use_conv_bias": True,
        "use_bcdt_rms": bool(header.field("ssm.dt_b_c_rms")),
        "mixer_rms_eps": header.real("attention.layer_norm_rms_epsilon"),
    }


def _qwen35(header: Header) -> dict[str, Any]:
    n_value, width = header.integer("ssm.time_step_rank"), header.integer("ssm.state_size")
    if n_value * width != header.integer("ssm.inner_size"):
        raise unsupported(header.file, f"{n_value} heads of {width} channels are not ssm.inner_size")
    _check_sections(header)
    return {
        "num_hidden_layers": header.integer("block_count") - header.integer("nextn_predict_layers", 0),
        "full_attention_interval": header.integer("full_attention_interval", 4),
        "linear_num_value_heads": n_value,
        "linear_num_key_heads": header.integer("ssm.group_count"),
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": header.integer("ssm.conv_kernel"),
        "rope_parameters": None,  # the rotary embedding is put in its place
    }


def _check_sections(header: Header) -> None:
    """See that each rotating channel takes one of the three positions that are the same in text (Qwen's M-RoPE)."""
    sections = header.list_or_integer("rope.dimension_sections", 0)
    n = read_attention(header).d_rope // 2
    if not isinstance(sections, list) or any(i >= 3 * sections[i % 3] for i in range(n)):
        raise unsupported(header.file, f"its rope sections {sections} do not cover {n} pairs of channels")


def _qwen35moe(header: Header) -> dict[str, Any]:
    header.expect("expert_weights_norm", 1)
    header.expect("expert_weights_scale", 0, 1)
    n_shared = header.integer("expert_shared_feed_forward_length")
    return _qwen35(header) | _experts(header) | {"shared_expert_intermediate_size": n_shared}


def _value_heads(header: Header) -> list[int]:
    """The file's value head for each of mlx-lm's: there those that share a key head follow each other, in the file they
    are as far apart as there are key heads."""
    n_key, n_value = header.integer("ssm.group_count"), header.integer("ssm.time_step_rank")
    return [i * n_key + key for key in range(n_key) for i in range(n_value // n_key)]


def _all_heads(header: Header) -> list[int]:
    """As ``_value_heads``, behind the heads of queries and keys."""
    n_before = 2 * header.integer("ssm.group_count")
    return [*range(n_before), *(n_before + head for head in _value_heads(header))]


_DELTA_NET = (
    ATTENTION
    | _QK_NORMS
    | _POST_NORM
    | {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
_STATES: dict[str, Callable[[Array], Array]] = {
    "ssm_a": lambda stored: np.log(-stored),  # stored as the (negative) matrix itself
    "ssm_conv1d.weight": _as_kernels,
}
_DECAY = ("ssm_a", "ssm_dt.bias")  # their rounding would go into the state with every token
_DELTA_HEADS: dict[str, tuple[int, Callable[[Header], list[int]]]] = {
    **dict.fromkeys(("attn_qkv.weight", "ssm_conv1d.weight"), (0, _all_heads)),
    **dict.fromkeys(("attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", *_DECAY), (0, _value_heads)),
    "ssm_out.weight": (-1, _value_heads),
}

_LFM2 = Architecture(
    "lfm2",
    _SHORT_CONVOLUTIONS | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
    _lfm2,
    converted={"shortconv.conv.weight": _as_kernels},
    norm="embedding_norm",
    top={"token_embd_norm": "embedding_norm"},
)
_QWEN35 = Architecture(
    "qwen3_5",
    _DELTA_NET | MLP,
    _qwen35,
    converted=_STATES,
    rearranged=_DELTA_HEADS,
    precise=_DECAY,
    prefix="Text",
)

ARCHITECTURES: dict[str, Architecture] = {
    "gemma": Architecture("gemma", _LLAMA, shifted_norms=True),
    "gemma3": Architecture(
        "gemma3_text",
        ATTENTION
        | MLP
        | _QK_NORMS
        | _POST_NORM
        | {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        _gemma3,
        shifted_norms=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        ATTENTION
        | MLP
        | _QK_NORMS
        | _EXPERTS
        | _feed_forward("mlp.shared_experts", "_shexp")
        | _POST_NORM
        | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        _glm4moe,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        ATTENTION
        | _POST_NORM
        | _feed_forward("mlp.experts", "_exps")
        | {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        _gpt_oss,
        stretched_windows=True,
    ),
    "granite": Architecture("granite", _LLAMA, _granite, interleaved=True),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        module="lfm2_moe",
        blocks=_SHORT_CONVOLUTIONS
        | _feed_forward("feed_forward")
        | _feed_forward("feed_forward.switch_mlp", "_exps")
        | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"},
        arguments=_lfm2moe,
    ),
    "llama": Architecture("llama", _LLAMA, _llama, interleaved=True, ignored=("attention.sliding_window",)),
    "mamba": Architecture(
        "mamba",
        {
            "attn_norm": "norm",
            "ssm_in": "mixer.in_proj",
            "ssm_conv1d": "mixer.conv1d",
            "ssm_x": "mixer.x_proj",
            "ssm_dt": "mixer.dt_proj",
            "ssm_a": "mixer.A_log",
            "ssm_d": "mixer.D",
            "ssm_out": "mixer.out_proj",
        },
        _mamba,
        attention=False,
        converted=_STATES,
        trunk="backbone",
        embedding="embeddings",
        norm="norm_f",
    ),
    "olmo2": Architecture(
        "olmo2",
        ATTENTION
        | MLP
        | _QK_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        _olmo2,
    ),
    "phi3": Architecture(
        "phi3",
        _NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        ignored=("attention.sliding_window",),
    ),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _LLAMA | _QK_NORMS),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        blocks=_DELTA_NET
        | _EXPERTS
        | _feed_forward("mlp.shared_expert", "_shexp")
        | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        arguments=_qwen35moe,
        converted=_STATES | {"ffn_gate_inp_shexp.weight": lambda stored: stored.reshape(1, -1)},
        ignored=("expert_gating_func", "expert_shared_count"),
    ),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | _NORMS | _QK_NORMS | _EXPERTS, _qwen3moe),
    "smollm3": Architecture(
        "smollm3", _LLAMA, _llama, interleaved=True, without_rope=lambda layer: (layer + 1) % 4 == 0
    ),
}
"""GGUF architecture -> how it is computed."""
