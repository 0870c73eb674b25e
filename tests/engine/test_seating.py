"""Conversations that no answer is made in do not stand in the way of those that are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.engine.pair import Pair
from localspec.engine.scheduler import SharedMemory
from tests.conftest import TinyFiles, open_backend
from tests.support.memory import shared_memories
from tests.support.waiting import Brake

pytestmark = pytest.mark.usefixtures("measured_home")

TWENTY = SamplingParams(max_tokens=20, ignore_eos=True)


def opened(tiny: TinyFiles, draft: Any = "ngram", engine: str = "llama-cpp", **options: Any) -> LLM:
    defaults: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "parallel": 3, "idle": False}
    return LLM(tiny.pair.target, draft, backend=open_backend(engine).name, **(defaults | options))


def cells(pair: Pair) -> list[int]:
    """Of each memory those in use."""
    return [batch.n_cells - batch.free_cells for batch in shared_memories(pair)]


@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_idle_conversations_leave_the_memory_on_a_cpu(engine: str, tiny: TinyFiles) -> None:
    """In the memories of target and draft model alike; they resume as if they had stayed."""
    with opened(tiny, tiny.pair.draft, engine) as llm:
        first = llm.tokenize("la la lo " * 20)
        said = llm.generate(first, TWENTY, draft_length=2).token_ids
        alone = llm.run(cells)
        assert len(alone) == 2
        assert min(alone) > len(first)
        other = llm.tokenize("le li lu " * 12)
        llm.generate(other, TWENTY, draft_length=2)
        assert max(llm.run(cells)) <= len(other) + 20
        went_on = llm.generate([*first, *said, *other], TWENTY, draft_length=2)
        assert went_on.stats["cached_tokens"] >= len(first) + 19
        scored = llm.logprobs([*first, *said, *other, *went_on.token_ids], top=1)[-20:]
        assert max(token.top[0][1] - (token.logprob or 0.0) for token in scored) < 0.05


def test_a_shared_prefix_is_held_once(tiny: TinyFiles) -> None:
    with opened(tiny) as llm:
        system = llm.tokenize("la la lo " * 30)
        llm.generate([*system, 5, 6, 7], TWENTY)
        replies = [llm.rounds([*system, 8 + i], TWENTY) for i in range(2)]
        assert [stream.reply.stats["cached_tokens"] for stream in replies] == [len(system)] * 2
        assert max(llm.run(cells)) < len(system) + 50


def test_conversations_stay_where_the_cache_would_not_keep_them(tiny: TinyFiles) -> None:
    with opened(tiny, prefix_cache_bytes=0) as llm:
        first = llm.tokenize("la la lo " * 20)
        llm.generate(first, TWENTY)
        llm.generate("le li lu " * 12, TWENTY)
        assert llm.generate(first, TWENTY).stats["cached_tokens"] >= len(first) - 1


def test_requests_one_at_a_time_use_the_same_drafters(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = SharedMemory.take

    def recorded(self: SharedMemory, prompt: Sequence[int]) -> int:
        taken.append(take(self, prompt))
        return taken[-1]

    monkeypatch.setattr(SharedMemory, "take", recorded)
    with opened(tiny) as llm:
        for text in ("la la lo ", "le li lu ", "lo la li ", "la la lo "):
            llm.generate(text * 12, TWENTY)
    assert taken == [0] * 4


def test_a_shared_prefix_needs_no_further_room(tiny: TinyFiles) -> None:
    """There are 1,024 cells for four answers that need 433 each, 300 of which are the same."""
    with opened(tiny, parallel=4) as llm:
        system, most = llm.tokenize("la la lo " * 100)[:300], SamplingParams(max_tokens=90, ignore_eos=True)
        with Brake(llm, after=20) as brake:
            streams = [llm.rounds([*system, 5], most, speculate=False)]
            brake.wait()
            streams += [llm.rounds([*system, 6 + i], most, speculate=False) for i in range(3)]
            brake.release()
            replies = [stream.reply for stream in streams]
        assert [reply.stats["cached_tokens"] for reply in replies] == [0, 300, 300, 300]
        assert all("Shared with other answers" in reply.explanation for reply in replies)
        assert re.search(r"on average (3\..|4\.0) at once", replies[-1].explanation)


def test_the_prefix_about_to_be_shared_is_not_evicted(tiny: TinyFiles) -> None:
    with opened(tiny, prefix_cache_bytes=0) as llm:
        system, other = llm.tokenize("la la lo " * 200)[:420], llm.tokenize("le li lu " * 200)[:380]
        llm.generate([*system, 5, 6, 7], TWENTY)
        with Brake(llm, after=20) as brake:
            neighbour = llm.rounds(other, SamplingParams(max_tokens=60, ignore_eos=True), speculate=False)
            brake.wait()
            follower = llm.rounds([*system, 8], TWENTY)
            brake.release()
            assert follower.reply.stats["cached_tokens"] == len(system)
            assert neighbour.reply.finish_reason == "length"


@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_only_what_is_settled_is_shared(engine: str, tiny: TinyFiles) -> None:
    """Of an answer under way not its draft tokens, in the memories of target and draft, nor rows of an early exit."""
    with opened(tiny, ["early-exit:1", str(tiny.pair.draft)], engine, n_ctx=256, parallel=2) as llm:
        prompt = llm.tokenize("la la lo " * 20)
        settled, drafted = prompt[:30], prompt[30:36]

        def under_way(pair: Pair) -> None:
            target, draft = shared_memories(pair)
            with pair.prefix_cache.conversation(target[0], [draft[0]], list(settled)):
                for memory in (target, draft):
                    memory[0].decode([*settled, *drafted], "none")
                    assert pair.prefix_cache.shareable(memory[1], prompt) == (0, 30)
                    memory[0].truncate(25)
                    assert pair.prefix_cache.shareable(memory[1], prompt) == (0, 25)
                target[0].decode_first_layers(settled[25:], 1)
                assert pair.prefix_cache.shareable(target[1], prompt) == (0, 25)
                pair.prefix_cache.switch(target[1], prompt)
                assert target[1].tokens == prompt[:25]
                target[0].truncate(25)

        llm.run(under_way)
