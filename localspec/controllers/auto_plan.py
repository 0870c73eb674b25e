"""A draft under way, as ``AutoController`` plans it: what was sent and spent so far, and what that says of going on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.controllers.acceptance import START, leads_to

if TYPE_CHECKING:
    from localspec.controllers.auto_controller import AutoController

PROBE_TOKENS = 8
"""Tokens of a long reading that are read first on a machine that has become slower: with more in a pass a token is
cheaper, and with fewer the pass says less of the rest."""


@dataclass(slots=True)
class AutoPlan:
    """Draft while it pays; see ``AutoController``.

    Attributes:
        room: guesses that may still be made.
        n: guesses made.
        reach: probability that all of them are right.
        ms_spent: time that draft models took for them, readings left out.
        invests: whether the next pass of a draft model is a reading, or a piece of one.
    """

    controller: AutoController
    room: int
    n: int = 0
    reach: float = 1.0
    ms_spent: float = 0.0
    invests: bool = False
    after: int = START
    last: str = ""
    last_counterfactual: int = START

    def more(self, source: str, pending: int = 0) -> bool:
        if self.room <= 0 or pending == 0:  # where looking costs nothing, keep() decides with the confidence known
            return self.room > 0
        self.invests = self.controller.is_reading(source, pending)
        return self.controller.step_pays(self, source, pending)

    def piece(self, source: str, pending: int) -> int:
        # A long reading is paid in advance, at a price that may be out of date: first pieces show today's.
        probes = self.invests and self.controller.is_uncertain_of(source)
        return min(pending, PROBE_TOKENS) if probes else pending

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        charged = self.controller.charge(source, n_tokens, ms, is_investment=self.invests)
        self.ms_spent += 0.0 if self.invests else charged

    def counterfactual(self, source: str, confidence: float, right: bool) -> None:
        acceptance = self.controller.sources[source]
        acceptance.notice(confidence)
        if self.last_counterfactual != START:
            acceptance.notice(confidence, self.last_counterfactual)
        self.last_counterfactual = leads_to(confidence) if right else START
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
