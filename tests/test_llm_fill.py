"""``LLM.fill``: what stands at a cursor, and what of it stays in memory for the next key stroke."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams, UsageError
from tests.conftest import TinyFiles

pytestmark = pytest.mark.usefixtures("measured_home")

BEFORE = "def area(r):\n    return the " * 8
BEHIND = "\n\nprint(area(2))\n" * 8
GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    with LLM(tiny.fim.target, draft=["ngram", tiny.fim.draft], backend="reference", n_ctx=1024) as loaded:
        yield loaded


def test_it_says_what_follows_the_tokens(llm: LLM) -> None:
    marks = "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>"
    tokens = llm.tokenize(marks.format("the b", "an a"), parse_special=True)
    expected = llm.generate(tokens, GREEDY)
    for reply in (llm.fill("the b", "an a", GREEDY), asyncio.run(llm.afill("the b", "an a", GREEDY))):
        assert (reply.token_ids, reply.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert reply.stats["prompt_tokens"] == len(tokens)


def test_a_single_line_ends_with_the_line(llm: LLM) -> None:
    line = SamplingParams(max_tokens=40, grammar='root ::= "the an\\nin on\\n"')
    assert llm.fill("x", "y", line).text == "the an\nin on\n"
    reply = llm.fill("x", "y", line, single_line=True)
    assert (reply.text, reply.finish_reason) == ("the an", "stop")


def test_where_nothing_is_said_an_answer_is_short(llm: LLM) -> None:
    assert len(llm.fill("x", "y").token_ids) <= 128
    with pytest.raises(UsageError, match="there is nothing to fill in from"):
        llm.fill("")
    with pytest.raises(UsageError, match="params must be"):
        llm.fill("a", "b", {"max_tokens": 3})


@pytest.mark.parametrize("draft_length", [0, 4])
def test_the_next_key_stroke_reads_what_is_new(llm: LLM, draft_length: int) -> None:
    first = llm.fill(BEFORE, BEHIND, GREEDY, draft_length=draft_length)
    stored = llm.cache_info()["stored"]
    for typed in ("a", "ar", "are", "area", "area("):
        prompt = llm.fill_prompt(BEFORE + typed, BEHIND, max_tokens=12)
        reply = llm.fill(BEFORE + typed, BEHIND, GREEDY, draft_length=draft_length)
        # All before the cursor, but the word that is being typed.
        assert reply.stats["cached_tokens"] >= prompt.n_before - 6
        assert reply.stats["cached_tokens"] > first.stats["prompt_tokens"] // 3
    assert llm.cache_info()["stored"] == stored  # nothing was copied aside for it
