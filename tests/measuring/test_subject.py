"""A pair under test, on tiny models: every arm starts from the same knowledge, and reads the prompt itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from localspec.engine.pair import Pair
from localspec.measuring.subject import Arm, Block, EngineUnderTest, Sample, measure, parse_arms, places
from localspec.prompts.questions import Question
from tests.conftest import TinyFiles
from tests.support.heads import write_random_head

QUESTION = Question("q", "code", ("a b c d a b c d a b",))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
ARMS = parse_arms(["model:3", "ngram:4", "auto"])


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    with LLM(tiny.quick.target, ["ngram", tiny.quick.draft], backend="reference", remember=False, idle=False) as loaded:
        yield loaded


@pytest.fixture(params=[True, False], ids=["slices", "whole"])
def subject(llm: LLM, request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    found = EngineUnderTest(llm, ARMS, threading.Event(), in_slices=request.param)
    yield found
    found.restore()


def answers(subject: EngineUnderTest) -> dict[str, Sample]:
    block = Block(0, 0, QUESTION, ends_cycle=True)
    samples = measure(block, places([subject], block), PARAMS, 4)
    return {sample.arm: sample for sample in samples}


def test_an_arm_begins_with_nothing_read_by_its_drafters(subject: EngineUnderTest) -> None:
    """So reading the prompt is in the arm that needs it, and the target's reading in none."""
    answers(subject)
    asked = subject.read(QUESTION, PARAMS)
    for arm in subject.arms:

        def begin(pair: Pair, arm=arm) -> tuple[list[int], int]:  # type: ignore[no-untyped-def]
            subject.become(arm, pair)
            asked.put_into(pair.context)
            return [draft.context.n_past for draft in pair.state.models], pair.context.n_past

        read_by_drafts, read_by_target = subject.llm.run(begin)
        assert set(read_by_drafts) <= {0}
        assert read_by_target == len(asked.tokens) - 1


def test_the_pair_is_left_as_it_was(llm: LLM) -> None:
    before = llm.run(lambda pair: pair.state)
    subject = EngineUnderTest(llm, ARMS, threading.Event(), in_slices=True)
    answers(subject)
    assert llm.run(lambda pair: pair.state) is not before
    subject.restore()
    assert llm.run(lambda pair: pair.state) is before
    assert llm.generate("a b c", SamplingParams(max_tokens=2)).text


@pytest.fixture(params=[True, False], ids=["slices", "whole"])
def with_head(tiny: TinyFiles, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    head = write_random_head(tiny.quick.target, tmp_path / "head.gguf", taps=("layer:0",))
    draft = ["ngram", f"head:{head}"]
    with LLM(tiny.quick.target, draft, backend="reference", remember=False, idle=False) as loaded:
        arms = parse_arms(["head:3", "ngram+head:auto", "ngram:4"])
        found = EngineUnderTest(loaded, arms, threading.Event(), in_slices=request.param)
        yield found
        found.restore()


def test_arms_with_a_head_say_the_same_and_begin_with_the_prompts_last_states(with_head: EngineUnderTest) -> None:
    found = answers(with_head)
    assert len({sample.token_sha256 for sample in found.values()}) == 1
    assert found["head:3"].rounds[0][3] == 3  # it drafts from the first round on
    assert found["head:3"].num_accepted_tokens > 0


def test_only_arms_with_a_head_decode_in_contexts_that_return_states(with_head: EngineUnderTest) -> None:
    def hidden(arm: Arm, pair: Pair) -> tuple[str, ...]:
        with_head.become(arm, pair)
        return pair.context.hidden

    returned = {arm.name: with_head.llm.run(partial(hidden, arm)) for arm in with_head.arms}
    taps = ("layer:0",)
    apart = {"plain": (), "head:3": taps, "ngram+head:auto": taps, "ngram:4": ()}
    assert returned == (apart if with_head.in_slices else dict.fromkeys(apart, taps))
