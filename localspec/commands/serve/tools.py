"""Tools on their way to the model: in its own chat template, or in the system prompt where that knows no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localspec.errors import UsageError
from localspec.prompts.templates import ChatTemplate, checked_messages
from localspec.sampling.sampling import SamplingParams


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


def messages_for(messages: Sequence[Any], system: str | None = None) -> list[dict[str, Any]]:
    """Messages as templates take them.

    Arguments of earlier calls become objects: OpenAI has them as strings, templates print them as JSON.

    Args:
        messages: as OpenAI has them.
        system: system prompt where the messages have none.

    Raises:
        UsageError: they are malformed.
    """
    prepared: list[dict[str, Any]] = []
    for i, message in enumerate(checked_messages(messages)):
        message = {name: value for name, value in message.items() if value is not None}
        if message["role"] == "developer":
            message["role"] = "system"
        message.setdefault("content", "")
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call, i) for call in _list(message["tool_calls"], i)]
        prepared.append(message)
    if system and prepared[0]["role"] != "system":
        prepared.insert(0, {"role": "system", "content": system})
    return prepared


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
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    return dict(call) | {"type": "function", "function": dict(function) | {"arguments": arguments}}


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
