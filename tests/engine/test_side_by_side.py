"""What belongs to one answer stays its own while others are under way: why it was drafted so, and its conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from tests.conftest import TinyFiles
from tests.support.waiting import Brake

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    with LLM(tiny.quick.target, "ngram", backend="reference", n_ctx=192, parallel=2, idle=False) as loaded:
        yield loaded


def test_an_explanation_is_of_the_answer_that_it_comes_with(llm: LLM) -> None:
    off = "Guessing is off."
    with Brake(llm, after=0) as brake:
        first = llm.rounds("la la lo la la lo", SHORT)
        second = llm.rounds("lo", LONG, drafters=[])  # begins last, and ends last
        brake.release()
        assert off not in first.reply.explanation
        assert off in second.reply.explanation


def test_the_conversation_last_worked_on_is_that_of_the_answer_that_ended_last(llm: LLM) -> None:
    short, long = llm.tokenize("la la lo la la lo"), llm.tokenize("lo la lo")
    with Brake(llm, after=0) as brake:
        first = llm.rounds(long, LONG)
        second = llm.rounds(short, SHORT, keep_tokens=3)
        brake.release()
        assert second.reply.finish_reason == first.reply.finish_reason == "length"
        said = first.reply.token_ids
    assert llm.run(lambda pair: list(pair.conversation)) == [*long, *said]
