"""Networks of published heads on MLX, built as mlx-lm's model classes are, and where a GGUF's tensors belong in them.

- EAGLE-3 (Li et al. 2025, arXiv:2503.01840): the first layer's input are the rows that a context is fed with, beside
  the tokens' embeddings.
- DFlash (Chen et al. 2026, arXiv:2602.06036): states of the target become keys and values of every layer, without
  queries; a block's rows see those, and one another.
- Layers for multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2): a block of mlx-lm's class behind
  a matrix that joins the state and the embedding; embeddings, output matrix and, where it has none, the last norm are
  the model's.

Names and layout of tensors are those of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from localspec.backends.mlx.architecture import ARCHITECTURES, ATTENTION, MLP, Architecture, Header, common_arguments
from localspec.backends.mlx.network import Network, install_rope, rope_scaling
from localspec.backends.mlx.weights import fill
from localspec.errors import UnsupportedModel
from localspec.heads.kinds.base import PublishedHead
from localspec.heads.mlx import (
    HEAD_DTYPE,
    HeadAttention,
    HeadModule,
    HeadSizes,
    embedding_of,
    head_network,
    loader,
    output_of,
    read_network,
)
from localspec.model_files.gguf import GGUFFile

_BLOCK = ATTENTION | MLP | {"attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}

EAGLE3 = Architecture(
    "eagle3",
    _BLOCK | {"attn_norm": "embedding_norm", "attn_norm_2": "state_norm"},
    interleaved=True,
    top={"fc": "fc", "enc.output_norm": "fc_norm"},
    no_parameters=("d2t",),
)

_EAGLE3_CHECKED = ("target_layers", "target_hidden_size", "block_count")  # settings that eagle3.read has read


class _Eagle3Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: HeadSizes, *, norm_before_residual: bool) -> None:
        from mlx_lm.models import qwen2

        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.embedding_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.state_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.self_attn = HeadAttention(sizes.attention, 2 * sizes.n_embd, sizes.n_embd)
        self.ffn_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.mlp = qwen2.MLP(sizes.n_embd, sizes.n_ff)

    def __call__(self, state: mx.array, embedding: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.state_norm(state)
        both = mx.concatenate([self.embedding_norm(embedding), normed], axis=-1)
        x = (normed if self.norm_before_residual else state) + self.self_attn(both, mask, cache)
        return cast(mx.array, x + self.mlp(self.ffn_norm(x)))


class Eagle3Trunk(nn.Module):  # type: ignore[misc]
    """Rows and tokens' ids [1, n] -> rows for the output matrix [1, n, n_embd]."""

    def __init__(self, sizes: HeadSizes, *, norm_before_residual: bool, norm_before_fc: bool) -> None:
        super().__init__()
        if norm_before_fc:
            self.fc_norm = nn.RMSNorm(sizes.n_taps, eps=sizes.eps)
        self.fc = nn.Linear(sizes.n_taps, sizes.n_embd, bias=False)
        self.layers = [_Eagle3Layer(sizes, norm_before_residual=norm_before_residual)]
        self.norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        from mlx_lm.models.base import create_attention_mask

        dtype = self.norm.weight.dtype
        embedding = self.embed_tokens(tokens).astype(dtype)
        mask = create_attention_mask(embedding, cache[0])
        # In the place of the zeros the layer is given the rows that the context was fed with; see ``Network.states``.
        state = self.layers[0](mx.zeros_like(embedding), embedding, mask, cache[0])
        return cast(mx.array, self.norm(state))

    def fuse(self, states: mx.array) -> mx.array:
        """The state that rows begin with, of the target's tapped ones side by side [n, n_taps * n_target]."""
        states = states.astype(self.norm.weight.dtype)
        return cast(mx.array, self.fc(self.fc_norm(states) if "fc_norm" in self else states))


def _eagle3_trunk(header: Header, sizes: HeadSizes) -> Eagle3Trunk:
    flags = {name: bool(header.field(name)) for name in ("norm_before_residual", "norm_before_fc")}
    return Eagle3Trunk(sizes, **flags)


load_eagle3 = loader(lambda head, target: read_network(head, target, EAGLE3, _EAGLE3_CHECKED, _eagle3_trunk))


# -- DFlash -----------------------------------------------------------------------------------------------------------

DFLASH = Architecture(
    "dflash",
    _BLOCK | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    top={"fc": "fc", "enc.output_norm": "fc_norm"},
    no_parameters=("d2t",),
)

# Settings that dflash.read has read, and those read here
_DFLASH_CHECKED = ("target_layers", "block_size", "block_count", "attention.sliding_window")


class _BlockLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: HeadSizes, window: int | None) -> None:
        from mlx_lm.models import qwen2

        super().__init__()
        self.attn_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.self_attn = HeadAttention(sizes.attention, sizes.n_embd, sizes.n_embd, sizes.eps)
        self.window = window
        self.ffn_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.mlp = qwen2.MLP(sizes.n_embd, sizes.n_ff)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        x = x + self.self_attn(self.attn_norm(x), self._mask(x.shape[1], cache.offset), cache)
        return cast(mx.array, x + self.mlp(self.ffn_norm(x)))

    def _mask(self, n: int, n_past: int) -> mx.array | None:
        """What each of n new rows sees: all new ones, and those before as far as the window reaches."""
        if self.window is None:
            return None
        at = mx.arange(max(0, n_past + 1 - self.window), n_past + n)
        return at[None] > mx.arange(n_past, n_past + n)[:, None] - self.window


class BlockTrunk(nn.Module):  # type: ignore[misc]
    """Tokens of a block [1, n] -> rows for the output matrix [1, n, n_embd]."""

    def __init__(self, sizes: HeadSizes, windows: Sequence[int | None]) -> None:
        super().__init__()
        self.fc = nn.Linear(sizes.n_taps, sizes.n_embd, bias=False)
        self.fc_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.layers = [_BlockLayer(sizes, window) for window in windows]
        self.norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.embed_tokens(tokens).astype(self.norm.weight.dtype)
        for layer, memory in zip(self.layers, cache, strict=True):
            x = layer(x, memory)
        return cast(mx.array, self.norm(x))

    def remember(self, states: mx.array, cache: list[Any]) -> None:
        """Put the target's tapped states, side by side [1, n, n_taps * n_target], into the memory of every layer."""
        fused = self.fc_norm(self.fc(states.astype(self.norm.weight.dtype)))
        for layer, memory in zip(self.layers, cache, strict=True):
            layer.self_attn.remember(fused, memory)


def _dflash_network(head: PublishedHead, target: Network | None) -> Network:
    assert head.block is not None
    if head.block.causal:
        raise UnsupportedModel(
            f"{head.path.name} has causal attention within its blocks, which the mlx backend does not support; "
            "use --backend llama-cpp"
        )
    network = read_network(
        head, target, DFLASH, _DFLASH_CHECKED, lambda header, sizes: BlockTrunk(sizes, _windows(header))
    )
    windows = tuple(layer.window for layer in network.module.layers)
    return replace(network, n_layer=len(windows), layer_windows=windows, layer_states=(0,) * len(windows))


def _windows(header: Header) -> list[int | None]:
    """How far back each layer sees; None for all the way."""
    n_layers, window = header.integer("block_count"), header.integer("attention.sliding_window", 0)
    pattern = header.list_or_integer("attention.sliding_window_pattern", 0)
    if not window or not isinstance(pattern, list):
        return [None] * n_layers
    return [window if has_window else None for has_window in pattern]


load_dflash = loader(_dflash_network)


# -- layers for multi-token prediction ---------------------------------------------------------------------------------

_MTP_COMPUTED = ("glm4moe", "qwen35", "qwen35moe")

# What it has besides a block; the last three are the model's own where the file has none
_MTP_PARTS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "head_norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "head",
}


class _MtpLayer(nn.Module):  # type: ignore[misc]
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


class _MtpTrunk(nn.Module):  # type: ignore[misc]
    def __init__(self, layer: _MtpLayer) -> None:
        super().__init__()
        self.layers = [layer]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        from mlx_lm.models.base import create_attention_mask

        layer = self.layers[0]
        embedding = layer.embed_tokens(tokens).astype(layer.enorm.weight.dtype)
        mask = create_attention_mask(embedding, cache[0])
        # In the place of the zeros come the rows that the context was fed with; see ``Network.states``.
        return layer(mx.zeros_like(embedding), embedding, mask, cache[0])


def _mtp_network(head: PublishedHead, target: Network | None) -> Network:
    """The layer of a target's file as a network; call it on the thread that will compute.

    Raises:
        UnsupportedModel: a tensor or tensor type that is not handled; the message names it.
    """
    assert target is not None
    if target.architecture not in _MTP_COMPUTED:
        raise UnsupportedModel(
            f"the mlx backend computes the MTP layers of {', '.join(_MTP_COMPUTED)}, not of {target.architecture}; "
            "use --backend llama-cpp"
        )
    family, first = ARCHITECTURES[target.architecture], target.n_layer
    architecture = replace(family, blocks={**family.blocks, **_MTP_PARTS})
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
        module = HeadModule(_MtpTrunk(_MtpLayer(models.DecoderLayer(args, number), args, tensors)))
        install_rope(header, architecture, module, args, rope_scaling(header)[0])
        fill(file, architecture, module, HEAD_DTYPE, None, range(first, first + 1))
    layer, trunk = module.model.layers[0], target.module[family.trunk]
    if "head_norm" not in layer:
        layer.head_norm = trunk[family.norm]
    if "embed_tokens" not in layer:
        layer.embed_tokens = embedding_of(target)
    project = layer.head if "head" in layer else output_of(target)
    return head_network(head, module, target.max_context, project)


load_mtp = loader(_mtp_network)
