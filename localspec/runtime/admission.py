"""Who fits into the memory that answers share, and who has to make way for whom."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backends.base import ContextState
from localspec.controllers.auto_controller import MAX_DRAFT
from localspec.runtime.seating import Seating
from localspec.runtime.under_way import OpenAnswer, Prepared, rank
from localspec.spec_decode.passes import TargetPass

RECKONED = 1024
"""Tokens that an answer is reckoned with when it is let in, if it may be longer: most are not. With room for two full
contexts, 8 answers to prompts of 1,000 tokens begin at once; one that goes on for longer may have to wait midway."""

SLACK = MAX_DRAFT + 1
"""Room for the rows of a pass, of which those of rejected draft tokens are given back."""


class Admission:
    """Reckons with what answers hold, and with what they may need further.

    Args:
        seating: the memory, and which conversation is where in it.
        at_once: most answers that have rows in passes.
    """

    def __init__(self, seating: Seating, at_once: int) -> None:
        self._seating = seating
        self._batch = seating.batch
        self._at_once = at_once

    def needs(self, prepared: Prepared) -> int:
        """Tokens that a request is reckoned to take, its prompt included."""
        n_prompt, most = len(prepared.asked[0]), prepared.request.params.max_tokens or RECKONED
        return min(self._batch.n_ctx, n_prompt + min(most, RECKONED) + SLACK)

    def make_way(self, one: OpenAnswer | Prepared, there: Sequence[OpenAnswer]) -> list[OpenAnswer] | None:
        """Which answers have to be put aside so that another can begin, or go on: the lowest, and as few as it takes.

        An answer makes way only for a higher priority, and not before its draft is made.

        Args:
            one: the other one.
            there: those that are under way and not put aside.

        Returns:
            Those; None where it has to wait all the same.
        """
        if isinstance(one, Prepared) and not self._seating.has_free:
            return None
        lower = [a for a in there if a.job.priority < one.job.priority and isinstance(a.wanted, TargetPass)]
        lower.sort(key=rank)
        staying = list(there)
        while len(staying) >= self._at_once or not self._fits(one, staying):
            if not lower:
                return None
            staying.remove(lower.pop())
        return [answer for answer in there if answer not in staying]

    def _fits(self, one: OpenAnswer | Prepared, there: Sequence[OpenAnswer]) -> bool:
        """Whether another one has room beside answers; alone it has."""
        if not there:
            return True
        n = self._needs_again(one) if isinstance(one, OpenAnswer) else self.needs(one)
        growth = sum(max(each.needs - self.held(each), SLACK) for each in there)
        sequences, cells = [each.sequence for each in there], self._batch.cells
        if cells.n_held(sequences) + growth + n <= self._batch.n_cells:
            return True
        shared = self._seating.shareable(one.asked[0]) if isinstance(one, Prepared) else None
        return shared is not None and (cells.n_held(sequences, *shared) + growth + n - shared[1] <= self._batch.n_cells)

    def _needs_again(self, answer: OpenAnswer) -> int:
        """Tokens that an answer is reckoned with that was put aside: anew where it is longer than was reckoned with."""
        state = answer.aside or []
        n = len(state.tokens if isinstance(state, ContextState) else state)
        return answer.needs if answer.needs >= n + SLACK else min(n + RECKONED, self._batch.n_ctx)

    def held(self, answer: OpenAnswer) -> int:
        """Tokens that an answer holds, those that others hold too included."""
        return self._batch[answer.sequence].n_past
