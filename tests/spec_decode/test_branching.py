"""Whole answers with drafts that branch: what is said does not depend on it, and the law is the target's."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from localspec import LLM
from localspec.backends import reference
from localspec.backends.base import Context, Forward
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.drafters.base import Branching, Controller, Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import Draft, DraftToken, Round
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import EXACT, PROMPT, SAMPLING, Predictions, Tokens, plain_law
from tests.spec_decode.test_lossless import N_CTX, Answer, TableContext, World, run
from tests.support.enumeration import largest_difference, law_of_answers

pytestmark = pytest.mark.usefixtures("measured_home")


@dataclass
class Everywhere:
    """Lets a draft branch wherever there is something to say, and remembers how often."""

    room: int
    sampled: bool = True

    def branch(self, draft: Draft, parent: int, source: str, confidence: float) -> float | None:
        if self.room <= 0 or confidence < 0.05:
            return None
        self.room -= 1
        return confidence


class Branchy(Controller):
    """Another shape every round: by what it saw before, or by chance."""

    def __init__(self, rng: random.Random | None = None, length: int = 2) -> None:
        self.rng, self.length, self.mood = rng, length, 1
        self.n_branched = self.n_beside = 0

    def plan(self, room: int, n_past: int, **situation: Any) -> Plan:
        controller = self
        length = self.length if self.rng is None else self.rng.choice([0, 1, 2, 3, 5])

        class Sampling(Plan):
            def samples(self, source: str, confidence: float) -> bool:
                return controller.mood != 0

            def branching(self) -> Any:
                if controller.mood == 2 and controller.rng is None:
                    return None
                return Everywhere(2 if controller.rng is None else max(0, room - 5))

        return Sampling(min(room, length))

    def learn(self, round_: Round) -> None:
        self.mood = sum(round_.draft.ids) % 4
        self.n_branched += round_.draft.branches
        self.n_beside += any(i != at for at, i in enumerate(round_.verdict.accepted))

    def explain(self) -> str:
        return "branchy"


class Forest(World):
    """Every drafter, and drafts that branch."""

    def __init__(self, pair_files: object, rng: random.Random, folder: object) -> None:
        super().__init__(pair_files, rng, folder)  # type: ignore[arg-type]
        self.controllers = [Branchy(rng) for _ in self.decoders]
        for decoder, controller in zip(self.decoders, self.controllers, strict=True):
            decoder.controller = controller

    def groups(self) -> list[list[Drafter]]:
        return [
            [DraftModelDrafter(self.small.new_context(N_CTX))],
            [DraftModelDrafter(self.small.new_context(N_CTX)), NgramDrafter()],
            [self.random, NgramDrafter(), DraftModelDrafter(self.small.new_context(N_CTX))],
        ]


@pytest.fixture
def forest(tiny: TinyFiles, tmp_path: object, request: pytest.FixtureRequest) -> Forest:
    return Forest(tiny.quick, random.Random(request.node.name), tmp_path)


def check_that_it_branched(forest: Forest, n_answers: int) -> None:
    for controller in forest.controllers:
        assert controller.n_branched > n_answers / 5
        assert controller.n_beside > n_answers / 50, "hardly any accepted path left the chain"


def test_greedy_answers_equal_plain_ones(forest: Forest) -> None:
    for _ in range(100):
        forest.compare(SamplingParams())
    check_that_it_branched(forest, 100)


def test_seeded_answers_equal_plain_ones(forest: Forest) -> None:
    for seed in range(120):
        forest.compare(replace(SAMPLING, top_k=forest.rng.choice([0, 5, 20]), seed=seed))
    check_that_it_branched(forest, 120)


def test_what_is_kept_of_the_wrong_branch_is_noticed(forest: Forest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the memory holds a row of a sibling."""
    keep = reference.ReferenceContext._keep

    def wrong(self: reference.ReferenceContext, path: Sequence[int]) -> None:
        assert self._tree is not None
        others = [i for i in range(len(self._tree[0])) if i not in path]
        keep(self, [*path[:-1], others[0]] if others else path)

    def many() -> None:
        for _ in range(100):
            forest.compare(SamplingParams())

    monkeypatch.setattr(reference.ReferenceContext, "_keep", wrong)
    with pytest.raises(AssertionError):
        many()


class BranchingTable(TableContext):
    """A context that looks its rows up, of trees too."""

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        paths: list[Tokens] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else tuple(self.tokens)), token))
        return Forward(np.stack([self.predictions[path] for path in paths]))

    def _keep(self, path: Sequence[int]) -> None:
        pass


class Copier(Drafter):
    """Says the same two tokens always, as n-grams might."""

    info = DrafterInfo("copier", copies=True)

    def __init__(self, *copied: int) -> None:
        self.copied = copied

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        n_drafted = len(tokens) - self.n_settled
        return [
            DraftToken(token, self.info.source, 0.5)
            for token in self.copied
            if n_drafted == 0 and plan.keep(self.info.source, 0.5)
        ]

    def begin(self, tokens: Sequence[int], **situation: Any) -> None:
        self.n_settled = len(tokens)

    def accept(self, emitted: Sequence[int]) -> None:
        self.n_settled += len(emitted)


@pytest.mark.parametrize(("length", "n", "beside_copies"), [(1, 2, False), (2, 3, False), (1, 3, True)])
def test_the_law_of_whole_answers_is_that_of_plain_sampling(
    target: Predictions,
    small: Predictions,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    n: int,
    beside_copies: bool,
) -> None:
    """Real decoder, drafter, proposer and group; samples and most probable tokens, with rivals, beside copies."""
    params = replace(SAMPLING, top_k=3, max_tokens=n, ignore_eos=True)
    branched: list[bool] = []

    def answer() -> list[Round]:
        drafters: list[Drafter] = [DraftModelDrafter(BranchingTable(small)), *[Copier(3, 4)] * beside_copies]
        controller = Branchy(length=length)
        rounds = run(SpeculativeDecoder(BranchingTable(target), drafters, controller), list(PROMPT), params)
        branched.append(controller.n_branched > 0)
        return rounds

    assert largest_difference(plain_law(params, target, n), law_of_answers(monkeypatch, answer)) < EXACT
    assert sum(branched) > len(branched) / 2


def test_an_engine_that_feeds_no_trees_gets_chains(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "can_branch", property(lambda self: False))
    with reference.load(tiny.quick.target) as model, reference.load(tiny.quick.draft) as small:
        drafter = DraftModelDrafter(small.new_context(N_CTX))
        decoder = SpeculativeDecoder(model.new_context(N_CTX), [drafter], Branchy(random.Random(0)))
        rounds = run(decoder, [5, 6, 7], SamplingParams(max_tokens=20))
    assert any(round_.draft for round_ in rounds)
    assert not any(round_.draft.branches for round_ in rounds)
    assert Answer.of(rounds).tokens


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=60), SamplingParams(temperature=1.0, seed=7, max_tokens=60)]
)
def test_through_the_whole_of_it(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> None:
    """The text is the plain one; rounds, events, statistics and logprobs go by the path that was accepted."""
    monkeypatch.setattr(Plan, "branching", lambda self: Branching(4))
    pair = tiny.quick
    with LLM(pair.target, draft=["ngram", pair.draft], draft_length=2, backend="reference", n_ctx=256) as llm:
        plain = llm.generate("la la la", params, speculate=False, logprobs=1)
        rounds = list(llm.rounds("la la la", params, logprobs=1))
    emitted = [token for round_ in rounds for token in round_.emitted]
    assert [token.id for token in emitted] == plain.token_ids
    assert [token.logprobs for token in emitted] == [token.logprobs for token in plain.tokens]
    assert any(round_.draft.branches for round_ in rounds)
    assert any(round_.verdict.path not in (None, tuple(range(round_.verdict.n_accepted))) for round_ in rounds)
    for round_ in rounds:
        event = json.loads(json.dumps(round_.as_event()))
        accepted = [token["text"] for token in event["draft"] if token["accepted"]]
        assert len(event["draft"]) == len(round_.draft_texts)
        assert len(accepted) == round_.verdict.n_accepted
        assert all("parent" in token for token in event["draft"]) == (round_.draft.branches or not event["draft"])


class Watcher(Drafter):
    """Keeps the target's states of what was settled, as heads do."""

    info = DrafterInfo("watcher", taps=("layer:0", "norm"))

    def begin(self, tokens: Sequence[int], **situation: Any) -> None:
        self.kept: dict[str, list[np.ndarray]] = {tap: [] for tap in self.info.taps}

    def process(self, tokens: Sequence[int], forward: Forward) -> None:
        self.seen = dict(forward.hidden)

    def accept(self, emitted: Sequence[int]) -> None:
        for tap, rows in self.seen.items():
            self.kept[tap].extend(rows[: len(emitted)])

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        return []


def test_states_are_those_of_the_accepted_path(tiny: TinyFiles) -> None:
    watcher, controller = Watcher(), Branchy(random.Random(0))
    with reference.load(tiny.quick.target) as model, reference.load(tiny.quick.draft) as small:
        target = model.new_context(N_CTX, hidden=watcher.info.taps)
        drafters = [DraftModelDrafter(small.new_context(N_CTX)), NgramDrafter(), watcher]
        answer = Answer.of(
            run(SpeculativeDecoder(target, drafters, controller), [5, 6, 7], SamplingParams(max_tokens=50))
        )
        assert controller.n_beside > 0
        text = [5, 6, 7, *answer.tokens[:-1]]
        wanted = model.new_context(N_CTX, hidden=watcher.info.taps).decode(text).hidden
    for tap in watcher.info.taps:
        assert np.array_equal(np.array(watcher.kept[tap]), wanted[tap][2:])
