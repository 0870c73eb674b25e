"""What a round leaves to be done is done while a device computes the next pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from localspec import LLM, Reply, SamplingParams
from localspec.backends.base import Context, Forward
from localspec.backends.llama.model import LlamaContext
from localspec.backends.llama.passes import LlamaPasses
from localspec.backends.reference import ReferenceContext
from localspec.controllers.auto import AutoController
from localspec.controllers.fixed import FixedController
from localspec.engine.worker import Job
from localspec.errors import EngineError
from localspec.spec_decode.rounds import Round, SpecStats
from tests.conftest import TinyFiles, open_backend

pytestmark = pytest.mark.usefixtures("measured_home")

PROMPT = "one two three one two three"
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture
def llm(tiny: TinyFiles) -> Iterator[LLM]:
    drafts = ["ngram", tiny.quick.draft]
    with LLM(tiny.quick.target, draft=drafts, backend="reference", n_ctx=512, idle=False, remember=False) as llm:
        yield llm


def overlap(patch: pytest.MonkeyPatch, log: Callable[[str, Context], None] = lambda what, context: None) -> None:
    """Contexts of the reference engine overlap; each pass is logged, as it begins and ends."""
    always = property(lambda self: True, lambda self, value: None)
    patch.setattr(ReferenceContext, "overlaps", always, raising=False)
    feed = Context._feed

    def fed(self: Context, tokens: Any, compute: Callable[[], Forward]) -> Forward:
        def computed() -> Forward:
            log("begins", self)
            if self.meanwhile is not None:
                self.meanwhile()
            return compute()

        forward = feed(self, tokens, computed)
        log("ends", self)
        return forward

    patch.setattr(Context, "_feed", fed)


class Log(list[str]):
    """What happens, in order: passes of the target and of a draft model, plans, rounds.

    Args:
        patch: until when.
        llm: whose.
    """

    def __init__(self, patch: pytest.MonkeyPatch, llm: LLM) -> None:
        super().__init__()
        target: Context = llm.run(lambda pair: pair.context)
        overlap(patch, lambda what, context: self.append(f"{'target' if context is target else 'draft'} {what}"))
        for kind in (FixedController, AutoController):
            for name in ("plan", "observe", "learn"):
                self._watch(patch, kind, name)
        self._watch(patch, Job, "give")

    def _watch(self, patch: pytest.MonkeyPatch, kind: type[Any], name: str) -> None:
        call = getattr(kind, name)

        def logged(*args: Any, **options: Any) -> Any:
            if name != "give" or isinstance(args[1], Round):  # a reply is given too
                self.append(name)
            return call(*args, **options)

        patch.setattr(kind, name, logged)


@pytest.mark.parametrize(("length", "first"), [(0, "target"), (3, "draft"), ("auto", "target")])
def test_a_round_is_handed_on_once_the_device_is_at_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, length: int | str, first: str
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    log = Log(monkeypatch, llm)
    reply = llm.generate("four five", params, draft_length=length)
    del log[: log.index("plan")]
    n = reply.stats["num_rounds"]
    assert n > 2
    assert log.count("plan") == log.count("observe") == log.count("learn") == log.count("give") == n
    firsts = set()
    gives = [i for i, what in enumerate(log) if what == "give"]
    for nth, at in enumerate(gives):
        before = log[:at]
        assert before.count("learn") == nth + 1  # each is learned from first
        if nth < n - 1:
            assert before.count("plan") == before.count("observe") + 1 == nth + 2
            begun = next(i for i in range(at, 0, -1) if log[i].endswith("begins"))
            assert begun > max(i for i in range(at) if log[i] == "plan")
            assert log[at + 1] == log[begun].replace("begins", "ends")
            firsts.add(log[begun].split()[0])
    assert log[-1] == "give"
    assert first in firsts


def test_an_engine_without_a_device_keeps_the_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, llm)
    monkeypatch.setattr(ReferenceContext, "overlaps", False)
    llm.generate("four five", SamplingParams(max_tokens=8, ignore_eos=True), draft_length=0)
    del log[: log.index("plan")]
    assert log == ["plan", "target begins", "target ends", "observe", "learn", "give"] * 8


REQUESTS: list[dict[str, Any]] = [
    {"params": GREEDY},
    {"params": SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)},
    {"params": SamplingParams(max_tokens=60, stop=("e",), ignore_eos=True)},
    {"params": SamplingParams(max_tokens=30, grammar='root ::= ("one " | "two ")+')},
    {"params": GREEDY, "logprobs": 2},
    {"params": SamplingParams(max_tokens=1)},
    {"params": SamplingParams(max_tokens=200)},
]


@pytest.mark.parametrize("length", [0, 4, "auto"])
def test_the_answer_is_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch, length: int | str) -> None:
    def asked(options: dict[str, Any]) -> tuple[Any, ...]:
        stream = llm.rounds(PROMPT, draft_length=length, **options)
        rounds = list(stream)
        emitted = [token.as_dict() for round_ in rounds for token in round_.emitted]
        for token in emitted:  # how far was drafted may differ
            del token["kind"], token["source"]
        reply = stream.reply
        assert "".join(round_.text for round_ in rounds) == reply.text
        assert [round_.index for round_ in rounds] == list(range(len(rounds)))
        return emitted, reply.text, reply.finish_reason, [round_.finish_reason for round_ in rounds][-1]

    expected = list(map(asked, REQUESTS))
    overlap(monkeypatch)
    assert list(map(asked, REQUESTS)) == expected


def test_llama_cpp_calls_back_within_its_passes(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU computes; each round but an answer's last is handed on there."""
    engine, n_within, run = open_backend("llama-cpp").name, 0, LlamaPasses.run

    def answers() -> list[Reply]:
        with LLM(tiny.pair.target, ["ngram", tiny.pair.draft], backend=engine, n_ctx=256, idle=False) as llm:
            return [llm.generate(PROMPT, GREEDY, draft_length=length) for length in (0, 3, "auto")]

    def watched(self: LlamaPasses, *args: Any, begun: Callable[[], None] | None = None, **options: Any) -> Any:
        called = Mock(side_effect=begun)
        forward = run(self, *args, begun=begun and called, **options)
        nonlocal n_within
        n_within += called.called
        return forward

    expected = [reply.token_ids for reply in answers()]
    monkeypatch.setattr(LlamaContext, "overlaps", property(lambda self: True, lambda self, value: None), raising=False)
    monkeypatch.setattr(LlamaPasses, "run", watched)
    found = answers()
    assert [reply.token_ids for reply in found] == expected
    assert n_within == sum(reply.stats["num_rounds"] - 1 for reply in found)


def test_a_pass_that_nothing_was_done_beside_is_run_once(llm: LLM) -> None:
    """As one that is taken apart for its hidden states, in a context that overlaps otherwise."""
    expected = llm.generate(PROMPT, GREEDY, draft_length=3).token_ids
    contexts = llm.run(lambda pair: [pair.context, *(draft.context for draft in pair.state.models)])
    llm.run(lambda pair: [setattr(each, "overlaps", True) for each in contexts])
    assert llm.generate(PROMPT, GREEDY, draft_length=3).token_ids == expected


@pytest.mark.parametrize("at", ["begins", "ends"])
def test_a_pass_that_fails_loses_no_round(llm: LLM, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    n_passes = 0
    rounds: list[Round] = []

    def fail(what: str, context: Context) -> None:
        nonlocal n_passes
        n_passes += what == at
        if n_passes == 6 and what == at:
            raise EngineError("the device is gone")

    expected = llm.generate(PROMPT, GREEDY, speculate=False).token_ids
    with monkeypatch.context() as patch:
        overlap(patch, fail)
        with pytest.raises(EngineError, match="is gone"):
            rounds.extend(llm.rounds(PROMPT, GREEDY, speculate=False))
    n = len(rounds)
    assert n >= 3
    assert [token.id for round_ in rounds for token in round_.emitted] == list(expected[:n])
    assert llm.generate(PROMPT, GREEDY, speculate=False).token_ids == expected


def test_after_an_answer_that_fails_meanwhile_or_is_broken_off_the_next_one_is_right(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(PROMPT, GREEDY, draft_length=3)
    overlap(monkeypatch)
    with monkeypatch.context() as patch:

        def fail(self: SpecStats, round_: Round) -> None:
            if round_.index == 2:
                raise EngineError("nobody counts")

        patch.setattr(SpecStats, "add", fail)
        with pytest.raises(EngineError, match="nobody counts"):
            llm.generate(PROMPT, GREEDY, draft_length=3)
    for n in (0, 1, 2, 3):
        with llm.rounds(PROMPT, GREEDY, draft_length=3) as stream:
            said = "".join(next(stream).text for _ in range(n))
        assert expected.text.startswith(said)
        assert len(said) < len(expected.text)
        assert llm.generate(PROMPT, GREEDY, speculate=n % 2 == 0, draft_length=3).token_ids == expected.token_ids
