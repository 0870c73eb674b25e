"""Anthropic's API as Anthropic's own Python package sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from tests.server.apis.conftest import CALL, SCHEMA, says
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE

anthropic = pytest.importorskip("anthropic")

ASKED: Any = {"model": "claude-local", "max_tokens": 100, "messages": [{"role": "user", "content": "Say something."}]}
TOOLS: Any = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]


def made(url: str, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with made(server.url) as client:
        yield client


def test_an_answer_is_the_library_s(llm: LLM, client: Any) -> None:
    system = "You are terse."
    found = client.messages.create(**ASKED | {"max_tokens": 20}, system=system, extra_body={"temperature": 0})
    messages = [{"role": "system", "content": system}, *ASKED["messages"]]
    expected = llm.chat(messages, SamplingParams(max_tokens=20))
    assert [(block.type, block.text) for block in found.content] == [("text", expected.text)]
    assert (found.type, found.role) == ("message", "assistant")
    assert found.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected.finish_reason]
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.stats["prompt_tokens"]
    assert usage.output_tokens == expected.stats["completion_tokens"]
    assert found.localspec["stats"]["num_rounds"] > 0


def test_a_stream_is_the_answer_in_pieces(client: Any) -> None:
    asked = ASKED | {"max_tokens": 24, "extra_body": {"temperature": 1, "seed": 3}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    order = "message_start content_block_start content_block_delta content_block_stop message_delta message_stop"
    assert [kind for kind, _ in groupby(kinds)] == order.split()
    assert len(kinds) > 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(client: Any, stream: bool) -> None:
    asked = ASKED | {"tools": TOOLS, "extra_body": says(f"I look.\n{CALL}")}
    if stream:
        with client.messages.stream(**asked) as events:
            found = events.get_final_message()
    else:
        found = client.messages.create(**asked)
    text, call = found.content
    assert text.text.strip() == "I look."
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    assert found.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    said = [block.model_dump() for block in found.content]
    turns = [*ASKED["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**ASKED | {"messages": turns}, tools=TOOLS, extra_body=says("It is sunny."))
    assert answer.content[0].text == "It is sunny."
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > found.usage.input_tokens


def test_a_call_can_be_asked_for(client: Any) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        (call,) = client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice).content
        assert call.input["city"] in ("Rome", "Oslo")


def test_schema_and_stop_sequence(client: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = client.messages.create(**ASKED, output_config=form)
    assert json.loads(found.content[0].text)["city"] in ("Rome", "Oslo")
    found = client.messages.create(**ASKED, stop_sequences=["zzz", " on"], extra_body=says("the cat sat on the mat"))
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("the cat sat", "stop_sequence", " on")


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


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"model": "gpt-9"}, "NotFoundError", "gpt-9"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "BadRequestError", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, "BadRequestError", "2048"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "BadRequestError", "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_answered_in_anthropic_s_form(
    client: Any, change: dict[str, Any], error: str, word: str, stream: bool
) -> None:
    with pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(**ASKED | change, stream=stream)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert word in caught.value.body["error"]["message"]


def test_the_key_is_sent_as_anthropic_s_clients_do(llm: LLM) -> None:
    with serve(llm, api_key="secret", aliases=["claude-local"]) as server:
        with made(server.url, "secret") as client:
            assert client.messages.count_tokens(model="claude-local", messages=ASKED["messages"]).input_tokens > 0
        with made(server.url, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**ASKED)
        assert caught.value.body["error"]["type"] == "authentication_error"
