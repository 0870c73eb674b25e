"""What is known of a pair: what passes cost, how likely draft tokens are accepted, and what follows from both."""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np

from localspec.controllers.acceptance import EDGES, SourceAcceptance, leads_to
from localspec.controllers.break_even import lowest_break_even, with_block
from localspec.controllers.cost_model import PassCost
from localspec.controllers.stopping import Continuation, Prospects

NEVER = 0.995
"""Where a larger share of the draft tokens must be accepted, a draft model is unprofitable whatever the text."""

LENGTHS = range(1, 9)
"""Draft lengths of which the best counts for the break-even acceptance rate."""

_LEADS_TO = np.array([leads_to(low) for low in (0.0, *EDGES)])

Tables = tuple[Mapping[str, SourceAcceptance], Mapping[str, SourceAcceptance]]
"""By source, how likely its most probable tokens are accepted, and sampled ones."""


class Estimates:
    """Costs and acceptance, and the stopping problem with them; see ``stopping``.

    Attributes:
        times: the target's t(w) [ms].
        draft_times: by source, d(w) of drafters that run a model of their own [ms]; the others draft for nothing.
        acceptance: by source.
        sampled: the same for tokens that a draft model samples; ``acceptance`` is for its most probable ones.
            Both are those of what comes next: thinking, or the answer.
        max_draft: longest draft to consider.
        one_pass: of drafters that run a model, those of which one pass guesses all of a draft.
        ms_other: of a round, outside the models [ms].
        takes_samples: whether a draft token may be a sample, where that is accepted more often.
        unprofitable: draft models that would not even pay if they were always right; they are left out of everything.
        lagging: draft models that have to read for long first, the unprofitable ones included.
        hidden: by source, the share of its steps that is taken while the target verifies; see ``Controller.hide``.
    """

    def __init__(
        self,
        times: PassCost,
        draft_times: Mapping[str, PassCost],
        acceptance: Mapping[str, SourceAcceptance],
        sampled: Mapping[str, SourceAcceptance],
        max_draft: int,
        thinking: Tables | None = None,
        one_pass: Set[str] = frozenset(),
    ) -> None:
        self.times = times
        self.draft_times = draft_times
        self.acceptance = acceptance
        self.sampled = sampled
        answer: Tables = acceptance, sampled
        self._parts = [answer] if thinking is None else [answer, thinking]
        self.max_draft = max_draft
        self.one_pass = one_pass
        self.ms_other = 0.3
        self.takes_samples = False
        self.hidden: Mapping[str, float] = {}
        self.unprofitable: Set[str] = frozenset()
        self.lagging: Set[str] = frozenset(draft_times)
        self.stale = True
        self._prospect: Continuation | None = None
        self._at_hand: Continuation | None = None
        self._joined: dict[str, Continuation] = {}

    def begin(self, *, takes_samples: bool) -> None:
        """A new answer begins."""
        self.takes_samples = takes_samples
        for times in (self.times, *self.draft_times.values()):
            times.begin()
        self.enter(thinks=False)
        for tables, _ in self._parts:
            for acceptance in tables.values():
                acceptance.new_text()

    def enter(self, *, thinks: bool) -> bool:
        """What comes next is thinking, or the answer; returns whether other tables hold from here on."""
        acceptance, sampled = self._parts[-1 if thinks else 0]
        if acceptance is self.acceptance:
            return False
        self.acceptance, self.sampled, self.stale = acceptance, sampled, True
        return True

    @property
    def ms_plain(self) -> float:
        """Expected time of a round of plain decoding."""
        return self.times(1) + self.ms_other

    def step_ms(self, source: str) -> float:
        """Expected time of one draft token, or of all of a draft that a pass guesses, so far as the target waits."""
        if source not in self.draft_times:
            return 0.0
        return self.draft_times[source](1) * (1.0 - self.hidden.get(source, 0.0))

    @property
    def models(self) -> list[str]:
        """The draft models that are thought about."""
        return [source for source in self.draft_times if source not in self.unprofitable]

    def break_even(self, source: str) -> float:
        """The acceptance rate at which the best fixed draft length of this source only equals plain decoding."""
        step_ms = self.step_ms(source)

        def rounds(w: int) -> float:
            return self.times(w) + self.ms_other

        if source in self.one_pass:
            return lowest_break_even(LENGTHS, with_block(rounds, step_ms), 0.0)
        return lowest_break_even(LENGTHS, rounds, step_ms)

    def set_unprofitable(self, sources: Set[str]) -> None:
        if sources != self.unprofitable:
            self.unprofitable, self.stale = sources, True
            for source in sources:
                self.set_lagging(source, True)

    def set_lagging(self, source: str, lagging: bool) -> None:
        if (source in self.lagging) != lagging:
            self.lagging ^= {source}
            self._at_hand = None
            self._joined.clear()

    # -- the stopping problem --------------------------------------------------------------------------------------

    def solve(self, *sources: str, rate: float | None = None) -> Continuation:
        """The stopping problem with some sources only; ``rate`` as in ``Continuation``."""
        rows = [self.times(w) + self.ms_other for w in range(1, self.max_draft + 2)]
        models = [self._prospects(source) for source in self.draft_times if source in sources]
        free = [self._prospects(source) for source in sources if source not in self.draft_times]
        return Continuation(rows, models, free[0] if free else None, rate)

    def _prospects(self, source: str) -> Prospects:
        table = np.array(self.acceptance[source].table())
        if self.takes_samples and source in self.sampled:
            table = np.maximum(table, self.sampled[source].table())
        histograms = np.array(self.acceptance[source].histograms)
        return Prospects(histograms, _LEADS_TO, table, self.step_ms(source), source in self.one_pass)

    def solve_again(self) -> None:
        """Solve the stopping problem with what was learned since it was last solved."""
        self.stale = True
        self._refresh()

    @property
    def at_hand(self) -> Continuation:
        """The stopping problem as last solved, with every source that can draft at once: without lagging models."""
        if not self.lagging:
            return self.prospect
        if self._at_hand is None or self.stale:
            self._refresh()
        assert self._at_hand is not None
        return self._at_hand

    @property
    def prospect(self) -> Continuation:
        """The stopping problem as last solved, as if every draft model had read everything."""
        if self._prospect is None or self.stale:
            self._refresh()
        assert self._prospect is not None
        return self._prospect

    def joined(self, source: str) -> Continuation:
        """The stopping problem with what is at hand and this draft model, were it to read what it has missed.

        Of two that lag, what the other might gain is no reason for this one to read.
        """
        if source not in self.lagging:
            return self.at_hand
        if self.stale:
            self._refresh()
        if self.lagging - self.unprofitable == {source}:
            return self.prospect
        if source not in self._joined:
            able = [each for each in self.acceptance if each not in self.lagging or each == source]
            self._joined[source] = self.solve(*able)  # a rate without it is not close
        return self._joined[source]

    def rank(self, source: str) -> int:
        """Which of the models of ``joined`` this one is."""
        return [each for each in self.draft_times if each not in self.lagging or each == source].index(source)

    def _refresh(self) -> None:
        self._joined.clear()
        last, at_hand = self._prospect, self._at_hand
        profitable = [source for source in self.acceptance if source not in self.unprofitable]
        self._prospect = self.solve(*profitable, rate=last.best_rate if last else None)
        if self.lagging == self.unprofitable:
            self._at_hand = self._prospect
        else:
            able = [source for source in self.acceptance if source not in self.lagging]
            self._at_hand = self.solve(*able, rate=at_hand.best_rate if at_hand else None)
        self.stale = False
