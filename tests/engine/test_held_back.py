"""Text that was held back when an answer ends: wherever it ends, what was streamed is the answer, and nothing is lost.

Answers are broken off at a chosen look at the clock, so nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec import LLM, Reply, SamplingParams
from localspec.commands.chat.chat import Chat
from localspec.commands.chat.screen import ChatScreen
from localspec.commands.replay.command import read
from localspec.engine.answer import answer
from localspec.engine.request import Request
from localspec.engine.worker import Job
from localspec.spec_decode.rounds import Round
from localspec.system.terminal import visible
from tests.conftest import TinyFiles
from tests.spec_decode.test_detokenizer import cut_at_stop
from tests.support.serving import serve

FREE = SamplingParams(max_tokens=40, ignore_eos=True)
NEVER = "\0never said"


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    with LLM(tiny.quick.target, draft=["ngram", tiny.quick.draft], backend="reference", n_ctx=512) as loaded:
        yield loaded


@contextmanager
def late_after(looks: int) -> Iterator[None]:
    """Within the block every running request finds itself too late when it has looked at the clock so often."""
    stopped = Job.stopped
    seen: dict[Job, int] = {}

    def counted(job: Job) -> bool:
        if job.state == "running":
            seen[job] = seen.get(job, 0) + 1
            if seen[job] > looks and job.cancelled_by is None:
                job.cancelled_by = "deadline"
        return stopped(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "stopped", counted)
        yield


def expected(llm: LLM, params: SamplingParams, reply: Reply) -> tuple[str, str]:
    """What an answer of these tokens says, and why it ended: the definition."""
    ended = bool(reply.token_ids) and reply.token_ids[-1] in llm.vocab.eog and not params.ignore_eos
    said = llm.detokenize(reply.token_ids[:-1] if ended else reply.token_ids)
    text, found = cut_at_stop(said, params.stop)
    if found or ended:
        return text, "stop"
    return text, "length" if len(reply.token_ids) == params.max_tokens else "cancelled"


def check(llm: LLM, params: SamplingParams, rounds: Sequence[Round], reply: Reply) -> None:
    assert (reply.text, reply.finish_reason) == expected(llm, params, reply)
    assert "".join(round_.text for round_ in rounds) == reply.text
    assert (reply.cancelled_by is not None) == (reply.finish_reason == "cancelled")
    assert [token.id for round_ in rounds for token in round_.emitted] == reply.token_ids
    with_tokens = [round_ for round_ in rounds if round_.emitted]
    assert [round_.index for round_ in rounds] == list(range(len(rounds)))
    assert reply.stats["num_rounds"] == len(with_tokens) >= len(rounds) - 1
    if rounds:
        assert rounds[-1].finish_reason in (reply.finish_reason, None)


@settings(deadline=None)  # of the test framework; a loaded machine takes its time
@given(st.data())
def test_answers_of_a_model_wherever_they_end(llm: LLM, data: st.DataObject) -> None:
    """Byte tokens of a model that babbles, stop strings out of what it says, given up after any round or within one."""
    temperature = data.draw(st.sampled_from([0.0, 1.0, 3.0]))
    free = SamplingParams(
        max_tokens=data.draw(st.integers(1, 24)),
        ignore_eos=data.draw(st.booleans()),
        temperature=temperature,
        seed=data.draw(st.integers(0, 50)) if temperature else None,
    )
    prompt = data.draw(st.sampled_from(["hello", "the cat", "x"]))
    length = data.draw(st.sampled_from([0, 1, 3, 8]))
    said = llm.generate(prompt, free, draft_length=length).text
    cuts = st.tuples(st.integers(0, len(said)), st.integers(1, 8)).map(lambda at: said[at[0] : sum(at)])
    ends = st.sampled_from(["", "a", "\ufffd", NEVER])
    stop = [text for text in data.draw(st.lists(st.tuples(cuts, ends).map("".join), max_size=3)) if text]
    params = replace(free, stop=stop)
    give_up_after = data.draw(st.one_of(st.none(), st.integers(1, 12)))
    looks = data.draw(st.one_of(st.none(), st.integers(0, 20)))
    rounds: list[Round] = []
    ended: list[Reply] = []

    def deliver(item: Any) -> None:
        if not isinstance(item, Round):
            ended.append(item.reply())
            return
        rounds.append(item)
        if len(rounds) == give_up_after:
            job.cancel()

    pair = llm.inspect()
    job = Job(lambda job: answer(pair, job), deliver, request=Request(pair.encoder, prompt, params, length))
    with late_after(10**9 if looks is None else looks):
        pair.worker.call(job.run)
    check(llm, params, rounds, ended[0])


def held(llm: LLM) -> tuple[SamplingParams, int]:
    """Parameters with a stop string that the answer seems to begin and never completes, and looks until it is late."""
    said = llm.chat("hello", FREE).text
    return SamplingParams(max_tokens=40, ignore_eos=True, stop=[said[2:] + NEVER]), 12


def test_every_way_of_asking_gives_the_rest_at_a_deadline(llm: LLM) -> None:
    params, looks = held(llm)
    with late_after(looks):
        reply = llm.chat("hello", params, draft_length=0)
        stream = llm.rounds([{"role": "user", "content": "hello"}], params, draft_length=0)
        rounds = list(stream)
        check(llm, params, rounds, stream.reply)
        pieces = list(llm.stream([{"role": "user", "content": "hello"}], params, draft_length=0))
        session = llm.session()
        assert "".join(session.stream("hello", params, draft_length=0)) == session.messages[1]["content"]

        async def main() -> tuple[Reply, str]:
            messages = [{"role": "user", "content": "hello"}]
            streamed = [piece async for piece in llm.astream(messages, params, draft_length=0)]
            return await llm.achat("hello", params, draft_length=0), "".join(streamed)

        later, streamed = asyncio.run(main())
    assert (reply.finish_reason, reply.cancelled_by) == ("cancelled", "deadline")
    assert len(reply.text) > 2  # more than what was free before the stop string seemed to begin
    assert reply.text == "".join(pieces) == streamed == later.text == stream.reply.text
    assert reply.text == session.messages[1]["content"] == llm.detokenize(reply.token_ids)
    events = [round_.as_event() for round_ in rounds]
    assert not events[-1]["emitted"]
    (found,) = read("\n".join(json.dumps(event) for event in [*events, stream.reply.as_dict()]).encode()).answers
    assert len(found.rounds) == len(events) - 1  # a recording has no empty one
    shown = "".join(token["text"] for round_ in found.rounds for token in round_["emitted"]) + found.text
    assert shown == visible(reply.text)


@pytest.mark.parametrize("looks", [12, 10**9])
def test_a_stop_string_that_waited_for_a_longer_one_ends_the_answer(llm: LLM, looks: int) -> None:
    said = llm.generate("hello", FREE, speculate=False).text
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop=[said[5:7], said[4:] + NEVER])
    with late_after(looks):
        stream = llm.rounds("hello", params, speculate=False)
        rounds = list(stream)
    check(llm, params, rounds, stream.reply)
    assert (stream.reply.text, stream.reply.finish_reason, stream.reply.cancelled_by) == (said[:5], "stop", None)
    assert len(stream.reply.token_ids) > 7


def test_the_server_gives_the_rest_at_a_deadline(llm: LLM) -> None:
    params, looks = held(llm)
    with late_after(looks):
        expected = llm.detokenize(llm.chat("hello", params, speculate=False).token_ids)
    body = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "temperature": 0,
        "stop": list(params.stop), "ignore_eos": True, "logprobs": True, "localspec": {"off": True},
    }  # fmt: skip
    with serve(llm) as server, late_after(looks):
        whole = server.ask("POST", "/v1/chat/completions", body)[2]
        stream = server.ask("POST", "/v1/chat/completions", body | {"stream": True})[2]
    (choice,) = json.loads(whole)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "length")
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert (text, choices[-1]["finish_reason"]) == (expected, "length")


@pytest.mark.parametrize("view", ["plain", "rounds", "tokens"])
def test_the_chat_shows_and_keeps_the_rest(llm: LLM, view: str) -> None:
    params, looks = held(llm)
    length, llm.draft_length = llm.draft_length, 0
    out, errors = io.StringIO(), io.StringIO()
    chat = Chat(llm, ChatScreen(out, errors), params=params, view=view)
    try:
        with late_after(looks):
            reply = llm.chat("hello", params)
            assert chat.ask("hello")
    finally:
        llm.draft_length = length
    (record,) = chat.records
    assert (chat.session.messages[-1]["content"], record.finish_reason) == (reply.text, "cancelled")
    assert (visible(reply.text) if view == "rounds" else reply.text) in out.getvalue()  # no terminal: as it is
    assert record.stats["num_rounds"] == len(reply.token_ids) == len(record.rounds) - 1
    if view == "rounds":
        n = len(reply.token_ids)
        assert f"1-{n} plain, {n} tokens" in out.getvalue()
