"""Tools in requests: when calls are read, how one is forced, and what holds an answer's form."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from localspec.prompts.templates import ChatTemplate
from localspec.sampling.sampling import SamplingParams
from localspec.server.tools import ToolUse, forced_call
from tests.server.apis.packages import says
from tests.support.serving import Server, asking

CHAT = [{"role": "user", "content": "Ann is 32."}]
FIXED: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"const": "find_person"}, "arguments": {"const": {"age": 32}}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
SAID = {"name": "find_person", "arguments": {"age": 32}}
CALL = '<tool_call>\n{"name": "find_person", "arguments": {"age": 3}}\n</tool_call>'


def tool(parameters: Any = None, name: str = "find_person", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}} | more}


def ask(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    few = {"temperature": 0, "seed": 1}
    own = {"/v1/responses": few | {"max_output_tokens": 200}, "/api/chat": {"options": few | {"num_predict": 200}}}
    status, _, answer = server.ask("POST", path, own.get(path, few | {"max_tokens": 200}) | body)
    return status, json.loads(answer) if answer.startswith(b"{") else answer.decode()


def chat(server: Server, **body: Any) -> dict[str, Any]:
    """The choice of a chat; streamed and whole are the same."""
    body = {"messages": CHAT, "tools": [tool()]} | body
    status, answer = ask(server, "/v1/chat/completions", **body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    streamed = ask(server, "/v1/chat/completions", **body, stream=True)[1]
    deltas = [json.loads(line[6:])["choices"][0] for line in streamed.split("\n") if line.startswith("data: {")]
    message = choice["message"]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == (message["content"] or "")
    pieces = [piece for delta in deltas for piece in delta["delta"].get("tool_calls", ())]
    said = "".join(piece["function"].get("arguments", "") for piece in pieces)
    assert said == "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    found: dict[str, Any] = choice
    return found


def test_an_answer_that_follows_a_schema_is_the_answer(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": FIXED, "strict": True}}
    found = chat(server, response_format=form, tool_choice="auto")
    assert json.loads(found["message"]["content"]) == SAID
    assert "tool_calls" not in found["message"]
    assert found["finish_reason"] == "stop"
    object_too = {"type": "json_object", "schema": FIXED}
    assert json.loads(chat(server, response_format=object_too)["message"]["content"]) == SAID
    # What is no schema holds nothing: the same words are a call then.
    assert chat(server, **says(json.dumps(SAID)))["message"]["tool_calls"]
    assert chat(server, **says(json.dumps(SAID)), response_format=None)["message"]["tool_calls"]


def test_text_and_calls_keep_their_order_where_an_answer_has_blocks(server: Server) -> None:
    text = f"First.\n\n{CALL}\n\nThen.\n{CALL}"
    asked = {"messages": CHAT, "tools": [{"name": "find_person", "input_schema": {"type": "object"}}]}
    for draft in ({"off": True}, {"draft_length": 40}):
        _, answer = ask(server, "/v1/messages", **asked, **says(text), localspec=draft)
        kinds = [(block["type"], block.get("text", "").strip()) for block in answer["content"]]
        assert kinds == [("text", "First."), ("tool_use", ""), ("text", "Then."), ("tool_use", "")]


# -- forms of calls, through a server ----------------------------------------------------------------------------------


def test_a_call_that_the_budget_cuts_is_not_made_whole(server: Server) -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis, and so on\n</parameter>\n</function>\n</tool_call>"
    )
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    found = chat(server, tools=[tool(city, "weather")], **says(text), max_tokens=len(text) // 2)
    for call in found["message"].get("tool_calls", ()):
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["function"]["arguments"])
    assert found["finish_reason"] == "length"


def test_nothing_follows_the_one_call_that_is_wanted(server: Server) -> None:
    text = f"{CALL}\n{CALL} more"
    for draft in ({"off": True}, {"draft_length": 60}):
        found = chat(server, parallel_tool_calls=False, **says(text), localspec=draft)
        assert (len(found["message"]["tool_calls"]), found["message"]["content"]) == (1, None)
        assert found["finish_reason"] == "tool_calls"


# -- a forced call -----------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"pet": {"$ref": "#/$defs/Pet"}, "default": {"$ref": "#/$defs/Pet/properties/kind"}},
    "required": ["pet", "default"],
    "additionalProperties": False,
    "$defs": {
        "Pet": {
            "type": "object",
            "properties": {"kind": {"enum": ["cat"]}, "where": {"const": "x", "type": "string", "format": "path"}},
            "required": ["kind", "where"],
            "additionalProperties": False,
        }
    },
}
LOOKS_AHEAD = {"type": "object", "properties": {"x": {"pattern": "(?=a)"}}}
MEANT = {"pet": {"kind": "cat", "where": "x"}, "default": "cat"}


def test_a_forced_call_follows_what_its_schema_refers_to(server: Server) -> None:
    named = {"type": "function", "function": {"name": "find_person"}}
    for choice in ("required", named):
        for tools in ([tool(PERSON)], [tool(PERSON), tool(PERSON | {"$id": "https://example.org/x"}, "other")]):
            found = chat(server, tools=tools, tool_choice=choice)
            (call,) = found["message"]["tool_calls"]
            assert call["function"]["name"] == "find_person" or choice == "required"
            assert json.loads(call["function"]["arguments"]) == MEANT
            assert found["finish_reason"] == "tool_calls"


def test_a_forced_call_takes_no_heed_of_a_format_for_texts(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": FIXED}}
    found = chat(server, tools=[tool(PERSON)], tool_choice="required", response_format=form)
    assert json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]) == MEANT
    asked = {"messages": CHAT, "tools": [tool()], "tool_choice": "required"}
    status, answer = ask(server, "/v1/chat/completions", **asked, **says("x"))
    assert status == 400
    assert "grammar" in answer["error"]["message"]


def test_a_schema_that_cannot_be_followed_gives_way_for_its_own_tool_only() -> None:
    use = ToolUse([tool(PERSON), tool(LOOKS_AHEAD, "strange")], required=True)
    _, params = forced_call(ChatTemplate(None), use, SamplingParams())
    kept, given_up = params.response_format["json_schema"]["schema"]["anyOf"]
    assert kept["properties"]["arguments"] == {"$ref": "#/$defs/0"}
    assert given_up["properties"]["arguments"] == {"type": "object"}


def test_a_strict_tool_is_refused_in_every_api(server: Server) -> None:
    strange = {"name": "strange", "strict": True}
    for path, choice, written in (
        ("/v1/chat/completions", "required", tool(LOOKS_AHEAD, **strange)),
        ("/v1/responses", "required", {"type": "function", "parameters": LOOKS_AHEAD} | strange),
        ("/v1/messages", {"type": "any"}, strange | {"input_schema": LOOKS_AHEAD}),
    ):
        body = asking("Ann is 32.", 9)[path] | {"tools": [written], "tool_choice": choice}
        status, _, answer = server.ask("POST", path, body)
        assert (status, b"the tool strange is strict, but" in answer) == (400, True), answer


def test_without_the_library_the_answer_says_what_to_install(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    schema = {"type": "object", "title": "seen by no test"}
    for path, body in (
        ("/v1/chat/completions", {"tools": [tool(schema)], "tool_choice": "required"}),
        ("/v1/chat/completions", {"grammar": 'root ::= "seen by no test"', "stream": True}),
        ("/api/chat", {"format": schema}),
    ):
        status, answer = ask(server, path, messages=CHAT, **body)
        assert (status, "pip install 'llguidance" in json.dumps(answer["error"])) == (501, True)
