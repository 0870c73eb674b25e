"""Drafts that branch: what is accepted, and that the law is the target's, by enumeration as in ``test_exactness``.

The draft is made as it is asked for: only the candidates on the path that is accepted are drawn, as the others, drawn
with noise of their own, make no difference. So a tree with two or three candidates everywhere, three tokens deep, can
be enumerated. A round is exact if what it emits, continued by plain sampling, has the law of plain sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import localspec.spec_decode.verification as verification
from localspec.sampling.sampling import Distribution, Noise, SamplingParams, distribution
from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, SpecStats, Verdict
from localspec.spec_decode.verification import verify
from tests.spec_decode.test_exactness import CHAINS, DEFECT, EXACT, PROMPT, UNFILTERED, Predictions, Tokens, plain_law
from tests.support.enumeration import Branches, BranchingNoise, branching_samples, explore, largest_difference

DEPTH = 3
FEW = {
    name: replace(params, logit_bias={**params.logit_bias, 0: -math.inf, 1: -math.inf})
    for name, params in CHAINS.items()
}
"""Every sampling chain, on three of the five tokens, so that deep trees have few enough branches."""


def token(id_: int, dist: Distribution | None = None) -> DraftToken:
    return DraftToken(id_, "test", 0.5, dist, 0.5)


def without(law: Distribution, *tokens: int) -> Distribution | None:
    """The law given that none of these come; None where nothing else can."""
    keep = ~np.isin(law.ids, tokens)
    return Distribution(law.ids[keep], law.probs[keep] / law.probs[keep].sum()) if keep.any() else None


KNOWN: dict[tuple[bytes, Tokens, int], tuple[Distribution, SamplingParams]] = {}


def remembered(row: np.ndarray, history: Sequence[int], params: SamplingParams, ids: None = None) -> Distribution:
    key = (row.tobytes(), tuple(history), id(params))
    if key not in KNOWN:
        KNOWN[key] = distribution(row, history, params), params  # which keeps the id from being given to another
    return KNOWN[key][0]


class Place:
    """What a drafter may look at when it makes the candidates for one position: everything but the target's noise."""

    def __init__(self, tokens: Tokens, small: Predictions, params: SamplingParams, noise: BranchingNoise) -> None:
        self.tokens, self.params, self.noise = tokens, params, noise
        self.q = remembered(small[tokens], tokens, params)
        self.flat = remembered(small[tokens], tokens, UNFILTERED)
        self._n = 0

    def sampled(self, law: Distribution) -> DraftToken:
        self._n += 1
        return token(law.sample(self.noise, 100 * len(self.tokens) + self._n, 3), law)  # type: ignore[arg-type]


Candidates = Callable[[Place, int], list[DraftToken]]


def sampled(place: Place, width: int) -> list[DraftToken]:
    found: list[DraftToken] = []
    while len(found) < width and (law := without(place.q, *(each.id for each in found))) is not None:
        found.append(place.sampled(law))
    return found


def fixed(place: Place, width: int) -> list[DraftToken]:
    best = place.q.ids[np.argsort(-place.q.probs, kind="stable")][:width]
    return [token(int(each)) for each in best]


def sampled_then_fixed(place: Place, width: int) -> list[DraftToken]:
    """The runner-up is the most probable of the others: it depends on the sample, and is no sample."""
    first = place.sampled(place.q)
    others = [each for each in fixed(place, width) if each.id != first.id]
    return [first, *others[: width - 1]]


def fixed_then_sampled(place: Place, width: int) -> list[DraftToken]:
    first = token(place.q.argmax())
    law = without(place.q, first.id)
    return [first] if law is None else [first, place.sampled(law)]


def two_drafters(place: Place, width: int) -> list[DraftToken]:
    """Each samples from a law of its own; the second from what the first left."""
    found = [place.sampled(place.flat)]
    law = without(place.q, found[0].id)
    return found if law is None else [*found, place.sampled(law)]


def as_the_first_says(place: Place, width: int) -> list[DraftToken]:
    """How many there are may depend on those that came before."""
    found = sampled(place, 1)
    law = without(place.q, found[0].id)
    return [*found, place.sampled(law)] if found[0].id % 2 and law is not None else found


CANDIDATES: dict[str, Candidates] = {
    "sampled": sampled,
    "fixed": fixed,
    "sampled, then fixed": sampled_then_fixed,
    "fixed, then sampled": fixed_then_sampled,
    "two drafters": two_drafters,
    "as the first says": as_the_first_says,
}


class GrowingDraft(Draft):
    """A tree whose candidates are made when they are first asked for."""

    def __init__(self, grow: Callable[[Tokens], list[DraftToken]], depth: int) -> None:
        super().__init__()
        self.branches = True
        self._grow, self._depth = grow, depth
        self._grown: set[int] = set()

    def children(self, index: int) -> Sequence[int]:
        path = tuple(self[i].id for i in self.path(index))
        if index not in self._grown and len(path) < self._depth:
            self._grown.add(index)
            for each in self._grow(path):
                self.add(each, index)
        return super().children(index)


class Rows:
    """The target's row for each draft token, and for the last settled one."""

    def __init__(self, target: Predictions, draft: Draft) -> None:
        self.target, self.draft = target, draft

    def __getitem__(self, row: int) -> np.ndarray:
        return self.target[(*PROMPT, *(self.draft[i].id for i in self.draft.path(row - 1)))]


@pytest.fixture(autouse=True)
def _branching(monkeypatch: pytest.MonkeyPatch) -> None:
    branching_samples(monkeypatch)
    monkeypatch.setattr(verification, "distribution", remembered)


def round_law(
    candidates: Candidates, width: int, depth: int, params: SamplingParams, target: Predictions, small: Predictions
) -> dict[Tokens, float]:
    """The exact law of what one round emits."""

    def program(branches: Branches) -> Tokens:
        noise = BranchingNoise(branches)
        draft = GrowingDraft(lambda path: candidates(Place((*PROMPT, *path), small, params, noise), width), depth)
        verdict = verify(draft, Rows(target, draft), PROMPT, params, noise)  # type: ignore[arg-type]
        return (*(draft[i].id for i in verdict.accepted), verdict.next_token)

    return explore(program)


def difference(law: dict[Tokens, float], params: SamplingParams, target: Predictions, n: int) -> float:
    """How far what was emitted, continued by plain sampling to n tokens, is from plain sampling."""
    found: dict[Tokens, float] = {}
    for emitted, probability in law.items():
        for tokens, weight in plain_law(params, target, n, emitted).items():
            found[tokens] = found.get(tokens, 0.0) + probability * weight
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    return largest_difference(found, plain_law(params, target, n))


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("chain", FEW)
def test_the_law_of_deep_trees_is_that_of_plain_sampling(
    target: Predictions, small: Predictions, chain: str, width: int
) -> None:
    """Two or three candidates, sampled without replacement, at every place of a tree three tokens deep."""
    law = round_law(sampled, width, DEPTH, FEW[chain], target, small)
    assert difference(law, FEW[chain], target, DEPTH + 1) < EXACT
    assert len(law) > 3 or FEW[chain].greedy or FEW[chain].top_k == 1


@pytest.mark.parametrize("kind", CANDIDATES)
def test_the_law_does_not_depend_on_what_the_candidates_are(target: Predictions, small: Predictions, kind: str) -> None:
    for name, params in CHAINS.items():
        for width in (2, 3):
            law = round_law(CANDIDATES[kind], width, 1, params, target, small)
            assert difference(law, params, target, 2) < EXACT, (name, width)
    law = round_law(CANDIDATES[kind], 2, DEPTH, FEW["everything"], target, small)
    assert difference(law, FEW["everything"], target, DEPTH + 1) < EXACT


def test_more_candidates_are_accepted_more_often(target: Predictions, small: Predictions) -> None:
    """All three of three tokens: one of them is always accepted. Two: more often than one."""
    accepted = []
    for width in (1, 2, 3):
        law = round_law(sampled, width, 1, FEW["hot"], target, small)
        accepted.append(sum(probability for tokens, probability in law.items() if len(tokens) > 1))
    assert accepted[0] < accepted[1] - 0.01
    assert accepted[2] == pytest.approx(1.0, abs=EXACT)


# Seeded defects: what the proof above would say of a verifier or drafter that is wrong.


def dropped(place: Place, width: int) -> list[DraftToken]:
    """The second is drawn from the whole law and says so: one like the first is not sent."""
    first, second = place.sampled(place.q), place.sampled(place.q)
    return [first] if second.id == first.id else [first, second]


def exchanged(place: Place, width: int) -> list[DraftToken]:
    """As before, but one like the first is another token."""
    first, second = place.sampled(place.q), place.sampled(place.q)
    law = without(place.q, first.id)
    assert law is not None
    return [first, token(law.argmax() if second.id == first.id else second.id, law)]


def picky(place: Place, width: int) -> list[DraftToken]:
    """A sample is left out for what it is."""
    first, *rest = sampled(place, width)
    return [first, *(each for each in rest if each.id % 2)]


def in_order(place: Place, width: int) -> list[DraftToken]:
    """The order depends on the tokens."""
    return sorted(sampled(place, width), key=lambda each: each.id)


MINUS, WHOLE = Distribution.minus, dict[int, Distribution]()


def not_renormalised(self: Distribution, other: Distribution) -> Distribution:
    rest = np.maximum(self.probs - other.probs_of(self.ids), 0.0)
    return Distribution(self.ids[rest > 0], rest[rest > 0]) if rest.any() else self


def forgetful(self: Distribution, other: Distribution) -> Distribution:
    """The second candidate is compared with p again, and not with what the first left of it."""
    law = WHOLE.get(id(self), self)
    rest = MINUS(law, other)
    WHOLE[id(rest)] = law
    return rest


@pytest.mark.parametrize(
    ("candidates", "minus"),
    [(dropped, MINUS), (exchanged, MINUS), (picky, MINUS), (in_order, MINUS), (sampled, not_renormalised),
     (sampled, forgetful)],
)  # fmt: skip
def test_a_defect_is_noticed(
    target: Predictions, small: Predictions, monkeypatch: pytest.MonkeyPatch, candidates: Candidates, minus: Any
) -> None:
    monkeypatch.setattr(Distribution, "minus", minus)
    params = CHAINS["temperature 1"]
    assert difference(round_law(candidates, 2, 1, params, target, small), params, target, 2) > DEFECT


# Trees by hand.


def tree() -> Draft:
    """1 -> (2 -> 3, 4 -> 5), 6."""
    return Draft([token(i) for i in (1, 2, 3, 4, 5, 6)], [-1, 0, 1, 0, 3, -1])


def rows_for(*tokens: int) -> np.ndarray:
    rows = np.zeros((len(tokens), 10), dtype=np.float32)
    rows[np.arange(len(tokens)), list(tokens)] = 5.0
    return rows


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ((1, 2, 3, 9, 0, 0, 0), Verdict(3, 9, "bonus", (0, 1, 2))),
        ((1, 4, 0, 0, 5, 8, 0), Verdict(3, 8, "bonus", (0, 3, 4))),
        ((1, 4, 0, 0, 7, 0, 0), Verdict(2, 7, "recovered", (0, 3))),
        ((6, 0, 0, 0, 0, 0, 7), Verdict(1, 7, "bonus", (5,))),
        ((8, 0, 0, 0, 0, 0, 0), Verdict(0, 8, "recovered", ())),
    ],
)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.01, seed=1)])
def test_the_path_that_the_target_takes_is_accepted(
    says: Sequence[int], verdict: Verdict, params: SamplingParams
) -> None:
    assert verify(tree(), rows_for(*says), [0, 1], params, Noise(0)) == verdict


def test_penalties_see_the_path_and_no_other_branch() -> None:
    rows = rows_for(1, 4, 3, 3, 3, 3, 3)  # after 1, 4 the target would say 3, which is in another branch
    params = SamplingParams(presence_penalty=10.0)
    assert verify(tree(), rows, [0], params, Noise(0)) == Verdict(2, 3, "recovered", (0, 3))


@pytest.mark.parametrize(
    ("draft", "depth", "children", "path"),
    [
        (Draft([token(1), token(2), token(3)], [-1, 0, 1]), 3, [[0], [1], [2], []], [0, 1, 2]),
        (tree(), 3, [[0, 5], [1, 3], [2], []], [0, 1, 2]),
    ],
)
def test_the_shape_of_a_draft(draft: Draft, depth: int, children: list[list[int]], path: list[int]) -> None:
    assert draft.branches == (len(draft) > 3)
    assert draft.depth == depth
    assert [list(draft.children(i)) for i in range(-1, 3)] == children
    assert (draft.path(2), draft.path(-1)) == (path, [])
    assert draft.parents == ([-1, 0, 1, 0, 3, -1] if draft.branches else [-1, 0, 1])


@pytest.mark.parametrize(("id_", "parent"), [(9, 6), (9, -2), (6, -1), (2, 0)])
def test_a_draft_token_follows_one_that_is_there_and_is_not_there_twice(id_: int, parent: int) -> None:
    with pytest.raises(ValueError, match="draft token"):
        tree().add(token(id_), parent)


def test_statistics_and_events_of_a_tree() -> None:
    round_ = Round(0, tree(), Verdict(2, 7, "recovered", (0, 3)), [], 1.0, 2.0)
    assert round_.accepted == [True, False, False, True, False, False]
    assert round_.width == 7
    assert round_.tokens_expected == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.25 + 0.125 + 0.5)
    assert [each["parent"] for each in round_.as_event()["draft"]] == [-1, 0, 1, 0, 3, -1]
    round_.emitted = [EmittedToken(1, "accepted"), EmittedToken(4, "accepted"), EmittedToken(7, "recovered")]
    stats = SpecStats()
    stats.add(round_)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 2)
    assert stats.drafted_per_position == [1, 1, 1]
    assert stats.accepted_per_position == [1, 1, 0]
