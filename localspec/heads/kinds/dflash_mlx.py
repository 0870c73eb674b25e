"""DFlash drafters on MLX (Chen et al. 2026, arXiv:2602.06036): their layers, and their weights from a GGUF.

States of the target become keys and values of every layer, without queries; a block's rows see those, and one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from localspec.backends.mlx.architecture import MLP, Architecture, Header
from localspec.backends.mlx.network import Network
from localspec.errors import UnsupportedModel
from localspec.heads.kinds.base import PublishedHead
from localspec.heads.mlx import FeedForward, HeadAttention, HeadSizes, loader, read_network

# Where the tensors of such a file belong; names and layout are those of llama.cpp's converter
DFLASH = Architecture(
    "dflash",
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
    }
    | MLP,
    top={"fc": "fc", "enc.output_norm": "fc_norm"},
    no_parameters=("d2t",),
)

# Settings that dflash.read has read, and those read here
_CHECKED = ("target_layers", "block_size", "block_count", "attention.sliding_window")


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: HeadSizes, window: int | None) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.self_attn = HeadAttention(sizes.attention, sizes.n_embd, sizes.n_embd, sizes.eps)
        self.window = window
        self.ffn_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.mlp = FeedForward(sizes.n_embd, sizes.n_ff)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        x = x + self.self_attn(self.attn_norm(x), self._mask(x.shape[1], cache.offset), cache)
        return x + self.mlp(self.ffn_norm(x))

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
        self.layers = [_Layer(sizes, window) for window in windows]
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


def _network(head: PublishedHead, target: Network | None) -> Network:
    assert head.block is not None
    if head.block.causal:
        raise UnsupportedModel(
            f"{head.path.name} has causal attention within its blocks, which the mlx backend does not support; "
            "use --backend llama-cpp"
        )
    network = read_network(head, target, DFLASH, _CHECKED, lambda header, sizes: BlockTrunk(sizes, _windows(header)))
    windows = tuple(layer.window for layer in network.module.layers)
    return replace(network, n_layer=len(windows), layer_windows=windows, layer_states=(0,) * len(windows))


def _windows(header: Header) -> list[int | None]:
    """How far back each layer sees; None for all the way."""
    n_layers, window = header.integer("block_count"), header.integer("attention.sliding_window", 0)
    pattern = header.list_or_integer("attention.sliding_window_pattern", 0)
    if not window or not isinstance(pattern, list):
        return [None] * n_layers
    return [window if has_window else None for has_window in pattern]


load = loader(_network)
