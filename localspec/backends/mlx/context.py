"""One sequence on MLX: passes, rollback, and fetching no more than is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, ContextState, FloatArray, Forward
from localspec.backends.forward import NORM, Wanted, joined, layer_name, n_wanted
from localspec.backends.mlx.best import Largest, largest, settled
from localspec.backends.mlx.memory import LayerCaches, Tree
from localspec.errors import Cancelled, EngineError

if TYPE_CHECKING:
    from localspec.backends.mlx.model import MLXModel

N_CHUNK = {"gpu": 512, "cpu": 32}
"""Most tokens in one pass; between passes Ctrl-C and ``interrupted`` are heard. A CPU gains nothing by more."""


class MLXContext(Context):
    """A sequence's memory in MLX's arrays.

    A pass is one evaluation: the logits and the memory are computed together, and waited for once.
    """

    model: MLXModel

    def __init__(self, model: MLXModel, n_ctx: int, hidden: tuple[str, ...]) -> None:
        super().__init__(model, n_ctx, hidden)
        self.finds_best = model.finds_best
        self._owner = model.owner
        self._memory = LayerCaches(model.network, model.kv_type)
        self._n_chunk = N_CHUNK[model.capabilities.device]
        self._last_names = {NORM, layer_name(model.n_layers - 1)}  # of these there is a row for each row of logits
        self._first_float: int | None = None  # from this position on, tokens do not tell what was fed

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._in_pieces(tokens, logits)

    def _decode_best(self, tokens: Sequence[int], n_best: int, logits: Wanted, rows: FloatArray | None) -> Forward:
        if len(tokens) > self._n_chunk:  # several passes, whose rows have to be alike
            n_best = 0
        if rows is not None:
            return self._decode_floats(rows, tokens, logits, n_best)
        return self._in_pieces(tokens, logits, n_best=n_best)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted, n_best: int = 0) -> Forward:
        if self._first_float is None:
            self._first_float = self.n_past
        return self._in_pieces(tokens, logits, rows, n_best=n_best)

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._in_pieces(tokens, "none", n_layers=n_layers)

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        self._catch_up()
        tree, memory, network = Tree(parents), self._memory, self.model.network

        def compute() -> Forward:
            memory.branch(tree)
            network.branch(tree.depths.tolist())
            try:
                return self._compute(tokens, "all", None, None)
            finally:
                memory.branch(None)
                network.branch(None)
                memory.n_past = min(memory.n_past, self.n_past)  # none of them is kept yet

        return self._owner.run(compute)

    def _keep(self, path: Sequence[int]) -> None:
        self._owner.run(lambda: self._memory.keep(path))

    def _in_pieces(
        self,
        tokens: Sequence[int],
        logits: Wanted,
        rows: FloatArray | None = None,
        n_layers: int | None = None,
        n_best: int = 0,
    ) -> Forward:
        self._catch_up()
        if self._partial is None:  # nothing ever goes on from rows of the first layers
            self._memory.checkpoint()
        forwards: list[Forward] = []
        for start in range(0, len(tokens), self._n_chunk):
            if start and self.interrupted is not None and self.interrupted():
                raise Cancelled("decoding was stopped")
            end = min(start + self._n_chunk, len(tokens))
            wanted = logits if end == len(tokens) or logits == "all" else "none"
            piece = None if rows is None else rows[start:end]
            forwards.append(self._pass(tokens[start:end], wanted, piece, n_layers, n_best))
        return joined(forwards)

    def _pass(
        self,
        tokens: Sequence[int],
        wanted: Wanted,
        rows: FloatArray | None = None,
        n_layers: int | None = None,
        n_best: int = 0,
    ) -> Forward:
        return self._owner.run(lambda: self._compute(tokens, wanted, rows, n_layers, n_best))

    def _compute(
        self, tokens: Sequence[int], wanted: Wanted, rows: FloatArray | None, n_layers: int | None, n_best: int = 0
    ) -> Forward:
        """One pass; on the owner thread."""
        memory, network, n = self._memory, self.model.network, len(tokens)
        n_rows = n_wanted(wanted, n)
        n_of = {name: n_rows if name in self._last_names else n for name in self.hidden}
        if n_layers is not None:
            n_of = {name: n for name in map(layer_name, range(n_layers)) if name in self.hidden}
        mx.set_default_device(self.model.device)
        try:
            floats = None if rows is None else mx.array(rows[None]).astype(network.compute_dtype)
            ids = mx.array([tokens]) if rows is None or network.reads_tokens_too else mx.zeros((1, n), mx.int32)
            states = network.states(ids, memory.layers, n_of, rows=floats, n_layers=n_layers)
            # What only rows that nobody wants need, such as the last layer's feed-forward part, is never computed.
            found = {name: states[name][0, n - n_name :].astype(mx.float32) for name, n_name in n_of.items() if n_name}
            best: Largest | None = None
            if n_rows:
                whole = network.logits(states[NORM][:, n - n_rows :])[0].astype(mx.float32)
                best = largest(whole, n_best) if n_best else None
                if best is None:
                    found["logits"] = whole
            mx.eval(found, best or (), memory.arrays())
            cut = None if best is None else settled(best, n_best)
            if best is not None and cut is None:
                found["logits"] = whole  # computed already
        except (RuntimeError, ValueError, MemoryError) as error:
            self._lose_memory()
            raise EngineError(f"{self.model.engine} failed to decode {n} tokens: {error}") from None
        memory.n_past += n
        # Nothing is copied: where CPU and GPU share their memory, these are views of MLX's arrays.
        arrays = {name: np.array(array, copy=False) for name, array in found.items()}
        logits = arrays.get("logits", np.empty((0, network.n_vocab), dtype=np.float32))
        nothing = np.empty((0, network.n_embd), dtype=np.float32)
        hidden = {name: arrays.get(name, nothing) for name in n_of}
        return Forward(logits, hidden) if cut is None else Forward(cut[0], hidden, cut[1])

    def _lose_memory(self) -> None:
        """Half of the layers may have got their rows: start over, from the tokens, with the next pass."""
        self._memory.clear()
        if self._first_float is not None:
            del self.tokens[self._first_float :]

    def _catch_up(self) -> None:
        """Feed again what the memory lost in a rollback that it could only do in part."""
        while self._memory.n_past < self.n_past:
            start = self._memory.n_past
            self._pass(self.tokens[start : min(start + self._n_chunk, self.n_past)], "none")

    def _truncate(self, n: int) -> None:
        if self._first_float is not None and n <= self._first_float:
            self._first_float = None
        self._owner.run(lambda: self._memory.rewind(n))

    def _export(self) -> Mapping[str, npt.NDArray[Any]]:
        self._catch_up()
        return self._owner.run(self._memory.export)

    def _state_bytes(self) -> int:
        self._catch_up()
        return self._owner.run(lambda: self._memory.n_bytes)

    def _import(self, state: ContextState) -> None:
        arrays, self._first_float = dict(state.arrays), None
        self._owner.run(lambda: self._memory.restore(arrays, len(state.tokens), self._sample()))

    def _sample(self) -> LayerCaches:
        """A memory of this model with one token in it."""
        sample = LayerCaches(self.model.network, self.model.kv_type)
        self.model.network.hidden(mx.array([[0]]), sample.layers)
        sample.n_past = 1
        return sample

    def _close(self) -> None:
        self._owner.run(self._memory.clear)
