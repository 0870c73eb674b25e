"""What was learned of a pair, across runs: how often its draft tokens are accepted, and the time they saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localspec.controllers.acceptance import COPIED, GREEDY, MOST_PROBABLE, SAMPLE, SourceAcceptance, of_a_head
from localspec.controllers.time_budget import TimeBudget
from localspec.sampling.sampling import SamplingParams
from localspec.system.json_store import JsonStore, Key

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
