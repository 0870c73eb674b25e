"""One sequence on MLX: passes, rollback, and fetching no more than is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, ContextState, Forward
from localspec.backends.mlx.memory import LayerCaches
from localspec.errors import Cancelled, EngineError

if TYPE_CHECKING:
    from localspec.backends.mlx.model import MLXModel

N_CHUNK = {"gpu": 512, "cpu": 32}
"""Most tokens in one pass; between passes Ctrl-C and ``interrupted`` are heard. A CPU gains nothing by more."""

Wanted = Literal["all", "last", "none"]


class MLXContext(Context):
    """A sequence's memory in MLX's arrays.

    A pass is one evaluation: the logits and the memory are computed together, and waited for once.
    """

    model: MLXModel

    def __init__(self, model: MLXModel, n_ctx: int) -> None:
        super().__init__(model, n_ctx)
        self._owner = model.owner
        self._memory = LayerCaches(model.network, model.kv_type)
        self._n_chunk = N_CHUNK[model.capabilities.device]

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        self._catch_up()
        self._memory.checkpoint()
        forwards: list[Forward] = []
        for start in range(0, len(tokens), self._n_chunk):
            if start and self.interrupted is not None and self.interrupted():
                raise Cancelled("decoding was stopped")
            piece = tokens[start : start + self._n_chunk]
            is_last = start + len(piece) == len(tokens)
            forward = self._pass(piece, logits if is_last or logits == "all" else "none")
            if forward is not None:
                forwards.append(forward)
        if len(forwards) == 1:
            return forwards[0]
        if not forwards:
            return Forward(np.empty((0, self.model.n_vocab), dtype=np.float32))
        return Forward(np.concatenate([forward.logits for forward in forwards]))

    def _pass(self, tokens: Sequence[int], wanted: Wanted) -> Forward | None:
        return self._owner.run(lambda: self._compute(tokens, wanted))

    def _compute(self, tokens: Sequence[int], wanted: Wanted) -> Forward | None:
        """One pass; on the owner thread."""
        memory, network = self._memory, self.model.network
        mx.set_default_device(self.model.device)
        try:
            hidden = network.hidden(mx.array([tokens]), memory.layers)[0]  # [n, n_embd]
            if wanted == "none":
                # What only the logits would need, such as the last layer's feed-forward part, is never computed.
                mx.eval(memory.arrays())
                memory.n_past += len(tokens)
                return None
            if wanted == "last":
                hidden = hidden[-1:]
            logits = network.logits(hidden[None])[0].astype(mx.float32)  # [n_rows, n_vocab]
            mx.eval(logits, memory.arrays())
        except (RuntimeError, ValueError, MemoryError) as error:
            # Half of the layers may have got their rows: start over, from the tokens, with the next pass.
            memory.clear()
            raise EngineError(f"{self.model.engine} failed to decode {len(tokens)} tokens: {error}") from None
        memory.n_past += len(tokens)
        # Nothing is copied: where CPU and GPU share their memory, this is a view of MLX's array.
        return Forward(np.array(logits, copy=False))

    def _catch_up(self) -> None:
        """Feed again what the memory lost in a rollback that it could only do in part."""
        while self._memory.n_past < self.n_past:
            start = self._memory.n_past
            self._pass(self.tokens[start : min(start + self._n_chunk, self.n_past)], "none")

    def _truncate(self, n: int) -> None:
        self._owner.run(lambda: self._memory.rewind(n))

    def _export(self) -> Mapping[str, npt.NDArray[Any]]:
        self._catch_up()
        return self._owner.run(self._memory.export)

    def _state_bytes(self) -> int:
        self._catch_up()
        return self._owner.run(lambda: self._memory.n_bytes)

    def _import(self, state: ContextState) -> None:
        arrays = dict(state.arrays)
        self._owner.run(lambda: self._memory.restore(arrays, len(state.tokens), self._sample()))

    def _sample(self) -> LayerCaches:
        """A memory of this model with one token in it."""
        sample = LayerCaches(self.model.network, self.model.kv_type)
        self.model.network.hidden(mx.array([[0]]), sample.layers)
        sample.n_past = 1
        return sample

    def _close(self) -> None:
        self._owner.run(self._memory.clear)
