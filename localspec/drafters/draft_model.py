"""A draft model: a smaller model with the target's vocabulary, in a context of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localspec.backends.base import Context, FloatArray
from localspec.drafters.base import Drafter, Plan, Proposer
from localspec.rounds import DraftToken
from localspec.sampling import Row

MAX_WITNESS = 24
"""Guesses judged after the fact when a draft model catches up; each takes a row of its output head."""


class DraftModelDrafter(Drafter):
    """Guesses one token a call, from a context that first decodes whatever it has not seen.

    That catch-up is all there is to it: the token after a fully accepted draft, the guesses of another drafter and a
    whole prompt are the same case. Nothing is decoded until the controller wants a guess, so a draft model that does
    not pay costs nothing.
    """

    def __init__(self, context: Context, source: str = "model") -> None:
        self.context = context
        self.source = source
        self._n_prompt = self._n_settled = 0

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
        # What it would have guessed for the last settled tokens that it is reading only now shows how it is doing here.
        n_witness = min(self._n_settled - max(known, self._n_prompt - 1) - 1, MAX_WITNESS)
        row = self._read(tokens, known, n_witness if len(tokens) - known > 2 else 0, plan, proposer)
        plan.spent(self.source, len(tokens) - known, (time.perf_counter() - started) * 1e3)
        confidence = proposer.confidence(row, tokens)
        sampled = proposer.has_fresh_noise and plan.samples(self.source, confidence)
        expected = plan.keep(self.source, confidence, sampled=sampled)
        if expected is None:
            return []
        token, dist = proposer.choose(len(tokens), sampled=sampled)
        prob = confidence if dist is None else dist.prob(token)
        return [DraftToken(token, self.source, prob, dist, expected)]

    def _read(self, tokens: Sequence[int], known: int, n_witness: int, plan: Plan, proposer: Proposer) -> Row:
        """Decode ``tokens[known:]`` and return the logits behind the last; judge guesses for settled ones on the way.

        Args:
            n_witness: how many of the last settled tokens to judge a guess for; none if not positive.
        """
        if n_witness <= 0:
            last: Row = self.context.decode(tokens[known:], "last").logits[0]
            return last
        first = self._n_settled - n_witness - 1  # its logits predict the first token to be judged
        if first > known:
            self.context.decode(tokens[known:first], "none")
        logits: FloatArray = self.context.decode(tokens[first:], "all").logits
        for i in range(n_witness):
            token = tokens[first + i + 1]
            confidence = proposer.confidence(logits[i], tokens[: first + i + 1])
            plan.witness(self.source, confidence, proposer.best() == token)
        behind_last: Row = logits[-1]
        return behind_last

    def begin(self, tokens: Sequence[int]) -> None:
        self._n_prompt = self._n_settled = len(tokens)

    def accept(self, emitted: Sequence[int]) -> None:
        self._n_settled += len(emitted)

    def close(self) -> None:
        self.context.close()
