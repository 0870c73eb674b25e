"""Rows over a trimmed vocabulary: what is proposed is what the whole vocabulary would give with all others banned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab
from localspec.sampling.constraint import constraint_for
from localspec.sampling.sampling import Ids, Noise, Row, SamplingParams, distribution
from localspec.spec_decode.drafters.base import DrafterFailed, Proposer
from tests.conftest import TinyFiles

HISTORY = [5, 9, 9, 30, 31, 9]
SAMPLED = SamplingParams(temperature=0.9)
CHAINS = {
    "greedy": SamplingParams(),
    "greedy, penalties": SamplingParams(repeat_penalty=1.7, frequency_penalty=0.6, logit_bias={30: 4.0, 11: 3.0}),
    "seeded": replace(SAMPLED, seed=3),
    "seeded, top-k": replace(SAMPLED, seed=4, top_k=5),
    "sampled": SAMPLED,
    "sampled, top-p": replace(SAMPLED, top_p=0.8),
    "sampled, min-p": replace(SAMPLED, min_p=0.1),
    "sampled, everything": replace(
        SAMPLED, top_k=12, top_p=0.9, min_p=0.02, repeat_penalty=1.3, presence_penalty=0.5, logit_bias={9: 2.0, 8: 9.0}
    ),
}
GRAMMAR = 'root ::= ("the " | "a " | "1" | "22") [a-z]+'


@pytest.fixture(scope="module")
def vocab(tiny: TinyFiles) -> Vocab:
    with GGUFFile(tiny.pair.target) as file:
        return Vocab.from_gguf(file)


def trimmed(vocab: Vocab, seed: int) -> tuple[Ids, Row, Row]:
    """Ids, their logits, and the same as a row over all tokens."""
    rng = np.random.default_rng(seed)
    ids = np.flatnonzero(rng.random(vocab.n_tokens) < 0.4)
    row = rng.normal(0.0, 2.0, len(ids)).astype(np.float32)
    whole: Row = np.full(vocab.n_tokens, -np.inf, dtype=np.float32)
    whole[ids] = row
    return ids, row, whole


@pytest.mark.parametrize("grammar", [None, GRAMMAR])
@pytest.mark.parametrize("chain", CHAINS)
def test_the_law_is_that_of_the_whole_vocabulary_with_the_others_banned(
    vocab: Vocab, chain: str, grammar: str | None
) -> None:
    params = replace(CHAINS[chain], grammar=grammar)
    n_proposed = 0
    for seed in range(20):
        ids, row, whole = trimmed(vocab, seed)
        proposed = []
        for logits, of in ((row, ids), (whole, None)):
            proposer = Proposer(params, Noise(7), constraint_for(params, vocab), vocab.n_tokens)
            confidence = proposer.confidence(logits, HISTORY, ids=of)
            token, q = proposer.choose(len(HISTORY))
            proposed.append((confidence, token, q))
        (confidence, token, q), (confidence_, token_, q_) = proposed
        assert confidence == pytest.approx(confidence_, rel=1e-6)
        if confidence == 0.0:  # the grammar allows none of these
            continue
        n_proposed += 1
        assert token == token_
        assert token in ids
        assert (q is None) == (q_ is None) == (params.greedy or params.seed is not None)
        if q is not None and q_ is not None:
            assert np.array_equal(q.ids, q_.ids)
            assert q.probs == pytest.approx(q_.probs, rel=1e-9)
    assert n_proposed > 10


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
def test_where_nothing_of_it_may_come_there_is_no_confidence(vocab: Vocab, params: SamplingParams) -> None:
    constrained = replace(params, grammar='root ::= "22"')
    constraint = constraint_for(constrained, vocab)
    assert constraint is not None
    forbidden = np.flatnonzero(~constraint.allowed(vocab.n_tokens))[:50]
    row: Row = np.linspace(0, 1, 50, dtype=np.float32)
    assert Proposer(constrained, Noise(0), constraint).confidence(row, [], ids=forbidden) == 0.0
    banned = replace(params, logit_bias={int(token): -np.inf for token in forbidden})
    assert Proposer(banned, Noise(0)).confidence(row, [], ids=forbidden) == 0.0


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_no_guess_comes_of_a_row_that_is_not_numbers(params: SamplingParams, broken: float) -> None:
    proposer = Proposer(params, Noise(0), n_vocab=50)
    row = np.linspace(-3, 3, 60, dtype=np.float32)
    row[40:] = broken  # of -inf alone that is nothing unusual
    if broken == -np.inf:
        assert proposer.confidence(row, []) > 0
        row[:] = broken
    with pytest.raises(DrafterFailed, match="not numbers"):
        proposer.confidence(row, [])
    row[:50] = 1.0  # what the target has no row for does not matter
    assert proposer.confidence(row, []) > 0


@pytest.mark.parametrize("chain", CHAINS)
def test_a_rival_is_what_would_be_chosen_without_the_first(vocab: Vocab, chain: str) -> None:
    """Greedily the second best; with a seed what the same noise chooses then; of a sample the law without it."""
    params = CHAINS[chain]
    for seed in range(20):
        ids, row, whole = trimmed(vocab, seed)
        proposer, again = (Proposer(params, Noise(params.seed or 7), n_vocab=len(whole)) for _ in range(2))
        proposer.rivals = {}
        proposer.confidence(row, HISTORY, ids=ids)
        first, law = proposer.choose(50)
        rival = proposer.rivals.get(50)
        if rival is None:  # the filters let a single token through
            assert len(distribution(whole, HISTORY, params).ids) == 1
            continue
        banned = whole.copy()
        banned[first] = -np.inf
        if law is None:
            again.confidence(banned, HISTORY)
            chosen = again.choose(50)[0]
            if not (params.top_k or params.top_p < 1 or params.min_p):  # what these let through depends on the first
                assert rival.token == proposer.draw(rival) == chosen
            assert rival.law is None
        else:
            assert rival.law is not None
            assert rival.law.prob(first) == 0.0
            others = law.ids != first
            np.testing.assert_allclose(rival.law.probs_of(law.ids[others]), law.probs[others] / law.probs[others].sum())
            assert rival.confidence == rival.law.probs.max()
            assert proposer.draw(rival) in rival.law.ids
        assert 0 < rival.confidence <= 1


def test_the_confidence_of_a_second_best_is_its_share_of_the_rest() -> None:
    proposer = Proposer(SamplingParams(), Noise(0))
    proposer.rivals = {}
    proposer.confidence(np.log(np.array([0.1, 0.5, 0.1, 0.3], dtype=np.float32)), [])
    assert proposer.choose(9) == (1, None)
    rival = proposer.rivals[9]
    assert (rival.token, rival.law) == (3, None)
    assert rival.confidence == pytest.approx(0.6, rel=1e-5)
