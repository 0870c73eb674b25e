"""OpenAI's Responses API as OpenAI's own Python package sees it."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import openai
import pytest

from localspec import LLM, SamplingParams
from localspec.server.service import ResponseStore, StoredResponse
from tests.server.apis.conftest import CALL, SCHEMA, says

ASKED: Any = {"model": "claude-local", "input": "Say something.", "max_output_tokens": 100}
TOOLS: Any = [{"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA}]


def test_an_answer_is_the_library_s(llm: LLM, client: openai.OpenAI) -> None:
    found = client.responses.create(**ASKED | {"max_output_tokens": 20}, instructions="Be terse.", temperature=0)
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": ASKED["input"]}]
    expected = llm.chat(messages, SamplingParams(max_tokens=20))
    assert found.output_text == expected.text
    assert found.status == {"length": "incomplete", "stop": "completed"}[expected.finish_reason]
    assert found.instructions == "Be terse."
    assert found.usage.input_tokens == expected.stats["prompt_tokens"]
    assert found.usage.output_tokens == expected.stats["completion_tokens"]
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens


def test_a_stream_s_events_come_in_openai_s_order(client: openai.OpenAI) -> None:
    asked = ASKED | {"temperature": 1, "extra_body": {"seed": 3}, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    kinds = [event.type.removeprefix("response.") for event in events]
    order = "created in_progress output_item.added content_part.added output_text.delta output_text.done"
    assert [kind for kind, _ in groupby(kinds)] == [
        *order.split(),
        "content_part.done",
        "output_item.done",
        whole.status,
    ]
    assert len(events) == len(deltas) + 8
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == whole.output_text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert events[0].response.id == events[-1].response.id
    with client.responses.stream(**asked) as stream:
        list(stream)
        assert stream.get_final_response().output_text == whole.output_text if whole.status == "completed" else True


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(client: openai.OpenAI, stream: bool) -> None:
    asked = ASKED | {"tools": [*TOOLS, {"type": "web_search"}], "extra_body": says(CALL)}
    if stream:
        events: list[Any] = list(client.responses.create(**asked, stream=True))
        kinds = [event.type for event in events if "function_call" in event.type]
        assert kinds[-1] == "response.function_call_arguments.done"
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(deltas)) == {"city": "Rome"}
        found = events[-1].response
    else:
        found = client.responses.create(**asked)
    (call,) = found.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": ASKED["input"]}]}
    own: Any = ASKED | {"tools": TOOLS, "extra_body": says("It is sunny.")}
    # The conversation by reference, and in full, is the same to the model.
    short = client.responses.create(**own | {"input": [result]}, previous_response_id=found.id)
    full = client.responses.create(**own | {"input": [question, call.model_dump(), result]})
    assert (short.output_text, short.usage.input_tokens) == ("It is sunny.", full.usage.input_tokens)
    assert short.previous_response_id == found.id


def test_choice_of_tools_and_form(client: openai.OpenAI) -> None:
    (call,) = client.responses.create(**ASKED, tools=TOOLS, tool_choice={"type": "function", "name": "weather"}).output
    assert call.type == "function_call"
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    assert json.loads(client.responses.create(**ASKED, text=form).output_text)["city"] in ("Rome", "Oslo")


def test_instructions_are_of_one_answer_only(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, instructions="Be terse.", extra_body=says("Hello."))
    second = client.responses.create(**ASKED, previous_response_id=first.id)
    turns: Any = [{"role": "user", "content": ASKED["input"]}, {"role": "assistant", "content": "Hello."}]
    full = client.responses.create(**ASKED | {"input": [*turns, turns[0]]})
    assert second.usage.input_tokens == full.usage.input_tokens
    assert second.output_text == full.output_text


def test_an_item_of_an_answer_that_is_kept_can_be_named(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, extra_body=says("Hello."))
    user: Any = {"role": "user", "content": ASKED["input"]}
    named: Any = {"type": "item_reference", "id": first.output[0].id}
    for reference in (named, {"id": named["id"]}):
        found = client.responses.create(**ASKED | {"input": [user, reference, user]})
        full = client.responses.create(**ASKED | {"input": [user, {"role": "assistant", "content": "Hello."}, user]})
        assert found.usage.input_tokens == full.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="there is no item") as caught:
        client.responses.create(**ASKED | {"input": [user, named, user]})
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[1].id")


def test_answers_are_kept_until_deleted_and_not_without_leave(client: openai.OpenAI) -> None:
    kept = client.responses.create(**ASKED)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    client.responses.delete(kept.id)
    secret = client.responses.create(**ASKED, store=False)
    for response in (kept, secret):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="no response") as caught:
            client.responses.create(**ASKED, previous_response_id=response.id)
        assert caught.value.code == "previous_response_not_found"


def test_the_store_is_bounded_in_number_and_size() -> None:
    def stored(n: int) -> StoredResponse:
        return StoredResponse({"id": n}, [{"role": "user", "content": "x" * n}])

    store = ResponseStore(max_responses=2, max_bytes=1000)
    for name in ("a", "b"):
        store.put(name, stored(1))
    assert store.get("a")  # used, so "b" goes first
    store.put("c", stored(1))
    assert [name for name in "abc" if store.get(name)] == ["a", "c"]
    store.put("d", stored(900))
    assert [name for name in "abcd" if store.get(name)] == ["c", "d"]
    store.put("e", stored(1001))
    assert not any(map(store.get, "abcde"))
    store.remove("d")  # is gone already
    store.put("f", stored(900))
    assert store.get("f")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"background": True}, "background"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_names_the_field(
    client: openai.OpenAI, change: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED | change, stream=stream)
    assert caught.value.param == param
