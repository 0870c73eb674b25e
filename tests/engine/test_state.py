"""The state of a pair, taken and put in place from outside: what a fork learns stays in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from localspec import LLM, Closed, SamplingParams
from localspec.controllers.cost_model import PassTimes
from localspec.engine.answer import rounds as rounds_of_pair
from localspec.engine.pair import Pair
from localspec.engine.state import DecodingState
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


def test_forks_with_their_own_contexts_answer_in_turns(llm: LLM) -> None:
    """Each is within an answer while the other goes on, and both say what one alone says."""
    alone = ids(llm.run(lambda pair: list(rounds(pair))))
    forks = llm.run(lambda pair: [pair.state.fork(own_contexts=True) for _ in range(2)])
    before = llm.run(lambda pair: pair.state)
    assert len({id(context) for state in [before, *forks] for context in state.contexts}) == 6

    def begin(state: DecodingState, pair: Pair) -> tuple[Iterator[Round], list[Round]]:
        pair.use(state)
        answer = rounds(pair)
        return answer, [next(answer)]

    def in_turns(pair: Pair) -> list[list[Round]]:
        answers = [begin(fork, pair) for fork in forks]
        for _ in range(PARAMS.max_tokens or 0):
            for answer, seen in answers:
                seen += [round_ for round_ in [next(answer, None)] if round_ is not None]
        pair.use(before)
        for fork in forks:
            pair.release(fork)
        return [seen for _, seen in answers]

    one, other = llm.run(in_turns)
    assert ids(one) == ids(other) == alone
    assert ids(llm.run(lambda pair: list(rounds(pair)))) == alone  # the pair's own contexts are as they were


def test_a_released_fork_frees_what_it_does_not_share(llm: LLM) -> None:
    def released(own: bool, pair: Pair) -> bool:
        fork = pair.state.fork(own_contexts=own)
        closed: list[object] = []
        for context in fork.contexts:
            context.close = partial(closed.append, context)  # type: ignore[method-assign]
        pair.release(fork)
        for context in fork.contexts:
            del context.close
        return closed == (fork.contexts if own else [])

    assert llm.run(partial(released, True))
    assert llm.run(partial(released, False))


def test_a_clone_of_the_ngram_drafter_knows_its_hit_rates_and_no_text(llm: LLM) -> None:
    def clone(pair: Pair) -> bool:
        (drafter,) = pair.state.free
        list(rounds(pair))
        copy = drafter.clone(None)
        before, after = vars(drafter), vars(copy)
        return before["_tokens"] != [] == after["_tokens"] and vars(before["_hits"]) == vars(after["_hits"])

    assert llm.run(clone)
