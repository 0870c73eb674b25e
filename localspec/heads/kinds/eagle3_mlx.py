"""EAGLE-3 heads on MLX (Li et al. 2025, arXiv:2503.01840): the layer, and its weights from a GGUF.

mlx-lm has no such class. This one is built as its model classes are, so that memory, rotary embedding, repacking and
passes are those of every other model: the first layer's input are the rows that a context is fed with, and the tokens'
embeddings go to the layer beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from localspec.backends.mlx.architecture import ARCHITECTURES, MLP, Architecture, Attention, Header, read_attention
from localspec.backends.mlx.library import defer_mlx_lm
from localspec.backends.mlx.network import Network, install_rope, rope_scaling
from localspec.backends.mlx.placement import fill
from localspec.backends.mlx.weights import Format
from localspec.errors import UnsupportedModel
from localspec.heads.kinds.base import PublishedHead
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

HEAD_DTYPE = mx.float32
"""How large the states are that a head is fed with, no probe of its file can tell."""

_CHECKED = ("target_layers", "target_hidden_size")
"""Settings that ``head_kinds.eagle3`` has read."""


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


class HeadAttention(nn.Module):  # type: ignore[misc]
    """Rows [1, n, n_in] -> what they attend to [1, n, n_embd].

    Args:
        attention: numbers of heads, and their size.
        n_in, n_embd: see above.
        norm_eps: that of the norms of queries and keys; None where there are none.
    """

    rope: nn.Module

    def __init__(self, attention: Attention, n_in: int, n_embd: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.d_head = d_head = attention.d_head
        self.q_proj = nn.Linear(n_in, attention.n_head * d_head, bias=False)
        self.k_proj = nn.Linear(n_in, attention.n_head_kv * d_head, bias=False)
        self.v_proj = nn.Linear(n_in, attention.n_head_kv * d_head, bias=False)
        self.o_proj = nn.Linear(attention.n_head * d_head, n_embd, bias=False)
        self.q_norm = nn.Identity() if norm_eps is None else nn.RMSNorm(d_head, eps=norm_eps)
        self.k_norm = nn.Identity() if norm_eps is None else nn.RMSNorm(d_head, eps=norm_eps)

    def remember(self, x: mx.array, cache: Any) -> tuple[Any, Any]:
        """Put rows' keys and values into the memory; returns all that they can see."""
        keys = self.rope(self.k_norm(self._heads(self.k_proj(x))), offset=cache.offset)
        return cast("tuple[Any, Any]", cache.update_and_fetch(keys, self._heads(self.v_proj(x))))

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        from mlx_lm.models.base import scaled_dot_product_attention

        queries = self.rope(self.q_norm(self._heads(self.q_proj(x))), offset=cache.offset)
        keys, values = self.remember(x, cache)
        found = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.d_head**-0.5, mask=mask)
        return cast(mx.array, self.o_proj(found.swapaxes(1, 2).flatten(2)))

    def _heads(self, projected: mx.array) -> mx.array:
        return projected.reshape(1, projected.shape[1], -1, self.d_head).swapaxes(1, 2)


class FeedForward(nn.Module):  # type: ignore[misc]
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, n_embd: int, n_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(n_embd, n_ff, bias=False)
        self.up_proj = nn.Linear(n_embd, n_ff, bias=False)
        self.down_proj = nn.Linear(n_ff, n_embd, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return cast(mx.array, self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x)))


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
    """All but the output matrix: rows and tokens' ids [1, n] -> what the matrix takes [1, n, n_embd]."""

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


def load_eagle3(head: PublishedHead, target: Network | None) -> Network:
    """A head's weights, and those that it borrows, as a network whose logits are for ``head.ids``, in their order.

    Call it on the thread that will compute.

    Args:
        head: its header, checked.
        target: the network that it drafts for; needed where it borrows from it.

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
        formats = fill(file, EAGLE3, module, HEAD_DTYPE, None)
        if "d2t" in file.tensors:
            sort_rows(module.lm_head, np.argsort(file.tensor_bytes("d2t").view("<i8")))
    if not has["embeddings"]:
        module.model.embed_tokens = embedding_of(needed(target))
    project = module.lm_head if has["output"] else output_of(needed(target))
    return head_network(head, module, sizes, formats, max_context, lambda hidden: project(hidden)[..., : sizes.n_out])


def head_network(
    head: PublishedHead,
    module: nn.Module,
    args: Any,
    formats: Mapping[str, Format],
    max_context: int | None,
    project: Callable[[mx.array], mx.array],
) -> Network:
    """A head as a network that is fed with states and tokens; of one layer that sees all rows before.

    Args:
        head: its header.
        module: with its trunk as ``model``.
        args, formats, max_context: as for ``Network``.
        project: the output matrix, for the tokens that it can guess.
    """
    return Network(
        module=module,
        args=args,
        architecture=head.kind,
        n_vocab=len(head.ids),
        n_layer=1,
        n_embd=head.n_embd,
        compute_dtype=HEAD_DTYPE,
        layer_windows=(None,),
        recurrent=False,
        max_context=max_context,
        size_bytes=sum(format_.n_bytes for format_ in formats.values()),
        formats=formats,
        _trunk=module.model,
        _head=project,
        reads_tokens_too=True,
    )


def sort_rows(output: nn.Module, order: Any) -> None:
    """Put an output matrix's rows into another order."""
    rows = mx.array(order)
    for name in ("weight", "scales", "biases"):
        if name in output:
            output[name] = output[name][rows]
    mx.eval(output.parameters())


def needed(target: Network | None) -> Network:
    """The target that a head borrows from."""
    if target is None:
        raise UnsupportedModel("a head that uses weights of its target needs the target on the mlx backend")
    return target


def embedding_of(target: Network) -> nn.Module:
    """The target's token embedding as it is stored: llama.cpp scales it for no head either."""
    architecture = ARCHITECTURES[target.architecture]
    return cast(nn.Module, target.module[architecture.trunk][architecture.embedding])


def output_of(target: Network) -> Callable[[mx.array], mx.array]:
    """The target's output matrix, without what its own logits are divided by."""
    module = target.module
    project: Callable[[mx.array], mx.array] = module.lm_head if "lm_head" in module else embedding_of(target).as_linear
    return lambda hidden: project(hidden.astype(target.compute_dtype))
