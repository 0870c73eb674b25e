"""A draft model: a smaller model with the target's vocabulary, in a context of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localspec.backends.base import Context
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo, Plan, Proposer, proposed
from localspec.spec_decode.rounds import DraftToken


class DraftModelDrafter(Drafter):
    """Draft tokens one token a call, from a context that first decodes whatever it has not seen.

    That catch-up is all there is to it: the token after a fully accepted draft, the draft of another drafter and a
    whole prompt are the same case. Nothing is decoded until the controller wants a draft, so a draft model that does
    not pay costs nothing.
    """

    def __init__(self, context: Context, source: str = "model") -> None:
        self.context = context
        self.info = DrafterInfo(source, runs_model=True)

    def clone(self, context: Context | None) -> Drafter:
        return DraftModelDrafter(context or self.context, self.info.source)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        source, context, n = self.info.source, self.context, len(tokens)
        known = self._n_known(tokens, plan)
        if known is None:
            return []
        is_as_wide = proposer.n_vocab is None or context.model.n_vocab <= proposer.n_vocab
        n_best = proposer.n_best if is_as_wide else 0
        started = time.perf_counter()
        forward = context.decode(tokens[known:], "last", n_best)
        ids = None if forward.ids is None else forward.ids[-1]
        confidence = proposer.confidence(forward.logits[-1], tokens, ids=ids)
        plan.spent(source, n - known, (time.perf_counter() - started) * 1e3)
        return proposed(source, confidence, n, plan, proposer)

    def _n_known(self, tokens: Sequence[int], plan: Plan) -> int | None:
        """Tokens of the text that the context holds once the rest is worth reading; None where it is not."""
        context = self.context
        if len(tokens) > context.n_ctx:
            return None
        known = context.reuse(tokens[:-1])
        if max(tokens[known:]) >= context.model.n_vocab:  # the target's padding can be wider than the draft's
            return None
        if len(tokens) - known > context.n_free:  # other answers' texts can be in the same memory
            return None
        while (piece := plan.more(self.info.source, len(tokens) - known)) < len(tokens) - known:
            if not piece:
                return None
            started = time.perf_counter()
            context.decode(tokens[known : known + piece], "none")
            plan.spent(self.info.source, piece, (time.perf_counter() - started) * 1e3)
            known += piece
        return known
