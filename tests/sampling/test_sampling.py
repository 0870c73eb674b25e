"""The sampling chain; of its noise see ``test_randomness``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from localspec.errors import EngineError, UsageError
from localspec.sampling.sampling import (
    Distribution,
    Noise,
    NotNumbers,
    SamplingParams,
    best_and_certainty,
    distribution,
    draft_distribution,
    edit_logits,
    greedy_token,
    top_k_ids,
)

ROWS = hnp.arrays(
    np.float32, st.integers(1, 700), elements=st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 0.5, 1.0, 2.0, 7.25])
)


class FixedNoise(Noise):
    """Noise nobody seeded, whose only number is given."""

    def __init__(self, number: float) -> None:
        super().__init__(None)
        self.number = number

    def uniform(self, position: int, stream: int) -> float:
        return self.number


def row_of(seed: int, n: int = 1000, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, n).astype(np.float32)


def dense_chain(row: np.ndarray, history: list[int], params: SamplingParams) -> np.ndarray:
    """The chain by the book, on whole vectors in float64: probabilities [n_vocab]."""
    logits = row.astype(np.float64)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    recent = history[len(history) - min(len(history), params.repeat_last_n) :]
    for token in set(recent):
        # llama.cpp, llama_sampler_penalties_apply
        if logits[token] <= 0:
            logits[token] *= params.repeat_penalty
        else:
            logits[token] /= params.repeat_penalty
        logits[token] -= recent.count(token) * params.frequency_penalty + params.presence_penalty
    n = len(logits)
    alive = np.ones(n, dtype=bool)
    by_size = sorted(range(n), key=lambda i: (-logits[i], i))
    if params.top_k:
        alive[by_size[params.top_k :]] = False

    def probabilities() -> np.ndarray:
        p = np.where(alive, np.exp((logits - logits.max()) / params.temperature), 0.0)
        return p / p.sum()

    if params.top_p < 1:
        p, total = probabilities(), 0.0
        for i in by_size:
            if total >= params.top_p:
                alive[i] = False
            total += p[i]
    if params.min_p:
        p = probabilities()
        alive &= p >= params.min_p * p.max()
    return probabilities()


def dense(d: Distribution, n: int) -> np.ndarray:
    p = np.zeros(n)
    p[d.ids] = d.probs
    return p


class TestChain:
    @settings(max_examples=150, deadline=None)
    @given(
        st.integers(0, 10**6),
        st.sampled_from([1, 7, 300, 1500]),
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.2, 0.8, 1.0, 3.0]),
                "top_k": st.sampled_from([0, 1, 5, 40, 2000]),
                "top_p": st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
                "min_p": st.sampled_from([0.0, 0.05, 0.5]),
                "repeat_penalty": st.sampled_from([1.0, 2.0, 0.5]),
                "presence_penalty": st.sampled_from([0.0, 1.5, -1.0]),
                "frequency_penalty": st.sampled_from([0.0, 0.75]),
                "repeat_last_n": st.sampled_from([0, 1, 3, 64]),
            }
        ),
    )
    def test_equals_a_dense_implementation(self, seed: int, n: int, options: dict[str, Any]) -> None:
        rng = np.random.default_rng(seed)
        # Sixty-fourths: no penalty is rounded, so nothing hangs on when float32 comes in; and there are ties.
        row, history = np.round(row_of(seed, n) * 64) / 64, rng.integers(0, n, 10).tolist()
        params = SamplingParams(**options, logit_bias={0: 2.0, n - 1: -math.inf} if n > 1 else {})
        before = row.copy()
        d = distribution(row, history, params)
        expected = dense_chain(row, history, params)
        assert np.array_equal(row, before)
        np.testing.assert_allclose(dense(d, n), expected, rtol=1e-9, atol=1e-300)
        assert np.all(np.diff(d.ids) > 0)
        assert np.all(d.probs > 0)

    def test_greedy_is_the_argmax_after_penalties_and_the_lowest_id_of_equals(self) -> None:
        row = np.array([1.0, 3.0, 3.0, 2.9], dtype=np.float32)
        assert greedy_token(row, [], SamplingParams()) == 1
        assert greedy_token(row, [1, 2], SamplingParams(repeat_penalty=2.0)) == 3
        d = distribution(row, [], SamplingParams())
        assert (d.ids.tolist(), d.probs.tolist()) == ([1], [1.0])

    def test_without_penalties_a_row_is_not_copied(self) -> None:
        row = row_of(1)
        assert edit_logits(row, [1, 2], SamplingParams(temperature=1.0, top_k=3)) is row
        assert edit_logits(row, [1, 2], SamplingParams(repeat_penalty=1.5, repeat_last_n=0)) is row

    @pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.5000001, 2), (0.75, 2), (0.76, 3), (1.0, 4), (1e-12, 1)])
    def test_top_p_keeps_the_fewest_that_reach_it(self, top_p: float, kept: int) -> None:
        row = np.log(np.array([0.125, 0.5, 0.125, 0.25])).astype(np.float32)
        row -= row.max()  # powers of two: exact
        d = distribution(row, [], SamplingParams(temperature=1.0, top_p=top_p))
        assert len(d.ids) == kept
        flat = distribution(np.zeros(1000, dtype=np.float32), [], SamplingParams(temperature=1.0, top_p=0.25))
        assert flat.ids.tolist() == list(range(250))

    @pytest.mark.parametrize("temperature", [1e-308, 1e-6, 100.0])
    @pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}])
    def test_extreme_temperatures(self, temperature: float, options: dict[str, Any]) -> None:
        row = row_of(3) * 100
        d = distribution(row, [], SamplingParams(temperature=temperature, **options))
        assert np.all(np.isfinite(d.probs))
        assert abs(d.probs.sum() - 1) < 1e-9
        assert d.argmax() == int(np.argmax(row))
        assert temperature > 1 or d.ids.tolist() == [int(np.argmax(row))]

    @pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0),
                                        SamplingParams(temperature=1.0, top_k=5)])  # fmt: skip
    @pytest.mark.parametrize("broken", [math.nan, math.inf, "all"])
    def test_broken_logits_are_an_error_and_not_a_token(self, params: SamplingParams, broken: Any) -> None:
        row = row_of(1)
        row[slice(None) if broken == "all" else 700] = -math.inf if broken == "all" else broken
        with pytest.raises(EngineError, match="not numbers"):
            distribution(row, [], params)

    @pytest.mark.parametrize(
        "options",
        [{"temperature": -1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 1},
         {"repeat_penalty": 0}, {"repeat_last_n": -1}, {"presence_penalty": math.inf}, {"max_tokens": 0},
         {"logit_bias": {1: math.nan}}, {"logit_bias": {1: math.inf}}, {"stop": [""]}, {"seed": 2**64},
         {"temperature": "1"}, {"temperature": None}, {"top_k": 2.5}, {"max_tokens": "9"}, {"seed": 0.5},
         {"stop": None}, {"logit_bias": {"1": 2.0}}, {"logit_bias": [1]}, {"logit_bias": {1: None}},
         {"presence_penalty": "x"}],
    )  # fmt: skip
    def test_absurd_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=next(iter(options))):
            SamplingParams(**options)


class TestTopK:
    @settings(deadline=None)
    @given(ROWS, st.integers(1, 720))
    def test_as_a_full_sort_with_ties(self, row: np.ndarray, k: int) -> None:
        expected = sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])
        assert top_k_ids(row, k).tolist() == expected

    @pytest.mark.parametrize(("n", "k"), [(100, 5), (6000, 5), (6001, 5), (6000, 5999), (100, 100)])
    def test_no_numbers_are_found(self, n: int, k: int) -> None:
        for at in (0, n // 2, n - 1):
            row = row_of(6, n)
            row[at] = math.nan
            assert at in top_k_ids(row, k)
            with pytest.raises(NotNumbers):
                distribution(row, [], SamplingParams(temperature=1.0, top_k=k))


class TestCertainty:
    @pytest.mark.parametrize("n", [5, 1024, 5000, 5003])
    @pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
    def test_the_most_probable_token_and_about_its_probability(self, n: int, temperature: float) -> None:
        for seed in range(20):
            row = row_of(seed, n)
            row[seed * 7 % n] = row.max() + 2  # beyond the last block too, and among equals below
            row[n - 1 - seed * 11 % n] = row.max() + np.float32(seed % 3)
            probs = np.exp((row - row.max()).astype(np.float64) / (temperature or 1e-30))
            best, certainty = best_and_certainty(row, temperature)
            assert best == int(np.argmax(row))
            assert probs.max() / probs.sum() * (1 - 1e-5) <= certainty <= min(1.0, 8 * probs.max() / probs.sum()) + 1e-5

    @pytest.mark.parametrize("n", [7, 5000])
    def test_no_numbers_and_banned_tokens(self, n: int) -> None:
        row = row_of(3, n)
        row[n // 2] = math.nan
        assert math.isnan(row[best_and_certainty(row)[0]])
        row = np.full(n, -math.inf, dtype=np.float32)
        assert row[best_and_certainty(row)[0]] == -math.inf
        row[n // 3] = -1e30
        assert best_and_certainty(row) == (n // 3, 1.0)


class TestLargeVocabulary:
    """Laws over more tokens than are worked on at a time are in single precision, cut up into blocks."""

    @pytest.mark.parametrize("n", [20_000, 20_099])
    @pytest.mark.parametrize(
        "options",
        [{"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9}, {"temperature": 2.5, "top_p": 0.5, "min_p": 0.01}],
    )
    def test_the_chain_by_the_book(self, n: int, options: dict[str, Any]) -> None:
        row = row_of(2, n)
        row[n - 2], row[n // 3] = 15.0, -math.inf
        law = distribution(row, [], SamplingParams(**options))
        found = np.zeros(n)
        found[law.ids] = law.probs
        np.testing.assert_allclose(found, dense_chain(row, [], SamplingParams(**options)), rtol=2e-5, atol=1e-12)
        assert law.probs.sum() == pytest.approx(1.0, abs=1e-6)
        assert law.top == pytest.approx(found.max())
        assert law.argmax() == n - 2
        assert law.prob(n // 3) == 0.0
        assert law.probs_of(np.array([n // 3, n - 2])).tolist() == [0.0, law.prob(n - 2)]

    @pytest.mark.parametrize("n", [3, 700, 17_000, 17_024])
    def test_every_token_has_its_share_of_the_numbers(self, n: int) -> None:
        """A draw without a seed looks one number up: the numbers that give a token are an interval of its length."""
        row = row_of(4, n, 1.0)
        row[: min(40, n // 3)] += 6.0
        row[n - 1], row[n // 2] = 7.0, -math.inf
        law = distribution(row, [], SamplingParams(temperature=1.0))
        m = 40_000
        drawn = [law.sample(FixedNoise((i + 0.5) / m), 0) for i in range(m)]
        counts = np.bincount(drawn, minlength=n)
        assert np.abs(counts - m * law.probs_of(np.arange(n))).max() < 1.5
        assert law.sample(FixedNoise(1 - 2**-53), 0) in law.ids[law.probs > 0]
        assert law.sample(FixedNoise(2**-53), 0) in law.ids[law.probs > 0]

    @pytest.mark.parametrize("depth", [0.6, 4.0])
    def test_what_a_draft_model_proposes_from(self, depth: float) -> None:
        """The likely tokens in their proportions; all of them where many are likely."""
        row, params = row_of(8, 20_000, 2.0), SamplingParams(temperature=depth, presence_penalty=1.0)
        row[[5, 19_999]] = 9.0, 9.5
        whole, law = distribution(row, [5], params), draft_distribution(row, [5], params)
        likely = whole.ids[whole.probs >= whole.top * math.exp(-8.0)]
        if depth == 4.0:
            assert len(law.ids) == 20_000
        else:
            assert law.ids.tolist() == likely.tolist()
            assert 5 < len(likely) < 2000
        shares = whole.probs_of(law.ids)
        np.testing.assert_allclose(law.probs, shares / shares.sum(), rtol=1e-5)
        trimmed = np.arange(20_000) * 3 + 1
        assert draft_distribution(row, [16], params, trimmed).ids.tolist() == trimmed[law.ids].tolist()

    def test_what_a_rejection_leaves(self) -> None:
        p_row = row_of(1, 20_099)
        q_row = 0.7 * p_row + 0.5 * row_of(2, 20_099)
        params = SamplingParams(temperature=0.7)
        p = distribution(p_row, [], params)
        for q in (distribution(q_row, [], params), draft_distribution(q_row, [], params)):
            rest = np.maximum(p.probs - q.probs_of(p.ids), 0.0)
            assert np.count_nonzero((rest > 0) & (q.probs_of(p.ids) > p.probs / 4)) > 5
            np.testing.assert_allclose(p.minus(q).probs, rest / rest.sum(), rtol=1e-3, atol=1e-9)
        assert p.minus(p) is p
