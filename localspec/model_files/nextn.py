"""A model's own layer for multi-token prediction, in its file or in one of its own: whether an engine may load it.

One more block after the model's layers reads the model's last state and the embedding of the token after it
(DeepSeek-AI 2024, arXiv:2412.19437). llama.cpp calls it NextN. A file of the layer alone has copies of the embeddings
and the output matrix, which are the model's otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from localspec.errors import ModelFileError, UnsupportedModel, is_whole, shown
from localspec.model_files.gguf import GGUFFile, check_shapes, damaged, is_mtp_alone, whole, width_of_heads

_ROUTER = ("ffn_gate_inp",)
_TENSORS: dict[str, tuple[str, ...]] = {
    "qwen35": (),
    "qwen35moe": _ROUTER,
    "qwen3next": _ROUTER,
    "glm4moe": _ROUTER,
    "glm-dsa": _ROUTER,
    "deepseek2": (*_ROUTER, "attn_q_a", "attn_q_b", "attn_k_b"),
    "deepseek32": _ROUTER,
    "bailingmoe3": _ROUTER,
    "cohere2moe": _ROUTER,
    "hy_v3": (),
    "nemotron_h_moe": _ROUTER,
}
"""Architectures whose layer llama.cpp feeds with a state and a token a row -> what it has to have besides the usual."""

ARCHITECTURES = frozenset(_TENSORS)

ASSISTANT = "gemma4-assistant"
_TARGET_OF_ASSISTANTS = "gemma4"

GIVES_STATES = ARCHITECTURES | {_TARGET_OF_ASSISTANTS}
"""Architectures of models that hand out the state which such a layer reads."""


def n_layers(file: GGUFFile) -> int:
    value = file.field("nextn_predict_layers", 0)
    return int(value) if is_whole(value) and value > 0 else 0


def is_alone(file: GGUFFile) -> bool:
    """Whether an open file is such a layer without the model that it is for."""
    return is_mtp_alone(file.tensors, file.field("block_count"), n_layers(file))


def has_layer(file: GGUFFile) -> bool:
    try:
        check(file)
    except ModelFileError:
        return False
    return True


def check(file: GGUFFile) -> int:
    """See that an open file has one such layer, with all that the engine would assert on; returns the layer's number.
    ``UnsupportedModel``: it has none, several, or one of another layout; ``ModelFileError``: it is damaged."""
    name, architecture, found = file.path.name, file.architecture, n_layers(file)
    if not found:
        raise UnsupportedModel(f"{name} has no layer for multi-token prediction (MTP)")
    if architecture not in _TENSORS:
        raise UnsupportedModel(
            f"{name} has MTP layers of {shown(architecture)}; supported are those of {', '.join(_TENSORS)}"
        )
    if found > 1:
        raise UnsupportedModel(f"{name} has {found} MTP layers; only models with one are supported")
    layer, n = whole(file, "block_count") - 1, whole(file, "embedding_length")
    block = f"blk.{layer}.nextn"
    if f"{block}.eh_proj.weight" not in file.tensors:
        raise UnsupportedModel(f"{name} lacks the MTP layer that its header declares")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (file.tensors["token_embd.weight"].shape[-1], n),
        f"{block}.eh_proj.weight": (n, 2 * n),
        f"{block}.enorm.weight": (n,),
        f"{block}.hnorm.weight": (n,),
    }
    for tensor in _TENSORS[architecture]:
        if tensor in _ROUTER:
            shapes[f"blk.{layer}.{tensor}.weight"] = (whole(file, "expert_count"), n)
        elif f"blk.{layer}.{tensor}.weight" not in file.tensors:
            raise UnsupportedModel(f"{name} has an MTP layer without {tensor}, which llama.cpp does not support")
    if file.field("attention.temperature_scale", 0.0):
        raise UnsupportedModel(f"{name} scales attention by position, which llama.cpp does not support with MTP layers")
    check_shapes(file, shapes)
    return layer


# Gemma 4's assistants: MTP layers in a file of their own that read keys and values of their target's last layers, and
# have none. Those with a window read the target's last layer but one, the others its last.


class KeysAndValues(NamedTuple):
    """What a layer keeps of each token, and for how long it looks at it."""

    n_heads: int
    width: int  # of a head's key, and of its value
    window: int  # positions that it looks back over; 0: all

    def __str__(self) -> str:
        window = f" and a window of {self.window:,} tokens" if self.window else ""
        return f"{self.n_heads} heads of {self.width} channels{window}"


def readable(file: GGUFFile) -> dict[bool, KeysAndValues]:
    """What an assistant can read of an open model file: whether with a window -> of which kind its last such layer is;
    empty for what is no Gemma 4, or orders its layers in another way."""
    if file.architecture != _TARGET_OF_ASSISTANTS:
        return {}
    last_two = zip((False, True), reversed(_kinds_of_layers(file)), strict=False)
    return {windowed: read for expected, (windowed, read) in last_two if windowed == expected}


def check_assistant(file: GGUFFile, n_vocab: int) -> dict[bool, KeysAndValues]:
    """See that an open file, of so many tokens, is a whole assistant with all that the engine would assert on.

    Returns:
        What its layers with a window (True) and those without (False) read; there are always some with one.

    Raises:
        UnsupportedModel: the engine does not compute it.
        ModelFileError: it is damaged.
    """
    name, n_layers_all = file.path.name, whole(file, "block_count")
    n, n_target = whole(file, "embedding_length"), whole(file, "embedding_length_out")
    if n_layers(file) != n_layers_all:
        raise damaged(file, f"{n_layers(file)} of its {n_layers_all} layers are for multi-token prediction")
    if n == n_target:
        raise UnsupportedModel(f"{name} is as wide as its target, which llama.cpp does not support")
    kinds = _kinds_of_layers(file)
    wanted = dict(kinds)
    if len(set(kinds)) > len(wanted):
        raise damaged(file, "its layers do not all read the same keys and values")
    if True not in wanted:
        raise UnsupportedModel(f"{name} has no layer with a window, which llama.cpp does not support")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n),
        "output_norm.weight": (n,),
        "nextn.pre_projection.weight": (n, 2 * n_target),
        "nextn.post_projection.weight": (n_target, n),
    }
    if False in wanted:
        shapes["rope_freqs.weight"] = (wanted[False].width // 2,)
    sizes = zip(kinds, _of_layers(file, "attention.head_count"), _of_layers(file, "feed_forward_length"), strict=True)
    for layer, ((_, read), n_head, n_ff) in enumerate(sizes):
        if n_head % read.n_heads:
            raise damaged(file, f"its {n_head} attention heads cannot share {read.n_heads} key heads")
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (n,),
            "attn_q": (n_head * read.width, n),
            "attn_q_norm": (read.width,),
            "attn_output": (n, n_head * read.width),
            "post_attention_norm": (n,),
            "layer_output_scale": (1,),
            "ffn_norm": (n,),
            "ffn_gate": (n_ff, n),
            "ffn_up": (n_ff, n),
            "ffn_down": (n, n_ff),
            "post_ffw_norm": (n,),
        }
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    check_shapes(file, shapes)
    return wanted


def _kinds_of_layers(file: GGUFFile) -> list[tuple[bool, KeysAndValues]]:
    """Of each layer of a Gemma 4 or an assistant whether it has a window, and what it keeps or reads."""
    pattern: Any = file.field("attention.sliding_window_pattern")
    if not isinstance(pattern, np.ndarray) or len(pattern) != whole(file, "block_count"):
        raise damaged(file, f"{file.architecture}.attention.sliding_window_pattern is {shown(pattern)}")
    window, wide = whole(file, "attention.sliding_window"), width_of_heads(file)
    in_window = width_of_heads(file, suffix="_swa")
    heads = zip(pattern, _of_layers(file, "attention.head_count_kv"), strict=True)
    return [
        (True, KeysAndValues(n, in_window, window)) if each else (False, KeysAndValues(n, wide, 0)) for each, n in heads
    ]


def _of_layers(file: GGUFFile, name: str) -> list[int]:
    """A number over 0 for each layer, of a header that lists them or says one for all."""
    values: Any = file.field(name)
    n = whole(file, "block_count")
    if not isinstance(values, np.ndarray):
        return [whole(file, name)] * n
    if values.dtype.kind not in "iu" or len(values) != n or not 0 < values.min() <= values.max() < 1 << 31:
        raise damaged(file, f"{file.architecture}.{name} is {shown(values.tolist())}")
    return [int(value) for value in values]
