"""The state of a pair, taken and put in place from outside: what a fork learns stays in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import LLM, Closed, SamplingParams
from localspec.controllers.cost_model import PassTimes
from localspec.engine.answer import rounds as rounds_of_pair
from localspec.engine.pair import Pair
from localspec.spec_decode.rounds import Round
from tests.conftest import TinyFiles

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def llm(tiny: TinyFiles, measured_home: Path) -> Iterator[LLM]:
    drafts = ["ngram", tiny.pair.draft]
    with LLM(tiny.pair.target, drafts, backend="reference", n_ctx=256, prefix_cache_bytes=0, idle=False) as loaded:
        yield loaded


def rounds(pair: Pair, text: str = "one two one two one") -> Iterator[Round]:
    prompt = pair.target.tokenize(text, add_special=True)
    return rounds_of_pair(pair, prompt, PARAMS, 4, lambda n_cached: None, lambda: False)


def ids(answered: list[Round]) -> list[int]:
    return [token.id for round_ in answered for token in round_.emitted]


def test_work_runs_on_the_engines_thread_while_no_request_runs(llm: LLM) -> None:
    assert llm.run(lambda pair: threading.current_thread().name) == "localspec"
    conversation = object()
    streams = [llm.rounds("tell me", PARAMS, conversation=conversation) for _ in range(2)]
    assert llm.run(lambda pair: [stream.state for stream in streams], conversation=conversation) == ["done", "done"]
    with pytest.raises(ZeroDivisionError):
        llm.run(lambda pair: 1 // 0)
    assert len(llm.generate("and on", PARAMS).token_ids) == 24
    llm.close()
    with pytest.raises(Closed):
        llm.run(lambda pair: None)


def test_what_a_fork_learns_stays_in_it(llm: LLM) -> None:
    def compare(pair: Pair) -> None:
        before = pair.state
        known = (before.times.scale, before.models[0].times.scale, before.acceptance.budget.as_dict())
        fork = before.fork()
        pair.use(fork)
        assert pair.times is fork.times is not before.times
        fork.times = PassTimes({1: 1e-6})  # so that every pass is a surprise
        assert ids(list(rounds(pair)))
        assert fork.times != PassTimes({1: 1e-6})
        pair.use(before)
        assert known == (before.times.scale, before.models[0].times.scale, before.acceptance.budget.as_dict())

    llm.run(compare)


def test_a_clone_of_the_ngram_drafter_knows_its_hit_rates_and_no_text(llm: LLM) -> None:
    def clone(pair: Pair) -> bool:
        (drafter,) = pair.state.free
        list(rounds(pair))
        copy = drafter.clone(None)
        before, after = vars(drafter), vars(copy)
        return before["_tokens"] != [] == after["_tokens"] and vars(before["_hits"]) == vars(after["_hits"])

    assert llm.run(clone)
