"""DFlash drafters on MLX (Chen et al. 2026, arXiv:2602.06036): their layers, and their weights from a GGUF.

States of the target become keys and values of every layer, without queries; a block's rows see those, and one another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from localspec.backends.base import Model
from localspec.backends.mlx.architecture import MLP, Architecture, Attention, Header, read_attention
from localspec.backends.mlx.library import defer_mlx_lm
from localspec.backends.mlx.network import Network, install_rope, rope_scaling
from localspec.backends.mlx.placement import fill
from localspec.errors import UnsupportedModel
from localspec.heads.kinds.base import PublishedHead
from localspec.heads.mlx import (
    HEAD_DTYPE,
    FeedForward,
    HeadAttention,
    MLXHeadModel,
    embedding_of,
    head_network,
    needed,
    output_of,
    sort_rows,
)
from localspec.model_files.gguf import GGUFFile

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
"""Where the tensors of such a file belong; names and layout are those of llama.cpp's converter."""

_CHECKED = ("target_layers", "block_size", "block_count", "attention.sliding_window")
"""Settings that ``dflash.read`` has read, and those read here."""


@dataclass(frozen=True)
class _Sizes:
    n_embd: int
    n_ff: int
    n_taps: int
    n_vocab: int
    eps: float
    attention: Attention
    windows: tuple[int | None, ...]


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: _Sizes, window: int | None) -> None:
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

    def __init__(self, sizes: _Sizes, *, has_embeddings: bool) -> None:
        super().__init__()
        if has_embeddings:
            self.embed_tokens = nn.Embedding(sizes.n_vocab, sizes.n_embd)
        self.fc = nn.Linear(sizes.n_taps, sizes.n_embd, bias=False)
        self.fc_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.layers = [_Layer(sizes, window) for window in sizes.windows]
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


class _Head(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: _Sizes, n_out: int, *, has_embeddings: bool, has_output: bool) -> None:
        super().__init__()
        self.model = BlockTrunk(sizes, has_embeddings=has_embeddings)
        if has_output:
            self.lm_head = nn.Linear(sizes.n_embd, n_out, bias=False)

    @property
    def layers(self) -> list[nn.Module]:
        return cast("list[nn.Module]", self.model.layers)


def _network(head: PublishedHead, target: Network | None) -> Network:
    """The drafter as a network whose logits are for ``head.ids``, in their order; call it on the thread that will
    compute.

    Raises:
        UnsupportedModel: a setting, tensor or tensor type that is not handled; the message names it.
    """
    assert head.block is not None
    if head.block.causal:
        raise UnsupportedModel(
            f"{head.path.name} has causal attention within its blocks, which the mlx backend does not support; "
            "use --backend llama-cpp"
        )
    defer_mlx_lm()
    with GGUFFile(head.path) as file:
        header = Header(file)
        sizes = _Sizes(
            n_embd=head.n_embd,
            n_ff=header.integer("feed_forward_length"),
            n_taps=head.row_width,
            n_vocab=head.n_vocab,
            eps=header.real("attention.layer_norm_rms_epsilon"),
            attention=read_attention(header),
            windows=_windows(header),
        )
        scaling, max_context = rope_scaling(header)
        header.ignore(_CHECKED)
        has = {what: tensor in file.tensors for what, tensor in _OWN.items()}
        module = _Head(sizes, len(head.ids), has_embeddings=has["embeddings"], has_output=has["output"])
        install_rope(header, DFLASH, module, sizes, scaling)
        header.refuse_unread()
        fill(file, DFLASH, module, HEAD_DTYPE, None)
        if "d2t" in file.tensors:
            sort_rows(module.lm_head, np.argsort(file.tensor_bytes("d2t").view("<i8")))
    if not has["embeddings"]:
        module.model.embed_tokens = embedding_of(needed(target))
    if has["output"]:
        project = module.lm_head
    else:
        project = output_of(needed(target)) if "output" in head.borrows else module.model.embed_tokens.as_linear
    n_out = len(head.ids)
    network = head_network(head, module, max_context, lambda hidden: project(hidden)[..., :n_out])
    return replace(network, n_layer=len(sizes.windows), layer_windows=sizes.windows)


_OWN = {"embeddings": "token_embd.weight", "output": "output.weight"}


def _windows(header: Header) -> tuple[int | None, ...]:
    """How far back each layer sees; None for all the way."""
    n_layers, window = header.integer("block_count"), header.integer("attention.sliding_window", 0)
    pattern = header.list_or_integer("attention.sliding_window_pattern", 0)
    if not window or not isinstance(pattern, list):
        return (None,) * n_layers
    return tuple(window if has_window else None for has_window in pattern)


def load(head: PublishedHead, target: Model, n_threads: int, n_gpu_layers: int | None) -> MLXHeadModel:
    """See ``published.LoadHeadModel``."""
    return MLXHeadModel(head, target, _network, n_gpu_layers)
