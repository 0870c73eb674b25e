"""The controller that always drafts alike."""

from __future__ import annotations

from collections.abc import Sequence, Set

from localspec.controllers.cost_model import PassCost
from localspec.errors import UsageError, shown
from localspec.spec_decode.drafters.base import NO_SHARES, Controller, Drafter, Plan, Shares
from localspec.spec_decode.rounds import Round

MAX_FIXED_DRAFT = 64


class FixedController(Controller):
    """Always drafts the same number of tokens; 0 is plain decoding.

    An unsure copy gives way where one of ``drafters`` runs a model; ``branches`` is the most tokens of a draft outside
    of its chain. ``times`` is the target's t(w), corrected by what is observed.
    """

    def __init__(
        self, length: int, times: PassCost | None = None, drafters: Sequence[Drafter] = (), *, branches: int = 0
    ) -> None:
        if not 0 <= length <= MAX_FIXED_DRAFT:
            raise UsageError(f"the draft length must be auto or 0..{MAX_FIXED_DRAFT}, not {shown(length)}")
        self.length = length
        self.times = times
        self._n_branches = branches
        has_model = any(drafter.info.runs_model for drafter in drafters)
        self.copying = {each.info.source for each in drafters if each.info.copies and has_model}

    def may_use(self, source: str) -> bool:
        return self.length > 0

    def plan(self, room: int, n_past: int, *, hidden: Shares = NO_SHARES, lost: Set[str] = frozenset()) -> Plan:
        length = min(room, self.length)
        return Plan(length, () if lost else self.copying, min(room - length, self._n_branches))

    def learn(self, round_: Round) -> None:
        if self.times is not None:
            round_.ms_verify_expected = self.times(len(round_.draft) + 1)
            self.times.observe(len(round_.draft) + 1, round_.ms_verify)
        round_.reason = self.explain()

    def explain(self) -> str:
        if self.length == 0:
            return "Guessing is off."
        tokens = f"{self.length} token{'s' * (self.length > 1)}"
        return f"Guessing {tokens} at a time, as asked; auto would weigh what they cost."
