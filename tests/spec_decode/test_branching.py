"""Whole answers with drafts that branch have the target's law; on engines: ``tests/engine/test_any_drafter.py``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import Forward
from localspec.backends.reference import ReferenceContext
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.drafters.base import Branching, Controller, Plan
from localspec.spec_decode.drafters.corpus import CorpusDrafter
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.rounds import Round
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import EXACT, Predictions, Tokens
from tests.spec_decode.test_lossless import N_CTX, TableContext, corpus_of, law_difference, of_few, run


class Branchy(Controller):
    """Another shape every round: by what it saw before, or by chance."""

    def __init__(self, rng: random.Random | None = None, length: int = 2) -> None:
        self.rng, self.length, self.mood = rng, length, 1
        self.n_beside = 0

    def plan(self, room: int, n_past: int, **situation: Any) -> Plan:
        controller = self
        length = self.length if self.rng is None else self.rng.choice([0, 1, 2, 3, 5])

        class Sampling(Plan):
            def samples(self, source: str, confidence: float) -> bool:
                return controller.mood != 0

            def branching(self) -> Any:
                if controller.mood == 2 and controller.rng is None:
                    return None
                return Branching(2 if controller.rng is None else max(0, room - 5))

        return Sampling(min(room, length))

    def learn(self, round_: Round) -> None:
        self.mood = sum(round_.draft.ids) % 4
        self.n_beside += any(i != at for at, i in enumerate(round_.verdict.accepted))

    def explain(self) -> str:
        return "branchy"


class BranchingTable(TableContext):
    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        paths: list[Tokens] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else tuple(self.tokens)), token))
        return Forward(np.stack([self.predictions[path] for path in paths]))

    def _keep(self, path: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize(("length", "n", "beside_copies"), [(1, 2, False), (2, 3, False), (1, 3, True)])
def test_the_law_of_whole_answers_is_that_of_plain_sampling(
    target: Predictions,
    small: Predictions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    n: int,
    beside_copies: bool,
) -> None:
    """Real decoder, drafter, proposer and group; samples and most probable tokens, with rivals, beside copies."""
    index, answers = corpus_of(tmp_path, [4, 3, 4, 4, 4]), list[list[Round]]()

    def made() -> SpeculativeDecoder:
        copying = [CorpusDrafter(index, "corpus", "corpus:x")] * beside_copies
        drafters = [DraftModelDrafter(BranchingTable(small)), *copying]
        return SpeculativeDecoder(BranchingTable(target), drafters, Branchy(length=length))

    assert law_difference(monkeypatch, target, of_few(n), made, answers.append) < EXACT
    branched = [[round_.draft for round_ in rounds if round_.draft.branches] for rounds in answers]
    assert sum(map(bool, branched)) > len(branched) / 2
    sources = {token.source for drafts in branched for draft in drafts for token in draft}
    assert ("corpus" in sources) == beside_copies


def test_an_engine_that_feeds_no_trees_gets_chains(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ReferenceContext, "_decode_tree")
    with reference.load(tiny.quick.target) as model, reference.load(tiny.quick.draft) as small:
        drafter = DraftModelDrafter(small.new_context(N_CTX))
        decoder = SpeculativeDecoder(model.new_context(N_CTX), [drafter], Branchy())
        rounds = run(decoder, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    assert any(round_.draft for round_ in rounds)
    assert not any(round_.draft.branches for round_ in rounds)
