"""``LLM`` as an application uses it: any thread, asyncio, cancelling, caching, closing; a real tiny pair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, Round, SamplingParams
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from tests.conftest import TinyFiles, open_backend
from tests.support.waiting import Brake

GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
CHAT = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module", params=["reference", "ik-llama", "llama-cpp"])
def llm(request: pytest.FixtureRequest, tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    open_backend(request.param)
    with LLM(tiny.pair.target, draft=["ngram", tiny.pair.draft], backend=request.param, n_ctx=512) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reference_llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    with LLM(tiny.pair.target, draft=["ngram", tiny.pair.draft], backend="reference", n_ctx=512) as loaded:
        yield loaded


def draft_context(llm: LLM) -> Any:
    return next(d for d in llm.inspect().state.drafters if isinstance(d, DraftModelDrafter)).context


def test_answers_streams_and_rounds_say_the_same_and_the_counts_fit(llm: LLM) -> None:
    reply = llm.chat(CHAT, GREEDY, draft_length=3)
    assert (len(reply.token_ids), reply.finish_reason) == (48, "length")
    assert "".join(llm.stream(CHAT, GREEDY, draft_length=3)) == reply.text == llm.detokenize(reply.token_ids)
    rounds = llm.rounds(CHAT, GREEDY, draft_length=3)
    seen = list(rounds)
    assert "".join(round_.text for round_ in seen) == reply.text == rounds.reply.text
    assert [token.id for round_ in seen for token in round_.emitted] == reply.token_ids
    assert seen[-1].finish_reason == "length"
    for round_ in seen:
        assert len(round_.draft_texts) == len(round_.draft)
        accepted = [token.id for token in round_.emitted[: round_.verdict.n_accepted]]
        assert accepted == round_.draft.ids[: len(accepted)]
    stats = reply.stats
    assert (stats["prompt_tokens"], stats["completion_tokens"]) == (llm.count_tokens(CHAT), 48)
    assert stats["mean_acceptance_length"] == pytest.approx(48 / stats["num_rounds"])
    assert stats["num_draft_tokens"] == sum(counts["num_draft_tokens"] for counts in stats["by_source"].values()) > 0


def test_closing_a_stream_stops_the_engine_and_the_next_call_works(llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY, speculate=False)
    with Brake(llm, after=5) as brake:
        stream = llm.rounds("endless", SamplingParams(max_tokens=400, ignore_eos=True))
        brake.wait()
        stream.close()
        assert stream.reply.finish_reason == "cancelled"
        assert brake.n_passes == 6
    assert 0 < len(stream.reply.token_ids) < 400
    again = llm.generate("hello", GREEDY, speculate=False)
    assert again.token_ids == expected.token_ids


def test_a_full_context_ends_with_length(llm: LLM) -> None:
    reply = llm.generate("a b c d e f g", SamplingParams(ignore_eos=True), draft_length=6)
    assert reply.finish_reason == "length"
    assert len(reply.token_ids) + reply.stats["prompt_tokens"] == 512


def test_asyncio(reference_llm: LLM) -> None:
    expected = reference_llm.chat(CHAT, GREEDY)

    async def main() -> None:
        assert (await reference_llm.achat(CHAT, GREEDY)).token_ids == expected.token_ids
        assert "".join([piece async for piece in reference_llm.astream(CHAT, GREEDY)]) == expected.text
        rounds = [round_ async for round_ in reference_llm.arounds(CHAT, GREEDY)]
        assert all(isinstance(round_, Round) for round_ in rounds)
        assert [token.id for round_ in rounds for token in round_.emitted] == expected.token_ids
        both = await asyncio.gather(reference_llm.achat(CHAT, GREEDY), reference_llm.achat(CHAT, GREEDY))
        assert [reply.token_ids for reply in both] == [expected.token_ids] * 2

        begun = asyncio.Event()

        async def endless() -> None:
            async for _ in reference_llm.astream("endless", SamplingParams(max_tokens=450, ignore_eos=True)):
                begun.set()

        with Brake(reference_llm, after=5) as brake:
            task = asyncio.create_task(endless())
            await begun.wait()
            await asyncio.to_thread(brake.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(reference_llm.run, lambda pair: None)
            assert brake.n_passes == 6
        assert (await reference_llm.achat(CHAT, GREEDY)).token_ids == expected.token_ids

    asyncio.run(main())


def test_a_draft_larger_than_the_target_is_warned_about(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.draft, draft=tiny.pair.target, backend="reference", n_ctx=128) as llm:
        assert any("larger than the target" in line for line in llm.warnings)


def test_nothing_is_drafted_behind_an_end_token(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.target, draft=tiny.pair.target, backend="reference", n_ctx=256) as llm:
        end = llm.generate("the cat", SamplingParams(max_tokens=12, ignore_eos=True)).token_ids[4]
        llm.inspect().target.vocab.eog = frozenset({end})
        rounds = list(llm.rounds("the cat", SamplingParams(max_tokens=40), draft_length=12))
        assert rounds[-1].finish_reason == "stop"
        for round_ in rounds:
            assert end not in round_.draft.ids[:-1]
