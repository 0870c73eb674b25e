"""A draft model: a smaller model with the target's vocabulary, in a context of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localspec.backends.base import FEW_ROWS, Context, Forward, Wanted
from localspec.errors import ContextFull, EngineError
from localspec.sampling.sampling import Ids
from localspec.spec_decode.drafters.base import Drafter, DrafterFailed, DrafterInfo, Plan, Proposer, proposed
from localspec.spec_decode.overlapping import before_pass
from localspec.spec_decode.rounds import DraftToken

MAX_COUNTERFACTUAL = 24
"""Counterfactual draft tokens scored when a draft model catches up. Each takes a row of its output head. Set by
hand."""


class DraftModelDrafter(Drafter):
    """Draft tokens one token a call, from a context that first decodes whatever it has not seen.

    That catch-up is all there is to it: the token after a fully accepted draft, the draft of another drafter and a
    whole prompt are the same case. Nothing is decoded until the controller wants a draft, so a draft model that does
    not pay costs nothing.

    Args:
        context: of the draft model.
        source: see ``DrafterInfo``.
    """

    def __init__(self, context: Context, source: str = "model") -> None:
        self.context = context
        self.info = DrafterInfo(source, runs_model=True)
        self._n_prompt = self._n_settled = 0
        self._n_best = 0

    def clone(self, context: Context | None) -> Drafter:
        return DraftModelDrafter(context or self.context, self.info.source)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        try:
            return self._draft(tokens, plan, proposer)
        except ContextFull:  # of a memory that holds other answers' texts too
            return []

    def _draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        position = len(tokens)
        if position > self.context.n_ctx:
            return []
        known = self._what_it_knows(tokens, plan)
        if known is None:
            return []
        is_as_wide = proposer.n_vocab is None or self.context.model.n_vocab <= proposer.n_vocab
        self._n_best = proposer.n_best if is_as_wide else 0
        started = time.perf_counter()
        # What it would have drafted for the last settled tokens, read only now, shows how it is doing here.
        n_counterfactual = min(self._n_settled - max(known, self._n_prompt - 1) - 1, MAX_COUNTERFACTUAL)
        n_scored = n_counterfactual if len(tokens) - known > 2 else 0
        forward = self._read(tokens, known, n_scored, plan, proposer)
        confidence = proposer.confidence(forward.logits[-1], tokens, ids=_ids(forward, -1))
        plan.spent(self.info.source, len(tokens) - known, (time.perf_counter() - started) * 1e3)
        return proposed(self.info.source, confidence, position, plan, proposer)

    def _what_it_knows(self, tokens: Sequence[int], plan: Plan) -> int | None:
        """How much of the text this model knows; None if the rest cannot be read, or is not worth it."""
        known = self._reuse(tokens[:-1])
        if max(tokens[known:]) >= self.context.model.n_vocab:  # the target's padding can be wider than the draft's
            return None
        pending = len(tokens) - known
        if pending > self.context.n_free:  # other answers' texts can be in the same memory
            return None
        if not plan.more(self.info.source, pending):
            return None
        return known if pending == 1 else self._probe(tokens, known, plan)

    def _probe(self, tokens: Sequence[int], known: int, plan: Plan) -> int | None:
        """Read first pieces, if the plan wants to see what reading costs now; None if the rest is not worth it."""
        while (piece := plan.piece(self.info.source, len(tokens) - known)) < len(tokens) - known:
            started = time.perf_counter()
            self._decode(tokens[known : known + piece], "none")
            plan.spent(self.info.source, piece, (time.perf_counter() - started) * 1e3)
            known += piece
            if not plan.more(self.info.source, len(tokens) - known):
                return None
        return known

    def _read(
        self, tokens: Sequence[int], known: int, n_counterfactual: int, plan: Plan, proposer: Proposer
    ) -> Forward:
        """Decode ``tokens[known:]``, the logits after the last being last; on the way, score counterfactual ones.

        Args:
            n_counterfactual: how many of the last settled tokens to score a draft token for; none if not positive.
        """
        if n_counterfactual <= 0:
            return self._decode(tokens[known:], "last")
        first = self._n_settled - n_counterfactual - 1  # its logits predict the first token to be judged
        if first > known:
            self._decode(tokens[known:first], "none")
        for start in range(first, len(tokens), FEW_ROWS):
            forward = self._decode(tokens[start : start + FEW_ROWS], "all")
            for at in range(start + 1, min(start + FEW_ROWS, first + n_counterfactual) + 1):
                row, ids = forward.logits[at - start - 1], _ids(forward, at - start - 1)
                confidence = proposer.confidence(row, tokens[:at], n_known=len(tokens) - at, ids=ids)
                if confidence:
                    plan.counterfactual(self.info.source, confidence, proposer.best() == tokens[at])
        return forward

    # The answer does not need a draft model: where its engine fails, it is done without.

    def _decode(self, tokens: Sequence[int], rows: Wanted) -> Forward:
        before_pass(self.context)
        try:
            if self._n_best and rows != "none":
                return self.context.decode_best(tokens, self._n_best, rows)
            return self.context.decode(tokens, rows)
        except ContextFull:
            raise
        except EngineError as error:
            raise DrafterFailed(f"failed: {error}") from error

    def _reuse(self, tokens: Sequence[int]) -> int:
        try:
            return self.context.reuse(tokens)
        except EngineError as error:
            raise DrafterFailed(f"failed: {error}") from error

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._n_prompt = self._n_settled = len(tokens)

    def accept(self, emitted: Sequence[int]) -> None:
        self._n_settled += len(emitted)


def _ids(forward: Forward, row: int) -> Ids | None:
    return None if forward.ids is None else forward.ids[row]
