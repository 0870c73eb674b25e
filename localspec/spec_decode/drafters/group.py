"""Several drafters as one: the first that is confident enough drafts next, token by token, in the plan's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localspec.backends.base import Context, Forward
from localspec.errors import EngineError
from localspec.spec_decode.drafters.base import Drafter, DrafterFailed, Plan, Proposer
from localspec.spec_decode.rounds import Draft, DraftToken


class DrafterGroup:
    """Asks its drafters in the plan's order, token by token: the first with one that it wants continues the draft.

    So a run that an n-gram recognises is copied for free in the middle of what a model began, and the model takes over
    again where the copy ends.

    Args:
        drafters: in the order in which they were loaded.
        lost: takes a drafter that failed, which is not asked again, and why.
    """

    def __init__(
        self, drafters: Sequence[Drafter], lost: Callable[[Drafter, str], None] = lambda drafter, why: None
    ) -> None:
        self.drafters = list(drafters)
        self._lost = lost

    @property
    def taps(self) -> set[str]:
        """The hidden states of the target that they want."""
        return {tap for drafter in self.drafters for tap in drafter.taps}

    def attach(self, target: Context) -> None:
        for drafter in self.drafters:
            drafter.attach(target)

    def begin(self, tokens: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.begin(tokens)

    def process(self, tokens: Sequence[int], forward: Forward) -> None:
        for drafter in self.drafters:
            drafter.process(tokens, forward)

    def draft(
        self, tokens: list[int], plan: Plan, proposer: Proposer, end_tokens: frozenset[int] = frozenset()
    ) -> Draft:
        """Draft what follows ``tokens`` (left as it was on return), up to an end token: nothing after one counts."""
        settled = len(tokens)
        draft = Draft()
        try:
            while plan.room > 0:
                for drafter in self._in_order(tokens, plan):
                    found = _legal(self._ask(drafter, tokens, plan, proposer), proposer)
                    if found:
                        break
                else:
                    break
                for token in found:
                    draft.append(token)
                    tokens.append(token.id)
                    if proposer.extend(token.id) or token.id in end_tokens:
                        return draft
        finally:
            del tokens[settled:]
            for drafter in self.drafters:
                drafter.drafted()
        return draft

    def _in_order(self, tokens: Sequence[int], plan: Plan) -> list[Drafter]:
        if len(self.drafters) < 2:
            return list(self.drafters)
        place = {source: i for i, source in enumerate(plan.order([drafter.source for drafter in self.drafters]))}
        drafters = sorted(self.drafters, key=lambda drafter: place[drafter.source])
        rivals = [i for i, drafter in enumerate(drafters) if drafter.ranked]
        if len(rivals) > 1:  # each of these takes a place of theirs, the surest the first
            surest = sorted((drafters[i] for i in rivals), key=lambda each: -each.confidence(tokens))
            for i, drafter in zip(rivals, surest, strict=True):
                drafters[i] = drafter
        return drafters

    def _ask(self, drafter: Drafter, tokens: list[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        try:
            return drafter.draft(tokens, plan, proposer)
        except DrafterFailed as error:
            drafter.drafted()
            drafter.failed = True
            self.drafters.remove(drafter)
            self._lost(drafter, str(error))
            return []

    def accept(self, emitted: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.accept(emitted)

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()


def _legal(draft: list[DraftToken], proposer: Proposer) -> list[DraftToken]:
    """Draft tokens up to the first that the target does not take or the grammar forbids.

    Dropping a draft token for what it is leaves the law alone only if it was not sampled; a sample comes from a masked
    distribution and cannot be forbidden.
    """
    n = proposer.n_legal([token.id for token in draft]) if draft else 0
    if n < len(draft) and draft[n].dist is not None:
        raise EngineError(f"the drafter {draft[n].source} sampled a token that may not come")
    return draft[:n]
