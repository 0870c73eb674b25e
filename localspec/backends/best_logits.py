"""The largest logits of each row, found by llama.cpp where it computes them: whole rows then stay on the device.

A chain of samplers that is set for a sequence becomes part of the graph of its passes; here it is top-k alone, and the
k largest logits and their tokens are what is copied. What is not known then is whether a logit that is not among them
is a number, and of equals at the end the device chooses: where that would matter the pass is run again for whole rows.
"""

from __future__ import annotations

import ctypes
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from localspec.backends.forward import FloatArray, TokenIds
from localspec.backends.gpus import ggml_devices, used_gpus
from localspec.backends.llama_binding import N_UBATCH

if TYPE_CHECKING:
    from localspec.backends.llama_family import LlamaModel

MOST_ROWS = 64
"""Rows of a pass of which the largest logits can be had; the engine refuses more than it was told of."""

LEAST, MOST = 64, 256
"""How many logits of a row are looked for: enough that they are nearly all of the probability, of a sure row."""

_MARGIN = 256 << 20
_N_TRIED = 6


class BestLogits:
    """What a context of the engine does to find them; one sequence.

    Args:
        lib: llama-cpp-python's functions.
        model: the weights.
        handle: the context.

    Attributes:
        k: how many the passes give now; 0 is whole rows.
    """

    def __init__(self, lib: Any, model: LlamaModel, handle: int) -> None:
        self._lib, self._model, self._handle = lib, model, handle
        self._chain: Any = None
        self._refused = False
        self.k = 0

    def enter(self, n_best: int, n_rows: int) -> bool:
        """Have the passes from here on give at least so many logits of each row; returns whether they will."""
        k = LEAST
        while k < n_best + 1:  # one more, which shows whether there are equals at the end
            k *= 2
        if self._refused or n_rows > MOST_ROWS or k > min(MOST, self._model.n_vocab):
            return False
        if k > self.k:
            self.leave()
            if not self._has_room():
                return False
            chain = self._lib.llama_sampler_chain_init(self._lib.llama_sampler_chain_default_params())
            self._lib.llama_sampler_chain_add(chain, self._lib.llama_sampler_init_top_k(k))
            if not self._lib.llama_set_sampler(self._handle, 0, chain):
                self._refused = True
                self._lib.llama_sampler_free(chain)
                return False
            self._chain, self.k = chain, k
        return True

    def leave(self) -> None:
        """Have the passes from here on give whole rows."""
        if self._chain is not None:
            self._lib.llama_set_sampler(self._handle, 0, None)
            self.close()

    def _has_room(self) -> bool:
        """Whether the device has room for the buffer that the engine makes anew, which ends the process where not."""
        if self._model.capabilities.device == "cpu":
            return True
        wanted = 2 * N_UBATCH * self._model.n_vocab * 4 + _MARGIN
        return all(gpu.free_bytes > wanted for gpu in used_gpus(ggml_devices() or []))

    def read(self, n_rows: int, first: int, n_best: int) -> tuple[FloatArray, TokenIds] | None:
        """Of the rows of the pass that was just run, the first of which belongs to token ``first`` of it.

        Returns:
            Logits [n_rows, k] and their tokens, increasing; None where these do not do, and whole rows are given from
            here on: the device finds none, a logit is no number, or the last of ``n_best`` has its equals.
        """
        lib, n_vocab, k = self._lib, self._model.n_vocab, self.k
        values = ctypes.cast(lib.llama_get_sampled_logits_ith(self._handle, first), ctypes.c_void_p).value
        tokens = ctypes.cast(lib.llama_get_sampled_candidates_ith(self._handle, first), ctypes.c_void_p).value
        if not values or not tokens or lib.llama_get_sampled_candidates_count_ith(self._handle, first) != k:
            self._refused = True
            self.leave()
            return None
        found = np.ctypeslib.as_array((ctypes.c_float * n_vocab * n_rows).from_address(values))[:, :k]
        ids = np.ctypeslib.as_array((ctypes.c_int32 * n_vocab * n_rows).from_address(tokens))[:, :k].astype(np.int64)
        order = ids.argsort(axis=1)
        logits, ids = np.take_along_axis(found, order, 1), np.take_along_axis(ids, order, 1)
        at_end = np.partition(logits, (0, k - n_best), axis=1)
        least, last = at_end[:, 0], at_end[:, k - n_best]
        if np.isfinite(logits.max(axis=1)).all() and ((least < last) | (last == -np.inf)).all():
            return logits, ids
        self.leave()
        return None

    def close(self) -> None:
        """Give the chain back, once no pass uses it any more."""
        if self._chain is not None:
            self._lib.llama_sampler_free(self._chain)
            self._chain, self.k = None, 0


def best_pays(model: LlamaModel) -> bool:
    """Whether a pass of five rows and a look at them takes less time so: a few are run both ways, in turns."""
    times: dict[int, list[float]] = {0: [], LEAST // 2: []}
    model.__dict__["finds_best"] = True  # of this context, while it is tried
    try:
        with model.new_context(64) as context:
            for n_best in times:
                for nth in range(_N_TRIED + 2):
                    started = time.perf_counter()
                    forward = context.decode_best([0] * 5, n_best) if n_best else context.decode([0] * 5)
                    forward.best()
                    if nth > 1:  # the first pass makes the graph
                        times[n_best].append(time.perf_counter() - started)
                    context.truncate(0)
            found = forward.ids is not None
    finally:
        del model.__dict__["finds_best"]
    whole, best = (median(each) for each in times.values())
    return found and best < whole
