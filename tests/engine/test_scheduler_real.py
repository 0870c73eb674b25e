"""Several requests at a time with real weights: every token is one that the target alone would have said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from tests.conftest import open_backend

MOST_GAP = 0.7
"""Of log-probability under the likeliest token: width moves logits by up to 0.25 at a place;
a wrong row or rollback lies at several."""

PROMPTS = (
    "Name three rivers.",
    "Write a Python function that returns the sum of a list of numbers.",
    "What is a hash table? " + "Be brief and clear. " * 20,
    "Translate to French: good morning.",
    "List the first ten prime numbers.",
)


@pytest.mark.real
@pytest.mark.parametrize("backend", ["ik-llama", "llama-cpp"])
@pytest.mark.parametrize("has_model", [False, True])
def test_each_token_is_the_targets_own(backend: str, has_model: bool, real_model: Callable[[str], Path]) -> None:
    open_backend(backend)
    greedy, model = SamplingParams(max_tokens=40), real_model("qwen2.5-coder-0.5b")
    draft = ["ngram", str(model)] if has_model else "ngram"
    with LLM(model, draft, backend=backend, n_ctx=1024, parallel=3, light_draft=False) as llm:
        prompts = [llm.encode([{"role": "user", "content": text}]) for text in PROMPTS]
        streams = [llm.rounds(prompt, greedy, draft_length=2 if has_model else None) for prompt in prompts]
        replies = [stream.reply for stream in streams]
        if has_model:  # drafted for by itself, by other passes
            assert min(reply.stats["acceptance_rate"] for reply in replies) > 0.8
        for prompt, reply in zip(prompts, replies, strict=True):
            scored = llm.logprobs([*prompt, *reply.token_ids], top=1)[len(prompt) :]
            assert scored
            gaps = [token.top[0][1] - (token.logprob or 0.0) for token in scored]
            assert max(gaps) < MOST_GAP
        batch = llm.inspect().state.batch
        assert batch is not None
        assert batch.n_cells - batch.free_cells <= sum(batch[i].n_past for i in range(3))
