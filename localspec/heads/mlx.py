"""Published heads on MLX: contexts that are fed with a state and a token a row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
import numpy as np

from localspec.backends.base import Capabilities, FloatArray, Forward, Model, TokenIds, Wanted
from localspec.backends.best_rows import best_pays, head_pass
from localspec.backends.mlx.library import NAME, binding, owner
from localspec.backends.mlx.model import MLXContext, MLXModel, building, device_for
from localspec.errors import EngineError, UnsupportedModel
from localspec.heads.kinds.base import MaskBlock, PublishedHead
from localspec.heads.kinds.dflash_mlx import BlockTrunk, load_dflash
from localspec.heads.kinds.eagle3_mlx import load_eagle3
from localspec.heads.kinds.mtp_mlx import load_mtp
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab


class MLXHeadModel(MLXModel):
    """The weights of a head in MLX's arrays, and those of its target that it borrows.

    Args:
        head: its header.
        target: what it drafts for, on MLX where the head borrows from it.
        n_gpu_layers: as for ``backends.load``.

    Raises:
        UnsupportedModel: a kind, setting or tensor that is not handled, or it borrows from a target elsewhere.
        ModelFileError: it is damaged.
        EngineError: it does not fit into memory.
    """

    def __init__(self, head: PublishedHead, target: Model, *, n_gpu_layers: int | None = None) -> None:
        lender = target.network if isinstance(target, MLXModel) else None
        if lender is None and (head.borrows or head.in_target):
            what = " and ".join(head.borrows) or "weights"
            raise UnsupportedModel(
                f"{head.path.name} uses the {what} of its target, so the target must run on the mlx backend, "
                f"not on {target.backend}"
            )
        engine = binding()
        self.head, self.owner = head, owner()
        with GGUFFile(head.path) as file:
            self.size_bytes, self.n_ctx_train = file.n_bytes, file.n_ctx_train
            self.device = target.device if isinstance(target, MLXModel) else device_for(file, n_gpu_layers)
        load = {"eagle3": load_eagle3, "mtp": load_mtp, "dflash": load_dflash}[head.kind]
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

    @cached_property
    def finds_best(self) -> bool:
        return self.capabilities.device == "gpu" and best_pays(self, head_pass)

    def _new_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> MLXHeadContext:
        return (MLXBlockContext if self.head.block else MLXHeadContext)(self, n_ctx, hidden)


class MLXHeadContext(MLXContext):
    """What a head remembers. ``decode_floats`` takes states as rows, and the tokens' real ids."""

    model: MLXHeadModel

    def fuse(self, states: FloatArray) -> FloatArray:
        """See ``published_heads.FusingContext``."""
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

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted, n_best: int = 0) -> Forward:
        if max(tokens) >= self.model.head.n_vocab:
            raise EngineError(f"{self.model.path.name} has no token {max(tokens)}")
        return super()._decode_floats(rows, tokens, logits, n_best)

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        raise EngineError(f"{self.model.path.name} is a draft head and cannot tokenize text")


class MLXBlockContext(MLXHeadContext):
    """What a block drafter remembers; see ``backends.llama_heads.LlamaBlockContext``."""

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted, n_best: int = 0) -> Forward:
        for start in range(0, len(rows), self._n_chunk):
            part = rows[start : start + self._n_chunk]
            self._owner.run(lambda part=part: self._remember(part))  # type: ignore[misc]
        return Forward(np.empty((0, self.model.n_vocab), dtype=np.float32), {})

    def _remember(self, rows: FloatArray) -> None:
        memory, trunk = self._memory, cast(BlockTrunk, self.model.network.module.model)
        mx.set_default_device(self.model.device)
        try:
            trunk.remember(mx.array(rows[None]), memory.layers)
            mx.eval(memory.arrays())
        except (RuntimeError, ValueError, MemoryError) as error:
            memory.clear()
            self.tokens = []
            raise EngineError(f"{self.model.engine} failed on {len(rows)} rows: {error}") from None
        memory.n_past += len(rows)

    def guesses(self, token: int, n: int, n_best: int = 0) -> tuple[FloatArray, TokenIds | None]:
        """See ``backends.llama_heads.LlamaBlockContext.guesses``."""
        of = cast(MaskBlock, self.model.head.block)
        block = [token, *[of.mask] * (n + of.n_skipped - 1)]
        self._check_room(len(block))
        if not 0 <= token < self.model.head.n_vocab or not 0 < n <= of.n_guesses:
            raise EngineError(f"{self.model.path.name} cannot decode a block of {n} tokens after {token}")
        n_best = n_best if self.finds_best else 0
        forward = self._feed(block, lambda: self._pass(block, "all", n_best=n_best))
        ids = None if forward.ids is None else self.model.head.ids[forward.ids[of.n_skipped :]]
        return forward.logits[of.n_skipped :], ids


def load_head_model(head: PublishedHead, target: Model, n_threads: int, n_gpu_layers: int | None) -> MLXHeadModel:
    """See ``published_heads.LoadHeadModel``; MLX has no setting for threads."""
    return MLXHeadModel(head, target, n_gpu_layers=n_gpu_layers)
