"""Several drafters as one: the first that is confident enough drafts next, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localspec.errors import ContextFull, EngineError
from localspec.spec_decode.drafters.base import Branching, Drafter, DrafterFailed, Plan, Proposer
from localspec.spec_decode.drafters.ngram import CopyingDrafter
from localspec.spec_decode.rounds import Draft, DraftToken


@dataclass(slots=True)
class DrafterGroup:
    """Asks its drafters in turn, token by token: the first with one that the plan wants continues the draft.

    So a run that an n-gram recognises is copied for free in the middle of what a model began, and the model takes over
    again where the copy ends.

    Args:
        drafters: in the order in which they are asked, of those that copy the surest first; one that fails is removed.
        proposer: of the answer.
        end_tokens: no draft goes on behind these.
        lost: takes a drafter that failed, and why.
    """

    drafters: list[Drafter]
    proposer: Proposer
    end_tokens: frozenset[int] = frozenset()
    lost: Callable[[Drafter, str], None] = lambda drafter, why: None

    def draft(self, tokens: list[int], plan: Plan, branching: Branching | None = None, *, ahead: bool = False) -> Draft:
        """Draft what follows ``tokens``, everything settled (left as it was on return), up to an end token.

        ``branching`` is the permission to add branches. Where the target has yet to read what precedes the draft
        (``ahead``), what drafts from its states waits.
        """
        settled, proposer = len(tokens), self.proposer
        draft, is_over = Draft(), False
        proposer.rivals = None if branching is None else {}
        try:
            while plan.room > 0 and not is_over:
                for drafter in self._in_order(tokens, ahead):
                    if found := self._ask(drafter, tokens, plan):
                        break
                else:
                    break
                for token in found:
                    draft.append(token)
                    tokens.append(token.id)
                    is_over = token.id in self.end_tokens
                    if proposer.constraint is not None:
                        proposer.constraint.advance(token.id)
                        is_over = is_over or proposer.constraint.complete
                    if is_over:
                        break
            if branching is not None and draft:
                del tokens[settled:]
                self._branch(draft, tokens, branching)
        finally:
            del tokens[settled:]
        return draft

    def _branch(self, draft: Draft, tokens: list[int], branching: Branching) -> None:
        """Add to a chain what else its draft model would have said, place by place, and what others copy.

        What is sampled comes before what is not, which may then be left out for being there already.
        """
        rivals = self.proposer.rivals or {}
        for at, first in enumerate(draft[:]):
            rival = rivals.get(len(tokens) + at)
            expected = rival and branching.branch(draft, at - 1, first.source, rival.confidence)
            if rival is not None and expected is not None:
                token = DraftToken(self.proposer.draw(rival), first.source, rival.confidence, rival.law, expected)
                draft.add(token, at - 1)
        copying = [each for each in self.drafters if each.info.copies and each.info.source != draft[0].source]
        for drafter in copying:
            at = -1
            for copy in self._ask(drafter, tokens, Plan(branching.room)):  # all that it has, weighed here
                if copy.dist is not None:  # it was sampled, which ``branch`` would have to be asked before
                    break
                here = [child for child in draft.children(at) if draft[child].id == copy.id]
                if not here:
                    expected = branching.branch(draft, at, copy.source, copy.prob)
                    if expected is None:
                        break
                    draft.add(DraftToken(copy.id, copy.source, copy.prob, None, expected), at)
                at = here[0] if here else len(draft) - 1
                if copy.id in self.end_tokens:
                    break

    def _in_order(self, tokens: Sequence[int], ahead: bool) -> list[Drafter]:
        drafters = [each for each in self.drafters if not (ahead and each.info.taps)]
        rivals = [each for each in drafters if isinstance(each, CopyingDrafter)]
        if len(rivals) > 1:  # each of these takes a place of theirs, the surest the first
            surest = iter(sorted(rivals, key=lambda each: -each.confidence(tokens)))
            drafters = [next(surest) if isinstance(each, CopyingDrafter) else each for each in drafters]
        return drafters

    def _ask(self, drafter: Drafter, tokens: list[int], plan: Plan) -> list[DraftToken]:
        """What a drafter drafts, up to the first token that the target does not take or the grammar forbids.

        Dropping a draft token for what it is leaves the law alone only if it was not sampled; a sample comes from a
        masked distribution and cannot be forbidden.
        """
        try:
            draft = drafter.draft(tokens, plan, self.proposer)
        except ContextFull:  # of a memory that holds other answers' texts too
            return []
        except (DrafterFailed, EngineError) as error:
            self.drafters.remove(drafter)
            self.lost(drafter, f"failed: {error}" if isinstance(error, EngineError) else str(error))
            return []
        n = self.proposer.n_legal([token.id for token in draft]) if draft else 0
        if n < len(draft) and draft[n].dist is not None:
            raise EngineError(f"the drafter {draft[n].source} sampled a token that may not come")
        return draft[:n]
