"""The largest logits of each row, found by llama.cpp where it computes them: whole rows then stay on the device.

A chain of samplers that is set for a sequence becomes part of the graph of its passes; here it is top-k alone, and the
k largest logits and their tokens are what is copied. What is not known then is whether a logit that is not among them
is a number; where these do not do (see ``best_rows``), the pass is run again for whole rows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from localspec.backends.best_rows import by_token, n_looked_for
from localspec.backends.forward import FloatArray, TokenIds
from localspec.backends.gpus import ggml_devices, used_gpus
from localspec.backends.llama_binding import N_UBATCH

MOST_ROWS = 64
"""Rows of a pass of which the largest logits can be had; the engine refuses more than it was told of."""

_MARGIN = 256 << 20


class BestLogits:
    """What a context of the engine does to find them; one sequence.

    Args:
        lib: llama-cpp-python's functions.
        handle: the context.
        n_vocab: width of its rows.
        device: where its logits are computed; see ``Capabilities``.
        n_out: how many of a row are logits of tokens, where the others are minus infinity; None for all.

    Attributes:
        k: how many the passes give now; 0 is whole rows.
    """

    def __init__(self, lib: Any, handle: int, n_vocab: int, device: str, n_out: int | None = None) -> None:
        self._lib, self._handle, self._device = lib, handle, device
        self._n_vocab, self._n_out = n_vocab, n_out or n_vocab
        self._chain: Any = None
        self._refused = False
        self.k = 0

    def enter(self, n_best: int, n_rows: int) -> bool:
        """Have the passes from here on give at least so many logits of each row; returns whether they will."""
        k = n_looked_for(n_best, self._n_out)
        if self._refused or n_rows > MOST_ROWS or not k:
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
        if self._device == "cpu":
            return True
        wanted = 2 * N_UBATCH * self._n_vocab * 4 + _MARGIN
        return all(gpu.free_bytes > wanted for gpu in used_gpus(ggml_devices() or []))

    def read(self, n_rows: int, first: int, n_best: int) -> tuple[FloatArray, TokenIds] | None:
        """Of the rows of the pass that was just run, the first of which belongs to token ``first`` of it.

        Returns:
            Logits [n_rows, k] and their tokens, increasing; None where these do not do, and whole rows are given from
            here on: the device finds none, a logit is no number, or the last of ``n_best`` has its equals.
        """
        lib, n_vocab, k = self._lib, self._n_vocab, self.k
        values = ctypes.cast(lib.llama_get_sampled_logits_ith(self._handle, first), ctypes.c_void_p).value
        tokens = ctypes.cast(lib.llama_get_sampled_candidates_ith(self._handle, first), ctypes.c_void_p).value
        if not values or not tokens or lib.llama_get_sampled_candidates_count_ith(self._handle, first) != k:
            self._refused = True
            self.leave()
            return None
        found = np.ctypeslib.as_array((ctypes.c_float * n_vocab * n_rows).from_address(values))[:, :k]
        ids = np.ctypeslib.as_array((ctypes.c_int32 * n_vocab * n_rows).from_address(tokens))[:, :k]
        best = by_token(found, ids, n_best)
        if best is None:
            self.leave()
        return best

    def close(self) -> None:
        """Give the chain back, once no pass uses it any more."""
        if self._chain is not None:
            self._lib.llama_sampler_free(self._chain)
            self._chain, self.k = None, 0
