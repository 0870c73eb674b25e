"""The controller that always drafts alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from localspec.controllers.cost_model import PassCost
from localspec.errors import UsageError, shown
from localspec.spec_decode.drafters.base import SURE_COPY, Controller, Drafter, Plan
from localspec.spec_decode.rounds import Draft, Round

MAX_FIXED_DRAFT = 64


class FixedPlan(Plan):
    """Draft up to ``room`` tokens, whatever they cost; a copy under ``SURE_COPY`` gives way to a draft model's
    token."""

    def __init__(self, room: int, copying: Collection[str] = (), n_beside: int = 0) -> None:
        super().__init__(room)
        self.copying, self.n_beside = copying, n_beside

    def branching(self) -> FixedBranching | None:
        return FixedBranching(self.n_beside) if self.n_beside else None

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        if source in self.copying and confidence < SURE_COPY:
            return None
        return super().keep(source, confidence)


@dataclass(slots=True)
class FixedBranching:
    """Let a draft branch wherever a drafter has something to say, up to ``room`` tokens."""

    room: int

    def beside(self, draft: Draft, parent: int, source: str, confidence: float) -> float | None:
        if self.room <= 0:
            return None
        self.room -= 1
        return confidence


class FixedController(Controller):
    """Always drafts the same number of tokens; 0 is plain decoding.

    An unsure copy gives way where one of ``drafters`` runs a model; ``beside`` is the most tokens of a draft outside of
    its chain. ``times`` is the target's t(w), corrected by what is observed.
    """

    def __init__(
        self, length: int, times: PassCost | None = None, drafters: Sequence[Drafter] = (), *, beside: int = 0
    ) -> None:
        if not 0 <= length <= MAX_FIXED_DRAFT:
            raise UsageError(f"the draft length must be auto or 0..{MAX_FIXED_DRAFT}, not {shown(length)}")
        self.length = length
        self.times = times
        self._beside = beside
        has_model = any(drafter.info.runs_model for drafter in drafters)
        self.copying = {each.info.source for each in drafters if each.info.copies and has_model}

    def may_use(self, source: str) -> bool:
        return self.length > 0

    def plan(
        self,
        room: int,
        n_past: int,
        *,
        thinks: bool = False,
        hidden: Mapping[str, float] = MappingProxyType({}),
        lost: Set[str] = frozenset(),
    ) -> Plan:
        length = min(room, self.length)
        return FixedPlan(length, () if lost else self.copying, min(room - length, self._beside))

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
