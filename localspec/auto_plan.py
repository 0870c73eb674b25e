"""A draft under way, as ``AutoController`` plans it: what was sent and spent so far, and what that says of going on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.acceptance import START, leads_to

if TYPE_CHECKING:
    from localspec.auto_controller import AutoController


@dataclass(slots=True)
class AutoPlan:
    """Draft while it pays; see ``AutoController``.

    Attributes:
        room: guesses that may still be made.
        n: guesses made.
        reach: probability that all of them are right.
        ms_spent: time that draft models took for them.
    """

    controller: AutoController
    room: int
    n: int = 0
    reach: float = 1.0
    ms_spent: float = 0.0
    after: int = START
    last: str = ""
    witnessed: int = START

    def more(self, source: str, pending: int = 0) -> bool:
        # Where looking costs nothing, keep() decides with the confidence known.
        return self.room > 0 and (pending == 0 or self.controller.step_pays(self, source, pending))

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.ms_spent += ms
        self.controller.excuse(source, n_tokens, ms)
        self.controller.draft_times[source].observe(n_tokens, ms)

    def witness(self, source: str, confidence: float, right: bool) -> None:
        acceptance = self.controller.sources[source]
        acceptance.notice(confidence)
        if self.witnessed != START:
            acceptance.notice(confidence, self.witnessed)
        self.witnessed = leads_to(confidence) if right else START
        acceptance.observe(confidence, right)
        self.controller.stale = True

    def nothing(self, source: str) -> None:
        if self.last != source:
            self.controller.sources[source].notice(0.0)

    def samples(self, source: str, confidence: float) -> bool:
        controller = self.controller
        return controller.sampled[source].expected(confidence) > controller.sources[source].expected(confidence)

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        acceptance = self.controller.sources[source]
        if source in self.controller.draft_times:
            acceptance.notice(confidence, self.after)
        elif self.last != source:  # of a copy only the first guess counts
            acceptance.notice(confidence)
        expected = (self.controller.sampled[source] if sampled else acceptance).expected(confidence)
        after = leads_to(confidence)
        if self.room <= 0 or not self.controller.row_pays(self, source, expected, after):
            return None
        self.room -= 1
        self.n += 1
        self.reach *= expected
        self.after, self.last = after, source
        return expected
