"""A draft model: a smaller model with the target's vocabulary, in a context of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localspec.backends.base import Context
from localspec.drafters.base import Drafter, Plan, Proposer
from localspec.rounds import DraftToken


class DraftModelDrafter(Drafter):
    """Guesses one token a call, from a context that first decodes whatever it has not seen.

    That catch-up is all there is to it: the token after a fully accepted draft, the guesses of another drafter and a
    whole prompt are the same case. Nothing is decoded until the controller wants a guess, so a draft model that does
    not pay costs nothing.
    """

    def __init__(self, context: Context, source: str = "model") -> None:
        self.context = context
        self.source = source

    def pending(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` the context has not decoded."""
        return len(tokens) - self.context.n_past

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        context = self.context
        if len(tokens) > context.n_ctx:
            return []
        known = context.reuse(tokens[:-1])
        if max(tokens[known:]) >= context.model.n_vocab:  # the target's padding can be wider than the draft's
            return []
        if not plan.more(self.source, pending=len(tokens) - known):
            return []
        started = time.perf_counter()
        forward = context.decode(tokens[known:], "last")
        plan.spent(self.source, len(tokens) - known, (time.perf_counter() - started) * 1e3)
        confidence = proposer.confidence(forward.logits[0], tokens)
        expected = plan.keep(self.source, confidence)
        if expected is None:
            return []
        token, dist = proposer.choose(len(tokens))
        prob = confidence if dist is None else dist.prob(token)
        return [DraftToken(token, self.source, prob, dist, expected)]

    def close(self) -> None:
        self.context.close()
