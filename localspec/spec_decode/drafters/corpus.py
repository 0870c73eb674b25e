"""Drafts copied from a person's own files: the corpus drafter."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from localspec.backends.base import Context
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo
from localspec.spec_decode.drafters.copying import CopyingDrafter
from localspec.spec_decode.drafters.corpus_index import CorpusIndex, Match


class CorpusDrafter(CopyingDrafter[Match]):
    """Copies from files that the user named (prompt-lookup decoding with a datastore: REST, He et al. 2023).

    As n-grams do for the conversation, but what one looks through is sorted on disk and mapped into memory. Of several
    places the token that follows at most of them is proposed.

    Args:
        index: of the files; clones share it.
        source, name: see ``DrafterInfo``.
    """

    def __init__(self, index: CorpusIndex, source: str, name: str) -> None:
        super().__init__(DrafterInfo(source, name, copies=True))
        self.index = self._texts = index
        self._settled = index.match([])
        self._n_settled = 0

    def clone(self, context: Context | None) -> Drafter:
        clone = CorpusDrafter(self.index, self.info.source, self.info.name)
        clone._hits = deepcopy(self._hits)
        return clone

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._settled, self._n_settled = self.index.match(tokens), len(tokens)

    def accept(self, emitted: Sequence[int]) -> None:
        for token in emitted:
            self._learn(self._settled, token)
            self._settled = self.index.step(self._settled, token)
        self._n_settled += len(emitted)

    def _place(self, tokens: Sequence[int]) -> Match:
        return self._settled if len(tokens) == self._n_settled else self.index.match(tokens)
