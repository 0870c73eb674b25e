"""``LLM.fill``: what stands at a cursor, and what of it stays in memory for the next key stroke."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams, UsageError
from tests.conftest import TinyFiles
from tests.support.waiting import wait_until

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


def test_drafts_change_nothing(llm: LLM) -> None:
    files = {"b.py": "the r in an on"}
    plain = llm.fill(BEFORE, BEHIND, GREEDY, context_files=files, speculate=False)
    drafted = llm.fill(BEFORE, BEHIND, GREEDY, context_files=files, draft_length=4)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats["num_accepted_tokens"] > 0


def test_a_single_line_ends_with_the_line(llm: LLM) -> None:
    line = SamplingParams(max_tokens=40, grammar='root ::= "the an\\nin on\\n"')
    assert llm.fill("x", "y", line).text == "the an\nin on\n"
    reply = llm.fill("x", "y", line, single_line=True)
    assert (reply.text, reply.finish_reason) == ("the an", "stop")


def test_where_nothing_is_said_an_answer_is_short(llm: LLM) -> None:
    assert len(llm.fill("x", "y").token_ids) <= 128
    with pytest.raises(UsageError, match="there is nothing to fill in from"):
        llm.fill("")


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


def test_another_conversation_and_back(llm: LLM) -> None:
    llm.fill(BEFORE, BEHIND, GREEDY)
    llm.generate("an on the in " * 20, GREEDY)
    back = llm.fill(BEFORE + "x", BEHIND, GREEDY)
    assert back.stats["cached_tokens"] > 50


def test_files_are_read_before_anything_is_typed(llm: LLM) -> None:
    llm.generate("an on the in " * 20, GREEDY)
    files = {"b.py": "he re in an on " * 20}
    prompt = llm.fill_prompt("", "", files)
    llm.read_ahead(prompt)
    assert llm.wait_idle(60)
    reply = llm.fill(BEFORE, BEHIND, GREEDY, context_files=files)
    assert reply.stats["cached_tokens"] == prompt.n_before


def test_the_newer_one_need_not_wait_for_the_older(llm: LLM) -> None:
    async def typing() -> None:
        older = asyncio.ensure_future(llm.afill(BEFORE, BEHIND, SamplingParams(max_tokens=500, ignore_eos=True)))
        while not llm.busy:
            await asyncio.sleep(0.001)
        older.cancel()
        newer = await llm.afill(BEFORE + "a", BEHIND, GREEDY)
        assert newer.finish_reason in ("stop", "length")
        with pytest.raises(asyncio.CancelledError):
            await older

    asyncio.run(typing())
    wait_until(lambda: not llm.busy, "it stops")


def test_a_model_that_cannot_says_so(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=256) as llm:
        with pytest.raises(UsageError, match=r"no fill-in-the-middle tokens.*coder model"):
            llm.fill("a", "b")
        with pytest.raises(UsageError, match="params must be"):
            llm.fill("a", "b", {"max_tokens": 3})
