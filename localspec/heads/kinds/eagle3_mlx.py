"""EAGLE-3 heads on MLX (Li et al. 2025, arXiv:2503.01840): the layer, and its weights from a GGUF.

Built as mlx-lm's model classes are; the first layer's input are the rows that a context is fed with, beside the tokens'
embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from localspec.backends.base import Model
from localspec.backends.mlx.architecture import MLP, Architecture, Attention, Header, read_attention
from localspec.backends.mlx.library import defer_mlx_lm
from localspec.backends.mlx.network import Network, install_rope, rope_scaling
from localspec.backends.mlx.placement import fill
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

EAGLE3 = Architecture(
    "eagle3",
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "embedding_norm",
        "attn_norm_2": "state_norm",
        "ffn_norm": "ffn_norm",
    }
    | MLP,
    interleaved=True,
    top={"fc": "fc", "enc.output_norm": "fc_norm"},
    no_parameters=("d2t",),
)
"""Where the tensors of such a file belong; names and layout are those of llama.cpp's converter."""

_CHECKED = ("target_layers", "target_hidden_size")
"""Settings that ``eagle3.read`` has read."""


@dataclass(frozen=True)
class _Sizes:
    n_embd: int
    n_ff: int
    n_taps: int
    n_out: int
    n_vocab: int
    eps: float
    attention: Attention
    norm_before_residual: bool
    norm_before_fc: bool


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.norm_before_residual = sizes.norm_before_residual
        self.embedding_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.state_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.self_attn = HeadAttention(sizes.attention, 2 * sizes.n_embd, sizes.n_embd)
        self.ffn_norm = nn.RMSNorm(sizes.n_embd, eps=sizes.eps)
        self.mlp = FeedForward(sizes.n_embd, sizes.n_ff)

    def __call__(self, state: mx.array, embedding: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.state_norm(state)
        both = mx.concatenate([self.embedding_norm(embedding), normed], axis=-1)
        x = (normed if self.norm_before_residual else state) + self.self_attn(both, mask, cache)
        return cast(mx.array, x + self.mlp(self.ffn_norm(x)))


class Eagle3Trunk(nn.Module):  # type: ignore[misc]
    """Rows and tokens' ids [1, n] -> rows for the output matrix [1, n, n_embd]."""

    def __init__(self, sizes: _Sizes, *, has_embeddings: bool) -> None:
        super().__init__()
        if has_embeddings:
            self.embed_tokens = nn.Embedding(sizes.n_vocab, sizes.n_embd)
        if sizes.norm_before_fc:
            self.fc_norm = nn.RMSNorm(sizes.n_taps, eps=sizes.eps)
        self.fc = nn.Linear(sizes.n_taps, sizes.n_embd, bias=False)
        self.layers = [_Layer(sizes)]
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


class _Head(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: _Sizes, *, has_embeddings: bool, has_output: bool) -> None:
        super().__init__()
        self.model = Eagle3Trunk(sizes, has_embeddings=has_embeddings)
        if has_output:
            self.lm_head = nn.Linear(sizes.n_embd, sizes.n_out, bias=False)

    @property
    def layers(self) -> list[nn.Module]:
        return cast("list[nn.Module]", self.model.layers)


def _network(head: PublishedHead, target: Network | None) -> Network:
    """The head as a network whose logits are for ``head.ids``, in their order; call it on the thread that will compute.

    Raises:
        UnsupportedModel: a setting, tensor or tensor type that is not handled; the message names it.
    """
    defer_mlx_lm()
    with GGUFFile(head.path) as file:
        header = Header(file)
        sizes = _Sizes(
            n_embd=head.n_embd,
            n_ff=header.integer("feed_forward_length"),
            n_taps=len(head.taps) * head.n_target,
            n_out=len(head.ids),
            n_vocab=head.n_vocab,
            eps=header.real("attention.layer_norm_rms_epsilon"),
            attention=read_attention(header),
            norm_before_residual=header.flag("norm_before_residual", False),
            norm_before_fc=header.flag("norm_before_fc", False),
        )
        scaling, max_context = rope_scaling(header)
        header.ignore((*_CHECKED, "block_count"))
        has = {what: what not in head.borrows for what in ("embeddings", "output")}
        module = _Head(sizes, has_embeddings=has["embeddings"], has_output=has["output"])
        install_rope(header, EAGLE3, module, sizes, scaling)
        header.refuse_unread()
        fill(file, EAGLE3, module, HEAD_DTYPE, None)
        if "d2t" in file.tensors:
            sort_rows(module.lm_head, np.argsort(file.tensor_bytes("d2t").view("<i8")))
    if not has["embeddings"]:
        module.model.embed_tokens = embedding_of(needed(target))
    project = module.lm_head if has["output"] else output_of(needed(target))
    return head_network(head, module, max_context, lambda hidden: project(hidden)[..., : sizes.n_out])


def load(head: PublishedHead, target: Model, n_threads: int, n_gpu_layers: int | None) -> MLXHeadModel:
    """See ``published.LoadHeadModel``."""
    return MLXHeadModel(head, target, _network, n_gpu_layers)
