"""Several sequences in one pass on MLX: what reads weights is computed over the rows of all of them together.

That is every linear layer, those within attention too, whose inputs' and output's projections are taken out of mlx-lm's
module for the time of a pass. What depends on the sequence mlx-lm's own attention computes for one after the other,
over its own rows alone: the heads' norms, the rotary embedding, keys and values, and which of them a row sees. Nothing
is padded, and a row passes over no other sequence's cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from localspec.backends.forward import NORM, FloatArray, Forward, joined, n_wanted
from localspec.backends.mlx.context import MLXContext
from localspec.backends.mlx.network import Network
from localspec.backends.sequence_batch import Piece, SequencesInTurn
from localspec.errors import Cancelled, EngineError

if TYPE_CHECKING:
    from localspec.backends.mlx.model import MLXModel

_OUTPUT = "o_proj"
_INPUTS = ({"q_proj", "k_proj", "v_proj"}, {"qkv_proj"})
"""Names of the linear layers in mlx-lm's attention modules that read what the module is called with."""

Part = tuple[slice, list[Any]]
"""Rows of one sequence in a pass, and its memory: a cache for each layer."""


class MLXSequences(SequencesInTurn):
    """Contexts of one model that are fed in one pass; one alone, or what only one can be fed, as that context is."""

    model: MLXModel
    _contexts: Sequence[MLXContext]

    def __init__(self, contexts: Sequence[MLXContext], n_cells: int) -> None:
        super().__init__(contexts, n_cells)
        self._n_chunk = contexts[0]._n_chunk

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        if len(pieces) == 1:
            return super()._decode(pieces)
        for piece in pieces:
            self._check_held(piece.sequence)
        contexts = [self._contexts[piece.sequence] for piece in pieces]
        found: list[list[Forward]] = [[] for _ in pieces]
        try:
            for context in contexts:
                context._catch_up()
            for n_before, parts in enumerate(_passes(pieces, self._n_chunk)):
                if n_before and self.interrupted is not None and self.interrupted():
                    raise Cancelled("decoding was stopped")
                forwards = self.model.owner.run(lambda parts=parts: self._compute([part for _, part in parts]))  # type: ignore[misc]
                for (number, _), forward in zip(parts, forwards, strict=True):
                    found[number].append(forward)
        except BaseException:
            for context in contexts:
                context._truncate(context.n_past)
            raise
        for context, piece in zip(contexts, pieces, strict=True):
            context.tokens.extend(piece.tokens)
        return [joined(forwards) for forwards in found]

    def _compute(self, parts: Sequence[Piece]) -> list[Forward]:
        """One pass, and one evaluation; on the owner thread."""
        network, contexts = self.model.network, [self._contexts[part.sequence] for part in parts]
        memories = [context._memory for context in contexts]
        rows, wanted, n = [], [], 0
        for _, tokens, logits in parts:
            rows.append(slice(n, n + len(tokens)))
            n += len(tokens)
            wanted.append(range(n - n_wanted(logits, len(tokens)), n))
        chosen = [row for each in wanted for row in each]
        last_names = contexts[0]._last_names  # of these there is a row for each row of logits
        mx.set_default_device(self.model.device)
        try:
            layers = [memory.layers for memory in memories]
            with divided(network, list(zip(rows, layers, strict=True))):
                ids = mx.array([[token for part in parts for token in part.tokens]])
                states = network.states(ids, None, self.hidden)
            arrays = {name: states[name][0] for name in self.hidden if name not in last_names}
            if chosen:
                of_chosen = mx.array(chosen)
                arrays |= {name: states[name][0, of_chosen] for name in self.hidden if name in last_names}
                arrays["logits"] = network.logits(states[NORM][:, of_chosen])[0]
            arrays = {name: array.astype(mx.float32) for name, array in arrays.items()}
            mx.eval(arrays, [memory.arrays() for memory in memories])
        except (RuntimeError, ValueError, MemoryError) as error:
            for context in contexts:
                context._lose_memory()
            raise EngineError(
                f"{self.model.engine} failed to decode {n} tokens of {len(parts)} sequences: {error}"
            ) from None
        for memory, (_, tokens, _) in zip(memories, parts, strict=True):
            memory.n_past += len(tokens)
        found = {name: np.array(array, copy=False) for name, array in arrays.items()}
        found.setdefault("logits", np.empty((0, network.n_vocab), dtype=np.float32))
        nothing = np.empty((0, network.n_embd), dtype=np.float32)
        forwards, start = [], 0
        for of_all, each in zip(rows, wanted, strict=True):
            of_wanted = slice(start, start := start + len(each))
            hidden: dict[str, FloatArray] = {
                name: found.get(name, nothing)[of_wanted if name in last_names else of_all] for name in self.hidden
            }
            forwards.append(Forward(found["logits"][of_wanted], hidden))
        return forwards


def _passes(pieces: Sequence[Piece], n_chunk: int) -> Iterator[list[tuple[int, Piece]]]:
    """The pieces in passes of at most so many rows: in each, parts of some of them, and which they are of."""
    parts: list[tuple[int, Piece]] = []
    room = n_chunk
    for number, (sequence, tokens, logits) in enumerate(pieces):
        start = 0
        while start < len(tokens):
            end = min(start + room, len(tokens))
            wanted = logits if end == len(tokens) or logits == "all" else "none"
            parts.append((number, Piece(sequence, tokens[start:end], wanted)))
            room -= end - start
            start = end
            if not room:
                yield parts
                parts, room = [], n_chunk
    if parts:
        yield parts


# -- layers that compute rows of several sequences ---------------------------------------------------------------------


def can_divide(network: Network) -> bool:
    """Whether ``divided`` is right about a network: only its attention looks at more than one row, by a known call."""
    return not network.recurrent and all(_can_divide(layer) for layer in network.module.layers)


def _can_divide(layer: nn.Module) -> bool:
    attention = layer.get("self_attn")
    if not isinstance(attention, nn.Module):
        return False
    linear = {name for name, part in attention.items() if isinstance(part, nn.Linear | nn.QuantizedLinear)}
    call = [*signature(type(attention).__call__).parameters]
    return call == ["self", "x", "mask", "cache"] and _OUTPUT in linear and linear - {_OUTPUT} in _INPUTS


@contextmanager
def divided(network: Network, parts: Sequence[Part]) -> Iterator[None]:
    """Within it, the rows of a pass are those of several sequences, and the cache given to the network is not used.

    On the owner thread.

    Args:
        network: of which ``can_divide`` holds.
        parts: that the rows of a pass consist of, in their order.
    """
    layers = network.module.layers
    originals = [layer["self_attn"] for layer in layers]
    masks = [_masks(caches, rows.stop - rows.start) for rows, caches in parts]
    try:
        for i, (layer, attention) in enumerate(zip(layers, originals, strict=True)):
            own = [(rows, mask[i], caches[i]) for (rows, caches), mask in zip(parts, masks, strict=True)]
            layer["self_attn"] = _Divided(attention, own)
        yield
    finally:
        for layer, attention in zip(layers, originals, strict=True):
            layer["self_attn"] = attention


def _masks(caches: Sequence[Any], n: int) -> list[Any]:
    """For each layer what the next n rows of a sequence see, made once for all layers that see the same."""
    of_window: dict[int | None, Any] = {}
    for cache in caches:
        if cache.window not in of_window:
            of_window[cache.window] = cache.make_mask(n)
    return [of_window[cache.window] for cache in caches]


class _Divided:
    """An attention module over rows of several sequences: projections of all, and in between each by itself.

    Args:
        attention: mlx-lm's.
        parts: rows, mask and cache of each sequence.
    """

    def __init__(self, attention: nn.Module, parts: Sequence[tuple[slice, Any, Any]]) -> None:
        self._attention = attention
        self._parts = parts

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        """[1, n, n_embd] -> [1, n, n_embd]; the one mask and cache that the layer hands over are not looked at."""
        attention = self._attention
        linear = {name: attention[name] for name in (_OUTPUT, *set.union(*_INPUTS)) if name in attention}
        projected = {name: layer(x) for name, layer in linear.items() if name != _OUTPUT}
        found = []
        try:
            attention[_OUTPUT] = lambda heads: heads
            for rows, mask, cache in self._parts:
                for name, array in projected.items():
                    attention[name] = _giving(array[:, rows])
                found.append(attention(x[:, rows], mask, cache))
        finally:
            for name, layer in linear.items():
                attention[name] = layer
        output: mx.array = linear[_OUTPUT](mx.concatenate(found, axis=1))
        return output


def _giving(array: mx.array) -> Callable[[mx.array], mx.array]:
    """A layer that puts this out whatever is put in."""
    return lambda _: array
