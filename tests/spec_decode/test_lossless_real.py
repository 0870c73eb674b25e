"""Losslessness on real engines, where the width of a pass changes the arithmetic.

Greedy: every emitted token is fed again, one token a pass, and must be within the noise of the argmax. The noise is
measured here, on the same engine and model, as the largest change of (best logit - logit of another candidate) between
passes of width 1 and 8. A wrong rollback or an off-by-one row is tens of times larger.

Sampled: verification draws from the target's own distribution, tested by chi-square with a stated false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from localspec import LLM, SamplingParams
from localspec.sampling.sampling import Noise, distribution
from localspec.spec_decode.drafters.base import Proposer
from localspec.spec_decode.rounds import Draft, DraftToken
from localspec.spec_decode.verification import verify
from tests.conftest import open_backend
from tests.support.replaying import margins, rows_at_width, width_noise

pytestmark = pytest.mark.real

PROMPTS = [
    "Write a Python function that merges two sorted lists.",
    "Explain in three sentences why the sky is blue.",
    "Repeat this line five times: the quick brown fox jumps over the lazy dog.",
]


@pytest.fixture(scope="module", params=["ik-llama", "llama-cpp"])
def llm(request: pytest.FixtureRequest, real_model: Callable[[str], Path]) -> Iterator[LLM]:
    open_backend(request.param)
    target, draft = real_model("qwen2.5-coder-1.5b"), real_model("qwen2.5-coder-0.5b")
    # Tests take contexts of the models that are loaded; in idle time a draft may be replaced by its lighter copy.
    with LLM(target, draft=["ngram", draft], backend=request.param, n_ctx=1024, idle=False) as loaded:
        yield loaded


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers_hold_when_replayed_at_width_one(llm: LLM, prompt: str) -> None:
    """At a fixed draft length and with the controller; both say the same but for ties, and then one replay does."""
    params, messages = SamplingParams(max_tokens=64), [{"role": "user", "content": prompt}]
    answers = {tuple(llm.chat(messages, params, draft_length=length).token_ids) for length in (7, "auto")}
    tokens = llm.encode(messages)
    for answer in map(list, answers):
        single = rows_at_width(1, llm, tokens, answer)
        off = margins(single, answer)
        assert off.max() <= 2 * width_noise(llm, tokens, answer, single), (
            f"token {off.argmax()} is {off.max():.2f} from the argmax"
        )
        assert (off == 0).mean() >= 0.9


def test_a_wrong_rollback_would_be_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a rejected token's row in place of the last settled one's, and the replay finds it."""
    kind = type(llm.inspect().context)
    original = kind.truncate

    def sloppy(self: Any, n: int) -> None:
        if self is llm.inspect().context and 0 < n < self.n_past:
            right, stale = self.tokens[n - 1], self.tokens[n]
            original(self, n - 1)
            self._decode([stale], "none")
            self.tokens.append(right)
        else:
            original(self, n)

    messages = [{"role": "user", "content": PROMPTS[1]}]
    tokens = llm.encode(messages)
    monkeypatch.setattr(kind, "truncate", sloppy)
    answer = llm.chat(messages, SamplingParams(max_tokens=64, ignore_eos=True), draft_length=7).token_ids
    monkeypatch.undo()
    single = rows_at_width(1, llm, tokens, answer)
    assert margins(single, answer).max() > 2 * width_noise(llm, tokens, answer, single)
    llm.inspect().context.truncate(0)


@pytest.mark.parametrize("sampled", [True, False])
def test_the_law_of_verification_on_real_distributions(llm: LLM, sampled: bool) -> None:
    """Chi-square of 20,000 draws at one real position: statistic over tokens with expected count 5 or more (the rest
    pooled), false-alarm rate 1e-4 for each of the two rules, seeds fixed."""
    params, n = SamplingParams(temperature=0.9, top_k=40), 20_000
    tokens = llm.tokenize("The best thing about a rainy day is", add_special=True)
    rows = []
    for model in (llm.inspect().target, llm.inspect().state.models[0].model):
        with model.new_context(64) as context:
            rows.append(context.decode(tokens, "last").logits[0].copy())
    p, q = (distribution(row, tokens, params) for row in rows)
    first: list[int] = []
    for seed in range(n):
        noise = Noise(seed * 7919 + 13)
        proposer = Proposer(params, noise)
        proposer.confidence(rows[1], tokens)
        token, law = proposer.choose(len(tokens)) if sampled else (q.argmax(), None)
        verdict = verify(Draft([DraftToken(token, "model", 0.5, law)]), np.stack([rows[0]] * 2), tokens, params, noise)
        first.append(token if verdict.n_accepted else verdict.next_token)
    assert set(first) <= set(p.ids.tolist())
    common = p.probs * n >= 5
    expected = [*p.probs[common] * n, p.probs[~common].sum() * n]
    observed = [*(first.count(int(i)) for i in p.ids[common]), sum(first.count(int(i)) for i in p.ids[~common])]
    m = len(expected) - (expected[-1] == 0)
    assert stats.chisquare(observed[:m], expected[:m]).pvalue > 1e-4
