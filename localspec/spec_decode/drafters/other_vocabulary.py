"""A draft model with another vocabulary than the target's: its drafts are carried over as text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localspec.backends.base import Context, Forward, Model
from localspec.errors import ContextFull, EngineError
from localspec.sampling.sampling import best_and_certainty
from localspec.spec_decode.drafters.base import Drafter, DrafterFailed, Plan, Proposer
from localspec.spec_decode.drafters.carried_text import CarriedText, Side
from localspec.spec_decode.overlapping import before_pass
from localspec.spec_decode.rounds import DraftToken


class OtherVocabularyDrafter(Drafter):
    """Drafts greedily in the draft model's own tokens; the target's tokens for that text are the draft.

    A draft token is always a function of the text before it, a point mass for verification, so that rejection sampling
    accepts it with the target's own probability and stays exact at any temperature (Timor et al. 2025,
    arXiv:2502.05202, algorithm 2).

    Its confidence in a token of the target is the product of the draft model's probabilities of the tokens it is made
    of, given those before. The last token of the text drafted so far is held back while another step is allowed: it
    may be the beginning of a longer one.

    Args:
        context: of the draft model.
        target: the model to draft for.
        source: see ``Drafter``.
    """

    context: Context

    def __init__(self, context: Context, target: Model, source: str = "model") -> None:
        self.context, self.source, self._target = context, source, target
        self._carried = CarriedText(
            Side(target.vocab, target.tokenize), Side(context.model.vocab, context.model.tokenize)
        )

    @property
    def reads_text(self) -> bool:
        return False  # in the target's tokens it does not

    def clone(self, context: Context | None) -> Drafter:
        return OtherVocabularyDrafter(context or self.context, self._target, self.source)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        ids = self._carried.follow(tokens)
        if not ids:
            return []
        known = self._reuse(ids[:-1])
        pending = ids[known:]
        if len(pending) > self.context.n_free or not plan.more(self.source, len(pending)):
            return []
        found: list[DraftToken] = []
        drafted: list[int] = []
        reach = [1.0]  # the draft model's probability of what it drafted, by number of its tokens
        done = 0  # of ``drafted``, what the tokens in ``found`` are made of
        while True:
            forward = self._decode(pending, plan)
            if forward is None:
                return found
            best, certainty = best_and_certainty(forward.logits[-1])
            pending = [best]
            drafted.append(best)
            reach.append(reach[-1] * certainty)
            carried = self._carried.continuation(drafted)
            if [token for token, _ in carried[: len(found)]] != [token.id for token in found]:
                return found  # merged with what was drafted before
            goes_on = best not in self.context.model.vocab.eog and self.context.n_free > 0
            may_end = not (goes_on and plan.room > len(carried) - len(found) and plan.more(self.source, 1))
            for token, n in carried[len(found) : len(carried) if may_end else -1]:
                confidence = reach[n] / reach[done] if reach[done] else 0.0
                expected = plan.keep(self.source, confidence)
                if expected is None:
                    return found
                found.append(DraftToken(token, self.source, confidence, None, expected))
                done = n
            if may_end:
                return found

    def _decode(self, tokens: Sequence[int], plan: Plan) -> Forward | None:
        """A pass of the draft model; None where its memory, which holds other answers' texts too, has no room."""
        started = time.perf_counter()
        before_pass(self.context)
        try:
            forward = self.context.decode(tokens, "last")
        except ContextFull:
            return None
        except EngineError as error:
            raise DrafterFailed(f"failed: {error}") from error
        plan.spent(self.source, len(tokens), (time.perf_counter() - started) * 1e3)
        return forward

    def _reuse(self, tokens: Sequence[int]) -> int:
        try:
            return self.context.reuse(tokens)
        except EngineError as error:
            raise DrafterFailed(f"failed: {error}") from error

    def close(self) -> None:
        self.context.close()
