"""EAGLE-3 heads on MLX (Li et al. 2025, arXiv:2503.01840): the layer, and its weights from a GGUF.

Built as mlx-lm's model classes are; the first layer's input are the rows that a context is fed with, beside the tokens'
embeddings.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from localspec.backends.mlx.architecture import MLP, Architecture, Header
from localspec.heads.mlx import FeedForward, HeadAttention, HeadSizes, loader, read_network

# Where the tensors of such a file belong; names and layout are those of llama.cpp's converter
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

_CHECKED = ("target_layers", "target_hidden_size", "block_count")  # settings that eagle3.read has read


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: HeadSizes, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
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

    def __init__(self, sizes: HeadSizes, *, norm_before_residual: bool, norm_before_fc: bool) -> None:
        super().__init__()
        if norm_before_fc:
            self.fc_norm = nn.RMSNorm(sizes.n_taps, eps=sizes.eps)
        self.fc = nn.Linear(sizes.n_taps, sizes.n_embd, bias=False)
        self.layers = [_Layer(sizes, norm_before_residual=norm_before_residual)]
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


def _build(header: Header, sizes: HeadSizes) -> Eagle3Trunk:
    flags = {name: header.flag(name, False) for name in ("norm_before_residual", "norm_before_fc")}
    return Eagle3Trunk(sizes, **flags)


load = loader(lambda head, target: read_network(head, target, EAGLE3, _CHECKED, _build))
