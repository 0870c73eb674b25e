"""Ollama's ``POST /api/chat`` and ``/api/generate``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from localspec.prompts.folding import merged
from localspec.sampling.sampling import SamplingParams
from localspec.server.answers import AnswerBlock, BlockAnswer
from localspec.server.bodies import MAX_COUNT, Body, Flag, ModelBody, items, must_be, whole
from localspec.server.events import Wire
from localspec.server.http import KeepAlive, invalid, read_keep_alive
from localspec.server.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiBody,
    ChatRequest,
    CompletionRequest,
    Ending,
    OwnFields,
    Prediction,
    ServedModel,
    Shared,
    Stops,
    ThinkingBudget,
    ToolCall,
    Tools,
    begins_answer,
    openai_tools,
    thinking,
    tool_use,
)
from localspec.server.service import Service
from localspec.server.tools import ToolUse


def line(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# The sign of life is white space before the next line: clients take every line for a piece of the answer.
WIRE = Wire("application/x-ndjson", lambda error, n: line(error.as_ollama()), b" ")


def _stays(value: Any) -> Any:
    try:
        return read_keep_alive(value)
    except ValueError:
        rule = 'a duration such as "5m", or a number of seconds; less than 0 is for ever'
        raise PydanticCustomError("rule", "rule", {"rule": rule}) from None


Stays = Annotated[float | Literal["usual"] | None, BeforeValidator(_stays)]
"""``keep_alive``: seconds for which the model stays loaded, None for ever, and what the server does by itself."""


class StayingBody(ModelBody):
    """A body that says how long the model stays loaded."""

    keep_alive: Stays = "usual"

    @property
    def keep(self) -> KeepAlive | Literal["usual"]:
        return self.keep_alive

    @property
    def unloads(self) -> bool:
        return self.keep_alive == 0.0 and self.asks_nothing

    @property
    def asks_nothing(self) -> bool:
        """Whether there is nothing to answer: that is how clients load a model beforehand, or unload it."""
        return False


class OllamaOptions(Shared):
    """``options``."""

    num_predict: Annotated[int, whole(-2, MAX_COUNT)] = -1
    repeat_last_n: Annotated[int, whole(-1, MAX_COUNT)] | None = None
    stop: Stops | None = None
    thinking_budget: ThinkingBudget | None = None


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[ToolCall], items(MAX_TOOLS)] = []
    tool_name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        named = {
            "reasoning_content": self.thinking or None,
            "tool_calls": [call.sent for call in self.tool_calls] or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }
        more = {name: value for name, value in named.items() if value is not None}
        return {"role": self.role, "content": self.content} | more


class OllamaBody(StayingBody, ApiBody):
    """What both have in common."""

    stream: Flag = True
    options: OllamaOptions = OllamaOptions()
    format: Annotated[
        str | dict[str, Any],
        must_be('"json" or a JSON schema', lambda value: value in ("json", "") or isinstance(value, dict)),
    ] = ""
    think: (
        Annotated[str | bool, must_be("true, false or an effort", lambda value: isinstance(value, str | bool))] | None
    ) = None
    prediction: Prediction = Prediction()
    localspec: OwnFields = OwnFields()

    def job_options(self, served: ServedModel, **more: Any) -> tuple[SamplingParams, dict[str, Any]]:
        form: Any = None
        if isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        elif self.format:
            form = {"type": "json_object"}
        given = self.options
        own: dict[str, Any] = {n: getattr(self, n) for n in ("prediction", "localspec") if n in self.model_fields_set}
        if given.repeat_last_n == -1:  # all of the text
            own["repeat_last_n"] = MAX_COUNT
        return given.model_copy(update=own).job_options(
            served,
            stop=given.stop,
            max_tokens=given.num_predict if given.num_predict > 0 else None,
            form=form,
            form_name="format",
            at="options.",
            **more,
        )

    def chat(self, messages: Sequence[Any], tools: ToolUse, served: ServedModel) -> ChatRequest:
        """A chat; without messages it only asks whether the model is loaded."""
        if not messages:  # how clients load a model beforehand
            return ChatRequest(served.params, {}, [], tools)
        think = ("on" if self.think else "off") if isinstance(self.think, bool) else self.think
        think, _ = thinking(served, think=think)
        how = self.job_options(served, thinking_budget=self.options.thinking_budget, think=think)
        ending: Ending = "continue" if begins_answer(messages) else "assistant"  # as Ollama's own templates have it
        return ChatRequest(*how, messages, tools, ending)


class OllamaChatBody(OllamaBody):
    """The body of ``/api/chat``."""

    messages: Annotated[list[OllamaMessage], items(MAX_MESSAGES)] = []
    tools: Tools = []

    @property
    def asks_nothing(self) -> bool:
        return not self.messages

    def asked(self, served: ServedModel) -> ChatRequest:
        messages = merged(message.for_template() for message in self.messages)
        return self.chat(messages, tool_use(openai_tools(self.tools)), served)


class OllamaGenerateBody(OllamaBody):
    """The body of ``/api/generate``."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: Flag = False

    @property
    def asks_nothing(self) -> bool:
        return not (self.prompt or self.suffix)

    def asked(self, served: ServedModel) -> ChatRequest | CompletionRequest:
        if not self.suffix and not (self.prompt and self.raw):
            system = [{"role": "system", "content": self.system}] if self.system else []
            said = [*system, {"role": "user", "content": self.prompt}] if self.prompt else []
            return self.chat(said, ToolUse(), served)
        if self.system:
            raise invalid("system and raw or suffix exclude each other: write it into the prompt", "system")
        budget = self.options.thinking_budget
        for path, asks in (
            ("think", self.think not in (None, False, "off", "auto", "")),
            ("options.thinking_budget", budget),
        ):
            if asks:
                raise invalid(f"{path} cannot be had with raw or suffix", path, "unsupported_parameter")
        return CompletionRequest(*self.job_options(served), [self.prompt], self.suffix or None)


class OllamaChat(BlockAnswer):
    """The answer to ``/api/chat``."""

    def __init__(self, service: Service, body: OllamaBody) -> None:
        request = body.asked(service.served())
        asks_nothing = isinstance(request, ChatRequest) and not request.messages
        super().__init__(service, [] if asks_nothing else service.choices(request))

    @classmethod
    def unloaded(cls, name: str) -> dict[str, Any]:
        """The answer to a request that unloads a model."""
        head = {"model": name, "created_at": timestamp(time.time())}
        return head | cls.said("") | {"done": True, "done_reason": "unload"}

    @staticmethod
    def said(text: str, thinking: str = "", calls: Sequence[AnswerBlock] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"index": i, "name": call.name, "arguments": call.arguments}}
                for i, call in enumerate(calls)
            ]
        return {"message": message}

    def told(self, what: str, block: AnswerBlock, piece: str = "") -> Iterator[bytes]:
        if block.kind == "call":
            if what == "end":
                yield self._piece("", "", [block])
        elif what == "piece":
            yield self._piece(piece) if block.kind == "text" else self._piece("", piece)

    def _piece(self, *said: Any) -> bytes:
        return line(_head(self.service) | self.said(*said) | {"done": False})

    def end(self) -> Iterator[bytes]:
        yield line(_head(self.service) | self.said("") | self._last())

    def finished(self) -> dict[str, Any]:
        text, thinking = ("".join(b.text for b in self.blocks if b.kind == kind) for kind in ("text", "thinking"))
        calls = [block for block in self.blocks if block.kind == "call"]
        return _head(self.service) | self.said(text, thinking, calls) | self._last()

    def _last(self) -> dict[str, Any]:
        """Why it ended, and figures; durations in nanoseconds."""
        if not self.choices:
            return {"done": True, "done_reason": "load"}
        stats, loading = self.replies[0].stats, self.seconds_loading
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            "total_duration": _ns(loading + time.time() - self.created),
            "load_duration": _ns(loading),
            "prompt_eval_count": len(self.choices[0].prompt),
            "prompt_eval_duration": _ns(stats.seconds_prompt),
            "eval_count": stats.completion_tokens,
            "eval_duration": _ns(stats.seconds_decode),
            "localspec": self.figures(),
        }


class OllamaGenerate(OllamaChat):
    """The answer to ``/api/generate``."""

    @staticmethod
    def said(text: str, thinking: str = "", calls: Sequence[AnswerBlock] = ()) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


def _head(service: Service) -> dict[str, Any]:
    return {"model": service.names[0], "created_at": timestamp(time.time())}


def timestamp(seconds: float) -> str:
    """A time since the epoch, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
