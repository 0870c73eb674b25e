"""The controller that always drafts alike."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.controllers.cost_model import PassTimes
from localspec.errors import UsageError
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.drafters.base import Plan
from localspec.spec_decode.rounds import Round
from localspec.values import shown

MAX_FIXED_DRAFT = 64


@dataclass(slots=True)
class FixedPlan:
    """Draft up to a number of tokens, whatever they cost.

    Attributes:
        floor: confidence under which a guess that cost nothing gives way to a draft model's.
    """

    room: int
    floor: float = 0.0

    def more(self, source: str, pending: int = 0) -> bool:
        return self.room > 0

    def piece(self, source: str, pending: int) -> int:
        return pending

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        pass

    def nothing(self, source: str) -> None:
        pass

    def counterfactual(self, source: str, confidence: float, right: bool) -> None:
        pass

    def samples(self, source: str, confidence: float) -> bool:
        return True

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        if self.room <= 0 or (source == "ngram" and confidence < self.floor):
            return None
        self.room -= 1
        return confidence


class FixedController(Controller):
    """Always drafts the same number of tokens; 0 is plain decoding.

    Args:
        length: tokens per draft.
        times: the target's t(w), corrected by what is observed.
        has_model: whether a draft model is there to guess where an n-gram is unsure.
    """

    def __init__(self, length: int, times: PassTimes | None = None, *, has_model: bool = False) -> None:
        if not 0 <= length <= MAX_FIXED_DRAFT:
            raise UsageError(f"the draft length must be auto or 0..{MAX_FIXED_DRAFT}, not {shown(length)}")
        self.length = length
        self.times = times
        self.floor = 0.7 if has_model else 0.0

    def may_use(self, source: str) -> bool:
        return self.length > 0

    def plan(self, room: int, n_past: int) -> Plan:
        return FixedPlan(min(room, self.length), self.floor)

    def lose(self, source: str) -> None:
        self.floor = 0.0

    def update(self, round_: Round) -> None:
        if self.times is not None:
            round_.ms_verify_expected = self.times(len(round_.draft) + 1)
            self.times.observe(len(round_.draft) + 1, round_.ms_verify)
        round_.reason = self.explain()

    def explain(self) -> str:
        if self.length == 0:
            return "drafting is off: plain decoding was asked for"
        return f"drafting {self.length} tokens a round, as asked; 'auto' would weigh their cost"
