"""A draft model with another vocabulary than the target's: its drafts are carried over as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from localspec.backends.base import Context, Model
from localspec.sampling.sampling import best_and_certainty
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.spec_decode.drafters.carried_text import CarriedText, Side
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.rounds import DraftToken


class OtherVocabularyDrafter(DraftModelDrafter):
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
        source: see ``DrafterInfo``.
    """

    def __init__(self, context: Context, target: Model, source: str = "model") -> None:
        super().__init__(context, source)
        self.info = replace(self.info, own_tokens=True)
        self._target = target
        draft = context.model
        self._carried = CarriedText(Side(target.vocab, target.tokenize), Side(draft.vocab, draft.tokenize))

    def clone(self, context: Context | None) -> Drafter:
        return OtherVocabularyDrafter(context or self.context, self._target, self.info.source)

    def _draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        source, found, drafted = self.info.source, list[DraftToken](), list[int]()
        reach = [1.0]  # the draft model's probability of all it drafted, by number of its tokens
        done = 0  # how many of them the tokens in ``found`` are made of
        ids = self._carried.follow(tokens)
        known = self._n_known(ids, plan) if ids else None
        if known is None:
            return []
        pending = ids[known:]
        while True:
            started = time.perf_counter()
            best, certainty = best_and_certainty(self._decode(pending, "last").logits[-1])
            plan.spent(source, len(pending), (time.perf_counter() - started) * 1e3)
            pending = [best]
            drafted.append(best)
            reach.append(reach[-1] * certainty)
            carried = self._carried.continuation(drafted)
            if [token for token, _ in carried[: len(found)]] != [token.id for token in found]:
                return found  # what is drafted now merges with what was drafted before
            can_go_on = best not in self.context.model.vocab.eog and self.context.n_free > 0
            is_last = not (can_go_on and plan.room > len(carried) - len(found) and plan.more(source, 1))
            for token, n in carried[len(found) : len(carried) if is_last else -1]:
                confidence = reach[n] / reach[done] if reach[done] else 0.0
                expected = plan.keep(source, confidence)
                if expected is None:
                    return found
                found.append(DraftToken(token, source, confidence, None, expected))
                done = n
            if is_last:
                return found
