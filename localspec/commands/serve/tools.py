"""Tools on their way to the model: in its own chat template, or in the system prompt where that knows no tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localspec.errors import UsageError
from localspec.prompts.templates import ChatTemplate, checked_messages
from localspec.sampling.sampling import SamplingParams
from localspec.values import written_json

_KNOWS_TOOLS = re.compile(r"\btools\b")

_FALLBACK = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: as OpenAI has them; empty if none may be called.
        required: the answer must be a call.
        forced: of this function.
        parallel: whether there may be several calls.
    """

    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    required: bool = False
    forced: str | None = None
    parallel: bool = True


def messages_for(
    template: ChatTemplate, messages: Sequence[Any], use: ToolUse, system: str | None = None
) -> list[dict[str, Any]]:
    """Messages as the template takes them.

    Arguments of earlier calls become objects: OpenAI has them as strings, templates print them as JSON. A template that
    knows no tools gets calls and results as text, in the way of Hermes.

    Args:
        template: the model's.
        messages: as OpenAI has them.
        use: the tools of the request.
        system: system prompt where the messages have none.

    Raises:
        UsageError: they are malformed.
    """
    knows = knows_tools(template)
    prepared: list[dict[str, Any]] = []
    for i, message in enumerate(checked_messages(messages)):
        message = {name: value for name, value in message.items() if value is not None}
        if message["role"] == "developer":
            message["role"] = "system"
        message.setdefault("content", "")
        if message.get("tool_calls"):
            message["tool_calls"] = [_call(call, i) for call in _list(message["tool_calls"], i)]
        prepared.append(message if knows else _as_text(message))
    if system and prepared[0]["role"] != "system":
        prepared.insert(0, {"role": "system", "content": system})
    if use.tools and not knows:
        _describe(prepared, use.tools)
    return prepared


def knows_tools(template: ChatTemplate) -> bool:
    """Whether the model's template prints tools itself."""
    return _KNOWS_TOOLS.search(template.source) is not None


def _list(value: Any, i: int) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"message {i}: tool_calls must be a list")
    return value


def _call(call: Any, i: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"message {i}: a tool call needs function.name")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = written_json(arguments or "{}")
        except ValueError:
            arguments = {"arguments": arguments}
    return dict(call) | {"type": "function", "function": dict(function) | {"arguments": arguments}}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [
        json.dumps({key: call["function"][key] for key in ("name", "arguments")}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}


def _describe(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _FALLBACK.format(tools=lines)
    if messages[0]["role"] == "system":
        messages[0] = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.insert(0, {"role": "system", "content": text})


# -- a call that must be made ------------------------------------------------------------------------------------------


def forced_call(template: ChatTemplate, use: ToolUse, params: SamplingParams) -> tuple[str, SamplingParams]:
    """How an answer is made to be a call, as ``tool_choice`` asks: it begins for the model, and follows a schema.

    Returns:
        The beginning of the answer, to be put behind the prompt; the request's parameters, with the schema.

    Raises:
        UsageError: the request also asks for a format of its own.
    """
    if params.response_format is not None or params.grammar is not None:
        raise UsageError("a forced tool call leaves no room for response_format or grammar")
    if "<|python_tag|>" in template.source:
        prefix, key = "", "parameters"
    else:
        prefix, key = "<tool_call>\n", "arguments"
    chosen = [tool["function"] for tool in use.tools if use.forced in (None, tool["function"]["name"])]

    def held_to(typed: bool) -> SamplingParams:
        schemas = [_call_schema(function, key, typed) for function in chosen]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        form = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
        return replace(params, response_format=form)

    try:
        return prefix, held_to(typed=True)
    except UsageError:  # a schema that cannot be followed gives way to any object
        return prefix, held_to(typed=False)


def _call_schema(function: Mapping[str, Any], key: str, typed: bool) -> dict[str, Any]:
    parameters = function.get("parameters") if typed else None
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: parameters or {"type": "object"}},
        "required": ["name", key],
        "additionalProperties": False,
    }
