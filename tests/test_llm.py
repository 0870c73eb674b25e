"""``LLM`` as an application uses it: any thread, asyncio, cancelling, caching, closing; a real tiny pair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, ModelFileError, Round, SamplingParams
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


def test_answers_and_counts(llm: LLM) -> None:
    reply = llm.chat(CHAT, GREEDY, draft_length=3)
    stats = reply.stats
    assert len(reply.token_ids) == 48 == stats["completion_tokens"]
    assert reply.finish_reason == "length"
    assert reply.text == llm.detokenize(reply.token_ids)
    assert stats["prompt_tokens"] == llm.count_tokens(CHAT)
    assert stats["mean_acceptance_length"] == pytest.approx(48 / stats["num_rounds"])
    assert stats["num_accepted_tokens"] == sum(stats["accepted_per_position"])
    assert stats["num_draft_tokens"] == sum(stats["drafted_per_position"])
    assert stats["num_draft_tokens"] == sum(counts["num_draft_tokens"] for counts in stats["by_source"].values())
    assert stats["num_draft_tokens"] > 0


def test_stream_and_rounds_give_the_same_text(llm: LLM) -> None:
    whole = llm.generate("once upon", GREEDY, draft_length=4)
    assert "".join(llm.stream("once upon", GREEDY, draft_length=4)) == whole.text
    rounds = llm.rounds("once upon", GREEDY, draft_length=4)
    seen = list(rounds)
    assert "".join(round_.text for round_ in seen) == whole.text == rounds.reply.text
    assert [token.id for round_ in seen for token in round_.emitted] == whole.token_ids
    assert seen[-1].finish_reason == "length"
    for round_ in seen:
        assert len(round_.draft_texts) == len(round_.draft)
        accepted = [token.id for token in round_.emitted[: round_.verdict.n_accepted]]
        assert accepted == round_.draft.ids[: len(accepted)]


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


def test_dropping_a_generator_stops_the_engine(reference_llm: LLM) -> None:
    with Brake(reference_llm, after=5) as brake:
        pieces = reference_llm.stream("endless", SamplingParams(max_tokens=450, ignore_eos=True))
        next(pieces)
        brake.wait()
        del pieces
        reference_llm.run(lambda pair: None)  # once its turn has come the other is over
        assert brake.n_passes == 6


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


def test_a_draft_that_cannot_be_loaded_is_refused_and_the_old_drafters_stay(tiny: TinyFiles, tmp_path: Path) -> None:
    other = tmp_path / "no-model.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        LLM(tiny.pair.target, draft=other, backend="reference")
    with LLM(tiny.pair.target, draft=tiny.pair.draft, backend="reference", n_ctx=256) as llm:
        before = llm.draft_names
        with pytest.raises(ModelFileError):
            llm.set_draft(other)
        assert llm.draft_names == before
        assert llm.generate("x", GREEDY, draft_length=2).stats["num_draft_tokens"] > 0
        llm.set_draft("ngram")
        assert llm.draft_names == ["ngram"]
        llm.set_draft(None)
        assert llm.generate("x", GREEDY).stats["num_draft_tokens"] == 0


def test_a_draft_larger_than_the_target_is_warned_about(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.draft, draft=tiny.pair.target, backend="reference", n_ctx=128) as llm:
        assert any("larger than the target" in line for line in llm.warnings)


def test_loading_reports_progress_and_can_be_cancelled(tiny: TinyFiles) -> None:
    said: list[str] = []
    LLM(tiny.pair.target, draft=None, backend="ik-llama", progress=lambda what, fraction: said.append(what)).close()
    assert any("loading" in line for line in said)
    assert any("measuring" in line for line in said)

    class Enough(Exception):
        pass

    def stop(what: str, fraction: float | None) -> None:
        if what == "measuring":
            raise Enough

    with pytest.raises(Enough):
        LLM(tiny.bpe, draft=None, backend="ik-llama", progress=stop)


def test_nothing_is_drafted_behind_an_end_token(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.target, draft=tiny.pair.target, backend="reference", n_ctx=256) as llm:
        end = llm.generate("the cat", SamplingParams(max_tokens=12, ignore_eos=True)).token_ids[4]
        llm.inspect().target.vocab.eog = frozenset({end})
        rounds = list(llm.rounds("the cat", SamplingParams(max_tokens=40), draft_length=12))
        assert rounds[-1].finish_reason == "stop"
        for round_ in rounds:
            assert end not in round_.draft.ids[:-1]
