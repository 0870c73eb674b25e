"""Anthropic's ``POST /v1/messages``, and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from localspec.prompts.folding import merged
from localspec.server.answers import AnswerBlock, BlockAnswer, identifier
from localspec.server.bodies import MAX_COUNT, Body, Flag, items, read, text_or_items, whole
from localspec.server.events import Wire, event
from localspec.server.http import invalid
from localspec.server.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiBody,
    ChatRequest,
    JsonSchema,
    ServedModel,
    Shared,
    Stops,
    TextPart,
    ThinkingBudget,
    ToolName,
    begins_answer,
    calling,
    required_messages,
    text_of,
    thinking,
    tool_use,
)
from localspec.server.service import Service

WIRE = Wire("text/event-stream", lambda error, n: event(error.as_anthropic(), "error"), event({"type": "ping"}, "ping"))

_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


# What is asked.


class ToolUseBlock(Body):
    type: str
    id: str
    name: str
    input: Any = None


class ToolResultBlock(Body):
    type: str
    tool_use_id: str
    content: Any = ""
    is_error: Flag = False


class ThinkingBlock(Body):
    type: str
    thinking: str = ""  # what is redacted only its encrypter can read


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Any], text_or_items(MAX_MESSAGES)] = []

    def messages(self, path: str) -> Iterator[dict[str, Any]]:
        """The message as messages of a chat, one for each block."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        for i, block in enumerate(self.content):
            yield from self._of_block(block, f"{path}.content[{i}]")

    def _of_block(self, block: Any, path: str) -> Iterator[dict[str, Any]]:
        kind = block.get("type") if isinstance(block, dict) else "text"
        if kind == "text":
            yield {"role": self.role, "content": read(TextPart, block, path).text}
        elif self.role == "user" and kind == "tool_result":
            result = read(ToolResultBlock, block, path)
            content = text_of(result.content, f"{path}.content", ("text",), "\n")
            if result.is_error and not content.lower().startswith("error"):
                content = f"Error: {content}"
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
        elif self.role == "assistant" and kind == "tool_use":
            use = read(ToolUseBlock, block, path)
            yield calling(use.id, use.name, use.input or {})
        elif self.role == "assistant" and kind in ("thinking", "redacted_thinking"):
            if thought := read(ThinkingBlock, block, path).thinking:
                yield {"role": self.role, "content": "", "reasoning_content": thought}
        else:
            raise invalid(f"{path}.type: {kind!r:.40} cannot be used here, only text and tools", f"{path}.type")


class AnthropicTool(Body):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str = ""
    input_schema: dict[str, Any] | None = None
    strict: Flag = False

    @model_validator(mode="wrap")
    @classmethod
    def _has_a_schema(cls, tool: Any, read: Callable[[Any], Any]) -> Any:
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            why = "cannot be had: only tools with an input_schema can be used"
            raise PydanticCustomError("unsupported_parameter", "refused", {"name": "type", "why": why})
        return read(tool)

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | self.those("strict")}


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: Flag = False


class OutputFormat(JsonSchema):
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Body):
    effort: Literal["", "low", "medium", "high", "xhigh", "max"] = ""
    format: OutputFormat | None = None


class Thinking(Body):
    type: Literal["adaptive", "enabled", "disabled"] = "adaptive"
    budget_tokens: Annotated[int, whole(0, MAX_COUNT)] | None = None


class CountBody(ApiBody, Shared):
    """The body of ``/v1/messages/count_tokens``."""

    messages: Annotated[list[AnthropicMessage], items(MAX_MESSAGES)] = []
    system: Any = None
    tools: Annotated[list[AnthropicTool], items(MAX_TOOLS)] = []
    tool_choice: AnthropicToolChoice = AnthropicToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    thinking_budget: ThinkingBudget | None = None

    def asked(self, served: ServedModel, **more: Any) -> ChatRequest:
        messages = self._messages()
        if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):
            raise invalid("messages: the last one calls tools, and their results are missing", "messages")
        config, budget = self.output_config, self.thinking_budget
        effort: str = config.effort
        if self.thinking is not None:
            budget = budget if self.thinking.budget_tokens is None else self.thinking.budget_tokens
            effort = {"adaptive": effort, "enabled": effort or "on", "disabled": "none"}[self.thinking.type]
        form = config.format and {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": config.format.schema_},
        }
        think, _ = thinking(served, effort)
        options = {"thinking_budget": budget, "think": think} | more
        how = self.job_options(served, form=form, form_name="output_config.format", **options)
        choice = self.tool_choice
        if choice.type == "tool" and choice.name is None:
            raise invalid("tool_choice.name is missing", "tool_choice.name", "missing_required_parameter")
        tools = tool_use(
            [tool.for_template() for tool in self.tools],
            {"any": "required", "tool": "required"}.get(choice.type, choice.type),
            forced=choice.name if choice.type == "tool" else None,
            parallel=not choice.disable_parallel_tool_use,
        )
        return ChatRequest(*how, messages, tools, "continue" if begins_answer(messages) else "assistant")

    def _messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [text_of(self.system, "system", ("text",), "\n")]
        found = [{"role": "system", "content": text} for text in system]
        for i, message in enumerate(self.messages):
            found += message.messages(f"messages[{i}]")
        return merged(required_messages(found))


class MessagesBody(CountBody):
    """The body of ``/v1/messages``."""

    max_tokens: Annotated[int, whole(1, MAX_COUNT)]
    stop_sequences: Stops | None = None
    stream: Flag = False

    def asked(self, served: ServedModel, **more: Any) -> ChatRequest:
        return super().asked(served, max_tokens=self.max_tokens, stop=self.stop_sequences)


# What is answered.


class MessagesAnswer(BlockAnswer):
    """The answer to ``/v1/messages``."""

    def __init__(self, service: Service, body: MessagesBody) -> None:
        super().__init__(service, service.choices(body.asked(service.served())))
        self._id = identifier("msg")

    def begin(self) -> Iterator[bytes]:
        usage = {"input_tokens": len(self.choices[0].prompt), "output_tokens": 0}
        yield _event("message_start", message=self._message() | {"usage": usage})

    def told(self, what: str, block: AnswerBlock, piece: str = "") -> Iterator[bytes]:
        at = {"index": block.index}
        if what == "begin":
            yield _event("content_block_start", **at, content_block=_content(block))
        elif what == "end":
            yield _event("content_block_stop", **at)
        else:
            kind, name = _DELTAS[block.kind]
            yield _event("content_block_delta", **at, delta={"type": kind, name: piece})

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
        said = "".join(token.text for token in self.replies[0].tokens if not token.thinking)
        if self.replies[0].tokens and not self.replies[0].tokens[-1].text:  # it may be a special token
            said += self.service.llm.token_text(self.replies[0].tokens[-1].id)
        stops = self.choices[0].job.request.params.stop
        stop = min((s for s in stops if s in said), key=said.index, default=None)
        if self.finish_reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOP_REASONS[self.finish_reason], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts cached input tokens apart."""
        stats, n = self.replies[0].stats, len(self.choices[0].prompt)
        return {
            "input_tokens": n - stats.cached_tokens,
            "cache_read_input_tokens": stats.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.completion_tokens,
        }


class CountAnswer:
    """The answer to ``/v1/messages/count_tokens``, also of what does not fit."""

    def __init__(self, service: Service, body: CountBody) -> None:
        self._n = len(service.chat_prompt(service.formed(body.asked(service.served()))))

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
