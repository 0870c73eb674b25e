"""What is the Responses API's own, as OpenAI's Python package sees it."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import openai
import pytest

from localspec.server.service import ResponseStore, StoredResponse
from tests.server.apis.packages import CALL, FUNCTION, says

ASKED: Any = {"model": "claude-local", "input": "Say something.", "max_output_tokens": 100}
USER: Any = {"role": "user", "content": [{"type": "input_text", "text": ASKED["input"]}]}
TOOLS: Any = [{"type": "function"} | FUNCTION]


def test_a_stream_s_events_come_in_openai_s_order(client: openai.OpenAI) -> None:
    asked = ASKED | {"temperature": 1, "extra_body": {"seed": 3}, "max_output_tokens": 24}
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    order = "created in_progress output_item.added content_part.added output_text.delta output_text.done"
    order += f" content_part.done output_item.done {events[-1].response.status}"
    assert [kind for kind, _ in groupby(kinds)] == order.split()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(events) == len(deltas) + 8
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert events[0].response.id == events[-1].response.id
    with client.responses.stream(**ASKED, extra_body=says("Hello.")) as stream:
        list(stream)
        assert stream.get_final_response().output_text == "Hello."
    events = list(client.responses.create(**ASKED, tools=TOOLS, extra_body=says(CALL), stream=True))
    *deltas, last = [event for event in events if event.type.startswith("response.function_call_arguments.")]
    assert {event.type for event in deltas} == {"response.function_call_arguments.delta"}
    assert json.loads("".join(event.delta for event in deltas)) == json.loads(last.arguments) == {"city": "Rome"}


def test_a_conversation_by_reference_and_in_full_is_the_same_to_the_model(client: openai.OpenAI) -> None:
    """Instructions are of one answer only."""
    asked = ASKED | {"tools": TOOLS}
    first = client.responses.create(**asked, instructions="Be terse.", extra_body=says(CALL))
    assert first.instructions == "Be terse."
    (call,) = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    short = client.responses.create(**asked | {"input": [result]}, previous_response_id=first.id)
    full = client.responses.create(**asked | {"input": [USER, call.model_dump(), result]})
    assert (short.output_text, short.usage.input_tokens) == (full.output_text, full.usage.input_tokens)
    assert short.previous_response_id == first.id


def test_answers_and_their_items_are_kept_until_deleted_and_not_without_leave(client: openai.OpenAI) -> None:
    kept = client.responses.create(**ASKED, extra_body=says("Hello."))
    assert client.responses.retrieve(kept.id).output_text == "Hello."
    full = client.responses.create(**ASKED | {"input": [USER, {"role": "assistant", "content": "Hello."}, USER]})
    named: Any = {"id": kept.output[0].id}
    for reference in (named, named | {"type": "item_reference"}):
        found = client.responses.create(**ASKED | {"input": [USER, reference, USER]})
        assert found.usage.input_tokens == full.usage.input_tokens
    client.responses.delete(kept.id)
    for response in (kept, client.responses.create(**ASKED, store=False)):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        for change, code in (
            ({"previous_response_id": response.id}, "previous_response_not_found"),
            ({"input": [USER, {"id": response.output[0].id}]}, "item_not_found"),
        ):
            with pytest.raises(openai.BadRequestError, match="there is no") as caught:
                client.responses.create(**ASKED | change)
            assert caught.value.code == code


def test_the_store_is_bounded_in_number_and_size() -> None:
    def stored(n: int) -> StoredResponse:
        return StoredResponse({"id": n}, [{"role": "user", "content": "x" * n}])

    store = ResponseStore(max_responses=2, max_bytes=1000)
    for name in ("a", "b"):
        store.put(name, stored(1))
    assert store.get("a")  # used, so "b" goes first
    for name, n, left in (("c", 1, "ac"), ("d", 900, "cd"), ("e", 1001, "")):
        store.put(name, stored(n))
        assert "".join(name for name in "abcde" if store.get(name)) == left
    store.remove("d")  # is gone already
    store.put("f", stored(900))
    assert store.get("f")
