"""Layers for multi-token prediction on MLX (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

Such a layer is a block of mlx-lm's class behind a matrix that joins the state and the embedding; embeddings, output
matrix and, where it has none, the last norm are the model's.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from localspec.backends.mlx.architecture import ARCHITECTURES, Header, common_arguments
from localspec.backends.mlx.library import defer_mlx_lm
from localspec.backends.mlx.network import Network, install_rope, rope_scaling
from localspec.backends.mlx.placement import fill
from localspec.errors import UnsupportedModel
from localspec.heads.kinds.base import PublishedHead
from localspec.heads.mlx import HEAD_DTYPE, HeadModule, embedding_of, head_network, loader, output_of
from localspec.model_files.gguf import GGUFFile

_COMPUTED = ("glm4moe", "qwen35", "qwen35moe")

# What it has besides a block; the last three are the model's own where the file has none
_PARTS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "head_norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "head",
}


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, block: nn.Module, args: Any, tensors: set[str]) -> None:
        super().__init__()
        n, eps = args.hidden_size, args.rms_norm_eps
        for name, part in block.items():  # its parts are this module's own: tensors are placed by their names
            self[name] = part
        for name, value in vars(block).items():  # and so is what its call reads besides
            self.__dict__.setdefault(name, value)
        self.eh_proj = nn.Linear(2 * n, n, bias=False)
        self.enorm, self.hnorm = nn.RMSNorm(n, eps=eps), nn.RMSNorm(n, eps=eps)
        if "nextn.shared_head_norm" in tensors:
            self.head_norm = nn.RMSNorm(n, eps=eps)
        if "nextn.embed_tokens" in tensors:
            self.embed_tokens = nn.Embedding(args.vocab_size, n)
        if "nextn.shared_head_head" in tensors:
            self.head = nn.Linear(n, args.vocab_size, bias=False)
        self._block = type(block).__call__

    def __call__(self, state: mx.array, embedding: mx.array, mask: Any, cache: Any) -> mx.array:
        x = self.eh_proj(mx.concatenate([self.enorm(embedding), self.hnorm(state)], axis=-1))
        return cast(mx.array, self.head_norm(self._block(self, x, mask, cache)))


class _Trunk(nn.Module):  # type: ignore[misc]
    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layers = [layer]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        from mlx_lm.models.base import create_attention_mask

        layer = self.layers[0]
        embedding = layer.embed_tokens(tokens).astype(layer.enorm.weight.dtype)
        mask = create_attention_mask(embedding, cache[0])
        # In the place of the zeros come the rows that the context was fed with; see ``Network.states``.
        return layer(mx.zeros_like(embedding), embedding, mask, cache[0])


def _network(head: PublishedHead, target: Network | None) -> Network:
    """The layer of a target's file as a network; call it on the thread that will compute.

    Raises:
        UnsupportedModel: a tensor or tensor type that is not handled; the message names it.
    """
    assert target is not None
    if target.architecture not in _COMPUTED:
        raise UnsupportedModel(
            f"the mlx backend computes the MTP layers of {', '.join(_COMPUTED)}, not of {target.architecture}; "
            "use --backend llama-cpp"
        )
    defer_mlx_lm()
    family, first = ARCHITECTURES[target.architecture], target.n_layer
    architecture = replace(family, blocks={**family.blocks, **_PARTS})
    models = import_module(f"mlx_lm.models.{family.module}")
    with GGUFFile(head.path) as file:
        header = Header(file)
        args = getattr(models, f"{family.prefix}ModelArgs").from_dict(
            common_arguments(header, family, head.n_vocab, False)
        )
        # One of attention: of Qwen 3.5's layers each of these numbers is, of GLM's all.
        number = getattr(args, "full_attention_interval", first + 1) - 1
        prefix = f"blk.{first}."
        tensors = {name.removeprefix(prefix).rpartition(".")[0] for name in file.tensors if name.startswith(prefix)}
        module = HeadModule(_Trunk(_Layer(models.DecoderLayer(args, number), args, tensors)))
        install_rope(header, architecture, module, args, rope_scaling(header)[0])
        fill(file, architecture, module, HEAD_DTYPE, None, range(first, first + 1))
    layer, trunk = module.model.layers[0], target.module[family.trunk]
    if "head_norm" not in layer:
        layer.head_norm = trunk[family.norm]
    if "embed_tokens" not in layer:
        layer.embed_tokens = embedding_of(target)
    project = layer.head if "head" in layer else output_of(target)
    return head_network(head, module, target.max_context, project)


load = loader(_network)
