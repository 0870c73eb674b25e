"""Addressed noise behaves as fresh noise, and draws follow their probabilities: statistics where enumeration ends.

``test_exactness`` replaces the primitives of ``Noise`` by what they mean; here the real ones are tested. Seeds are
fixed, so a result never changes from run to run. Every test rejects at a false-alarm rate of 1e-6: had the seed been
drawn at random, one run in a million would fail without a defect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from localspec.sampling.sampling import Distribution, Noise, SamplingParams, distribution
from localspec.spec_decode.rounds import Draft, DraftToken
from localspec.spec_decode.verification import STREAM_DRAFT, verify

FALSE_ALARM = 1e-6

PROBS = np.array([0.4, 0.25, 0.2, 0.1, 0.045, 0.005])
LAW = Distribution(np.array([3, 17, 18, 400, 70_000, 151_935]), PROBS)


def chi_square(counts: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """The p-value of Pearson's statistic: small when the counts do not follow the expectation."""
    return float(stats.chisquare(counts, expected).pvalue)


def independent(left: npt.ArrayLike, right: npt.ArrayLike) -> float:
    """The p-value of the chi-square test of independence of two sequences of draws."""
    table = stats.contingency.crosstab(left, right).count
    return float(stats.chi2_contingency(table).pvalue)


def counts_of(draws: list[int], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    assert set(draws) <= set(ids.tolist())
    return np.array([draws.count(int(token)) for token in ids])


@pytest.mark.parametrize(
    "address",
    [
        lambda i: (Noise(7), i, 0),
        lambda i: (Noise(i), 5, 0),
        lambda i: (Noise(7), 5, i),
        lambda i: (Noise(i * 2**40), i, i % 4),
    ],
    ids=["along positions", "along seeds", "along streams", "along all"],
)
def test_draws_follow_their_probabilities(address: Callable[[int], tuple[Noise, int, int]]) -> None:
    """Chi-square with 5 degrees of freedom over 30 000 draws."""
    draws = []
    for i in range(30_000):
        noise, position, stream = address(i)
        draws.append(LAW.sample(noise, position, stream))
    assert chi_square(counts_of(draws, LAW.ids), PROBS * len(draws)) > FALSE_ALARM


@pytest.mark.parametrize("n", [1, 2, 5, 40, 3000, 20_000])
def test_a_draw_is_the_winner_of_a_race(n: int) -> None:
    """``sample`` is argmin(e / p), e exponential by ``Noise``: laws of n tokens, in single precision too."""
    rng = np.random.default_rng(n)
    for position in range(300 if n < 20_000 else 60):
        ids = np.sort(rng.choice(152_000, n, replace=False))
        probs = rng.dirichlet(np.full(n, rng.choice([0.05, 0.5, 5.0])))
        with np.errstate(divide="ignore"):
            row = np.log(probs).astype(np.float32)
            for law in (Distribution(ids, probs), Distribution.of_row(row, row.max(), 1.0, ids)):
                race = -np.log(Noise(9).uniforms(position, ids, 2)) / law.probs
                assert law.sample(Noise(9), position, 2) == ids[np.argmin(race)]


def test_numbers_are_uniform() -> None:
    """Kolmogorov-Smirnov over 30 000 numbers, along positions, seeds and one token's along positions, and over the
    150 000 of one row."""
    for numbers in (
        [Noise(3).uniform(i, 1) for i in range(30_000)],
        [Noise(i).uniform(9, 1) for i in range(30_000)],
        [Noise(2**64 - 1).uniform(i, 0) for i in range(30_000)],
        [Noise(3).uniforms(i, np.array([77]))[0] for i in range(30_000)],
        Noise(3).uniforms(11, np.arange(150_000)),
    ):
        assert 0 < min(numbers) < max(numbers) < 1
        assert stats.kstest(numbers, "uniform").pvalue > FALSE_ALARM


def test_no_seed_is_a_fresh_one() -> None:
    assert Noise(None).seed != Noise(None).seed
    assert Noise(-1).seed == 2**64 - 1


PAIRS: dict[str, Callable[[int], tuple[tuple[int, int, int], tuple[int, int, int]]]] = {
    # (seed, position, stream) of the two draws that must know nothing of each other
    "neighbouring positions": lambda i: ((1, i, 0), (1, i + 1, 0)),
    "distant positions": lambda i: ((1, i, 0), (1, i + 4096, 0)),
    "target and accept": lambda i: ((1, i, 0), (1, i, 1)),
    "target and residual": lambda i: ((1, i, 0), (1, i, 2)),
    "target and draft": lambda i: ((1, i, 0), (1, i, 3)),
    "accept and residual": lambda i: ((1, i, 1), (1, i, 2)),
    "draft and the next target": lambda i: ((1, i, 3), (1, i + 1, 0)),
    "neighbouring seeds": lambda i: ((i, 9, 0), (i + 1, 9, 0)),
    "seed and position": lambda i: ((i, i, 0), (i + 1, i, 0)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_draws_at_different_addresses_are_independent(pair: str) -> None:
    """Chi-square test of independence over 8 000 pairs of draws."""
    left, right = [], []
    for i in range(8_000):
        for (seed, position, stream), draws in zip(PAIRS[pair](i), (left, right), strict=True):
            draws.append(LAW.sample(Noise(seed), position, stream))
    assert independent(left, right) > FALSE_ALARM


def test_numbers_of_neighbouring_tokens_are_independent() -> None:
    """Eighths of the numbers of 150 000 tokens against those of the tokens beside them, bits of which differ little."""
    ids = np.arange(150_000)
    for distance in (1, 2, 64, 4096):
        left, right = ((8 * Noise(3).uniforms(10, ids + shift)).astype(int) for shift in (0, distance))
        assert independent(left, right) > FALSE_ALARM


def test_a_draw_does_not_depend_on_tokens_that_cannot_be_drawn() -> None:
    """Adding tokens of no probability changes nothing: noise belongs to token ids, not to places in an array."""
    wide = Distribution(np.arange(200), np.zeros(200))
    wide.probs[[3, 17, 18]] = [0.5, 0.3, 0.2]
    narrow = Distribution(np.array([3, 17, 18]), np.array([0.5, 0.3, 0.2]))
    assert [wide.sample(Noise(1), i) for i in range(500)] == [narrow.sample(Noise(1), i) for i in range(500)]


ROW = np.array([1.0, 2.0, 0.5, -1.0, 1.5, 0.0, -0.5, 1.2], dtype=np.float32)
DRAFT_ROW = np.array([0.0, 1.0, 1.5, 1.0, -1.0, 0.5, 0.0, 2.0], dtype=np.float32)


@pytest.mark.parametrize(
    ("params", "claimed"),
    [
        ({}, 1.0),
        ({"temperature": 0.6, "top_k": 5}, 0.6),
        ({"top_p": 0.8, "min_p": 0.1}, 1.0),
        ({}, 2.0),  # the negative control: guesses accepted by a law that they were not drawn from
    ],
)
def test_verified_samples_follow_the_target_and_are_independent(params: dict[str, float], claimed: float) -> None:
    """Accepted and recovered tokens at neighbouring positions of one seed, guesses sampled from another law: chi-square
    of the tokens, and of the independence of neighbours, over 8 000 pairs."""
    sampling = replace(SamplingParams(temperature=1.0), **params)
    p, q = (distribution(row, [0], sampling) for row in (ROW, DRAFT_ROW))
    said = distribution(DRAFT_ROW, [0], replace(sampling, temperature=claimed))
    noise, tokens = Noise(42), list[int]()
    for position in range(1, 8_001):
        guess = DraftToken(q.sample(noise, position, STREAM_DRAFT), "test", 0.5, said)
        verdict = verify(Draft([guess]), np.stack([ROW, ROW]), [0] * position, sampling, noise)
        tokens.append(guess.id if verdict.n_accepted else verdict.next_token)
    assert independent(tokens[:-1], tokens[1:]) > FALSE_ALARM
    follows = chi_square(counts_of(tokens, p.ids), p.probs * len(tokens)) > FALSE_ALARM
    assert follows == (claimed == sampling.temperature)
