"""Drafts copied from a person's own files: the corpus drafter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy

from localspec.backends.base import Context
from localspec.spec_decode.drafters.base import Drafter, HitRates, Plan, Proposer
from localspec.spec_decode.drafters.corpus_index import DEPTH, CorpusIndex, Match
from localspec.spec_decode.drafters.ngram import MEMORY, PRIOR_WEIGHT, PRIORS, kind_of_match
from localspec.spec_decode.rounds import DraftToken
from localspec.system.steps import Steps

LOOK_AGAIN_S = 30.0
"""How soon after a look at the files there is another: a look at 10,000 files takes a tenth of a second."""


class CorpusDrafter(Drafter):
    """Copies what follows the longest recent suffix in files that the user named.

    As n-grams do for the conversation (prompt-lookup decoding with a datastore: REST, He et al. 2023), but what one
    looks through is sorted on disk and mapped into memory. Of several places the token that follows at most of them is
    proposed. Each carries an estimate of being right: how often those with such a match were, real or counterfactual.

    Args:
        index: of the files; clones share it.
        source: its name in rounds and statistics.
        name: what ``--draft`` calls it.
    """

    copies = ranked = True

    def __init__(self, index: CorpusIndex, source: str, name: str) -> None:
        self.index = index
        self.source = source
        self._name = name
        self._hits = HitRates(PRIORS, PRIOR_WEIGHT, MEMORY)
        self._last: list[int] = []  # the last settled tokens, as many as are compared
        self._n_settled = 0
        self._match: Match | None = None  # of the settled text; None: not looked for yet

    @property
    def name(self) -> str:
        return self._name

    def clone(self, context: Context | None) -> Drafter:
        clone = CorpusDrafter(self.index, self.source, self._name)
        clone._hits = deepcopy(self._hits)
        return clone

    def idle_work(self) -> Steps[str] | None:
        """The index in step with the files again, where that was not looked at just now."""
        index = self.index
        is_known = index.is_current or index.was_updated
        if index.is_updating or (is_known and time.monotonic() - index.seen < LOOK_AGAIN_S):
            return None
        index.is_updating = True
        return self._update()

    def _update(self) -> Steps[str]:
        n_before = self.index.n_tokens
        yield from self.index.update()
        return "" if n_before or not self.index.n_tokens else f"{self.name}: {self.index.n_tokens:,} tokens are indexed"

    def begin(self, tokens: Sequence[int]) -> None:
        self._last, self._n_settled, self._match = list(tokens[-DEPTH:]), len(tokens), None

    def accept(self, emitted: Sequence[int]) -> None:
        for token in emitted:
            match = self._settled()
            if (found := match.best()) is not None:
                self._hits.learn(_kind(found, match), found[0] == token)
            self._last = [*self._last[1 - DEPTH :], token]
            self._match = match.then(token)
        self._n_settled += len(emitted)

    def confidence(self, tokens: Sequence[int]) -> float:
        match = self._after(tokens)
        found = match.best()
        return 0.0 if found is None else self._hits.rate(_kind(found, match))

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        draft: list[DraftToken] = []
        match = None
        while plan.room > 0 and plan.more(self.source):
            ids = [each.id for each in draft]
            if match is None:
                match = self.index.match([*tokens[-DEPTH:], *ids]) if ids else self._after(tokens)
            found = match.best()
            if found is None or proposer.n_legal([*ids, found[0]]) <= len(ids):
                plan.nothing(self.source)
                break
            confidence = self._hits.rate(_kind(found, match))
            expected = plan.keep(self.source, confidence)
            if expected is None:
                break
            draft.append(DraftToken(found[0], self.source, confidence, None, expected))
            match = match.then(found[0])
        return draft

    def _settled(self) -> Match:
        if self._match is None:
            self._match = self.index.match(self._last)
        return self._match

    def _after(self, tokens: Sequence[int]) -> Match:
        """The match of a text; that of the settled text is at hand."""
        return self._settled() if len(tokens) == self._n_settled else self.index.match(tokens[-DEPTH:])

    def close(self) -> None:
        self._last, self._match, self._n_settled = [], None, 0


def _kind(found: tuple[int, int, int], match: Match) -> tuple[int, int]:
    return kind_of_match(*found[1:], match.length)
