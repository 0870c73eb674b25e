"""Which mlx-lm model class computes a GGUF architecture, with which arguments, and where each tensor belongs.

Adding one means an entry in ``ARCHITECTURES`` and a tiny random file in ``tests/support/mlx_ggufs.py`` on which its
logits must be those of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel
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


class Header:
    """``<architecture>.<key>`` settings of a file, which remembers the keys that were read.

    A setting that was not read may change what the model computes, so ``refuse_unread`` is called last.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name = file.path.name
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; a list with one number for each layer must repeat a single one."""
        value = self._uniform(key, default)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise UnsupportedModel(f"{self.name}: {self._full(key)} is {value!r}, not a whole number")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        value = self._uniform(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise UnsupportedModel(f"{self.name}: {self._full(key)} is {value!r}, not a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        self._read.add(key)
        return str(self.file.field(key, default))

    def flag(self, key: str, default: bool) -> bool:
        self._read.add(key)
        return bool(self.file.field(key, default))

    def list_or_integer(self, key: str, default: int) -> int | list[int]:
        self._read.add(key)
        value = self.file.field(key, default)
        return [int(item) for item in value] if isinstance(value, np.ndarray) else int(value)

    def expect(self, key: str, *accepted: float) -> None:
        """Refuse a setting whose value would need code that is not there."""
        self._read.add(key)
        value = self.file.field(key)
        if value is not None and not any(np.isclose(value, one) for one in accepted):
            raise UnsupportedModel(
                f"{self.name}: {self._full(key)} = {value} is not handled by the mlx backend; use --backend llama-cpp"
            )

    def ignore(self, keys: Iterable[str]) -> None:
        self._read.update(keys)

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel where a setting was not read."""
        prefix = self.file.architecture + "."
        found = {key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)}
        unread = sorted(found - self._read - _WITHOUT_EFFECT)
        if unread:
            raise UnsupportedModel(
                f"{self.name}: the mlx backend does not know the {self.file.architecture} "
                f"setting{'s' * (len(unread) > 1)} {', '.join(unread)}; use --backend llama-cpp"
            )

    def _uniform(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.file.field(key, default)
        if value is None:
            raise UnsupportedModel(f"{self.name} lacks the setting {self._full(key)}")
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise UnsupportedModel(
                    f"{self.name}: {self._full(key)} differs between layers, which the mlx backend cannot compute; "
                    "use --backend llama-cpp"
                )
            value = value[0]
        return value

    def _full(self, key: str) -> str:
        return f"{self.file.architecture}.{key}"


Array = npt.NDArray[Any]

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_LLAMA = _ATTENTION | MLP | _NORMS
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")
}


def _nothing(header: Header) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture."""

    module: str  # of ``mlx_lm.models``
    blocks: Mapping[str, str]  # ``blk.N.<key>.weight`` or ``.bias`` -> path of the submodule or parameter in layer N
    # Settings -> arguments of the class beyond ``common_arguments``, which they replace.
    arguments: Callable[[Header], dict[str, Any]] = _nothing
    attention: bool = True  # whether it has attention heads and a rotary embedding
    # The rotary embedding turns neighbouring channels (llama.cpp's NORM): query and key rows were permuted for that.
    interleaved: bool = False
    shifted_norms: bool = False  # norm weights are stored one too large for the class, which adds 1
    # ``blk`` key and suffix -> function from the stored array to the parameter.
    converted: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    trunk: str = "model"  # attribute of the model up to and including the last norm
    embedding: str = "embed_tokens"  # of the trunk
    norm: str = "norm"  # the last one, of the trunk
    ignored: tuple[str, ...] = ()  # settings that llama.cpp does not look at either
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
        raise UnsupportedModel(f"{header.name} has {n_head} attention heads")
    d_head = header.integer("attention.key_length", n_embd // n_head)
    if header.integer("attention.value_length", d_head) != d_head:
        raise UnsupportedModel(f"{header.name}: keys and values differ in size; use --backend llama-cpp")
    n_head_kv = header.integer("attention.head_count_kv", n_head)
    d_rope = header.integer("rope.dimension_count", d_head)
    if n_head_kv <= 0 or n_head % n_head_kv or not 0 < d_rope <= d_head or d_rope % 2:
        raise UnsupportedModel(
            f"{header.name}: {n_head} query heads, {n_head_kv} key heads, {d_rope} of {d_head} channels rotating: "
            "these do not fit together"
        )
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
            "intermediate_size": header.integer("feed_forward_length"),
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
            raise UnsupportedModel(
                f"{header.name}: its sliding-window layers are in an order that mlx-lm cannot compute"
            )
        pattern = every
    if pattern < 1 or n_layer < pattern:
        raise UnsupportedModel(f"{header.name}: a global layer every {pattern} layers, but it has {n_layer}")
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


def _llama(header: Header) -> dict[str, Any]:
    header.expect("expert_count", 0)
    header.expect("expert_used_count", 0)
    return {"attention_bias": False, "mlp_bias": False}


def _olmo2(header: Header) -> dict[str, Any]:
    header.expect("attention.sliding_window", 0)
    return {"attention_bias": False, "mlp_bias": False}


def _qwen3moe(header: Header) -> dict[str, Any]:
    header.expect("expert_weights_norm", 1)
    header.expect("expert_weights_scale", 0, 1)
    header.expect("expert_gating_func", 1)  # softmax
    header.expect("expert_shared_count", 0)
    return {
        "num_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


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
        "norm_topk_prob": header.flag("expert_weights_norm", False),
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
        "use_bcdt_rms": header.flag("ssm.dt_b_c_rms", False),
        "mixer_rms_eps": header.real("attention.layer_norm_rms_epsilon"),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "gemma": Architecture("gemma", _LLAMA, shifted_norms=True),
    "gemma3": Architecture(
        "gemma3_text",
        _ATTENTION
        | MLP
        | _QK_NORMS
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3,
        shifted_norms=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        _ATTENTION
        | MLP
        | _QK_NORMS
        | _EXPERTS
        | {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        _glm4moe,
    ),
    "granite": Architecture("granite", _LLAMA, _granite, interleaved=True),
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
        converted={
            # Stored as the (negative) matrix itself, and as [channels, kernel].
            "ssm_a": lambda stored: np.log(-stored),
            "ssm_conv1d.weight": lambda stored: stored[:, :, None],
        },
        trunk="backbone",
        embedding="embeddings",
        norm="norm_f",
    ),
    "olmo2": Architecture(
        "olmo2",
        _ATTENTION
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
    "qwen3moe": Architecture("qwen3_moe", _ATTENTION | _NORMS | _QK_NORMS | _EXPERTS, _qwen3moe),
    "smollm3": Architecture(
        "smollm3", _LLAMA, _llama, interleaved=True, without_rope=lambda layer: (layer + 1) % 4 == 0
    ),
}
"""GGUF architecture -> how it is computed."""


def find_architecture(header: Header) -> Architecture:
    """The entry for a file; UnsupportedModel where there is none."""
    name = header.file.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.name}: the mlx backend does not know the architecture {name!r} "
            f"(it knows {', '.join(sorted(ARCHITECTURES))}); use --backend llama-cpp"
        )
    return ARCHITECTURES[name]
