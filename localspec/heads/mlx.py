"""Published heads on MLX: contexts that are fed with a state and a token a row, and parts of their networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from localspec.backends.base import Capabilities, FloatArray, Forward, Model, Wanted
from localspec.backends.mlx.architecture import ARCHITECTURES, Architecture, Attention, Header, read_attention
from localspec.backends.mlx.library import NAME, binding, owner
from localspec.backends.mlx.model import MLXContext, MLXModel, building, device_for
from localspec.backends.mlx.network import Network, install_rope, rope_scaling
from localspec.backends.mlx.weights import fill
from localspec.errors import EngineError
from localspec.heads.base import HeadContext
from localspec.heads.kinds.base import OWN_TENSORS, LoadHeadModel, PublishedHead
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab


class MLXHeadModel(MLXModel):
    """The weights of a head in MLX's arrays, and those of its target that it borrows; see ``LoadHeadModel``.

    ``load`` makes its network, given the target's where the target is on MLX; called on the thread that computes.
    """

    def __init__(
        self,
        head: PublishedHead,
        target: Model,
        load: Callable[[PublishedHead, Network | None], Network],
        n_gpu_layers: int | None = None,
    ) -> None:
        lender = target.network if isinstance(target, MLXModel) else None
        if lender is None and (head.borrows or head.in_target):
            raise head.misplaced(NAME, target)
        engine = binding()
        self.head, self.owner = head, owner()
        with GGUFFile(head.path) as file:
            self.size_bytes, self.n_ctx_train = file.n_bytes, file.n_ctx_train
            self.device = target.device if isinstance(target, MLXModel) else device_for(file, n_gpu_layers)
        network = self.owner.run(lambda: building(head.path, self.device, lambda: load(head, lender)))
        self._network = network
        self.path, self.architecture, self.chat_template = head.path, head.kind, None
        self.backend, self.engine = NAME, f"{NAME} {engine.version}"
        if head.in_target:
            self.engine += f" {head.title}"  # its passes are not those of the model in the same file
        self.vocab, self.n_embd, self.n_layers = Vocab.none(), head.row_width, 1
        self.n_threads, self.n_vocab, self.kv_type = 1, network.n_vocab, "f16"
        on_gpu = self.device == mx.Device(mx.gpu)
        self.capabilities = Capabilities(device="gpu" if on_gpu else "cpu", hidden=True, float_rows=True)

    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> MLXHeadContext:
        return (MLXBlockContext if self.head.block else MLXHeadContext)(self, n_ctx, hidden)


class MLXHeadContext(HeadContext, MLXContext):
    model: MLXHeadModel

    def fuse(self, states: FloatArray) -> FloatArray:
        self._check_open()
        trunk: Any = self.model.network.module.model

        def compute() -> FloatArray:
            mx.set_default_device(self.model.device)
            try:
                found = trunk.fuse(mx.array(states)).astype(mx.float32)
                mx.eval(found)
            except (RuntimeError, ValueError, MemoryError) as error:
                raise EngineError(f"{self.model.engine} failed to fuse {len(states)} states: {error}") from None
            return np.array(found, copy=False)

        return self._owner.run(compute)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        self._check_tokens(tokens)
        return super()._decode_floats(rows, tokens, logits)


class MLXBlockContext(MLXHeadContext):
    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        self._owner.run(lambda: self._remember(rows))
        return Forward(np.empty((0, self.model.n_vocab), dtype=np.float32), {})

    def _remember(self, rows: FloatArray) -> None:
        memory, trunk = self.memory, cast(Any, self.model.network.module.model)
        mx.set_default_device(self.model.device)
        try:
            trunk.remember(mx.array(rows[None]), memory.layers)
            mx.eval(memory.arrays())
        except (RuntimeError, ValueError, MemoryError) as error:
            memory.clear()
            self.tokens = []
            raise EngineError(f"{self.model.engine} failed on {len(rows)} rows: {error}") from None
        memory.n_past += len(rows)

    def _guess(self, block: Sequence[int], n_best: int) -> Forward:
        return self._pass(block, "all")


# Parts of networks of heads, built as mlx-lm's model classes are: memory, rotary embedding, repacking and passes are
# those of every model.

HEAD_DTYPE = mx.float32  # no probe of a head's file tells how large the states are that it is fed with


class HeadAttention(nn.Module):  # type: ignore[misc]
    """Rows [1, n, n_in] -> what they attend to [1, n, n_embd]; ``norm_eps`` is of norms of queries and keys."""

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


class HeadModule(nn.Module):  # type: ignore[misc]
    """A head as mlx-lm's model classes are: its layers in ``model``, and an output matrix if it has one."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.model = trunk

    @property
    def layers(self) -> list[nn.Module]:
        return cast("list[nn.Module]", self.model.layers)


@dataclass(frozen=True)
class HeadSizes:
    """Sizes in a head's header; ``n_taps``: channels of all tapped states."""

    n_embd: int
    n_ff: int
    n_taps: int
    eps: float
    attention: Attention


def read_network(
    head: PublishedHead,
    target: Network | None,
    architecture: Architecture,
    checked: Sequence[str],
    build: Callable[[Header, HeadSizes], nn.Module],
) -> Network:
    """A head as a network whose logits are for ``head.ids``, in their order; call it on the thread that will compute.

    Args:
        architecture: where the tensors belong.
        checked: settings that the kind's own reader has looked at.
        build: makes the trunk, without embeddings.

    Raises:
        UnsupportedModel: a setting, tensor or tensor type that is not handled; the message names it.
    """
    n_out = len(head.ids)
    with GGUFFile(head.path) as file:
        header = Header(file)
        n_ff, eps = header.integer("feed_forward_length"), header.real("attention.layer_norm_rms_epsilon")
        sizes = HeadSizes(head.n_embd, n_ff, len(head.taps) * head.n_target, eps, read_attention(header))
        module = HeadModule(build(header, sizes))
        has_embeddings, has_output = (name in file.tensors for name in OWN_TENSORS.values())
        if has_embeddings:
            module.model.embed_tokens = nn.Embedding(head.n_vocab, sizes.n_embd)
        if has_output:
            module.lm_head = nn.Linear(sizes.n_embd, n_out, bias=False)
        scaling, max_context = rope_scaling(header)
        header.ignore(checked)
        install_rope(header, architecture, module, sizes, scaling)
        header.refuse_unread()
        fill(file, architecture, module, HEAD_DTYPE, None)
        if "d2t" in file.tensors:
            _sort_rows(module.lm_head, np.argsort(file.tensor_bytes("d2t").view("<i8")))
    if not has_embeddings:
        assert target is not None
        module.model.embed_tokens = embedding_of(target)
    project = module.lm_head if has_output else module.model.embed_tokens.as_linear
    if "output" in head.borrows:
        assert target is not None
        project = output_of(target)
    return head_network(head, module, max_context, lambda hidden: project(hidden)[..., :n_out])


def loader(network: Callable[[PublishedHead, Network | None], Network]) -> LoadHeadModel:
    def load(head: PublishedHead, target: Model, n_threads: int, n_gpu_layers: int | None) -> MLXHeadModel:
        return MLXHeadModel(head, target, network, n_gpu_layers)

    return load


def head_network(
    head: PublishedHead,
    module: nn.Module,
    max_context: int | None,
    project: Callable[[mx.array], mx.array],
) -> Network:
    """A head as a network of one layer; ``project`` is the output matrix, for the tokens that it can guess."""
    return Network(
        module=module,
        architecture=head.kind,
        n_vocab=len(head.ids),
        n_layer=1,
        n_embd=head.n_embd,
        compute_dtype=HEAD_DTYPE,
        layer_windows=(None,),
        layer_states=(0,),
        max_context=max_context,
        _trunk=module.model,
        _head=project,
        reads_tokens_too=True,
    )


def _sort_rows(output: nn.Module, order: Any) -> None:
    rows = mx.array(order)
    for name in ("weight", "scales", "biases"):
        if name in output:
            output[name] = output[name][rows]
    mx.eval(output.parameters())


def embedding_of(target: Network) -> nn.Module:
    """The target's token embedding as it is stored: llama.cpp scales it for no head either."""
    architecture = ARCHITECTURES[target.architecture]
    return cast(nn.Module, target.module[architecture.trunk][architecture.embedding])


def output_of(target: Network) -> Callable[[mx.array], mx.array]:
    """The target's output matrix, without what its own logits are divided by."""
    module = target.module
    project: Callable[[mx.array], mx.array] = module.lm_head if "lm_head" in module else embedding_of(target).as_linear
    return lambda hidden: project(hidden.astype(target.compute_dtype))
