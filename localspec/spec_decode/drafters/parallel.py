"""Heads that guess several tokens ahead in one pass: rows for positions not known yet, or a matrix for each."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, FloatArray
from localspec.backends.heads import Head
from localspec.backends.published_heads import EngineHead
from localspec.errors import EngineError
from localspec.spec_decode.drafters.base import Drafter, DrafterFailed, Plan, Proposer
from localspec.spec_decode.drafters.early_exit import EarlyExitDrafter
from localspec.spec_decode.drafters.head import ChainedHead, HeadDrafter
from localspec.spec_decode.rounds import DraftToken


class OnePassHead(HeadDrafter):
    """A head whose guess for a position does not depend on the draft before it: one pass a round serves all positions.

    So it also goes on behind tokens that others drafted.
    """

    def _begin_round(self) -> None:
        self._rows: FloatArray | None = None
        self._candidates: npt.NDArray[np.int64] | None = None  # which tokens the logits are of, where rows differ

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        n_drafted = len(tokens) - len(self._text)
        if n_drafted >= self.head.steps:
            return []
        started, n_pass = time.perf_counter(), 0
        if self._rows is None:
            unread = self._unread()
            n_wanted = min(n_drafted + plan.room, self.head.steps)
            if unread is None or not plan.more(self.source, n_pass := self._n_rows(unread, n_wanted)):
                return []
            self._candidates = None
            self._rows = self._guesses(unread, n_wanted, proposer.n_best)
        elif n_drafted >= len(self._rows) or not plan.more(self.source):
            return []
        ids = self._ids if self._candidates is None else self._candidates[n_drafted]
        confidence = proposer.confidence(self._rows[n_drafted], tokens, ids=ids)
        if n_pass:
            plan.spent(self.source, n_pass, (time.perf_counter() - started) * 1e3)
        return self._proposed(confidence, len(tokens), plan, proposer)

    @abstractmethod
    def _n_rows(self, unread: range, n_wanted: int) -> int:
        """How many rows of a pass over these true ones count, which guesses so many tokens, or more."""

    @abstractmethod
    def _guesses(self, unread: range, n_wanted: int, n_best: int) -> FloatArray:
        """Logits by position ahead [n_wanted or more, n_out], valid until the next pass; or the largest ``n_best`` or
        more of each, and their tokens as ``_candidates``."""


class ParallelHead(OnePassHead):
    """A layer that reads learned rows in the place of those that are not known yet (P-EAGLE)."""

    head: Head

    def _n_rows(self, unread: range, n_wanted: int) -> int:
        return len(unread) + len(self.head.masks)

    def _guesses(self, unread: range, n_wanted: int, n_best: int) -> FloatArray:
        if len(unread) > 1:
            self._read(unread[:-1], "none")
        self._forget_untrue()
        rows = np.concatenate([self._true_rows(unread[-1:]), self.head.masks])
        forward = self._decode(rows, [self._text[-1], *[0] * len(self.head.masks)], "all", n_best)
        if forward.ids is not None:
            self._candidates = self._ids[forward.ids]
        self._n_true += 1
        return forward.logits


class BlockHead(OnePassHead):
    """A block of masks behind the last token, which one pass fills in (DFlash: Chen et al. 2026, arXiv:2602.06036).

    Its memory holds rows of the target's states alone. The block is as wide as the draft may become.
    """

    head: EngineHead
    one_pass = True

    def _n_rows(self, unread: range, n_wanted: int) -> int:
        return len(unread)  # the block is the same whatever there is to read

    def _guesses(self, unread: range, n_wanted: int, n_best: int) -> FloatArray:
        self._read(unread, "none")
        try:
            rows, self._candidates = self.head.block_logits(self.context, self._text[-1], n_wanted, n_best)
        except EngineError as error:
            raise DrafterFailed(f"failed: {error}") from error
        return rows


class MedusaHead(OnePassHead):
    """A matrix for each position ahead, and no memory (Cai et al. 2024, arXiv:2401.10774)."""

    head: Head

    def _n_rows(self, unread: range, n_wanted: int) -> int:
        return self.head.steps

    def _guesses(self, unread: range, n_wanted: int, n_best: int) -> FloatArray:
        (state,) = self._states.between(unread.stop - 1, unread.stop)
        if not np.isfinite(state).all():
            raise DrafterFailed("computed states that are not numbers")
        try:
            return self.head.medusa_logits(self.context, state)
        except EngineError as error:
            raise DrafterFailed(f"failed: {error}") from error


HEAD_DRAFTERS: Mapping[str, Callable[[Any, Context, str], Drafter]] = {
    "chained": ChainedHead,
    "parallel": ParallelHead,
    "medusa": MedusaHead,
    "block": BlockHead,
    "exit": EarlyExitDrafter,
}
"""``DraftHead.kind`` -> what makes a drafter of such a head, a context of its own and a source."""
