"""A higher priority comes before a lower one that runs, waits for room or was put aside; nobody's text changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.engine import scheduler as scheduler_module
from localspec.engine.scheduler import Scheduler, SharedMemory
from tests.conftest import TinyFiles
from tests.support.memory import check_only_conversations_are_held
from tests.support.waiting import Brake

N_CTX = 192
N_PARALLEL = 3


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"backend": "reference", "n_ctx": N_CTX, "parallel": N_PARALLEL, "idle": False}
    with LLM(tiny.quick.target, ["ngram", str(tiny.quick.draft)], **options) as loaded:
        yield loaded


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the scheduler does, and with the answer of which priority."""
    seen: list[tuple[str, int]] = []

    def record(owner: type, method: str, event: str) -> None:
        original = getattr(owner, method)

        def recorded(self: Any, one: Any, *args: Any) -> Any:
            seen.append((event, getattr(one, "job", one).priority))
            return original(self, one, *args)

        monkeypatch.setattr(owner, method, recorded)

    record(Scheduler, "_begin", "begins")
    record(SharedMemory, "put_aside", "pauses")
    record(SharedMemory, "bring_back", "resumes")
    record(Scheduler, "_end", "ends")
    return seen


def params(i: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=i % 2, seed=i, ignore_eos=True)


@pytest.mark.parametrize("draft_length", ["auto", 3])
def test_a_running_answer_pauses_for_a_higher_priority(
    llm: LLM, events: list[tuple[str, int]], draft_length: Any
) -> None:
    texts, lengths, priorities = ("la la lo la", "lo le la lo", "lo la", "le lo"), (90, 80, 80, 10), (-3, -1, -2, 0)
    asked = [(texts[i], params(i, lengths[i]), priorities[i]) for i in range(4)]
    alone = [llm.generate(text, each, draft_length=draft_length).token_ids for text, each, _ in asked]
    events.clear()
    with Brake(llm, after=8) as brake:
        *low, high = asked
        streams = [llm.rounds(text, each, priority=n, draft_length=draft_length) for text, each, n in low]
        brake.wait()
        text, each, n = high
        streams.append(llm.rounds(text, each, priority=n, draft_length=draft_length))
        brake.release()
        assert [stream.reply.token_ids for stream in streams] == alone
    assert {event for event, _ in events[:3]} == {"begins"}
    assert events[3:5] == [("pauses", -3), ("begins", 0)]
    assert events.index(("ends", 0)) < events.index(("ends", -3))
    assert events.count(("resumes", -3)) == 1
    assert not llm.busy


def test_of_equal_priority_nobody_pauses(llm: LLM, events: list[tuple[str, int]]) -> None:
    with Brake(llm, after=8) as brake:
        streams = [llm.rounds("la la lo", params(i, 40)) for i in range(N_PARALLEL)]
        brake.wait()
        streams.append(llm.rounds("le lo", params(3, 5)))
        brake.release()
        assert {stream.reply.finish_reason for stream in streams} == {"length"}
    assert "pauses" not in {event for event, _ in events}


def test_several_may_pause_and_one_that_is_cancelled_meanwhile_ends(llm: LLM, events: list[tuple[str, int]]) -> None:
    alone = llm.generate("lo le la lo", params(2, 60)).token_ids
    events.clear()
    with Brake(llm, after=8) as brake:
        third = llm.rounds("la", params(4, 60), priority=-1)
        gone = llm.rounds("la la lo la", params(1, 90), priority=-2)
        paused = llm.rounds("lo le la lo", params(2, 60), priority=-1)
        brake.wait()
        urgent = [llm.rounds("le lo", params(i, 20), priority=i) for i in range(3)]
        gone.close()
        brake.release()
        assert {stream.reply.finish_reason for stream in (third, *urgent)} == {"length"}
        assert paused.reply.token_ids == alone
        assert gone.reply.finish_reason == "cancelled"
    assert ("pauses", -1) in events
    assert events.index(("ends", 0)) < events.index(("ends", -1))


def test_one_that_waits_for_room_does_not_block_a_higher_priority(llm: LLM, events: list[tuple[str, int]]) -> None:
    """Of 384 cells the first two take 192 and about 140: the third needs 192 too, the fourth only 50."""
    with Brake(llm, after=4) as brake:
        streams = [llm.rounds("la" * n, params(1, 100), priority=5) for n in (50, 1)]
        streams.append(llm.rounds("lo" * 50, params(2, 100)))
        brake.wait()
        streams.append(llm.rounds("le", params(3, 5), priority=1))
        brake.release()
        assert {stream.reply.finish_reason for stream in streams} == {"length"}
    assert [n for event, n in events if event == "begins"] == [5, 5, 1, 0]
    assert events.index(("begins", 0)) > events.index(("ends", 5))
    assert "pauses" not in {event for event, _ in events}


def test_one_that_outgrows_its_estimate_is_put_aside_and_does_not_block_a_higher_priority(
    llm: LLM, events: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "RESERVED", 8)
    asked = [params(i, 170) for i in range(N_PARALLEL)]
    alone = [llm.generate("la la", each).token_ids for each in asked]
    events.clear()
    put_aside, came, asks = SharedMemory.put_aside, threading.Event(), threading.Event()

    def held(self: SharedMemory, answer: Any) -> None:
        put_aside(self, answer)
        asks.set()
        came.wait(20)

    monkeypatch.setattr(SharedMemory, "put_aside", held)
    with Brake(llm, after=0):  # they begin together
        streams = [llm.rounds("la la", each, draft_length=0) for each in asked]  # all go on at one pace
    assert asks.wait(20)
    streams.append(llm.rounds("le", params(3, 5), priority=1))
    came.set()
    assert [stream.reply.token_ids for stream in streams][:N_PARALLEL] == alone
    assert events.index(("begins", 1)) < events.index(("resumes", 0))
    llm.run(check_only_conversations_are_held)
