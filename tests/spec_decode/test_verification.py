"""Verification: which guesses are accepted, what is said instead, and that the law of the output is the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from localspec.sampling.sampling import Distribution, Noise, SamplingParams, distribution
from localspec.spec_decode.rounds import Draft, DraftToken, Verdict
from localspec.spec_decode.verification import STREAM_DRAFT, verify

GREEDY = SamplingParams()


def rows_for(tokens: Sequence[int], n_vocab: int = 10) -> np.ndarray:
    """Logits whose argmaxes are these tokens [n_tokens, n_vocab]."""
    rows = np.zeros((len(tokens), n_vocab), dtype=np.float32)
    rows[np.arange(len(tokens)), list(tokens)] = 5.0
    return rows


def draft_of(*ids: int) -> Draft:
    return Draft([DraftToken(i, "test", 0.5) for i in ids])


class TestGreedy:
    def verdict(self, draft: Draft, rows: np.ndarray, params: SamplingParams = GREEDY) -> Verdict:
        return verify(draft, rows, [0, 1], params, Noise(0))

    def test_all_accepted_then_a_bonus(self) -> None:
        assert self.verdict(draft_of(3, 4, 5), rows_for([3, 4, 5, 6])) == Verdict(3, 6, "bonus")

    def test_an_empty_draft_is_plain_decoding(self) -> None:
        assert self.verdict(draft_of(), rows_for([7])) == Verdict(0, 7, "plain")

    @pytest.mark.parametrize("n", [0, 1, 2])
    def test_rejected_then_recovered(self, n: int) -> None:
        guesses = [3, 4, 5]
        guesses[n] = 9
        assert self.verdict(draft_of(*guesses), rows_for([3, 4, 5, 6])) == Verdict(n, [3, 4, 5][n], "recovered")

    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.01, seed=1)])
    def test_rows_after_a_rejection_are_not_looked_at(self, params: SamplingParams) -> None:
        rows = rows_for([3, 4, 5, 6])
        rows[2:] = np.nan
        assert self.verdict(draft_of(3, 9, 5), rows, params) == Verdict(1, 4, "recovered")

    def test_a_tie_goes_to_the_lower_id_as_in_plain_decoding(self) -> None:
        rows = rows_for([3, 6])
        rows[0, 2] = rows[0, 3]
        for ids in (None, np.tile(np.arange(10), (2, 1))):
            assert verify(draft_of(3), rows, [0, 1], GREEDY, Noise(0), ids) == Verdict(0, 2, "recovered")

    def test_accepted_guesses_are_history_for_penalties(self) -> None:
        rows = rows_for([3, 3, 3])
        rows[:, 4] = 4.0
        params = SamplingParams(presence_penalty=2.0)
        assert self.verdict(draft_of(3, 3), rows, params) == Verdict(1, 4, "recovered")
        assert self.verdict(draft_of(3, 4), rows, params) == Verdict(2, 3, "bonus")  # 3.0, 2.0

    def test_only_recent_tokens_are_penalised(self) -> None:
        rows = rows_for([0])
        rows[0, 4] = 4.0
        for last_n, expected in ((1, 0), (2, 4), (0, 0)):
            params = SamplingParams(presence_penalty=2.0, repeat_last_n=last_n)
            assert self.verdict(draft_of(), rows, params).next_token == expected

    def test_the_verdict_changes_nothing(self) -> None:
        tokens, rows = [0, 1], rows_for([3, 4])
        before = rows.copy()
        verify(draft_of(3), rows, tokens, SamplingParams(presence_penalty=1.0), Noise(0))
        assert tokens == [0, 1]
        assert np.array_equal(rows, before)


class TestSampled:
    """The law of what is emitted with the noise that requests have, by simulation on 6 tokens: N runs, false alarm
    under 1e-4, fixed seeds. ``test_exactness`` has every kind of guess, by enumeration."""

    N = 2_500
    PARAMS = SamplingParams(temperature=0.9, top_p=0.97, presence_penalty=0.4, seed=0)

    def rows(self) -> np.ndarray:
        return np.random.default_rng(5).normal(0, 1.5, (3, 6)).astype(np.float32)

    def q(self) -> Distribution:
        row = np.random.default_rng(6).normal(0, 1.5, 6).astype(np.float32)
        return distribution(row, [], SamplingParams(temperature=1))

    def check_first_two(self, first_two: Counter[tuple[int, int]], rows: np.ndarray) -> None:
        """Joint law of the first two emitted tokens against plain sampling; rare cells are pooled."""
        expected: dict[tuple[int, int], float] = {}
        p0 = distribution(rows[0], [2], self.PARAMS)
        for a, pa in zip(p0.ids.tolist(), p0.probs.tolist(), strict=True):
            p1 = distribution(rows[1], [2, a], self.PARAMS)
            for b, pb in zip(p1.ids.tolist(), p1.probs.tolist(), strict=True):
                expected[a, b] = pa * pb * self.N
        assert set(first_two) <= set(expected)
        common = [pair for pair, n in expected.items() if n >= 10]
        observed = [first_two[pair] for pair in common]
        wanted = [expected[pair] for pair in common]
        observed.append(self.N - sum(observed))
        wanted.append(self.N - sum(wanted))
        assert stats.chisquare(observed, wanted).pvalue > 1e-4

    def emitted(self, draft: Draft, rows: np.ndarray, noise: Noise) -> tuple[int, int]:
        """The first two tokens that a decoder with this target says; row i follows i tokens, whatever they are."""
        verdict = verify(draft, rows[: len(draft) + 1], [2], self.PARAMS, noise)
        out = [*draft.ids[: verdict.n_accepted], verdict.next_token]
        if len(out) == 1:
            out.append(verify(Draft(), rows[1:2], [2, *out], self.PARAMS, noise).next_token)
        return out[0], out[1]

    def test_a_mixed_draft(self) -> None:
        rows, q, counts = self.rows(), self.q(), Counter[tuple[int, int]]()
        for seed in range(self.N):
            noise = Noise(seed)
            sampled = DraftToken(q.sample(noise, 2, STREAM_DRAFT), "model", 0.5, q)
            counts[self.emitted(Draft([DraftToken(1, "ngram", 0.5), sampled]), rows, noise)] += 1
        self.check_first_two(counts, rows)

    def test_a_guess_that_cannot_be_is_never_accepted(self) -> None:
        params = SamplingParams(temperature=1.0, top_k=2)
        for q in (None, Distribution(np.array([0, 5]), np.array([0.01, 0.99]))):
            draft = Draft([DraftToken(5, "test", 0.9, q)])
            rows = np.array([[5, 4, 0, 0, 0, 1], [0] * 6], dtype=np.float32)
            for seed in range(200):
                verdict = verify(draft, rows, [2], params, Noise(seed))
                assert verdict.n_accepted == 0
                assert verdict.next_token in (0, 1)

    def test_with_deterministic_guesses_the_text_depends_on_the_seed_alone(self) -> None:
        rows = self.rows()
        for seed in range(50):
            plain = self.emitted(Draft(), rows, Noise(seed))
            for draft in (draft_of(0), draft_of(3, 1), draft_of(plain[0], 2), draft_of(*plain)):
                assert self.emitted(draft, rows, Noise(seed)) == plain
            assert verify(draft_of(*plain), rows, [2], self.PARAMS, Noise(seed)).n_accepted == 2
