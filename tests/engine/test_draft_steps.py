"""Steps of draft models that several answers take together: one pass, and each answer drafts what it does alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Context, Forward, Piece, SequenceBatch
from localspec.controllers.batching import ShareOfPass
from localspec.controllers.cost_model import PassTimes
from localspec.engine.pair import Pair
from localspec.engine.scheduler import FORGOTTEN, DraftSteps
from localspec.errors import ContextFull, EngineError
from localspec.spec_decode.passes import DraftPass
from tests.conftest import TinyFiles
from tests.support.waiting import Brake

N_PARALLEL = 4


@pytest.fixture
def llm(tiny: TinyFiles, measured_home: Path) -> Iterator[LLM]:
    options: Any = {"backend": "reference", "n_ctx": 192, "parallel": N_PARALLEL, "idle": False, "remember": False}
    with LLM(tiny.quick.target, tiny.quick.draft, **options) as loaded:
        yield loaded


def memory_of(pair: Pair) -> SequenceBatch:
    memory = pair.state.models[0].memory.batch
    assert memory is not None
    return memory


def answers(llm: LLM) -> list[tuple[list[int], int, int]]:
    """Tokens, draft tokens and accepted ones of as many as go side by side."""
    params = [SamplingParams(max_tokens=24, temperature=i % 2, seed=i, ignore_eos=True) for i in range(N_PARALLEL)]
    with Brake(llm, after=0):  # they begin together
        streams = [llm.rounds(f"{i} la la lo", each, draft_length=3) for i, each in enumerate(params)]
    replies = [stream.reply for stream in streams]
    return [
        (reply.token_ids, int(reply.stats["num_draft_tokens"]), int(reply.stats["num_accepted_tokens"]))
        for reply in replies
    ]


def test_all_that_draft_take_a_step_in_one_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(llm)
    memory = memory_of(llm._pair)
    fed: list[list[Piece]] = []
    decode = memory.decode

    def recorded(pieces: Sequence[Piece]) -> list[Forward]:
        fed.append(list(pieces))
        return decode(pieces)

    monkeypatch.setattr(memory, "decode", recorded)
    assert answers(llm) == before
    assert max(map(len, fed)) == N_PARALLEL
    assert all(drafted for _, drafted, _ in before)


def test_where_the_pass_of_several_fails_each_takes_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(llm)
    memory = memory_of(llm._pair)
    decode = memory._decode

    def failing(pieces: Sequence[Piece]) -> list[Forward]:
        if len(pieces) > 1:
            raise EngineError("it broke")
        return decode(pieces)

    monkeypatch.setattr(memory, "_decode", failing)
    assert answers(llm) == before
    assert llm.warnings == []


def wanted(contexts: Sequence[Context], n_tokens: int = 1) -> list[DraftPass]:
    return [DraftPass(context, [5] * n_tokens, "last") for context in contexts]


def test_of_those_that_do_not_fit_beside_each_other_the_last_has_no_room(llm: LLM) -> None:
    def check(pair: Pair) -> None:
        memory = memory_of(pair)
        memory.cells.take(3, memory.free_cells - 2)  # somebody else's
        first, second, third = DraftSteps(pair.state.models).take(wanted([memory[i] for i in range(3)]))
        assert isinstance(first, Forward)
        assert isinstance(second, Forward)
        assert isinstance(third, ContextFull)
        assert [memory[i].n_past for i in range(3)] == [1, 1, 0]
        memory.cells.cut(3, 0)

    llm.run(check)


def test_an_engine_that_pays_for_ever_for_many_rows_is_asked_for_few(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(pair: Pair) -> None:
        memory, fed = memory_of(pair), list[int]()
        decode = memory.decode

        def recorded(pieces: Sequence[Piece]) -> list[Forward]:
            fed.append(len(pieces))
            return decode(pieces)

        monkeypatch.setattr(memory, "decode", recorded)
        steps = [DraftPass(memory[i], [5] * 3, "all") for i in range(N_PARALLEL)]
        for keeps, groups in ((False, [N_PARALLEL]), (True, [2, 2])):
            monkeypatch.setattr(memory.model, "capabilities", replace(memory.model.capabilities, keeps_rows=keeps))
            DraftSteps(pair.state.models).take(steps)
            assert fed == groups
            fed.clear()

    llm.run(check)


def test_an_answer_that_finds_no_room_goes_on_and_drafts_later(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(llm)
    memory = memory_of(llm._pair)
    n_left = [3]

    def full(pieces: Sequence[Piece]) -> list[Forward]:
        if n_left[0]:
            n_left[0] -= 1
            raise ContextFull("somebody was first")
        return decode(pieces)

    decode = memory._decode
    monkeypatch.setattr(memory, "_decode", full)
    found = answers(llm)
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in before]
    assert llm.warnings == []
    assert all(drafted for _, drafted, _ in found)


def test_what_a_step_costs_an_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of the pass, by how many took one together; where nobody drafts, as if all did."""

    def steps_of(pair: Pair) -> DraftSteps:
        pair.state.models[0].times = PassTimes({1: 8.0, N_PARALLEL: 12.0})
        return DraftSteps(pair.state.models)

    def cost(steps: DraftSteps, n_answers: int = N_PARALLEL) -> float:
        times = steps.times()["model"]
        assert isinstance(times, ShareOfPass)
        steps.begin(n_answers)
        return times(1)

    def check(pair: Pair) -> None:
        memory = memory_of(pair)
        assert steps_of(pair).times() == {}  # this engine takes turns: a step costs what it does alone
        monkeypatch.setattr(memory.model, "capabilities", replace(memory.model.capabilities, batches=True))
        steps = steps_of(pair)
        assert cost(steps) == pytest.approx(12.0 / N_PARALLEL)
        assert cost(steps, 1) == pytest.approx(8.0)
        steps = steps_of(pair)
        monkeypatch.setattr(type(steps._memories[0]), "_observe", lambda *_: None)  # the curve stays as it is
        for _ in range(60):
            steps.take(wanted([memory[1]]))
            memory[1].truncate(0)
        assert cost(steps) > 7.0
        for _ in range(int(4 / FORGOTTEN)):
            steps.begin(N_PARALLEL)
        assert cost(steps) == pytest.approx(12.0 / N_PARALLEL)

    llm.run(check)
