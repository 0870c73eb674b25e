"""Chat templates of many kinds (``tests/data/chat_templates.toml``), and conversations to walk them with."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
TEMPLATES: dict[str, str] = tomllib.loads((DATA / "chat_templates.toml").read_text(encoding="utf-8"))


def _call(name: str = "look", id: str = "call_1f3a", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {"place": "Oslo"}}}


S, S2 = {"role": "system", "content": "Answer in rhymes."}, {"role": "system", "content": "The user likes herons."}
U, U2 = {"role": "user", "content": "Where is it cold?"}, {"role": "user", "content": "And where warm, pray?"}
A, A2 = {"role": "assistant", "content": "Up north, of old."}, {"role": "assistant", "content": "Down south, they say."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [_call()]}
RESULT = {"role": "tool", "tool_call_id": "call_1f3a", "name": "look", "content": "minus seven degrees"}
TWO_CALLS = CALLS | {"tool_calls": [_call(), _call(id="call_2b", place="Rome")]}
RESULT_2 = RESULT | {"tool_call_id": "call_2b", "content": "plus thirty degrees"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [U],
    "a system prompt": [S, U],
    "two system prompts": [S, S2, U],
    "a system prompt behind": [U, S],
    "a system prompt between": [S, U, A, S2, U2],
    "turns": [S, U, A, U2],
    "two questions": [S, U, U2],
    "two answers": [U, A, A2, U2],
    "an answer first": [A, U],
    "an answer last": [U, A],
    "an empty answer": [U, A | {"content": ""}, U2],
    "no answer": [U, A | {"content": None}, U2],
    "no calls": [U, A | {"tool_calls": []}, U2],
    "only thoughts": [U, {"role": "assistant", "content": None, "reasoning_content": "Hm, north."}, U2],
    "thoughts": [U, A | {"reasoning_content": "Hm, north."}, U2],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": " it cold?"}]},
        A,
        {"role": "user", "content": [{"type": "text", "text": "And where warm?"}]},
    ],
    "a call": [S, U, CALLS, RESULT],
    "a call and what follows": [S, U, CALLS, RESULT, A, U2],
    "a call beside a text": [U, CALLS | {"content": "Let me look it up."}, RESULT, A, U2],
    "two calls": [U, TWO_CALLS, RESULT, RESULT_2],
    "calls one after the other": [U, CALLS, RESULT, CALLS, RESULT, A, U2],
    "a call without ids": [
        U,
        CALLS | {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "minus seven degrees"},
    ],
    "a call and a note": [S, U, CALLS, RESULT, S2, U2],
    "unicode": [U | {"content": "Hvor er det kaldt? ❄️ 北 \U0001f427 'q\" \\n"}, A, U2],
    "long": [S, *[U, A] * 60, U2],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Reads a thermometer.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
