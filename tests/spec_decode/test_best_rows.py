"""Answers of an engine that hands out the largest logits of rows only, where a request needs no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.reference import ReferenceContext
from tests.conftest import TinyFiles
from tests.support.best_rows import hand_out_best

pytestmark = pytest.mark.usefixtures("measured_home")

PROMPTS = ("one two three one two three", "four five")


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles) -> Iterator[LLM]:
    with LLM(tiny.quick.target, draft=["ngram", tiny.quick.draft], backend="reference", n_ctx=512) as llm:
        yield llm


def answers(llm: LLM, params: SamplingParams, length: int) -> list[list[int]]:
    return [list(llm.generate(prompt, params, draft_length=length).token_ids) for prompt in PROMPTS]


WHOLE = {
    "all": SamplingParams(temperature=1.0, seed=5, max_tokens=8),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=8),
    "penalty": SamplingParams(repeat_penalty=1.2, max_tokens=8),
    "bias": SamplingParams(temperature=1.0, top_k=4, seed=5, logit_bias={7: 1.0}, max_tokens=8),
    "grammar": SamplingParams(grammar='root ::= "one" | "two"', max_tokens=8),
}


@pytest.mark.parametrize("settings", WHOLE)
def test_who_needs_more_is_given_whole_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    n_rows = hand_out_best(monkeypatch, ReferenceContext)
    answers(llm, WHOLE[settings], 2)
    assert not n_rows


def test_log_probabilities_need_whole_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    n_rows = hand_out_best(monkeypatch, ReferenceContext)
    llm.generate("one", SamplingParams(max_tokens=4), speculate=False, logprobs=2)
    assert not n_rows
