"""Layers for multi-token prediction inside of a model's own file (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

One more block after the model's layers reads the model's last state and the embedding of the token after it, and shares
embeddings and output matrix with the model. llama.cpp calls it NextN.
"""

from __future__ import annotations

import numpy as np

from localspec.errors import ModelFileError, UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.head_kinds.base import PublishedHead, check_shapes, whole
from localspec.values import is_whole, shown

TAP = "nextn"
"""The state that such a layer reads, as ``backends.forward`` names it."""

_TENSORS = {"qwen35": (), "qwen35moe": ("ffn_gate_inp",), "qwen3next": ("ffn_gate_inp",), "glm4moe": ("ffn_gate_inp",)}
"""Architectures whose layer llama.cpp feeds as it is done here -> what it has to have besides the usual."""


def n_layers(file: GGUFFile) -> int:
    """How many such layers a model's file says that it has."""
    value = file.field("nextn_predict_layers", 0)
    return int(value) if is_whole(value) and value > 0 else 0


def has_layer(file: GGUFFile) -> bool:
    """Whether an open file has a layer that is drafted with."""
    try:
        read(file)
    except ModelFileError:
        return False
    return True


def read(file: GGUFFile) -> PublishedHead:
    """What the open file of a model says of its layer for multi-token prediction.

    Raises:
        UnsupportedModel: it has none, several, or one of another layout.
        ModelFileError: it is damaged.
    """
    name, architecture, found = file.path.name, file.architecture, n_layers(file)
    if not found:
        raise UnsupportedModel(f"{name} has no layer for multi-token prediction (MTP)")
    if architecture not in _TENSORS:
        raise UnsupportedModel(
            f"{name} has MTP layers of the architecture {shown(architecture)}; those of {', '.join(_TENSORS)} are read"
        )
    if found > 1:
        raise UnsupportedModel(f"{name} has {found} MTP layers; models with one are supported")
    layer, n = whole(file, "block_count") - 1, whole(file, "embedding_length")
    block = f"blk.{layer}.nextn"
    if f"{block}.eh_proj.weight" not in file.tensors:
        raise UnsupportedModel(f"{name} was made without the MTP layer that its header speaks of")
    n_vocab = file.tensors["token_embd.weight"].shape[-1]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n),
        f"{block}.eh_proj.weight": (n, 2 * n),
        f"{block}.enorm.weight": (n,),
        f"{block}.hnorm.weight": (n,),
    }
    for tensor in _TENSORS[architecture]:
        shapes[f"blk.{layer}.{tensor}.weight"] = (whole(file, "expert_count"), n)
    check_shapes(file, shapes)
    return PublishedHead(
        kind="mtp",
        title="MTP",
        path=file.path,
        taps=(TAP,),
        n_target=n,
        n_embd=n,
        n_vocab=n_vocab,
        ids=np.arange(n_vocab),
        in_target=True,
    )
