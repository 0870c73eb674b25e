"""OpenAI's ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from localspec.prompts.folding import merged
from localspec.server import known_fields as known
from localspec.server.blocks import AnswerBlock, BlockAnswer, Change, identifier
from localspec.server.events import Wire, event
from localspec.server.fields import ApiError, Fields, invalid
from localspec.server.requests import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_TOOLS,
    SHARED,
    TEXT_KINDS,
    AnswerOptions,
    ChatRequest,
    ServedModel,
    chat_request,
    text_of,
)
from localspec.server.service import Service, StoredResponse

MAX_METADATA, MAX_NAME, MAX_VALUE = 16, 64, 512

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_INCLUDES = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What can be asked for of what is never in an answer."""

_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "text", "tool_choice")


def _failed(error: ApiError, n_sent: int) -> bytes:
    content = {"message": error.message, "code": error.code, "param": error.param}
    return event({"type": "error", "sequence_number": n_sent} | content, "error")


WIRE = Wire("text/event-stream", _failed, b": waiting\n\n")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """The body of ``/v1/responses``.

    Attributes:
        chat: its input as a chat, without what went before.
        instructions: a system prompt, of this answer only.
        previous: the answer that it goes on from.
        store: whether others may go on from its answer.
        echoed: what the answer repeats of it.
    """

    chat: ChatRequest
    instructions: str | None
    previous: str | None
    store: bool
    echoed: dict[str, Any]

    @property
    def options(self) -> AnswerOptions:
        return self.chat.options


def responses_request(fields: Fields, served: ServedModel) -> ResponsesRequest:
    """Check the body of ``/v1/responses``.

    Tools that OpenAI's servers would run are left out: a model that is not offered one answers without.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    fields.known(known.RESPONSES)
    for include in fields.items("include", MAX_TOOLS):
        if include not in _INCLUDES:
            message = f"include: {include!r:.60} cannot be had; log-probabilities are at /v1/chat/completions"
            raise invalid(message, "include", "unsupported_parameter")
    _check_metadata(fields)
    if (options := fields.object("stream_options")) is not None:
        options.known(known.RESPONSES_STREAM_OPTIONS)
    body = fields.those((*SHARED, "stream", "stop", "parallel_tool_calls", "thinking_budget", "chat_template_kwargs"))
    body |= {"messages": _input(fields, served), "max_tokens": fields.integer("max_output_tokens", 1, MAX_COUNT)}
    if (reasoning := fields.object("reasoning")) is not None:
        body["reasoning_effort"] = reasoning.known(known.REASONING).text("effort")
    tools = [Fields(item, f"tools[{i}]") for i, item in enumerate(fields.items("tools", MAX_TOOLS))]
    body["tools"] = [_tool(tool) for tool in tools if tool.required_text("type") == "function"]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        choice = _tool_choice(Fields(choice, "tool_choice").known(known.RESPONSES_TOOL_CHOICE))
    body["tool_choice"] = choice
    text = fields.object("text")
    if text is not None and (form := text.known(known.TEXT).object("format")) is not None:
        kind = form.known(known.TEXT_FORMAT).choice("type", ("text", "json_object", "json_schema"))
        body["response_format"] = {"type": kind}
        if kind == "json_schema":
            body["response_format"]["json_schema"] = form.those(("name", "schema", "strict"))
    return ResponsesRequest(
        chat_request(Fields(body), served),
        fields.text("instructions"),
        fields.text("previous_response_id"),
        fields.flag("store", True),
        fields.those(_ECHOED) | {"tools": fields.items("tools", MAX_TOOLS)},
    )


def _tool_choice(choice: Fields) -> dict[str, Any]:
    def named(tool: Fields) -> dict[str, Any]:
        return {"type": "function", "function": {"name": tool.required_text("name")}}

    kind = choice.choice("type", ("function", "allowed_tools"))
    if kind == "function":
        return named(choice)
    tools = [Fields(item, choice.path(f"tools[{i}]")) for i, item in enumerate(choice.items("tools", MAX_TOOLS))]
    return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": [named(tool) for tool in tools]}}


def _check_metadata(fields: Fields) -> None:
    """It is only repeated, within OpenAI's own limits."""
    metadata = fields.get("metadata") or {}
    fits = isinstance(metadata, dict) and len(metadata) <= MAX_METADATA
    for name, value in metadata.items() if fits else ():
        is_simple = value is None or isinstance(value, str | bool | int | float)
        fits = fits and is_simple and len(name) <= MAX_NAME and len(str(value)) <= MAX_VALUE
    if not fits:
        rule = f"at most {MAX_METADATA} names of {MAX_NAME} characters, with texts of at most {MAX_VALUE}"
        raise fields.wrong("metadata", rule)


def _tool(tool: Fields) -> dict[str, Any]:
    tool.known(known.RESPONSES_TOOL)
    return {"type": "function", "function": tool.those(("name", "description", "parameters", "strict"))}


def _input(fields: Fields, served: ServedModel) -> list[dict[str, Any]]:
    if isinstance(fields.get("input"), str):
        return [{"role": "user", "content": fields.get("input")}]
    items = [Fields(item, f"input[{i}]") for i, item in enumerate(fields.items("input", MAX_MESSAGES))]
    messages = [message for item in items for message in _of_item(_referred(item, served))]
    if not messages:
        raise invalid("input is missing or empty", "input", "missing_required_parameter")
    return messages


def _referred(item: Fields, served: ServedModel) -> Fields:
    """The item of an answer that is kept, where an item of the input only names it; else the item itself."""
    if item.get("type") != "item_reference" and (item.has("type") or item.has("role")):
        return item
    name = item.known(known.ITEM_REFERENCE).required_text("id")
    found = served.item(name)
    if found is None:
        message = (
            f"{item.path('id')}: there is no item {name!r:.80}: they are kept in memory with their answers, the latest "
            "only, and unless store is false"
        )
        raise invalid(message, item.path("id"), "item_not_found")
    return Fields(found, item.path("id"))


def _of_item(item: Fields) -> Iterator[dict[str, Any]]:
    """An item of the input as messages of a chat."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.required_text("role")
        if role not in _ROLES:
            raise item.wrong("role", " or ".join(_ROLES))
        item.known(known.RESPONSES_MESSAGE)
        content = text_of(item.get("content"), item.path("content"), TEXT_KINDS, "\n")
        yield {"role": _ROLES[role], "content": content}
    elif kind == "function_call":
        item.known(known.FUNCTION_CALL)
        function = {"name": item.required_text("name"), "arguments": item.text("arguments") or "{}"}
        call = {"id": item.required_text("call_id"), "type": "function", "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind == "function_call_output":
        item.known(known.FUNCTION_CALL_OUTPUT)
        content = text_of(item.get("output"), item.path("output"), TEXT_KINDS, "\n")
        yield {"role": "tool", "tool_call_id": item.required_text("call_id"), "content": content}
    elif kind == "reasoning":  # OpenAI's own have no content: it is encrypted, or not sent at all
        item.known(known.REASONING_ITEM)
        thought = text_of(item.get("content") or "", item.path("content"), ("reasoning_text",), "\n")
        thought = thought or text_of(item.get("summary") or "", item.path("summary"), ("summary_text",), "\n")
        if thought:
            yield {"role": "assistant", "content": "", "reasoning_content": thought}
    else:
        raise invalid(f"{item.path('type')}: {kind!r:.40} cannot be used here", item.path("type"))


class ResponsesAnswer(BlockAnswer):
    """The answer to ``/v1/responses``. Made in a thread: templates and grammars may take a while.

    Raises:
        ApiError: the answer to go on from is not there any more.
        LocalspecError: the messages do not fit the template or the context.
    """

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        self._request = request
        history: list[dict[str, Any]] = []
        if request.previous is not None:
            history += stored_response(service, request.previous, 400, "previous_response_id").messages
        self._messages = [*history, *request.chat.messages]
        system = [{"role": "system", "content": request.instructions}] if request.instructions else []
        task = service.chat_task(merged([*system, *self._messages]), request.chat.tools, request.options)
        super().__init__(service, request.options, task)
        self._id = identifier("resp")
        self._n_events = 0

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def change(self, change: Change) -> Iterator[bytes]:
        block = change.block
        at = {"output_index": block.index}
        inside = at | {"item_id": self._item(block)["id"]}
        part = inside | {"content_index": 0}
        if change.what == "begin":
            yield self._event("response.output_item.added", **at, item=self._item(block, "in_progress"))
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=_part(block.kind, ""))
        elif change.what == "piece":
            if block.kind == "text":
                yield self._event("response.output_text.delta", **part, delta=change.piece, logprobs=[])
            elif block.kind == "thinking":
                yield self._event("response.reasoning_text.delta", **part, delta=change.piece)
            else:
                yield self._event("response.function_call_arguments.delta", **inside, delta=change.piece)
        else:
            if block.kind == "text":
                yield self._event("response.output_text.done", **part, text=block.text, logprobs=[])
            elif block.kind == "thinking":
                yield self._event("response.reasoning_text.done", **part, text=block.text)
            if block.kind != "call":
                yield self._event("response.content_part.done", **part, part=_part(block.kind, block.text))
            else:
                whole = {"name": block.name, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **inside, **whole)
            yield self._event("response.output_item.done", **at, item=self._item(block))

    def end(self) -> Iterator[bytes]:
        response = self.finished()
        yield self._event(f"response.{response['status']}", response=response)

    def finished(self) -> dict[str, Any]:
        cut = self.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block) for block in self.blocks],
            "usage": self._usage(),
            "localspec": self.figures(),
        }
        if self._request.store:
            messages = [message for block in self.blocks for message in _of_item(Fields(self._item(block)))]
            owner = self.service.client.owner
            self.service.responses.put(self._id, StoredResponse(response, [*self._messages, *messages], owner))
        return response

    def _response(self, status: str) -> dict[str, Any]:
        params, request = self.task.params, self._request
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self.created),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.service.names[0],
            "output": [],
            "usage": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": request.chat.tools.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": request.store,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "top_p": params.top_p,
            "truncation": "disabled",
        } | request.echoed

    def _item(self, block: AnswerBlock, status: str = "completed") -> dict[str, Any]:
        if self.finish_reason == "length" and block is self.blocks[-1]:
            status = "incomplete"
        name = f"{self._id.removeprefix('resp_')}{block.index:04x}"
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": f"fc_{name}", "status": status} | call
        content = [_part(block.kind, block.text)] if block.text else []
        if block.kind == "thinking":
            return {"type": "reasoning", "id": f"rs_{name}", "status": status, "summary": [], "content": content}
        return {"type": "message", "id": f"msg_{name}", "status": status, "role": "assistant", "content": content}

    def _usage(self) -> dict[str, Any]:
        stats, n = self.reply.stats, len(self.task.prompt)
        return {
            "input_tokens": n,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens},
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": stats.thinking_tokens},
            "total_tokens": n + stats.completion_tokens,
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        self._n_events += 1
        return event({"type": kind, "sequence_number": self._n_events - 1} | content, kind)


def stored_response(service: Service, name: str, status: int = 404, param: str | None = None) -> StoredResponse:
    """An answer that is kept.

    Raises:
        ApiError: it is not.
    """
    stored = service.responses.get(name)
    if stored is None or not service.client.may_read(stored.owner):
        message = (
            f"there is no response {name!r:.80}: they are kept in memory, the latest only, and unless store is false"
        )
        raise ApiError(status, message, param=param, code="previous_response_not_found" if param else "not_found")
    return stored


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
