"""Heads that guess several tokens ahead in one pass: rows for positions not known yet, or a matrix for each."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from localspec.backends.base import Context, FloatArray
from localspec.backends.heads import Head
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

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        n_drafted = len(tokens) - len(self._text)
        if n_drafted >= self.head.steps:
            return []
        started, n_pass = time.perf_counter(), 0
        if self._rows is None:
            unread = self._unread()
            if unread is None or not plan.more(self.source, n_pass := self._n_rows(unread)):
                return []
            self._rows = self._guesses(unread)
        elif not plan.more(self.source):
            return []
        confidence = proposer.confidence(self._rows[n_drafted], tokens, ids=self._ids)
        if n_pass:
            plan.spent(self.source, n_pass, (time.perf_counter() - started) * 1e3)
        return self._proposed(confidence, len(tokens), plan, proposer)

    @abstractmethod
    def _n_rows(self, unread: range) -> int:
        """How many rows a pass over these true ones has."""

    @abstractmethod
    def _guesses(self, unread: range) -> FloatArray:
        """Logits by position ahead [steps, n_out]; valid until the next pass."""


class ParallelHead(OnePassHead):
    """A layer that reads learned rows in the place of those that are not known yet (P-EAGLE)."""

    head: Head

    def _n_rows(self, unread: range) -> int:
        return len(unread) + len(self.head.masks)

    def _guesses(self, unread: range) -> FloatArray:
        if len(unread) > 1:
            self._read(unread[:-1], "none")
        self._forget_untrue()
        rows = np.concatenate([self._true_rows(unread[-1:]), self.head.masks])
        logits = self._decode(rows, [self._text[-1], *[0] * len(self.head.masks)], "all").logits
        self._n_true += 1
        return logits


class MedusaHead(OnePassHead):
    """A matrix for each position ahead, and no memory (Cai et al. 2024, arXiv:2401.10774)."""

    head: Head

    def _n_rows(self, unread: range) -> int:
        return self.head.steps

    def _guesses(self, unread: range) -> FloatArray:
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
    "exit": EarlyExitDrafter,
}
"""``DraftHead.kind`` -> what makes a drafter of such a head, a context of its own and a source."""
