"""OpenAI's ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from localspec.prompts.folding import merged
from localspec.server.access import Client
from localspec.server.answers import AnswerBlock, BlockAnswer, identifier
from localspec.server.bodies import MAX_COUNT, Body, Flag, items, must_be, read, text_or_items, whole, wrong
from localspec.server.events import Wire, event
from localspec.server.http import ApiError, invalid
from localspec.server.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiBody,
    ChatRequest,
    Effort,
    Function,
    JsonSchema,
    ServedModel,
    Shared,
    Stops,
    ThinkingBudget,
    calling,
    required_messages,
    text_of,
    thinking,
    tool_use,
)
from localspec.server.service import ResponseStore, Service, StoredResponse
from localspec.server.tools import ToolUse, usual_role

MAX_METADATA, MAX_NAME, MAX_VALUE = 16, 64, 512

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

_NAMES = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}

_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "text", "tool_choice")


def _failed(error: ApiError, n_sent: int) -> bytes:
    content = {"message": error.message, "code": error.code, "param": error.param}
    return event({"type": "error", "sequence_number": n_sent} | content, "error")


WIRE = Wire("text/event-stream", _failed, b": waiting\n\n")


# Items of the input.


class Item(Body):
    """An item of the input; its ``messages`` are what it is in a chat."""

    type: str = "message"


class MessageItem(Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Any = None

    def messages(self, path: str) -> Iterator[dict[str, Any]]:
        yield {"role": usual_role(self.role), "content": text_of(self.content, f"{path}.content", between="\n")}


class FunctionCallItem(Item):
    call_id: str
    name: str
    arguments: str = ""

    def messages(self, path: str) -> Iterator[dict[str, Any]]:
        yield calling(self.call_id, self.name, self.arguments or "{}")


class FunctionCallOutputItem(Item):
    call_id: str
    output: Any = None

    def messages(self, path: str) -> Iterator[dict[str, Any]]:
        content = text_of(self.output, f"{path}.output", between="\n")
        yield {"role": "tool", "tool_call_id": self.call_id, "content": content}


class ReasoningItem(Item):
    """Thinking. OpenAI's own has no content: it is encrypted, or not sent at all."""

    content: Any = ""
    summary: Any = ""

    def messages(self, path: str) -> Iterator[dict[str, Any]]:
        thought = text_of(self.content, f"{path}.content", ("reasoning_text",), "\n")
        thought = thought or text_of(self.summary, f"{path}.summary", ("summary_text",), "\n")
        if thought:
            yield {"role": "assistant", "content": "", "reasoning_content": thought}


ITEMS: dict[str, Any] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


class ItemReference(Body):
    type: str = "item_reference"
    id: str


def messages_of(item: Any, path: str) -> list[dict[str, Any]]:
    """An item as messages of a chat; an ``ApiError`` if it is of another kind."""
    kind = (item.get("type") or "message") if isinstance(item, dict) else "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise invalid(f"{path}.type: {kind!r:.40} cannot be used here", f"{path}.type")
    return list(read(ITEMS[kind], item, path).messages(path))


def _referred(item: Any, path: str, served: ServedModel) -> tuple[Any, str]:
    """The item of an answer that is kept, where an item of the input only names it; else the item itself."""
    kind = item.get("type") if isinstance(item, dict) else ""
    if kind != "item_reference" and (kind is not None or item.get("role") is not None):
        return item, path
    name, path = read(ItemReference, item, path).id, f"{path}.id"
    found = served.item(name)
    if found is None:
        message = (
            f"{path}: there is no item {name!r:.80}: they are kept in memory with their answers, the latest only, and "
            "unless store is false"
        )
        raise invalid(message, path, "item_not_found")
    return found, path


# The request.


class ResponsesStreamOptions(Body):
    pass


class Reasoning(Body):
    effort: Effort = ""


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"

    @property
    def schema_of_answer(self) -> dict[str, Any]:
        return {"json_schema": self.those("name", "schema", "strict")} if self.type == "json_schema" else {}


class TextConfig(Body):
    format: TextFormat | None = None


class ResponsesTool(Function):
    type: Literal["function"]


class NamedTool(Body):
    type: Literal["function"] = "function"
    name: str


class ResponsesToolChoice(Body):
    type: Literal["function", "allowed_tools"] = "function"
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], items(MAX_TOOLS)] = []


def _is_metadata(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_METADATA
        and all(
            (each is None or isinstance(each, str | bool | int | float))
            and len(name) <= MAX_NAME
            and len(str(each)) <= MAX_VALUE
            for name, each in value.items()
        )
    )


class ResponsesBody(ApiBody, Shared):
    """The body of ``/v1/responses``."""

    input: Annotated[str | list[Any], text_or_items(MAX_MESSAGES)] = []
    instructions: str | None = None
    max_output_tokens: Annotated[int, whole(1, MAX_COUNT)] | None = None
    metadata: Annotated[
        dict[str, Any],
        must_be(
            f"at most {MAX_METADATA} names of {MAX_NAME} characters, with texts of at most {MAX_VALUE}", _is_metadata
        ),
    ] = {}
    parallel_tool_calls: Flag = True
    previous_response_id: str | None = None
    reasoning: Reasoning = Reasoning()
    store: Flag = True
    stream: Flag = False
    stream_options: ResponsesStreamOptions | None = None
    stop: Stops | None = None
    text: TextConfig = TextConfig()
    tools: Annotated[list[Any], items(MAX_TOOLS)] = []
    tool_choice: Any = None
    include: Annotated[list[Any], items(MAX_TOOLS)] = []
    thinking_budget: ThinkingBudget | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def asked(self, served: ServedModel) -> ChatRequest:
        for include in self.include:
            if include not in _INCLUDES:
                message = f"include: {include!r:.60} cannot be had; log-probabilities are at /v1/chat/completions"
                raise invalid(message, "include", "unsupported_parameter")
        if isinstance(self.input, str):
            messages = [{"role": "user", "content": self.input}]
        else:
            given = [_referred(item, f"input[{i}]", served) for i, item in enumerate(self.input)]
            messages = required_messages([each for item, path in given for each in messages_of(item, path)], "input")
        form = self.text.format
        think, variables = thinking(served, self.reasoning.effort, self.chat_template_kwargs)
        how = self.job_options(
            served,
            stop=self.stop,
            max_tokens=self.max_output_tokens,
            form=form and {"type": form.type} | form.schema_of_answer,
            form_name="text.format",
            thinking_budget=self.thinking_budget,
            think=think,
        )
        return ChatRequest(*how, messages, self._tools(), variables=variables)

    def _tools(self) -> ToolUse:
        tools = []
        for i, tool in enumerate(self.tools):
            if isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "function":
                continue  # one that OpenAI's servers would run: a model that is not offered it answers without
            function = read(ResponsesTool, tool, f"tools[{i}]")
            kept = function.those("name", "description", "parameters", "strict")
            tools.append({"type": "function", "function": kept})
        choice, forced, allowed = self.tool_choice or "auto", None, None
        if isinstance(choice, dict):
            given = read(ResponsesToolChoice, choice, "tool_choice")
            if given.type == "allowed_tools":
                choice, allowed = given.mode, [tool.name for tool in given.tools]
            elif given.name is None:
                raise invalid("tool_choice.name is missing", "tool_choice.name", "missing_required_parameter")
            else:
                choice, forced = "required", given.name
        elif choice not in ("auto", "none", "required"):
            raise wrong("tool_choice", '"auto", "none", "required" or {"type": "function", "name": …}', choice)
        return tool_use(tools, choice, forced=forced, allowed=allowed, parallel=self.parallel_tool_calls)


# The answer.


class ResponsesAnswer(BlockAnswer):
    """The answer to ``/v1/responses``."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        self._body, asked = body, body.asked(service.served())
        history: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            history += stored_response(
                service.responses, service.client, body.previous_response_id, 400, "previous_response_id"
            ).messages
        self._messages = [*history, *asked.messages]
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        self._asked = replace(asked, messages=merged([*system, *self._messages]))
        super().__init__(service, service.choices(self._asked))
        self._id = identifier("resp")
        self._n_events = 0

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def told(self, what: str, block: AnswerBlock, piece: str = "") -> Iterator[bytes]:
        is_call = block.kind == "call"
        at = {"output_index": block.index}
        inside = at | {"item_id": self._item(block)["id"]} | ({} if is_call else {"content_index": 0})
        name = f"response.{_NAMES[block.kind]}"
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if what == "begin":
            yield self._event("response.output_item.added", **at, item=self._item(block, "in_progress"))
            if not is_call:
                yield self._event("response.content_part.added", **inside, part=_part(block.kind, ""))
        elif what == "piece":
            yield self._event(f"{name}.delta", **inside, delta=piece, **logprobs)
        else:
            whole = {"name": block.name, "arguments": block.text} if is_call else {"text": block.text}
            yield self._event(f"{name}.done", **inside, **whole, **logprobs)
            if not is_call:
                yield self._event("response.content_part.done", **inside, part=_part(block.kind, block.text))
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
        if self._body.store:
            messages = [message for item in response["output"] for message in messages_of(item, "output")]
            owner = self.service.client.owner
            self.service.responses.put(self._id, StoredResponse(response, [*self._messages, *messages], owner))
        return response

    def _response(self, status: str) -> dict[str, Any]:
        params, body = self._asked.params, self._body
        return (
            {
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
                "parallel_tool_calls": self._asked.tools.parallel,
                "previous_response_id": None,
                "reasoning": {"effort": None, "summary": None},
                "store": body.store,
                "temperature": params.temperature,
                "text": {"format": {"type": "text"}},
                "tool_choice": "auto",
                "top_p": params.top_p,
                "truncation": "disabled",
            }
            | body.those(*_ECHOED)
            | {"tools": body.tools}
        )

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
        stats, n = self.replies[0].stats, len(self.choices[0].prompt)
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


def stored_response(
    kept: ResponseStore, client: Client, name: str, status: int = 404, param: str | None = None
) -> StoredResponse:
    """An answer that is kept; an ``ApiError`` of this status and field if it is not."""
    stored = kept.get(name)
    if stored is None or not client.may_read(stored.owner):
        message = (
            f"there is no response {name!r:.80}: they are kept in memory, the latest only, and unless store is false"
        )
        raise ApiError(status, message, param=param, code="previous_response_not_found" if param else "not_found")
    return stored


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
