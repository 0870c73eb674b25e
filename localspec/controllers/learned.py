"""What was learned of a pair, across runs: how often its draft tokens are accepted, and the time they saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.controllers.acceptance import SourceAcceptance, prior_of
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.base import DrafterInfo
from localspec.system.files import JsonStore, Key

# What drafting may still cost: the time that it saved, a small grant, and a small share of all tokens.
# Two bounds hold at once, both in plain tokens, so that a machine that slows down does not change them. Over all
# answers of a process, drafting never costs more than it saved before, a grant and 0.75 % of the tokens. Within one
# answer, drafts never cost more than two tokens and one percent of its length, so that no single answer is noticeably
# slower. Reading a prompt with a draft model is an investment with a bound of its own; see ``PrefillGate``.

# What may be lost before anything was saved, once per process. The reading of a prompt of 300 tokens is 9 to 12 where a
# draft token costs a tenth of one of the target's; half of the grant is for an answer's first reading alone.
GRANT = 12.0

SHARE = 0.0075  # What may be lost in looking for something better, as a share of every token

KEPT = 0.5  # Share of an earlier run's savings that counts in the next

# What drafts may cost an answer: at 48 tokens 2.5 of them, at 100 three. Where a further row costs 0.4 of a token, a
# draft of three costs 1.4: with less, a draft model that had read the prompt could not show what it is worth.
ANSWER_GRANT = 2.0
ANSWER_SHARE = 0.01

# In place of ``ANSWER_GRANT`` where the caller gave a text that the answer is likely to repeat: in a short answer wide
# copies have to be tried at once to be worth it.
PREDICTED_GRANT = 3.0

# What a draft model's reading may cost an answer on top of what this answer has saved. One that takes the time of more
# than 7 tokens is begun only where drafting is clearly worth it (``auto.CLEAR_GAIN``).
READING_GRANT = 12.0
READING_SHARE = 0.05

# The same where drafts are carried over as text. How often those are right depends on the text, such as its language,
# more than the target's certainty shows: with as much as others, twice as many replayed ends were under 0.97.
CARRIED_GRANT = 2.0
CARRIED_SHARE = 0.03


@dataclass(slots=True)
class TimeBudget:
    """The balance of a process and of the current answer [plain tokens]."""

    balance: float = GRANT  # saved so far in all answers, the grant and the share included
    in_answer: float = 0.0  # saved so far in this answer, investments left out
    n_tokens: int = 0  # of this answer
    invested: float = 0.0  # what reading has cost this answer
    answer_grant: float = ANSWER_GRANT  # what drafts may cost this answer at its start

    def begin(self, *, predicted: bool = False) -> None:
        self.answer_grant = PREDICTED_GRANT if predicted else ANSWER_GRANT
        self.in_answer, self.n_tokens, self.invested = 0.0, 0, 0.0

    def book(self, n_tokens: int, saved: float, invested: float = 0.0) -> None:
        """A round saved so many plain tokens against plain decoding (negative: lost), a reading included."""
        self.n_tokens += n_tokens
        self.in_answer += saved + invested
        self.invested += invested
        self.balance += saved + SHARE * n_tokens

    @property
    def for_drafts(self) -> float:
        """What a draft may cost, were all of it rejected [plain tokens]."""
        return min(self.balance, self.answer_grant + ANSWER_SHARE * self.n_tokens + self.in_answer)

    @property
    def for_reading(self) -> float:
        return self._for_reading(READING_GRANT, READING_SHARE)

    @property
    def for_carried_reading(self) -> float:
        """What may be read now by a draft model whose drafts are carried over as text [plain tokens]."""
        return self._for_reading(CARRIED_GRANT, CARRIED_SHARE)

    def _for_reading(self, grant: float, share: float) -> float:
        left = self.balance - (GRANT / 2 if self.invested else 0.0)
        return min(left, grant + share * self.n_tokens + max(0.0, self.in_answer) - self.invested)

    def as_dict(self) -> dict[str, Any]:
        return {"saved": round(self.balance, 3)}

    @classmethod
    def restored(cls, stored: Any) -> TimeBudget:
        """A budget for a new process: the grant, and a part of what an earlier one saved."""
        saved = stored.get("saved") if isinstance(stored, dict) else None
        if not isinstance(saved, int | float) or not math.isfinite(saved):
            return cls()
        return cls(GRANT + KEPT * max(0.0, saved - GRANT))


_FORMAT = 1  # of the budget; an acceptance table that cannot be read is learned anew


def mode_of(params: SamplingParams) -> str:
    if params.greedy:
        return "greedy"
    return "seeded" if params.seed is not None else "sampled"


class AcceptanceStore:
    """The acceptance tables of one pair by target and drafters (``key``), and its time budget; without a folder nothing
    is kept beyond the process."""

    def __init__(self, folder: Path | None, key: Key) -> None:
        self._store = JsonStore(folder, _FORMAT) if folder is not None else None
        self._key = dict(key)
        self._tables: dict[str, SourceAcceptance] = {}
        self._stored: dict[str, Any] = (self._store.get(self._key) or {}) if self._store else {}
        self.budget = TimeBudget.restored(self._stored.get("budget"))

    def source(self, params: SamplingParams, info: DrafterInfo, *, sampled: bool = False) -> SourceAcceptance:
        """The table of one drafter, for requests sampled like this one; what an earlier run learned is its start.

        ``sampled``: of samples, rather than the most probable tokens.
        """
        name = f"{mode_of(params)} {info.source}{' sample' if sampled else ''}"
        if name not in self._tables:
            table = SourceAcceptance(prior_of(info, greedy=params.greedy, sampled=sampled))
            table.restore(self._stored.get(name))
            self._tables.setdefault(name, table)  # the other of two threads may have been faster
        return self._tables[name]

    def save(self) -> None:
        if self._store is not None and self._tables:
            self._stored |= {name: table.as_dict() for name, table in list(self._tables.items())}
            self._stored["budget"] = self.budget.as_dict()
            self._store.put(self._key, self._stored)
