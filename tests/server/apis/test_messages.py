"""What is Anthropic's API's own, as Anthropic's Python package sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from tests.server.apis.packages import FUNCTION, Messages, says
from tests.support.serving import Server, serve

ASKED: Any = {"model": "claude-local", "max_tokens": 100, "messages": [{"role": "user", "content": "Say something."}]}
TOOLS: Any = [{"name": "weather", "input_schema": FUNCTION["parameters"]}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with Messages(server.url, "claude-local").package as client:
        yield client


def test_the_events_of_a_stream_come_in_anthropic_s_order(client: Any) -> None:
    with client.messages.stream(**ASKED | {"max_tokens": 24, "extra_body": {"temperature": 1, "seed": 3}}) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
    order = "message_start content_block_start content_block_delta content_block_stop message_delta message_stop"
    assert [kind for kind, _ in groupby(kinds)] == order.split()


def test_any_call_and_which_stop_sequence(client: Any) -> None:
    (call,) = client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "any"}).content
    assert call.input["city"] in ("Rome", "Oslo")
    found = client.messages.create(**ASKED, stop_sequences=["zzz", " on"], extra_body=says("the cat sat on the mat"))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", " on")
    assert found.localspec["stats"]["num_rounds"] > 0


def test_what_is_counted_without_an_answer(client: Any) -> None:
    def count(*messages: Any, **more: Any) -> int:
        return client.messages.count_tokens(model="claude-local", messages=messages, **more).input_tokens

    user = ASKED["messages"][0]
    usage = client.messages.create(**ASKED | {"max_tokens": 1}).usage
    assert count(user) == usage.input_tokens + usage.cache_read_input_tokens
    assert count({"role": "user", "content": "word " * 4000}) > 2048
    # What was thought is no part of the history, and a system message may stand anywhere.
    text, thought = {"type": "text", "text": "Hi."}, {"type": "thinking", "thinking": "hm", "signature": ""}
    said = [{"role": "assistant", "content": content} for content in ([thought, text], "Hi.")]
    assert count(user, said[0], user) == count(user, said[1], user)
    note = {"role": "system", "content": [{"type": "text", "text": "Five words at most."}]}
    assert min(count(user, note), count(note, user)) > count(user) + 5
    # That a tool failed is told.
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no network"}
    failed, worked, unsaid = (
        count(user, call, {"role": "user", "content": [result | more]}, tools=TOOLS)
        for more in ({"is_error": True}, {"is_error": False}, {})
    )
    assert failed > worked == unsaid


def test_an_answer_that_was_begun_is_gone_on_with(llm: LLM, client: Any) -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": "the cat "}]
    found = client.messages.create(**ASKED | {"messages": turns, "max_tokens": 8}, extra_body={"temperature": 0})
    prompt = llm.encode(ASKED["messages"]) + llm.tokenize("the cat ")
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == len(prompt)
    assert found.content[0].text == llm.generate(prompt, SamplingParams(max_tokens=8)).text.lstrip()


def test_the_key_is_sent_as_anthropic_s_clients_do(llm: LLM) -> None:
    with serve(llm, api_key="secret", aliases=["claude-local"]) as server:
        count: Any = {"model": "claude-local", "messages": ASKED["messages"]}
        for key, status in (("secret", 200), ("wrong", 401)):
            found, _, answer = server.ask("POST", "/v1/messages/count_tokens", count, {"x-api-key": key})
            assert found == status
        assert json.loads(answer)["error"]["type"] == "authentication_error"
