"""The law of speculative sampling is the law of plain sampling: shown by enumeration, not by drawing.

A model of five tokens predicts; every continuation of two or three tokens has an exact probability under plain
sampling, the product of ``distribution(...)`` along the way. The same is computed for rounds of guessing and
``verification.verify``, following every branch of every random choice, for every kind of guess and every sampling
chain. The two must agree to 1e-12. Seeded defects show that the comparison would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import FloatArray, Forward
from localspec.sampling.sampling import Distribution, SamplingParams, distribution
from localspec.spec_decode.rounds import Draft, DraftToken
from localspec.spec_decode.verification import verify
from tests.support import best_rows
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

Tokens = tuple[int, ...]


class Predictions:
    """The rows of a micro model, remembered by prefix."""

    def __init__(self, model: reference.ReferenceModel) -> None:
        self.context = model.new_context(32)
        self.known: dict[Tokens, FloatArray] = {}
        self.n_vocab = model.n_vocab

    def __getitem__(self, prefix: Tokens) -> FloatArray:
        if prefix not in self.known:
            kept = self.context.reuse(prefix[:-1])
            self.known[prefix] = self.context.decode(prefix[kept:], "last").logits[0]
        return self.known[prefix]


SAMPLING = SamplingParams(temperature=1.0)


@pytest.fixture(autouse=True)
def _branching(monkeypatch: pytest.MonkeyPatch) -> None:
    branching_samples(monkeypatch)


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


class Guesser:
    """What a drafter may look at when it guesses one token: everything but the target's randomness."""

    def __init__(
        self, tokens: Tokens, params: SamplingParams, small: Predictions, target: Predictions, noise: BranchingNoise
    ) -> None:
        self.tokens, self.params, self.small, self.target, self.noise = tokens, params, small, target, noise

    def law(self, predictions: Predictions | None = None, params: SamplingParams | None = None) -> Distribution:
        return distribution((predictions or self.small)[self.tokens], self.tokens, params or self.params)

    def sampled(self, law: Distribution) -> DraftToken:
        return DraftToken(law.sample(self.noise, len(self.tokens), 3), "test", 0.5, law)  # type: ignore[arg-type]

    def fixed(self, token: int) -> DraftToken:
        return DraftToken(token, "test", 0.5)


Guess = Callable[[Guesser, int], DraftToken | None]


def sampled_or_nothing(g: Guesser, i: int) -> DraftToken | None:
    """Whether to guess is decided before the draw, from the distribution alone."""
    return g.sampled(g.law()) if g.law().probs.max() > 0.35 else None


def fixed_or_nothing(g: Guesser, i: int) -> DraftToken | None:
    """A deterministic guess may be dropped by looking at it, even at what the target thinks of it."""
    token = g.law().argmax()
    return g.fixed(token) if token % 2 or g.law(g.target).prob(token) > 0.3 else None


def coin(g: Guesser, i: int) -> DraftToken | None:
    """The drafter has randomness of its own for everything else."""
    kind = g.noise.branches.choose([0.2, 0.5, 0.3])
    if kind == 2:
        return g.sampled(g.law())
    return g.fixed(3 + i % 2) if kind else None


UNFILTERED = SamplingParams(temperature=1.3)

GUESSES: dict[str, Guess] = {
    "plain": lambda g, i: None,
    "argmax of the draft": lambda g, i: g.fixed(g.law().argmax()),
    "argmax of the target": lambda g, i: g.fixed(g.law(g.target).argmax()),
    "the least likely token": lambda g, i: g.fixed(int(np.argmin(g.target[g.tokens]))),
    "the same token always": lambda g, i: g.fixed(4),
    "a copy of an earlier token": lambda g, i: g.fixed(g.tokens[-2]),
    "sampled": lambda g, i: g.sampled(g.law()),
    "sampled from the target's own law": lambda g, i: g.sampled(g.law(g.target)),
    "sampled with another chain": lambda g, i: g.sampled(g.law(params=UNFILTERED)),
    "sampled from few": lambda g, i: g.sampled(Distribution(np.array([2, 4]), np.array([0.9, 0.1]))),
    "sampled from a point": lambda g, i: g.sampled(Distribution(np.array([3]), np.ones(1))),
    "sampled, then fixed": lambda g, i: g.fixed(g.tokens[-1]) if i else g.sampled(g.law()),
    "fixed, then sampled": lambda g, i: g.sampled(g.law()) if i else g.fixed(g.law().argmax()),
    "sampled or nothing": sampled_or_nothing,
    "fixed or nothing": fixed_or_nothing,
    "by coin": coin,
}


def rounds_law(
    guess: Guess,
    params: SamplingParams,
    target: Predictions,
    small: Predictions,
    n_draft: int,
    n: int = 2,
    n_best: int = 0,
) -> dict[Tokens, float]:
    """The exact law of the first n tokens that rounds of guessing and verifying emit.

    ``n_best``: how many of the largest logits of each row are handed out, with their tokens; 0 is whole rows.
    """
    round_laws: dict[Tokens, dict[Tokens, float]] = {}

    def one_round(tokens: Tokens) -> dict[Tokens, float]:
        def program(branches: Branches) -> Tokens:
            noise = BranchingNoise(branches)
            draft, seen = Draft(), tokens
            while len(draft) < n_draft:
                token = guess(Guesser(seen, params, small, target, noise), len(draft))
                if token is None:
                    break
                draft.append(token)
                seen = (*seen, token.id)
            logits = np.stack([target[seen[: len(tokens) + i]] for i in range(len(draft) + 1)])
            rows = best_rows.cut(Forward(logits), n_best) if n_best else Forward(logits)
            verdict = verify(draft, rows.logits, tokens, params, noise, rows.ids)  # type: ignore[arg-type]
            return (*draft.ids[: verdict.n_accepted], verdict.next_token)

        if tokens not in round_laws:
            round_laws[tokens] = explore(program)
        return round_laws[tokens]

    def continuations(tokens: Tokens, n: int) -> dict[Tokens, float]:
        law: dict[Tokens, float] = {}
        for emitted, probability in one_round(tokens).items():
            # A round may emit more than is wanted: the budget cuts it.
            rest = continuations(tokens + emitted, n - len(emitted)) if len(emitted) < n else {(): 1.0}
            for tail, weight in rest.items():
                whole = (emitted + tail)[:n]
                law[whole] = law.get(whole, 0.0) + probability * weight
        return law

    return continuations(PROMPT, n)


def plain_law(params: SamplingParams, target: Predictions, n: int = 2, said: Tokens = ()) -> dict[Tokens, float]:
    """The law of plain sampling of n tokens, which begin with what was said, from ``distribution`` alone."""
    if len(said) >= n:
        return {said: 1.0}
    seen = (*PROMPT, *said)
    law = distribution(target[seen], seen, params)
    return {
        tokens: probability * weight
        for token, probability in zip(law.ids.tolist(), law.probs.tolist(), strict=True)
        for tokens, weight in plain_law(params, target, n, (*said, token)).items()
    }


@pytest.mark.parametrize("kind", GUESSES)
def test_the_law_is_that_of_plain_sampling(target: Predictions, small: Predictions, kind: str) -> None:
    """The first two tokens, for every chain; drafts of one token, and of two, which may emit more than the budget."""
    for name, params in CHAINS.items():
        plain = plain_law(params, target)
        assert sum(plain.values()) == pytest.approx(1.0, abs=EXACT)
        for n_draft in (1, 2):
            difference = largest_difference(plain, rounds_law(GUESSES[kind], params, target, small, n_draft))
            assert difference < EXACT, (name, n_draft)


@pytest.mark.parametrize("kind", GUESSES)
def test_the_largest_logits_are_enough(target: Predictions, small: Predictions, kind: str) -> None:
    """Of as many as a request needs (``SamplingParams.n_best``), and of one more."""
    for name in ("greedy", "top-k", "top-k of one", "top-k and more"):
        params = CHAINS.get(name, replace(SAMPLING, temperature=0.8, top_k=3, top_p=0.9, min_p=0.05))
        plain = plain_law(params, target)
        for n_best in (params.n_best, params.n_best + 1):
            law = rounds_law(GUESSES[kind], params, target, small, 2, n_best=n_best)
            assert largest_difference(plain, law) < EXACT, (name, n_best)


def test_fewer_are_not(target: Predictions, small: Predictions) -> None:
    law = rounds_law(GUESSES["plain"], CHAINS["top-k"], target, small, 0, n_best=2)
    assert largest_difference(plain_law(CHAINS["top-k"], target), law) > DEFECT


def test_who_needs_whole_rows() -> None:
    needs = {name: params.n_best for name, params in CHAINS.items()}
    assert {name: n for name, n in needs.items() if n} == {"greedy": 1, "top-k": 3, "top-k of one": 1}


@pytest.mark.parametrize("kind", ["sampled", "sampled, then fixed", "fixed, then sampled", "fixed or nothing"])
def test_the_law_of_three_tokens_and_longer_drafts(target: Predictions, small: Predictions, kind: str) -> None:
    params = replace(SAMPLING, top_k=3, repeat_penalty=1.3)
    plain = plain_law(params, target, 3)
    assert largest_difference(plain, rounds_law(GUESSES[kind], params, target, small, 3, 3)) < EXACT


def test_the_model_is_worth_enumerating(target: Predictions, small: Predictions) -> None:
    """No prediction is nearly certain or nearly uniform, it depends on what came before, and the draft differs."""
    rows = {tokens: distribution(target[tokens], tokens, SAMPLING).probs for tokens in [(1,), (1, 3), (1, 3, 4)]}
    for probs in rows.values():
        assert 0.5 < -(probs * np.log(probs)).sum() < 1.7
    assert np.abs(target[(1, 3, 4)] - target[(1, 2, 4)]).max() > 0.1
    assert np.abs(target[PROMPT] - small[PROMPT]).max() > 0.5


def test_guesses_are_accepted_as_often_as_theory_says(target: Predictions, small: Predictions) -> None:
    """Sampled guesses: sum(min(p, q)); deterministic ones: p(x). A verifier that accepts less wastes the draft."""
    for params in CHAINS.values():
        p = distribution(target[PROMPT], PROMPT, params)
        q = distribution(small[PROMPT], PROMPT, params)
        x = q.argmax()
        for law, expected in ((q, sum(min(p.prob(t), q.prob(t)) for t in range(5))), (None, p.prob(x))):

            def program(branches: Branches, law: Distribution | None = law) -> bool:
                noise = BranchingNoise(branches)
                guess = law.sample(noise, 3, 3) if law is not None else x  # type: ignore[arg-type]  # noqa: B023
                logits = np.stack([target[PROMPT], target[(*PROMPT, guess)]])
                draft = Draft([DraftToken(guess, "test", 0.5, law)])
                return verify(draft, logits, PROMPT, params, noise).n_accepted == 1  # type: ignore[arg-type]  # noqa: B023

            assert explore(program).get(True, 0.0) == pytest.approx(expected, abs=EXACT)


# Seeded defects: what the proof above would say of a verifier or drafter that is wrong.

SAMPLED = GUESSES["sampled"]


def differs(guess: Guess, target: Predictions, small: Predictions, params: SamplingParams | None = None) -> bool:
    params = params or SAMPLING
    return largest_difference(plain_law(params, target), rounds_law(guess, params, target, small, 2)) > DEFECT


MINUS = Distribution.minus


def liar(g: Guesser, i: int) -> DraftToken:
    honest = g.sampled(g.law(params=SamplingParams(temperature=3.0)))
    return DraftToken(honest.id, "test", 0.5, g.law())


def picky(g: Guesser, i: int) -> DraftToken | None:
    """Drops a sample for what it is: why ``Plan.keep`` is asked before the draw."""
    token = g.sampled(g.law())
    return token if g.law().prob(token.id) > 0.25 else None


@pytest.mark.parametrize(
    ("guess", "minus"),
    [
        (SAMPLED, lambda self, other: self),  # no residual
        (SAMPLED, lambda self, other: MINUS(other, self)),  # it is reversed
        (liar, MINUS),
        (picky, MINUS),
    ],
)
def test_a_defect_makes_the_law_differ(
    target: Predictions, small: Predictions, monkeypatch: pytest.MonkeyPatch, guess: Guess, minus: Any
) -> None:
    monkeypatch.setattr(Distribution, "minus", minus)
    assert differs(guess, target, small)


def test_rows_off_by_one_make_the_law_differ(target: Predictions, small: Predictions) -> None:
    class Shifted(Predictions):
        def __init__(self) -> None:
            self.n_vocab = target.n_vocab

        def __getitem__(self, prefix: Tokens) -> FloatArray:
            return target[prefix[:-1]] if len(prefix) > len(PROMPT) else target[prefix]

    difference = largest_difference(plain_law(SAMPLING, target), rounds_law(SAMPLED, SAMPLING, Shifted(), small, 2))
    assert difference > DEFECT


def test_penalties_blind_to_the_draft_make_the_law_differ(
    target: Predictions, small: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    import localspec.spec_decode.verification as verification

    monkeypatch.setattr(verification, "distribution", lambda row, history, *rest: distribution(row, PROMPT, *rest))
    assert differs(GUESSES["argmax of the target"], target, small, CHAINS["frequency"])


def test_one_random_number_for_two_decisions_is_an_error() -> None:
    def program(branches: Branches) -> int:
        noise = BranchingNoise(branches)
        law = Distribution(np.array([0, 1]), np.array([0.5, 0.5]))
        return law.sample(noise, 0, 0) + law.sample(noise, 0, 0)  # type: ignore[arg-type]

    with pytest.raises(NoiseReused):
        explore(program)


def test_enumeration_itself() -> None:
    """Two dice and a biased coin, by hand."""

    def program(branches: Branches) -> int:
        if branches.choose([0.25, 0.75]) == 0:
            return 0
        return branches.choose([1, 1, 0, 1, 1, 1]) + branches.choose([2, 1])

    law = explore(program)
    assert law[0] == pytest.approx(0.25 + 0.75 / 5 * 2 / 3, abs=EXACT)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert set(law) == {0, 1, 2, 3, 4, 5, 6}
