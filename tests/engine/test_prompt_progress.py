"""How far a long prompt is read is said while it is read; a short one says nothing; reading can be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from localspec import LLM, Round, SamplingParams
from localspec.engine.answer import LONG_PROMPT
from localspec.engine.request import RoundStream
from localspec.spec_decode.rounds import PromptProgress
from tests.conftest import TinyFiles
from tests.support.contexts import some_tokens
from tests.support.waiting import Brake


def some(n: int, seed: int = 0) -> list[int]:
    return some_tokens(n, seed, 280)


SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = some(1000)


def progress_of(stream: RoundStream) -> list[PromptProgress]:
    """All that a stream says of the prompt, which comes before the first round."""
    steps = list(stream.steps())
    said = [step for step in steps if isinstance(step, PromptProgress)]
    assert steps[: len(said)] == said
    assert len(steps) > len(said)
    return said


@pytest.fixture(params=[1, 2])
def llm(request: pytest.FixtureRequest, tiny: TinyFiles) -> Iterator[LLM]:
    with LLM(tiny.quick.target, "ngram", backend="reference", n_ctx=2048, parallel=request.param) as loaded:
        yield loaded


def test_every_piece_of_a_long_prompt_is_told_and_a_short_one_is_not(llm: LLM) -> None:
    said = progress_of(llm.rounds(PROMPT, SHORT))
    assert {(each.total, each.cached) for each in said} == {(len(PROMPT), 0)}
    read = [each.processed for each in said]
    assert read == sorted(set(read))
    assert (read[0], read[-1]) == (0, len(PROMPT))
    assert len(read) > 3
    first, *others = said
    assert (first.seconds_left, first.fraction, said[-1].seconds_left, said[-1].fraction) == (None, 0.0, 0.0, 1.0)
    for each in others:
        assert each.tokens_per_second == each.processed / each.seconds
    # Only what is new counts.
    again, *_ = progress_of(llm.rounds([*PROMPT, *some(LONG_PROMPT + 1, 1)], SHORT))
    assert again.cached == again.processed >= len(PROMPT)
    assert progress_of(llm.rounds([*PROMPT, *some(LONG_PROMPT + 1, 1), 7, 8], SHORT)) == []
    assert progress_of(llm.rounds(some(LONG_PROMPT, 2), SHORT)) == []
    # Those who take rounds see rounds.
    assert all(isinstance(step, Round) for step in llm.rounds(some(900, 3), SHORT))

    async def steps() -> list[Any]:
        async with llm.arounds(some(900, 4), SHORT) as stream:
            return [step async for step in stream.steps()]

    kinds = [type(step) for step in asyncio.run(steps())]
    assert kinds[:2] + kinds[-1:] == [PromptProgress, PromptProgress, Round]


def test_a_prompt_that_is_stopped_is_read_no_further_and_gone_on_with(llm: LLM) -> None:
    with Brake(llm, after=2) as brake:
        stream = llm.rounds(PROMPT, SHORT)
        next(each for each in stream.steps() if isinstance(each, PromptProgress) and each.processed)
        stream.close()
        reply = stream.reply
        assert (reply.finish_reason, reply.token_ids) == ("cancelled", [])
        assert brake.n_passes <= 4
    said = progress_of(again := llm.rounds(PROMPT, SHORT))
    assert 0 < said[0].cached < len(PROMPT) - 1
    with LLM(llm.model_path, None, backend="reference", n_ctx=2048) as other:
        assert again.reply.token_ids == other.generate(PROMPT, SHORT).token_ids


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_draft_model_tells_how_far_it_reads_and_can_be_stopped(tiny: TinyFiles, parallel: int) -> None:
    pair = tiny.quick
    with LLM(pair.target, pair.draft, draft_length=4, backend="reference", n_ctx=2048, parallel=parallel) as llm:
        said = progress_of(llm.rounds(PROMPT, SHORT))
        of_draft = [each for each in said if each.reader == "draft"]
        assert said[-len(of_draft) :] == of_draft  # behind all of the target's
        assert [each.total for each in of_draft] == [len(PROMPT)] * len(of_draft)
        read = [each.processed for each in of_draft]
        assert (len(read), read) == (len(PROMPT) // 256, sorted(set(read)))
        assert str(of_draft[-1]).startswith("draft model · ")
        # What it has read is said no more.
        again = progress_of(llm.rounds([*PROMPT, *some(LONG_PROMPT + 1, 1)], SHORT))
        assert [each.processed for each in again if each.reader == "draft"] in ([], [len(PROMPT) + 256])
        # It stops between two pieces.
        stream = llm.rounds(some(1000, 5), SHORT)
        next(each for each in stream.steps() if isinstance(each, PromptProgress) and each.reader == "draft")
        stream.close()
        assert stream.reply.finish_reason == "cancelled"
        assert llm.generate(PROMPT, SHORT).token_ids == llm.generate(PROMPT, SHORT, speculate=False).token_ids
