"""A model's own layer for multi-token prediction, in its file or in one of its own: whether an engine may load it.

One more block after the model's layers reads the model's last state and the embedding of the token after it
(DeepSeek-AI 2024, arXiv:2412.19437). llama.cpp calls it NextN. A file of the layer alone has copies of the embeddings
and the output matrix, which are the model's otherwise.
"""

from __future__ import annotations

from localspec.errors import ModelFileError, UnsupportedModel, is_whole, shown
from localspec.model_files.gguf import GGUFFile, check_shapes, is_mtp_alone, whole

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

_OTHERWISE = {
    "step35": "are several, each for one position further ahead",
    "mimo2": "are several, each for one position further ahead",
    "deepseek4": "read several states side by side",
    "glm5-next": "read several states side by side",
    "gemma4-assistant": "read the keys and values of their target",
}
"""Architectures whose layers llama.cpp feeds otherwise -> in which way they differ."""


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
    if architecture in _OTHERWISE:
        raise UnsupportedModel(
            f"{name} has MTP layers of {architecture}, which {_OTHERWISE[architecture]}; this is not supported"
        )
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
