"""Several drafters as one: the cheapest that is confident enough guesses next, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backends.base import Forward
from localspec.drafters.base import Drafter, Plan, Proposer
from localspec.rounds import Draft


class DrafterGroup:
    """Asks its drafters in order, before every guess: whoever has one the plan wants continues the draft.

    So a run that an n-gram recognises is copied for free in the middle of what a model began, and the model takes over
    again where the copy ends.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)

    def begin(self, tokens: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.begin(tokens)

    def process(self, tokens: Sequence[int], forward: Forward | None) -> None:
        for drafter in self.drafters:
            drafter.process(tokens, forward)

    def draft(
        self, tokens: list[int], plan: Plan, proposer: Proposer, end_tokens: frozenset[int] = frozenset()
    ) -> Draft:
        """Guess what follows ``tokens`` (left as it was on return), up to an end token: nothing counts behind one."""
        settled = len(tokens)
        draft = Draft()
        try:
            while plan.room > 0:
                for drafter in self.drafters:
                    guesses = drafter.draft(tokens, plan, proposer)
                    if guesses:
                        break
                else:
                    break
                for guess in guesses:
                    draft.append(guess)
                    tokens.append(guess.id)
                    if guess.id in end_tokens:
                        return draft
        finally:
            del tokens[settled:]
        return draft

    def accept(self, emitted: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.accept(emitted)

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()
