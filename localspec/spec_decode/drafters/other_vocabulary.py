"""A draft model with another vocabulary than the target's.

Where only special tokens differ their ids are mapped; else drafts are carried over as text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localspec.backends.base import Context, Model, shared_prefix
from localspec.sampling.sampling import Row, best_and_certainty
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer, proposed
from localspec.spec_decode.drafters.carried_text import CarriedText, Side, partners
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
        passes: see ``DrafterInfo``: tokens of the draft model for one of the target's in ordinary text.
    """

    def __init__(self, context: Context, target: Model, source: str = "model", passes: float = 1.0) -> None:
        super().__init__(context, source)
        self.info = replace(self.info, own_tokens=True, as_text=True, passes=passes)
        self._target, draft = target, context.model
        self._carried = CarriedText(Side(target.vocab, target.tokenize), Side(draft.vocab, draft.tokenize))

    def clone(self, context: Context | None) -> Drafter:
        return OtherVocabularyDrafter(context or self.context, self._target, self.info.source, self.info.passes)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        source, found, drafted = self.info.source, list[DraftToken](), list[int]()
        reach = [1.0]  # the draft model's probability of all it drafted, by number of its tokens
        done = 0  # how many of them the tokens in ``found`` are made of

        def confidence(n: int) -> float:
            return reach[n] / reach[done] if reach[done] else 0.0

        ids, vocab = self._carried.follow(tokens), self.context.model.vocab
        known = self._n_known(ids, plan) if ids and not self._carried.pending else None
        if known is None:
            return []
        pending = ids[known:]
        while True:
            started = time.perf_counter()
            best, certainty = best_and_certainty(self.context.decode(pending, "last").logits[-1])
            plan.spent(source, len(pending), (time.perf_counter() - started) * 1e3)
            pending = [best]
            drafted.append(best)
            reach.append(reach[-1] * certainty)
            carried = self._carried.continuation(drafted)
            if [token for token, _ in carried[: len(found)]] != [token.id for token in found]:
                return found  # what is drafted now merges with what was drafted before
            can_go_on = best not in vocab.eog and bool(vocab.token_bytes(best)) and self.context.n_free > 0
            fresh = carried[len(found) :]
            for token, n in fresh:
                is_held = can_go_on and len(found) + 1 == len(carried) and plan.room > 1
                if is_held and plan.more(source, 1, confidence(n)):
                    break
                expected = plan.keep(source, confidence(n))
                if expected is None:
                    return found
                found.append(DraftToken(token, source, confidence(n), None, expected))
                done = n
            else:
                # Half a character has three bytes at most: what more tokens do not complete cannot be carried over.
                can_go_on = can_go_on and len(drafted) - done < 4
                if fresh or not (can_go_on and plan.more(source, 1)):
                    return found


class MappedTokensDrafter(DraftModelDrafter):
    """Drafts with a model whose tokens are the target's but for special ones, which are mapped by name and meaning.

    The draft model's law is one over the target's tokens: a special token of the target has the logit of its partner,
    or none. A special token without a partner is read as the draft model's with the same id.
    """

    def __init__(self, context: Context, target: Model, source: str = "model") -> None:
        super().__init__(context, source)
        self.info = replace(self.info, own_tokens=True)
        self._target, mine, its = target, target.vocab, context.model.vocab
        shared = min(mine.n_tokens, its.n_tokens)
        special = mine.special
        special[:shared] |= its.special[:shared]
        special[shared:] = True
        self._special = np.flatnonzero(special)
        self._logits_of = np.array([*partners(its, mine).items()], dtype=np.int64).reshape(-1, 2).T
        beyond = its.eos or 0  # what it reads for what it has no number for
        self._reads = {i: i if i < its.n_tokens else beyond for i in self._special.tolist()} | partners(mine, its)
        self._tokens: list[int] = []  # the target's
        self._ids: list[int] = []  # the draft model's, one for each of them

    def clone(self, context: Context | None) -> Drafter:
        return MappedTokensDrafter(context or self.context, self._target, self.info.source)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        kept = shared_prefix(self._tokens, tokens)
        self._tokens[kept:] = tokens[kept:]
        self._ids[kept:] = [self._reads.get(token, token) for token in tokens[kept:]]
        known = self._n_known(self._ids, plan)
        if known is None:
            return []
        started = time.perf_counter()
        row = self._for_target(self.context.decode(self._ids[known:], "last").logits[-1])
        confidence = proposer.confidence(row, tokens)
        plan.spent(self.info.source, len(tokens) - known, (time.perf_counter() - started) * 1e3)
        return proposed(self.info.source, confidence, len(tokens), plan, proposer)

    def _for_target(self, logits: Row) -> Row:
        """The draft model's logits by the target's tokens [n_tokens of the target]."""
        row = np.full(self._target.vocab.n_tokens, -np.inf, dtype=np.float32)
        n = min(len(row), len(logits))
        row[:n] = logits[:n]
        row[self._special] = -np.inf
        its, mine = self._logits_of
        np.maximum.at(row, mine, logits[its])
        return row
