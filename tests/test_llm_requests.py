"""Requests on their way: the queue, its bound, turns, deadlines, cancelling at every stage; log-probabilities."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from localspec import (
    LLM,
    Cancelled,
    Closed,
    PromptTooLong,
    QueueFull,
    Reply,
    RequestOptions,
    RoundStream,
    SamplingParams,
    UsageError,
)
from localspec.engine.request import SamplingOptions
from localspec.engine.worker import FairQueue, Job, Worker
from localspec.sampling.sampling import SAMPLING
from localspec.spec_decode.rounds import SpecStats
from tests.conftest import TinyFiles
from tests.support.contexts import watch_passes
from tests.support.waiting import PATIENCE, Brake, held, wait_until

pytestmark = pytest.mark.usefixtures("measured_home")

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    with LLM(tiny.quick.target, draft=["ngram", tiny.quick.draft], backend="reference", n_ctx=512) as loaded:
        yield loaded


@pytest.mark.parametrize("is_served", [False, True])
def test_cancelled_jobs_do_not_pile_up(is_served: bool) -> None:
    fair, kept = FairQueue(max_waiting=2), list[weakref.ref[Job]]()
    if is_served:
        fair.put(Job(print, print, conversation="x"))
        assert fair.get() is not None
    for _ in range(100):
        late = Job(print, print, conversation="x")
        fair.put(late)
        late.cancel()
        kept.append(weakref.ref(late))
    del late
    assert len(fair) == 0
    assert sum(each() is not None for each in kept) <= 2


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.mark.parametrize("kind", [MemoryError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_the_worker_outlives_whatever_delivery_raises(worker: Worker, kind: type[BaseException]) -> None:
    """What is given meanwhile stops the work."""
    seen: list[bool] = []

    def work(job: Job) -> str:
        seen.append(job.stopped())
        job.give("a round")
        seen.append(job.stopped())
        return "the result"

    def nobody(item: Any) -> None:
        raise kind("not here")

    job = Job(work, nobody)
    worker.queue.put(job)
    assert worker.call(lambda: 5) == 5
    with pytest.raises(kind):
        job.reply()
    assert seen == [False, True]


@pytest.mark.parametrize("late", [False, True])
def test_what_is_made_for_a_request_that_never_ran_may_fail(worker: Worker, late: bool) -> None:
    got: list[Any] = []
    job = Job(lambda job: "ran", got.append, abandoned=lambda job: {}["gone"], deadline=1e-9 if late else None)
    if not late:
        job.cancel()
    worker.queue.put(job)
    assert (worker.call(lambda: 5), got) == (5, [job])
    with pytest.raises(KeyError):
        job.reply()


def test_an_answer_that_raises_stop_iteration_is_no_end_without_an_answer(llm: LLM) -> None:
    def prompt() -> Any:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        RoundStream(llm.job(prompt, GREEDY)).reply  # noqa: B018


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_that_a_worker_ends_with_is_done() -> None:
    worker, done = Worker(), []

    def fails() -> None:
        done.append(1)
        raise OSError

    worker.close(fails, lambda: done.append(2))
    assert done == [1, 2]


def test_who_claims_a_job_first_answers_for_it() -> None:
    """Exactly one side does, and it is delivered once."""
    given: list[Job] = []

    def job(deadline: float | None = None) -> Job:
        return Job(lambda job: "ran", given.append, abandoned=lambda job: job.cancelled_by, deadline=deadline)

    cancelled, done, late = job(), job(), job(1e-9)
    cancelled.cancel()
    for each in (cancelled, done, late):
        each.run()
        each.cancel()
    assert given == [cancelled, done, late]
    assert [each.reply() for each in given] == ["caller", "ran", "deadline"]


def test_a_full_queue_refuses_and_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(llm):
        monkeypatch.setattr(llm, "max_queue", 2)
        waiting = [llm.rounds("one", GREEDY), llm.rounds("two", GREEDY)]
        assert llm.queue_length == 2
        assert llm.busy
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            llm.rounds("three", GREEDY)
        waiting[0].close()
        assert waiting[0].reply.finish_reason == "cancelled"
        assert llm.queue_length == 1
        third = llm.rounds("three", GREEDY)
    assert len(third.reply.token_ids) == len(waiting[1].reply.token_ids) == 24
    assert llm.queue_length == 0
    assert not llm.busy


def test_turns_between_conversations_of_an_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while a conversation is served goes before its next request."""

    def ask(n: int, conversation: str) -> None:
        one = SamplingParams(max_tokens=1)
        streams.append(llm.rounds([n] * n, one, conversation=conversation, speculate=False))

    streams, context = list[RoundStream](), llm.inspect().context
    sizes = watch_passes(context, monkeypatch, after=lambda n: ask(32, "c") if n == 1 else None)
    with held(llm):
        for n, conversation in ((12, "a"), (13, "a"), (14, "a"), (22, "b"), (23, "b")):
            ask(n, conversation)
    for stream in streams:
        assert stream.reply.token_ids
    prompts = [size + 1 for size in sizes if size > 1]  # whose last token is read alone
    assert prompts[:6] == [12, 22, 32, 13, 23, 14]


def test_a_request_cancelled_in_the_queue_never_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = watch_passes(llm.inspect().context, monkeypatch)
    with held(llm):
        stream = llm.rounds("never", GREEDY)
        dropped = llm.rounds("nor this", GREEDY)
        assert stream.state == "waiting"
        stream.close()
        reply = stream.reply  # at once, though the worker is busy
        assert (reply.text, reply.token_ids, reply.finish_reason, reply.cancelled_by) == ("", [], "cancelled", "caller")
        assert stream.state == "done"
        del dropped
        gc.collect()
    llm.run(lambda pair: None)
    assert sizes == []


def test_a_deadline_in_the_queue(llm: LLM) -> None:
    with held(llm):
        reply = llm.chat("late", GREEDY, deadline=0.2)  # comes though the worker is busy
        assert (reply.finish_reason, reply.cancelled_by, reply.token_ids) == ("cancelled", "deadline", [])
        assert reply.seconds_waited >= 0.2
        assert llm.queue_length == 0

        async def main() -> Reply:
            return await llm.achat("late", GREEDY, deadline=0.2)

        assert asyncio.run(main()).cancelled_by == "deadline"
        with pytest.raises(Cancelled, match="deadline"):
            llm.logprobs("late", deadline=0.1)
    assert llm.generate("hello", GREEDY, deadline=3600.0).cancelled_by is None


def solo_logprobs(llm: LLM, tokens: list[int]) -> np.ndarray[Any, Any]:
    """log softmax [n_tokens, n_vocab] in float64, from one-token passes of a fresh context."""
    with llm.inspect().target.new_context(512) as context:
        rows = np.concatenate([context.decode([token]).logits.astype(np.float64) for token in tokens])
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("params", "draft_length"),
    [
        (GREEDY, 0),
        (GREEDY, 5),
        (replace(GREEDY, temperature=1.5, top_k=20, seed=3), 5),
        (replace(GREEDY, repeat_penalty=1.3, logit_bias={7: 50.0}), 4),
    ],
)
def test_logprobs_of_an_answer_are_those_of_scoring_it(llm: LLM, params: SamplingParams, draft_length: int) -> None:
    """``test_any_drafter`` compares them with those of plain decoding."""
    prompt = llm.encode("the cat")
    reply = llm.generate(prompt, params, draft_length=draft_length, logprobs=3)
    assert [token.id for token in reply.tokens] == reply.token_ids
    if draft_length:
        assert {token.kind for token in reply.tokens} > {"accepted"}
    scored = llm.logprobs([*prompt, *reply.token_ids], top=3)[len(prompt) :]
    for token, wanted in zip(reply.tokens, scored, strict=True):
        assert token.logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert [i for i, _ in token.logprobs.top] == [i for i, _ in wanted.top]
        assert [p for _, p in token.logprobs.top] == pytest.approx([p for _, p in wanted.top], abs=1e-5)


def test_logprobs_are_there_only_when_asked_for(llm: LLM) -> None:
    rounds = list(llm.rounds("the cat", GREEDY, draft_length=3))
    assert all(token.logprobs is None for round_ in rounds for token in round_.emitted)
    assert "logprob" not in rounds[0].as_event()["emitted"][0]
    event = next(llm.rounds("the cat", GREEDY, draft_length=3, logprobs=0)).as_event()["emitted"][0]
    assert (event["logprob"] < 0, event["top_logprobs"]) == (True, [])
    for n in (-1, 21, 2.0, True):
        with pytest.raises(UsageError, match="most probable"):
            llm.rounds("x", GREEDY, logprobs=n)


def test_scoring_a_text(llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY).token_ids
    text = "the cat sat on the mat, and then it sat there again: naïve, 宽字符. " * 4
    scored = llm.logprobs(text, top=2)
    tokens = llm.encode(text)
    assert [token.id for token in scored] == tokens
    assert len(tokens) > 2 * 64  # more than one chunk
    assert scored[0].logprob is None
    wanted = solo_logprobs(llm, tokens)
    for i, token in enumerate(scored[1:]):
        assert token.logprob == pytest.approx(wanted[i, token.id], abs=1e-5)
        assert [at for at, _ in token.top] == list(np.argsort(-wanted[i], kind="stable")[:2])
    assert "".join(token.text for token in scored[:20]) in text[:60]
    assert asyncio.run(llm.alogprobs(text, top=2)) == scored
    assert llm.logprobs([tokens[0]]) == [llm.logprobs(text)[0]]
    with pytest.raises(UsageError, match="no text"):
        llm.logprobs("")
    with pytest.raises(PromptTooLong):
        llm.logprobs([5] * 600)
    assert llm.generate("hello", GREEDY).token_ids == expected


def test_counting_tokens_does_not_wait_for_the_queue(llm: LLM) -> None:
    with held(llm):
        tokens = llm.tokenize("hello there")
        assert llm.detokenize(tokens) == "hello there"
        assert llm.count_tokens([{"role": "user", "content": "x"}]) > 1
        assert "".join(llm.token_text(token) for token in tokens) == "hello there"
        assert llm.token_text(10**6) == "<1000000>"


@pytest.mark.parametrize("parallel", [1, 2])
def test_close_can_cancel(tiny: TinyFiles, parallel: int) -> None:
    llm = LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=2048, parallel=parallel)
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    with Brake(llm) as brake:
        running = [llm.rounds("endless", endless, speculate=False) for _ in range(parallel)]
        brake.wait()
        waiting = llm.rounds("later", GREEDY)
        llm.close(cancel=True)
    assert {stream.reply.finish_reason for stream in (*running, waiting)} == {"cancelled"}
    assert all(len(stream.reply.token_ids) < 1000 for stream in running)
    assert waiting.reply.token_ids == []
    llm.close()
    for use in (llm.rounds, llm.tokenize, llm.logprobs, llm.set_draft, lambda text: llm.inspect()):
        with pytest.raises(Closed):
            use("x")


def test_close_finishes_what_waits(tiny: TinyFiles) -> None:
    llm = LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=256)
    streams = [llm.rounds("x", GREEDY) for _ in range(3)]
    llm.close()
    assert [len(stream.reply.token_ids) for stream in streams] == [24] * 3


def test_loading_in_asyncio(tiny: TinyFiles) -> None:
    async def main() -> None:
        async with await LLM.aload(tiny.quick.target, draft=None, backend="reference", n_ctx=256) as llm:
            assert len((await llm.agenerate("x", GREEDY)).token_ids) == 24
        with pytest.raises(Closed):
            llm.rounds("x")
        started, released = threading.Event(), threading.Event()

        def progress(what: str, fraction: float | None) -> None:
            said.append(what)
            started.set()
            released.wait(PATIENCE)

        task = asyncio.create_task(LLM.aload(tiny.quick.target, draft=None, backend="reference", progress=progress))
        await asyncio.to_thread(started.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()

    before, said = threading.active_count(), list[str]()
    asyncio.run(main())
    wait_until(lambda: threading.active_count() <= before)
    assert len(said) == 1  # then the load ended


def test_sampling_parameters_are_keywords_too(llm: LLM) -> None:
    fields: Any = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    drawn = SamplingParams(**fields)
    wanted = llm.generate("la la la", drawn).token_ids
    assert llm.generate("la la la", **fields).token_ids == wanted
    assert llm.generate("la la la", replace(drawn, seed=6), seed=5).token_ids == wanted
    assert len(llm.generate("la la la", replace(drawn, max_tokens=3), max_tokens=12).token_ids) == 12
    assert len(llm.chat("Hello", max_tokens=3, ignore_eos=True).token_ids) == 3
    assert len(list(llm.rounds("la la la", GREEDY, max_tokens=2, speculate=False))) == 2


def test_keywords_of_a_session_go_over_its_parameters(llm: LLM) -> None:
    session = llm.session(params=SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True))
    long = session.chat("Hello").token_ids
    assert session.undo()
    assert session.chat("Hello", max_tokens=4).token_ids == long[:4]
    with pytest.raises(UsageError, match="conversation of its own"):
        session.chat("Hello", conversation="mine")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("deadlin", "deadline"), ("temp", "temperature"), ("max_token", "max_tokens"), ("seeds", "seed"), ("qqq", None)],
)
def test_an_unknown_option_names_the_one_that_is_meant(llm: LLM, given: str, meant: str | None) -> None:
    hint = f"; did you mean {meant}?" if meant else ""
    line = f"there is no option {given!r}{hint}"
    for ask in (llm.chat, llm.generate, llm.rounds, llm.fill, llm.session().chat):
        with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
            ask("Hello", **{given: 1})
    with pytest.raises(UsageError, match="there is no option"):
        list(llm.stream("Hello", **{given: 1}))


def test_the_keywords_are_all_there_are() -> None:
    """A type checker knows each option: those of sampling by their own names and types, the others as ``rounds`` has
    them."""
    named, params = get_type_hints(SamplingOptions), get_type_hints(SamplingParams)
    assert {**named, "stop": params["stop"]} == {name: params[name] for name in SAMPLING}
    arguments = (LLM.rounds.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    documented = set(re.findall(r"^ {12}(\w+): ", arguments, re.MULTILINE))
    assert set(RequestOptions.__annotations__) - set(named) == documented - {"question", "params"}


def test_a_reply_prints_as_its_text(llm: LLM) -> None:
    reply = llm.generate("la la la", max_tokens=40)
    assert str(reply) == reply.text
    assert len(repr(reply)) < 200
    assert llm.model_name in repr(llm)


def test_the_types_of_statistics_are_as_declared(llm: LLM) -> None:
    declared = {name: kind for name, kind in get_type_hints(SpecStats).items() if kind in (int, float)}
    for speculate in (True, False):
        stats = llm.generate("la la la", max_tokens=24, speculate=speculate, draft_length=3).stats
        assert {name: type(stats[name]) for name in declared} == declared
        assert (stats["acceptance_rate"] is None) == (stats["num_draft_tokens"] == 0) == (not speculate)


def test_work_on_the_model_s_thread_that_waits_for_an_answer_is_refused(llm: LLM) -> None:
    """It would wait for itself for ever."""
    for ask in (lambda: llm.generate("la"), lambda: next(llm.stream("la")), lambda: llm.logprobs("la")):
        with pytest.raises(UsageError, match="cannot wait for an answer"):
            llm.run(lambda pair, ask=ask: ask())
    assert llm.generate("la", max_tokens=2).token_ids
