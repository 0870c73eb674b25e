"""Anthropic's ``POST /v1/messages``, and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localspec.prompts.folding import merged
from localspec.server import known_fields as known
from localspec.server.blocks import AnswerBlock, BlockAnswer, Change, identifier
from localspec.server.events import Wire, event
from localspec.server.fields import Fields, invalid
from localspec.server.requests import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_TOOLS,
    SHARED,
    ChatRequest,
    ServedModel,
    chat_request,
    text_of,
)
from localspec.server.service import Service

WIRE = Wire("text/event-stream", lambda error, n: event(error.as_anthropic(), "error"), event({"type": "ping"}, "ping"))

_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_request(fields: Fields, served: ServedModel) -> ChatRequest:
    """Check the body of ``/v1/messages``.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    if fields.known(known.MESSAGES).integer("max_tokens", 1, MAX_COUNT) is None:
        raise invalid("max_tokens is missing", "max_tokens")
    return chat_request(Fields(_chat_body(fields) | fields.those(("max_tokens", "stream"))), served)


def count_request(fields: Fields, served: ServedModel) -> ChatRequest:
    """Check the body of ``/v1/messages/count_tokens``."""
    return chat_request(Fields(_chat_body(fields.known(known.COUNT_TOKENS))), served)


def _chat_body(fields: Fields) -> dict[str, Any]:
    messages = _messages(fields)
    body = fields.those((*SHARED, "thinking_budget")) | {"messages": messages, "stop": fields.get("stop_sequences")}
    if messages and messages[-1]["role"] == "assistant":  # the answer's beginning
        if messages[-1].get("tool_calls"):
            raise invalid("messages: the last one calls tools, and their results are missing", "messages")
        body["continue_final_message"] = bool(messages[-1]["content"])
    body["tools"] = [_tool(Fields(item, f"tools[{i}]")) for i, item in enumerate(fields.items("tools", MAX_TOOLS))]
    choice = fields.object("tool_choice")
    if choice is not None:
        body["tool_choice"] = _tool_choice(choice.known(known.ANTHROPIC_TOOL_CHOICE))
        body["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    config = fields.object("output_config") or Fields({}, "output_config")
    effort = config.known(known.OUTPUT_CONFIG).choice("effort", ("", "low", "medium", "high", "xhigh", "max"))
    if (thinking := fields.object("thinking")) is not None:
        kind = thinking.known(known.THINKING).choice("type", ("adaptive", "enabled", "disabled"))
        if kind == "disabled":
            effort = "none"
        elif kind == "enabled" and not effort:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        if (budget := thinking.integer("budget_tokens", 0, MAX_COUNT)) is not None:
            body["thinking_budget"] = budget
    body["reasoning_effort"] = effort
    if (form := config.object("format")) is not None:
        form.known(known.OUTPUT_FORMAT).choice("type", ("json_schema",))
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.get("schema")},
        }
    return body


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise invalid(f"{tool.path('type')}: only tools with an input_schema can be used", tool.path("type"))
    tool.known(known.ANTHROPIC_TOOL)
    function = {"name": tool.required_text("name"), "description": tool.text("description") or ""}
    function |= {"parameters": tool.get("input_schema")} | tool.those(("strict",))
    return {"type": "function", "function": function}


def _tool_choice(choice: Fields) -> Any:
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.required_text("name")}}
    return "required" if kind == "any" else kind


def _messages(fields: Fields) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if fields.has("system"):
        found.append({"role": "system", "content": text_of(fields.get("system"), "system", ("text",), "\n")})
    for i, item in enumerate(fields.items("messages", MAX_MESSAGES)):
        message = Fields(item, f"messages[{i}]").known(known.ANTHROPIC_MESSAGE)
        role = message.required_text("role")
        if role not in ("user", "assistant", "system"):
            raise message.wrong("role", "user, assistant or system")
        content = message.get("content")
        blocks = (
            [{"type": "text", "text": content}] if isinstance(content, str) else message.items("content", MAX_MESSAGES)
        )
        for j, block in enumerate(blocks):
            found += _of_block(role, Fields(block, f"messages[{i}].content[{j}]"))
    return merged(found)


def _of_block(role: str, block: Fields) -> Iterator[dict[str, Any]]:
    """A block of a message as messages of a chat."""
    kind = block.get("type")
    if kind == "text":
        yield {"role": role, "content": block.known(known.PART).required_text("text")}
    elif role == "user" and kind == "tool_result":
        block.known(known.TOOL_RESULT)
        content = text_of(block.get("content") or "", block.path("content"), ("text",), "\n")
        if block.flag("is_error") and not content.lower().startswith("error"):
            content = f"Error: {content}"
        yield {"role": "tool", "tool_call_id": block.required_text("tool_use_id"), "content": content}
    elif role == "assistant" and kind == "tool_use":
        block.known(known.TOOL_USE)
        function = {"name": block.required_text("name"), "arguments": block.get("input") or {}}
        call = {"id": block.required_text("id"), "type": "function", "function": function}
        yield {"role": role, "content": "", "tool_calls": [call]}
    elif role == "assistant" and kind == "thinking":
        thought = block.known(known.THINKING_BLOCK).required_text("thinking")
        yield {"role": role, "content": "", "reasoning_content": thought}
    elif role == "assistant" and kind == "redacted_thinking":
        block.known(known.REDACTED_THINKING)
    else:
        raise invalid(
            f"{block.path('type')}: {kind!r:.40} cannot be used here, only text and tools", block.path("type")
        )


class MessagesAnswer(BlockAnswer):
    """The answer to ``/v1/messages``. Made in a thread: templates and grammars may take a while.

    Raises:
        LocalspecError: the messages do not fit the template or the context.
    """

    def __init__(self, service: Service, request: ChatRequest) -> None:
        task = service.chat_task(request.messages, request.tools, request.options)
        super().__init__(service, request.options, task)
        self._id = identifier("msg")

    def begin(self) -> Iterator[bytes]:
        usage = {"input_tokens": len(self.task.prompt), "output_tokens": 0}
        yield _event("message_start", message=self._message() | {"usage": usage})

    def change(self, change: Change) -> Iterator[bytes]:
        block, at = change.block, {"index": change.block.index}
        if change.what == "begin":
            yield _event("content_block_start", **at, content_block=_content(block))
        elif change.what == "end":
            yield _event("content_block_stop", **at)
        else:
            kind, name = _DELTAS[block.kind]
            yield _event("content_block_delta", **at, delta={"type": kind, name: change.piece})

    def end(self) -> Iterator[bytes]:
        yield _event("message_delta", delta=self._stop(), usage=self._usage(), localspec=self.figures())
        yield _event("message_stop")

    def finished(self) -> dict[str, Any]:
        said = {"content": [_content(block) for block in self.blocks], "usage": self._usage()}
        return self._message() | said | self._stop() | {"localspec": self.figures()}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.service.names[0],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop(self) -> dict[str, Any]:
        assert self.finish_reason is not None
        said = "".join(token.text for token in self.reply.tokens if not token.thinking)
        if self.reply.tokens and not self.reply.tokens[-1].text:  # it may be a special token
            said += self.service.llm.token_text(self.reply.tokens[-1].id)
        stop = min((s for s in self.task.params.stop if s in said), key=said.index, default=None)
        if self.finish_reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOP_REASONS[self.finish_reason], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Anthropic's input tokens are those that were read; the others are counted apart."""
        stats, n = self.reply.stats, len(self.task.prompt)
        return {
            "input_tokens": n - stats.cached_tokens,
            "cache_read_input_tokens": stats.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.completion_tokens,
        }


class CountAnswer:
    """The answer to ``/v1/messages/count_tokens``, also of what does not fit."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self._n = len(service.chat_tokens(request.messages, request.tools, request.options))

    async def whole(self) -> dict[str, Any]:
        return {"input_tokens": self._n}


def _content(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments}


def _event(kind: str, **content: Any) -> bytes:
    return event({"type": kind} | content, kind)
