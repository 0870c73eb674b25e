"""The law of speculative sampling is the law of plain sampling: shown by enumeration, not by drawing.

A model of five tokens predicts; every continuation of a few tokens has an exact probability under plain sampling, the
product of ``distribution(...)`` along the way. The same is computed for a round of guessing and
``verification.verify``, continued by plain sampling, following every branch of every random choice, for every kind of
guess, in chains and in trees, and every sampling chain. The two must agree to 1e-12. Seeded defects show that the
comparison would notice.

A tree is made as it is asked for: only the candidates on the path that is accepted are drawn, as the others, drawn with
noise of their own, make no difference. So trees three tokens deep have few enough branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import localspec.spec_decode.verification as verification
from localspec.backends import reference
from localspec.backends.base import FloatArray, Forward
from localspec.sampling.sampling import Distribution, SamplingParams, distribution, top_k_ids
from localspec.spec_decode.rounds import Draft, DraftToken
from localspec.spec_decode.verification import verify
from tests.support.enumeration import (
    Branches,
    BranchingNoise,
    NoiseReused,
    branching_samples,
    explore,
    largest_difference,
)

PROMPT = (1, 3, 4)
EXACT = 1e-12
DEFECT = 1e-4
DEPTH = 3

Tokens = tuple[int, ...]


class Predictions:
    """The rows of a micro model, and its states where they are asked for, remembered by prefix."""

    def __init__(self, model: reference.ReferenceModel, hidden: Sequence[str] = ()) -> None:
        self.context = model.new_context(32, hidden=hidden)
        self.known: dict[Tokens, FloatArray] = {}
        self.states: dict[Tokens, dict[str, FloatArray]] = {}

    def __getitem__(self, prefix: Tokens) -> FloatArray:
        if prefix not in self.known:
            kept = self.context.reuse(prefix[:-1])
            forward = self.context.decode(prefix[kept:], "last")
            self.known[prefix] = forward.logits[0]
            self.states[prefix] = {name: rows[-1] for name, rows in forward.hidden.items()}
        return self.known[prefix]


KNOWN: dict[tuple[bytes, Tokens, int], tuple[Distribution, SamplingParams]] = {}


def remembered(row: np.ndarray, history: Sequence[int], params: SamplingParams, ids: Any = None) -> Distribution:
    if ids is not None:
        return distribution(row, history, params, ids)
    key = (row.tobytes(), tuple(history), id(params))
    if key not in KNOWN:
        KNOWN[key] = distribution(row, history, params), params  # which keeps the id from being given to another
    return KNOWN[key][0]


@pytest.fixture(autouse=True)
def _branching(monkeypatch: pytest.MonkeyPatch) -> None:
    branching_samples(monkeypatch)
    monkeypatch.setattr(verification, "distribution", remembered)


SAMPLING = SamplingParams(temperature=1.0)
UNFILTERED = SamplingParams(temperature=1.3)
CHAINS = {
    "temperature 1": SAMPLING,
    "cold": replace(SAMPLING, temperature=0.4),
    "hot": replace(SAMPLING, temperature=1.7),
    "top-k": replace(SAMPLING, top_k=3),
    "top-k of one": replace(SAMPLING, top_k=1),
    "top-p": replace(SAMPLING, top_p=0.7),
    "min-p": replace(SAMPLING, min_p=0.3),
    "repeat penalty": replace(SAMPLING, repeat_penalty=1.6),
    "presence": replace(SAMPLING, presence_penalty=1.0, repeat_last_n=2),
    "frequency": replace(SAMPLING, frequency_penalty=0.7, repeat_penalty=0.8),
    "bias": replace(SAMPLING, logit_bias={3: 1.5, 4: -100.0}),
    "everything": SamplingParams(
        temperature=0.8, top_k=4, top_p=0.9, min_p=0.05, repeat_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={2: 0.7},
    ),
    "greedy": SamplingParams(temperature=0.0),
    "greedy with penalties": SamplingParams(temperature=0.0, repeat_penalty=1.6, frequency_penalty=0.5),
}  # fmt: skip


FEW = {
    name: replace(params, logit_bias={**params.logit_bias, 0: -math.inf, 1: -math.inf})
    for name, params in CHAINS.items()
}
"""Every sampling chain, on three of the five tokens, so that deep trees have few enough branches."""


def token(id_: int, law: Distribution | None = None) -> DraftToken:
    return DraftToken(id_, "test", 0.5, law)


def without(law: Distribution, *tokens: int) -> Distribution | None:
    """The law given that none of these come; None where nothing else can."""
    keep = ~np.isin(law.ids, tokens)
    return Distribution(law.ids[keep], law.probs[keep] / law.probs[keep].sum()) if keep.any() else None


class Place:
    """What a drafter may look at when it guesses one token: everything but the target's randomness."""

    def __init__(
        self, tokens: Tokens, params: SamplingParams, small: Predictions, target: Predictions, noise: BranchingNoise
    ) -> None:
        self.tokens, self.params, self.small, self.target, self.noise = tokens, params, small, target, noise
        self.depth, self.q, self._n = len(tokens) - len(PROMPT), self.law(), 0

    def law(self, predictions: Predictions | None = None, params: SamplingParams | None = None) -> Distribution:
        return remembered((predictions or self.small)[self.tokens], self.tokens, params or self.params)

    def sampled(self, law: Distribution) -> DraftToken:
        self._n += 1
        return token(law.sample(self.noise, 100 * len(self.tokens) + self._n, 3), law)  # type: ignore[arg-type]


Guess = Callable[[Place], DraftToken | None]
Candidates = Callable[[Place, int], list[DraftToken]]


def fixed_or_nothing(g: Place) -> DraftToken | None:
    """A deterministic guess may be dropped by looking at it, even at what the target thinks of it."""
    best = g.q.argmax()
    return token(best) if best % 2 or g.law(g.target).prob(best) > 0.3 else None


def coin(g: Place) -> DraftToken | None:
    """The drafter has randomness of its own for everything else."""
    kind = g.noise.branches.choose([0.2, 0.5, 0.3])
    if kind == 2:
        return g.sampled(g.q)
    return token(3 + g.depth % 2) if kind else None


GUESSES: dict[str, Guess] = {
    "plain": lambda g: None,
    "argmax of the draft": lambda g: token(g.q.argmax()),
    "argmax of the target": lambda g: token(g.law(g.target).argmax()),
    "the least likely token": lambda g: token(int(np.argmin(g.target[g.tokens]))),
    "sampled": lambda g: g.sampled(g.q),
    "sampled from the target's own law": lambda g: g.sampled(g.law(g.target)),
    "sampled with another chain": lambda g: g.sampled(g.law(params=UNFILTERED)),
    "sampled from few": lambda g: g.sampled(Distribution(np.array([2, 4]), np.array([0.9, 0.1]))),
    "sampled from a point": lambda g: g.sampled(Distribution(np.array([3]), np.ones(1))),
    "sampled, then fixed": lambda g: token(g.tokens[-1]) if g.depth else g.sampled(g.q),
    "fixed, then sampled": lambda g: g.sampled(g.q) if g.depth else token(g.q.argmax()),
    # Whether to guess is decided before the draw, from the distribution alone.
    "sampled or nothing": lambda g: g.sampled(g.q) if g.q.probs.max() > 0.35 else None,
    "fixed or nothing": fixed_or_nothing,
    "by coin": coin,
}


def alone(guess: Guess) -> Candidates:
    return lambda place, width: [found] if (found := guess(place)) is not None else []


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


def and_a_sample(first: DraftToken, place: Place) -> list[DraftToken]:
    law = without(place.q, first.id)
    return [first] if law is None else [first, place.sampled(law)]


def as_the_first_says(place: Place, width: int) -> list[DraftToken]:
    """How many there are may depend on those that came before."""
    first = place.sampled(place.q)
    return and_a_sample(first, place) if first.id % 2 else [first]


CANDIDATES: dict[str, Candidates] = {
    "sampled": sampled,
    "fixed": fixed,
    "sampled, then fixed": sampled_then_fixed,
    "fixed, then sampled": lambda place, width: and_a_sample(token(place.q.argmax()), place),
    # Each samples from a law of its own; the second from what the first left.
    "two drafters": lambda place, width: and_a_sample(place.sampled(place.law(params=UNFILTERED)), place),
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


def cut(forward: Forward, n_best: int) -> Forward:
    """The same pass, with the largest logits of each row only, as an engine would that finds them on its device."""
    ids = np.stack([top_k_ids(row, n_best) for row in forward.logits])
    return Forward(np.take_along_axis(forward.logits, ids, 1), forward.hidden, ids)


Pair = tuple[Predictions, Predictions]


@pytest.fixture
def pair(target: Predictions, small: Predictions) -> Pair:
    return target, small


def round_law(
    candidates: Candidates, width: int, depth: int, params: SamplingParams, pair: Pair, n_best: int = 0
) -> dict[Tokens, float]:
    """The exact law of what one round emits; drafts of width 1 are chains.

    ``n_best``: how many of the largest logits of each row of a chain are handed out, with their tokens; 0 is whole
    rows.
    """
    target, small = pair

    def program(branches: Branches) -> Tokens:
        noise = BranchingNoise(branches)

        def grow(path: Tokens) -> list[DraftToken]:
            return candidates(Place((*PROMPT, *path), params, small, target, noise), width)

        draft: Draft = GrowingDraft(grow, depth) if width > 1 else Draft()
        logits: Any = Rows(target, draft)
        ids = None
        if width == 1:
            while len(draft) < depth and (found := grow(tuple(draft.ids))):
                draft.append(found[0])
            logits = np.stack([logits[i] for i in range(len(draft) + 1)])
        if n_best:
            rows = cut(Forward(logits), n_best)
            logits, ids = rows.logits, rows.ids
        verdict = verify(draft, logits, PROMPT, params, noise, ids)  # type: ignore[arg-type]
        return (*(draft[i].id for i in verdict.accepted), verdict.next_token)

    return explore(program)


def plain_law(params: SamplingParams, target: Predictions, n: int, said: Tokens = ()) -> dict[Tokens, float]:
    """The law of plain sampling of n tokens, which begin with what was said, from ``distribution`` alone."""
    if len(said) >= n:
        return {said: 1.0}
    seen = (*PROMPT, *said)
    law = remembered(target[seen], seen, params)
    return {
        tokens: probability * weight
        for token, probability in zip(law.ids.tolist(), law.probs.tolist(), strict=True)
        for tokens, weight in plain_law(params, target, n, (*said, token)).items()
    }


def difference(
    candidates: Candidates, width: int, depth: int, params: SamplingParams, pair: Pair, n_best: int = 0
) -> float:
    """How far what a round emits, continued by plain sampling, is from plain sampling."""
    found: dict[Tokens, float] = {}
    for emitted, probability in round_law(candidates, width, depth, params, pair, n_best).items():
        for tokens, weight in plain_law(params, pair[0], depth + 1, emitted).items():
            found[tokens] = found.get(tokens, 0.0) + probability * weight
    plain = plain_law(params, pair[0], depth + 1)
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert sum(plain.values()) == pytest.approx(1.0, abs=EXACT)
    return largest_difference(found, plain)


@pytest.mark.parametrize("kind", GUESSES)
def test_the_law_of_chains_is_that_of_plain_sampling(pair: Pair, kind: str) -> None:
    for name, params in CHAINS.items():
        for depth in (1, 2):
            assert difference(alone(GUESSES[kind]), 1, depth, params, pair) < EXACT, (name, depth)
    params = replace(SAMPLING, top_k=3, repeat_penalty=1.3)
    assert difference(alone(GUESSES[kind]), 1, DEPTH, params, pair) < EXACT


@pytest.mark.parametrize("kind", CANDIDATES)
def test_the_law_of_trees_is_that_of_plain_sampling(pair: Pair, kind: str) -> None:
    for name, params in CHAINS.items():
        for width in (2, 3):
            assert difference(CANDIDATES[kind], width, 1, params, pair) < EXACT, (name, width)
    assert difference(CANDIDATES[kind], 2, DEPTH, FEW["everything"], pair) < EXACT


@pytest.mark.parametrize(
    ("chain", "width"), [*((chain, 2) for chain in FEW), ("hot", 3), ("everything", 3), ("greedy", 3)]
)
def test_the_law_of_deep_trees_is_that_of_plain_sampling(pair: Pair, chain: str, width: int) -> None:
    """Two or three candidates, sampled without replacement, at every place of a tree three tokens deep."""
    assert difference(sampled, width, DEPTH, FEW[chain], pair) < EXACT


@pytest.mark.parametrize("kind", GUESSES)
def test_the_largest_logits_are_enough(pair: Pair, kind: str) -> None:
    """Of as many as a request needs (``SamplingParams.n_best``), and of one more."""
    for name in ("greedy", "top-k", "top-k of one", "top-k and more"):
        params = CHAINS.get(name, replace(SAMPLING, temperature=0.8, top_k=3, top_p=0.9, min_p=0.05))
        for n_best in (params.n_best, params.n_best + 1):
            assert difference(alone(GUESSES[kind]), 1, 2, params, pair, n_best) < EXACT, (name, n_best)


def test_who_needs_whole_rows(pair: Pair) -> None:
    needs = {name: params.n_best for name, params in CHAINS.items()}
    assert {name: n for name, n in needs.items() if n} == {"greedy": 1, "top-k": 3, "top-k of one": 1}
    assert difference(alone(GUESSES["plain"]), 1, 1, CHAINS["top-k"], pair, n_best=2) > DEFECT


def test_the_model_is_worth_enumerating(target: Predictions, small: Predictions) -> None:
    """No prediction is nearly certain or nearly uniform, it depends on what came before, and the draft differs."""
    for tokens in [(1,), (1, 3), (1, 3, 4)]:
        probs = distribution(target[tokens], tokens, SAMPLING).probs
        assert 0.5 < -(probs * np.log(probs)).sum() < 1.7
    assert np.abs(target[(1, 3, 4)] - target[(1, 2, 4)]).max() > 0.1
    assert np.abs(target[PROMPT] - small[PROMPT]).max() > 0.5


def accepted(candidates: Candidates, width: int, params: SamplingParams, pair: Pair) -> float:
    law = round_law(candidates, width, 1, params, pair)
    return sum(probability for tokens, probability in law.items() if len(tokens) > 1)


def test_guesses_are_accepted_as_often_as_theory_says(pair: Pair) -> None:
    """Sampled guesses: sum(min(p, q)); deterministic ones: p(x). A verifier that accepts less wastes the draft."""
    for params in CHAINS.values():
        p, q = (distribution(each[PROMPT], PROMPT, params) for each in pair)
        overlap = sum(min(p.prob(t), q.prob(t)) for t in range(5))
        for kind, expected in (("sampled", overlap), ("argmax of the draft", p.prob(q.argmax()))):
            assert accepted(alone(GUESSES[kind]), 1, params, pair) == pytest.approx(expected, abs=EXACT)
    one, two, three = (accepted(sampled, width, FEW["hot"], pair) for width in (1, 2, 3))
    assert one < two - 0.01
    assert three == pytest.approx(1.0, abs=EXACT)  # one of all three tokens


# Seeded defects: what the proof above would say of a verifier or drafter that is wrong.


def liar(place: Place, width: int) -> list[DraftToken]:
    return [token(place.sampled(place.law(params=SamplingParams(temperature=3.0))).id, place.q)]


def picky(place: Place, width: int) -> list[DraftToken]:
    """Drops a sample for what it is: why ``Plan.keep`` is asked before the draw."""
    return [each for each in sampled(place, width) if place.q.prob(each.id) > 0.25]


def dropped(place: Place, width: int) -> list[DraftToken]:
    """The second is drawn from the whole law and says so: one like the first is not sent."""
    first, second = place.sampled(place.q), place.sampled(place.q)
    return [first] if second.id == first.id else [first, second]


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


NO_DEFECT = (Distribution, "minus", MINUS)
OFF_BY_ONE = (Rows, "__getitem__", lambda self, row: self.target[(*PROMPT, *self.draft.ids)[: 2 + row]])
BLIND = (verification, "distribution", lambda row, history, *rest: distribution(row, PROMPT, *rest))


@pytest.mark.parametrize(
    ("candidates", "width", "defect"),
    [
        (sampled, 1, (Distribution, "minus", lambda self, other: self)),  # no residual
        (sampled, 2, (Distribution, "minus", not_renormalised)),
        (sampled, 2, (Distribution, "minus", forgetful)),
        (sampled, 1, OFF_BY_ONE),
        (alone(GUESSES["argmax of the target"]), 1, BLIND),  # penalties do not see the draft
        (liar, 1, NO_DEFECT),
        (picky, 1, NO_DEFECT),
        (dropped, 2, NO_DEFECT),
        (in_order, 2, NO_DEFECT),
    ],
)
def test_a_defect_makes_the_law_differ(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, candidates: Candidates, width: int, defect: Any
) -> None:
    monkeypatch.setattr(*defect)
    depth, params = (2, CHAINS["frequency"]) if defect in (OFF_BY_ONE, BLIND) else (1, SAMPLING)
    assert difference(candidates, width, depth, params, pair) > DEFECT


def test_one_random_number_for_two_decisions_is_an_error() -> None:
    def program(branches: Branches) -> int:
        noise = BranchingNoise(branches)
        law = Distribution(np.array([0, 1]), np.array([0.5, 0.5]))
        return law.sample(noise, 0, 0) + law.sample(noise, 0, 0)  # type: ignore[arg-type]

    with pytest.raises(NoiseReused):
        explore(program)
