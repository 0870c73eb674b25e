"""Drafts from the target's own first layers: no second model, no training (LayerSkip: Elhoushi et al. 2024)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from localspec.backends.base import Context
from localspec.backends.heads import Head
from localspec.errors import EngineError
from localspec.sampling.sampling import Ids, Row
from localspec.spec_decode.drafters.base import Drafter, DrafterFailed, Plan, Proposer
from localspec.spec_decode.drafters.head import tokens_of
from localspec.spec_decode.rounds import DraftToken


class EarlyExitDrafter(Drafter):
    """Ends the target's pass after some layers and reads the output matrix there (arXiv:2404.16710).

    Draft tokens are decoded in the target's own context, whose keys and values of those layers they share; it is given
    back as it was before the target verifies them.

    Args:
        head: of the kind ``exit``: the layer, the target's last norm, and some rows of its output matrix.
        context: of the head, which multiplies by those rows.
        source: see ``Drafter``.
    """

    context: Context

    def __init__(self, head: Head, context: Context, source: str = "early-exit") -> None:
        self.source = source
        self.head = head
        self.context = context
        self.taps = head.taps
        self._ids = head.token_map.astype(np.int64)
        self._n_layers = int(head.taps[0].removeprefix("layer:")) + 1
        self._target: Context | None = None
        self._n_past: int | None = None  # of the target, before this round's draft

    def clone(self, context: Context | None) -> Drafter:
        return EarlyExitDrafter(self.head, context or self.context, self.source)

    def attach(self, target: Context) -> None:
        self._target, self._n_past = target, None

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        target = self._target
        assert target is not None
        if self._n_past is None:
            self._n_past = target.n_past
        unread = tokens[target.n_past :]
        if not unread or len(unread) > target.n_free or not plan.more(self.source, len(unread)):
            return []
        started = time.perf_counter()
        row, ids = self._row(target, unread, proposer.n_best)
        confidence = proposer.confidence(row, tokens, ids=ids)
        plan.spent(self.source, len(unread), (time.perf_counter() - started) * 1e3)
        return self._proposed(confidence, len(tokens), plan, proposer)

    def _row(self, target: Context, tokens: Sequence[int], n_best: int) -> tuple[Row, Ids]:
        """Decode tokens through the first layers and return the logits after the last, and the tokens they are of."""
        try:
            state = target.decode_first_layers(tokens, self._n_layers).hidden[self.taps[0]][-1:]
            if not np.isfinite(state).all():
                raise DrafterFailed("computed states that are not numbers")
            self.context.truncate(0)
            forward = self.context.decode_floats(state, [0], "all", n_best)
        except EngineError as error:
            raise DrafterFailed(f"failed: {error}") from error
        return forward.logits[0], tokens_of(forward, 0, self._ids)

    def drafted(self) -> None:
        if self._target is not None and self._n_past is not None:
            self._target.truncate(self._n_past)
        self._n_past = None

    def close(self) -> None:
        self.context.close()
