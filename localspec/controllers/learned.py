"""What was learned of a pair, across runs: how often its draft tokens are accepted, and the time they saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.controllers.acceptance import COPIED, GREEDY, MOST_PROBABLE, SAMPLE, SourceAcceptance, of_a_head
from localspec.sampling.sampling import SamplingParams
from localspec.system.files import JsonStore, Key

# What drafting may still cost: the time that it saved, a small grant, and one percent.
#
# Two bounds hold at once, both counted in plain tokens, so that a machine that slows down does not change what they
# are worth. Over everything that a process answers, drafting never costs more than it saved before, a grant and one
# percent of the tokens. Within one answer, drafts never cost more than a token and a few percent of what it has said,
# so that no single answer is noticeably slower, however much earlier ones saved. What reading a prompt with a draft
# model costs is an investment: it has a bound of its own within the answer, and ``prefill_gate`` asks for good
# reasons.

GRANT = 6.0
"""What may be lost before anything was saved, once per process: the reading of a short prompt is 3 to 5 tokens."""

SHARE = 0.01
"""Of every token, what may be lost in looking for something better."""

KEPT = 0.5
"""Of the savings of an earlier run, what is counted in the next."""

ANSWER_GRANT = 0.9
ANSWER_SHARE = 0.01
"""What drafts may cost an answer: at 48 tokens 1.4 of them, 2.9 %; at 100 1.9 %."""

STATES_SHARE = 0.005
"""Of every token, what drafts may cost an answer less where one reads the target's states: handing those out makes each
pass longer, 0.17 to 0.4 ms where it was measured, whether a draft follows or not. On 18 recorded answers to the tuning
questions with the head that ships 5 instead of 14 of 264 ends of answers are then under 0.97 of plain with the costs of
machine B, 10 instead of 13 with A's; the mean is 1.249 instead of 1.251, and 1.386 instead of 1.396."""

PREDICTED_GRANT = 3.0
"""In place of ``ANSWER_GRANT`` where the caller gave a text that the answer is likely to repeat: in a short answer wide
copies have to be tried at once to be worth it."""

READING_GRANT = 5.0
READING_SHARE = 0.05
"""What a draft model's reading may cost an answer, beside what this answer has saved: enough for the last 50 tokens of
a prompt. Without such a bound 7 of 96 replayed answers fell below 0.97 once others had filled the balance, to 0.83;
with it one did."""


@dataclass(slots=True)
class TimeBudget:
    """The balance of a process and of the answer under way.

    Attributes:
        balance: saved so far in all answers, the grant and the percent included [plain tokens].
        in_answer: saved so far in this answer, investments left out [plain tokens].
        n_tokens: tokens of this answer so far.
        invested: what reading has cost this answer [plain tokens].
        answer_grant: what drafts may cost this answer before it has said anything [plain tokens].
        answer_share: and of each token that it has said.
    """

    balance: float = GRANT
    in_answer: float = 0.0
    n_tokens: int = 0
    invested: float = 0.0
    answer_grant: float = ANSWER_GRANT
    answer_share: float = ANSWER_SHARE

    def begin(self, *, predicted: bool = False, reads_states: bool = False) -> None:
        """A new answer.

        Args:
            predicted: whether the caller gave a text that it is likely to repeat.
            reads_states: whether a drafter reads the target's hidden states.
        """
        self.answer_grant = PREDICTED_GRANT if predicted else ANSWER_GRANT
        self.answer_share = ANSWER_SHARE - (STATES_SHARE if reads_states else 0.0)
        self.in_answer, self.n_tokens, self.invested = 0.0, 0, 0.0

    def book(self, n_tokens: int, saved: float, invested: float = 0.0) -> None:
        """A round is over.

        Args:
            n_tokens: tokens it emitted.
            saved: time saved against plain decoding [plain tokens]; negative if it took longer.
            invested: of what it took, the reading of a text with a draft model [plain tokens].
        """
        self.n_tokens += n_tokens
        self.in_answer += saved + invested
        self.invested += invested
        self.balance += saved + SHARE * n_tokens

    @property
    def for_drafts(self) -> float:
        """What a draft may cost, were all of it rejected [plain tokens]."""
        return min(self.balance, self.answer_grant + self.answer_share * self.n_tokens + self.in_answer)

    @property
    def for_reading(self) -> float:
        """What a draft model's reading may cost now [plain tokens]."""
        in_all = READING_GRANT + READING_SHARE * self.n_tokens + max(0.0, self.in_answer)
        return min(self.balance, in_all - self.invested)

    def as_dict(self) -> dict[str, Any]:
        """What the next run begins with, as JSON values."""
        return {"saved": round(self.balance, 3)}

    @classmethod
    def restored(cls, stored: Any) -> TimeBudget:
        """A budget for a new process: the grant, and a part of what an earlier one saved; anything else is ignored."""
        saved = stored.get("saved") if isinstance(stored, dict) else None
        if not isinstance(saved, int | float) or not math.isfinite(saved):
            return cls()
        return cls(GRANT + KEPT * max(0.0, saved - GRANT))


_FORMAT = 1  # of the budget; an acceptance table that cannot be read is learned anew


def mode_of(params: SamplingParams) -> str:
    """Acceptance differs by how tokens are chosen: the most probable, a seed's draw (compared), a free draw."""
    if params.greedy:
        return "greedy"
    return "seeded" if params.seed is not None else "sampled"


class AcceptanceStore:
    """The acceptance tables of one pair, and its time budget.

    Args:
        folder: where they are kept; None keeps nothing beyond the process.
        key: the target and the drafters.

    Attributes:
        budget: what drafting may still cost, in all answers of this process.
    """

    def __init__(self, folder: Path | None, key: Key) -> None:
        self._store = JsonStore(folder, _FORMAT) if folder is not None else None
        self._key = dict(key)
        self._tables: dict[str, SourceAcceptance] = {}
        self._stored: dict[str, Any] = (self._store.get(self._key) or {}) if self._store else {}
        self.budget = TimeBudget.restored(self._stored.get("budget"))

    def source(
        self,
        params: SamplingParams,
        source: str,
        *,
        copies: bool,
        sampled: bool = False,
        reads_target: bool = False,
        thinks: bool = False,
        rate: float | None = None,
    ) -> SourceAcceptance:
        """The table of one source, for requests sampled like this one; what an earlier run learned is its start.

        Args:
            params: the request's.
            source: the drafter's name.
            copies: whether it copies from the text, rather than running a model.
            sampled: for guesses drawn from a model's distribution, rather than its most probable tokens.
            reads_target: whether it drafts from what the target computes, as heads do.
            thinks: in thinking blocks, rather than in answers.
            rate: see ``of_a_head``.
        """
        name = f"{mode_of(params)} {source}{' sample' if sampled else ''}{' thinking' if thinks else ''}"
        if name not in self._tables:
            prior = COPIED if copies else GREEDY if params.greedy else SAMPLE if sampled else MOST_PROBABLE
            table = SourceAcceptance(of_a_head(prior, rate) if reads_target else prior)
            table.restore(self._stored.get(name))
            self._tables.setdefault(name, table)  # the other of two threads may have been faster
        return self._tables[name]

    def save(self) -> None:
        """Keep what was learned so far."""
        if self._store is not None and self._tables:
            self._stored |= {name: table.as_dict() for name, table in list(self._tables.items())}
            self._stored["budget"] = self.budget.as_dict()
            self._store.put(self._key, self._stored)
