"""The memory of a context in MLX's arrays: keys and values that can be taken back, and states that are restored.

A layer has the one or the other. A model that has layers of both goes back to where its states were kept, and its keys
and values with them.

mlx-lm's cache for sliding windows overwrites old rows and cannot be rewound after that. Here every row is kept, and a
layer with a window is shown only those that its new tokens can see: rewinding is a matter of a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from localspec.backends.mlx.network import Network
from localspec.errors import EngineError
from localspec.model_files.kv_memory import KV_BLOCK

KV_BITS = {"f32": None, "f16": None, "q8_0": 8, "q4_0": 4}
"""Type of the KV cache -> bits per value; None keeps keys and values as they are computed."""

_N_CHECKPOINTS = 4


class Tree:
    """Rows of a pass that branch; ``parents`` as for ``Context.decode_tree``."""

    def __init__(self, parents: Sequence[int]) -> None:
        n = len(parents)
        self._is_seen = np.eye(n, dtype=bool)  # [row, row]: itself, and those on its path
        for row, parent in enumerate(parents):
            if parent >= 0:
                self._is_seen[row] |= self._is_seen[parent]
        self.depths = self._is_seen.sum(axis=1) - 1

    def mask(self, n_past: int, first: int, window: int | None) -> mx.array:
        """What each row sees [n, n_past - first + n]: of the memory from ``first`` on, and of the rows."""
        past = np.arange(first, n_past)
        near = np.ones((len(self.depths), len(past)), dtype=bool)
        seen = self._is_seen
        if window is not None:
            near = n_past + self.depths[:, None] - past < window
            seen = seen & (self.depths[:, None] - self.depths < window)
        return mx.array(np.concatenate([near, seen], axis=1))


class _Windowed:
    """Shows attention the rows that its new tokens can see, of all that are kept. Mixed into mlx-lm's caches."""

    offset: int
    tree: Tree | None = None

    def __init__(self, window: int | None, **options: int) -> None:
        super().__init__(**options)
        self.window = window

    def _first_visible(self) -> int:
        """The oldest row that a token at position ``offset`` sees."""
        return 0 if self.window is None else max(0, self.offset + 1 - self.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        first = self._first_visible()
        kept = super().update_and_fetch(keys, values)  # type: ignore[misc]
        return kept if first == 0 else tree_map(lambda rows: rows[..., first:, :], kept)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None and window_size != self.window:
            raise EngineError(
                f"a layer needs a window of {window_size} tokens, but its memory has one of {self.window}"
            )
        if n == 1:
            return None  # the only token sees every row that is shown
        if self.tree is not None:
            return self.tree.mask(self.offset, self._first_visible(), self.window)
        if self.window is not None and self.offset + n > self.window:
            first = self._first_visible()
            return create_causal_mask(n, self.offset - first, window_size=self.window)
        return create_causal_mask(n, self.offset) if return_array else "causal"


class PlainRows(_Windowed, KVCache):  # type: ignore[misc]
    """Keys and values of one layer, in the type they are computed in."""


class QuantizedRows(_Windowed, QuantizedKVCache):  # type: ignore[misc]
    """Keys and values of one layer, in ``bits`` bits with a scale and an offset for every ``KV_BLOCK`` of them."""


class LayerCaches:
    """The memory of one sequence. Only to be touched by the thread that computes."""

    def __init__(self, network: Network, kv_type: str) -> None:
        self._network = network
        self._bits = KV_BITS[kv_type]
        self.clear()

    def clear(self) -> None:
        self.n_past = 0
        self._checkpoints: dict[int, list[list[Any]]] = {}
        self.layers: list[Any] = []  # a cache for each, as mlx-lm's models take them
        for window, n_arrays in zip(self._network.layer_windows, self._network.layer_states, strict=True):
            if n_arrays:
                self.layers.append(ArraysCache(n_arrays))
            elif self._bits is None:
                self.layers.append(PlainRows(window))
            else:
                self.layers.append(QuantizedRows(window, group_size=KV_BLOCK, bits=self._bits))
        self._states = [layer for layer in self.layers if isinstance(layer, ArraysCache)]
        self._rows = [layer for layer in self.layers if not isinstance(layer, ArraysCache)]

    def checkpoint(self) -> None:
        """Remember the state, where rewinding will need it: arrays are never changed in place, so that is free."""
        if self._states:
            self._checkpoints[self.n_past] = [list(layer.cache) for layer in self._states]
            for old in sorted(self._checkpoints)[:-_N_CHECKPOINTS]:
                del self._checkpoints[old]

    def rewind(self, n: int) -> None:
        """Keep at most the first n tokens: exactly those, or as many of them as a checkpoint allows."""
        if self._states and n < self.n_past:
            self._checkpoints = {position: state for position, state in self._checkpoints.items() if position <= n}
            if not self._checkpoints:
                self.clear()
                return
            n = max(self._checkpoints)
            for layer, state in zip(self._states, self._checkpoints[n], strict=True):
                layer.cache = list(state)
        for layer in self._rows:
            layer.offset = min(layer.offset, n)  # rows that no path of a tree was kept of go too
        self.n_past = min(self.n_past, n)

    def branch(self, tree: Tree | None) -> None:
        """The rows of the passes to come are a tree's; None ends that."""
        for layer in self.layers:
            layer.tree = tree

    def keep(self, path: Sequence[int]) -> None:
        """Of the rows behind the first ``n_past`` keep these, in order."""
        start, rows = self.n_past, mx.array([self.n_past + at for at in path])

        def moved(array: mx.array) -> mx.array:
            array[..., start : start + len(path), :] = array[..., rows, :]
            return array

        for layer in self.layers:
            layer.keys, layer.values = tree_map(moved, (layer.keys, layer.values))
            layer.offset = start + len(path)
        self.n_past += len(path)
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for _, array, _ in self._named()]

    def _named(self) -> Iterator[tuple[str, mx.array, bool]]:
        """Each array with its name, and whether it has a row for each token."""
        for i, layer in enumerate(self.layers):
            has_rows = not isinstance(layer, ArraysCache)
            parts = [layer.keys, layer.values] if has_rows else layer.cache
            for name, array in tree_flatten([part for part in parts if part is not None]):
                yield f"{i}.{name}", array, has_rows

    @property
    def n_bytes(self) -> int:
        """Size of what ``export`` gives [bytes]."""
        return sum(
            array.nbytes // array.shape[-2] * self.n_past if has_rows else array.nbytes
            for _, array, has_rows in self._named()
        )

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of the rows in use, by layer and part; bfloat16, which NumPy lacks, as unsigned integers."""
        exported = {}
        for name, array, has_rows in self._named():
            used = array[..., : self.n_past, :] if has_rows else array
            exported[name] = np.array(used.view(mx.uint16) if used.dtype == mx.bfloat16 else used)
        return exported

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]], n_past: int, like: LayerCaches) -> None:
        """Hold what ``export`` gave of ``n_past`` tokens; EngineError where the arrays do not fit ``like``, a memory of
        the same model that holds one token."""
        self.clear()
        wanted = {name: (array, has_rows) for name, array, has_rows in like._named()}
        if arrays.keys() != wanted.keys():
            raise EngineError("the saved state belongs to another model or cache type")
        taken: dict[str, mx.array] = {}
        for name, (template, has_rows) in wanted.items():
            array = mx.array(arrays[name])
            if template.dtype == mx.bfloat16 and array.dtype == mx.uint16:
                array = array.view(mx.bfloat16)
            *before, n_rows, width = template.shape
            if array.shape != (*before, n_past if has_rows else n_rows, width) or array.dtype != template.dtype:
                raise EngineError("the saved state does not have the shape that this model needs")
            taken[name] = array
        for layer, parts in zip(self.layers, tree_unflatten([*taken.items()]), strict=True):
            if isinstance(layer, ArraysCache):
                layer.cache = parts
            else:
                (layer.keys, layer.values), layer.offset = parts, n_past
        mx.eval(list(taken.values()))
        self.n_past = n_past
