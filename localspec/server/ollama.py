"""Ollama's ``POST /api/chat`` and ``/api/generate``."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec._version import __version__
from localspec.model_files.gguf import GGUFFile
from localspec.prompts.folding import merged
from localspec.server.access import public_name
from localspec.server.answers import AnswerBlock, BlockAnswer, Change
from localspec.server.bodies import MAX_COUNT, Body, Flag, items, must_be, read, whole
from localspec.server.events import Wire
from localspec.server.http import invalid
from localspec.server.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AnswerOptions,
    ApiBody,
    ChatRequest,
    CompletionRequest,
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


def _line(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# No sign of life while a request waits: clients take every line for a piece of the answer.
WIRE = Wire("application/x-ndjson", lambda error, n: _line(error.as_ollama()))


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


class OllamaBody(ApiBody):
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
    prediction: Prediction | None = None
    localspec: OwnFields | None = None

    def answer_options(self, served: ServedModel, **more: Any) -> AnswerOptions:
        form: Any = None
        if isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        elif self.format:
            form = {"type": "json_object"}
        given, own = self.options, dict[str, Any]()
        for name in ("prediction", "localspec"):
            if (value := getattr(self, name)) is not None:
                own[name] = value
        if given.repeat_last_n == -1:  # all of the text
            own["repeat_last_n"] = MAX_COUNT
        return given.model_copy(update=own).answer_options(
            served,
            stop=given.stop,
            max_tokens=given.num_predict if given.num_predict > 0 else None,
            form=form,
            form_name="format",
            at="options.",
            stream=self.stream,
            **more,
        )

    @abstractmethod
    def asked(self, served: ServedModel) -> ChatRequest | CompletionRequest:
        """A chat, or a text to continue or to fill in; without messages it only asks whether the model is loaded."""

    def chat(self, messages: Sequence[Any], tools: ToolUse, served: ServedModel) -> ChatRequest:
        if not messages:  # how clients load a model beforehand
            return ChatRequest(AnswerOptions(served.params, stream=self.stream), [], tools)
        think = ("on" if self.think else "off") if isinstance(self.think, bool) else self.think
        options = self.answer_options(
            served,
            thinking_budget=self.options.thinking_budget,
            ending="continue" if begins_answer(messages) else "assistant",  # as Ollama's own templates have it
            **thinking(served, think=think),
        )
        return ChatRequest(options, list(messages), tools)


class OllamaChatBody(OllamaBody):
    """The body of ``/api/chat``."""

    messages: Annotated[list[OllamaMessage], items(MAX_MESSAGES)] = []
    tools: Tools = []

    def asked(self, served: ServedModel) -> ChatRequest:
        messages = merged(message.for_template() for message in self.messages)
        return self.chat(messages, tool_use(openai_tools(self.tools)), served)


class OllamaGenerateBody(OllamaBody):
    """The body of ``/api/generate``."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: Flag = False

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
        options = self.answer_options(served)
        return CompletionRequest(options, [self.prompt], suffix=self.suffix or None)


class OllamaShowBody(Body):
    model: str | None = None
    name: str | None = None


class OllamaChat(BlockAnswer):
    """The answer to ``/api/chat``."""

    def __init__(self, service: Service, body: OllamaBody) -> None:
        request = body.asked(service.served())
        asks_nothing = isinstance(request, ChatRequest) and not request.messages
        super().__init__(service, request.options, [] if asks_nothing else service.tasks(request))

    @staticmethod
    def said(text: str, thinking: str = "", calls: Sequence[AnswerBlock] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            functions = [{"index": i, "name": call.name, "arguments": call.arguments} for i, call in enumerate(calls)]
            message["tool_calls"] = [
                {"id": call.id, "function": function} for call, function in zip(calls, functions, strict=True)
            ]
        return {"message": message}

    def told(self, change: Change) -> Iterator[bytes]:
        if change.block.kind == "call":
            if change.what == "end":
                yield self._piece("", "", [change.block])
        elif change.what == "piece":
            yield self._piece(change.piece) if change.block.kind == "text" else self._piece("", change.piece)

    def _piece(self, *said: Any) -> bytes:
        return _line(_head(self.service) | self.said(*said) | {"done": False})

    def end(self) -> Iterator[bytes]:
        yield _line(_head(self.service) | self.said("") | self._last())

    def finished(self) -> dict[str, Any]:
        text, thinking = ("".join(b.text for b in self.blocks if b.kind == kind) for kind in ("text", "thinking"))
        calls = [block for block in self.blocks if block.kind == "call"]
        return _head(self.service) | self.said(text, thinking, calls) | self._last()

    def _last(self) -> dict[str, Any]:
        """Why it ended, and figures; durations in nanoseconds."""
        if not self.tasks:
            return {"done": True, "done_reason": "load"}
        stats = self.replies[0].stats
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            "total_duration": _ns(time.time() - self.created),
            "load_duration": 0,
            "prompt_eval_count": len(self.tasks[0].prompt),
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


# What Ollama's clients ask about models: ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/version``.

_PATH = re.compile(r"(?:[A-Za-z]:)?(?:~|\.{1,2})?[\\/][^\n]*")

OLLAMA_VERSION = "0.9.0"
"""Clients ask it whether tools, JSON schemas and thinking are known; Ollama knows all three since then."""


class OllamaModels:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @cached_property
    def _header(self) -> dict[str, Any]:
        """What the file's header says, as Ollama has it."""
        llm = self._service.llm
        with GGUFFile(llm.model_path) as file:
            scalars = {name: _scalar(value) for name, value in file.metadata.items()}
            return {
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": file.architecture,
                    "families": [file.architecture],
                    "parameter_size": _rounded(file.n_params),
                    "quantization_level": file.quantization,
                },
                "model_info": scalars | {"general.parameter_count": file.n_params},
                "license": str(file.metadata.get("general.license", "")),
                "template": llm.template.source,
                "modified_at": timestamp(llm.model_path.stat().st_mtime),
            }

    async def _listed(self) -> list[dict[str, Any]]:
        header = await asyncio.to_thread(lambda: self._header)
        llm = self._service.llm
        # Clients want 64 digits that tell files apart; reading all of a large file for its own digest takes a minute.
        digest = hashlib.sha256(
            f"{llm.vocab.fingerprint} {llm.size_bytes} {header['modified_at']}".encode()
        ).hexdigest()
        about = {"modified_at": header["modified_at"], "size": llm.size_bytes, "digest": digest}
        return [{"name": name, "model": name} | about | {"details": header["details"]} for name in self._service.names]

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": await self._listed()})

    async def ps(self, request: Request) -> Response:
        models = [
            {name: value for name, value in model.items() if name != "modified_at"} for model in await self._listed()
        ]
        return JSONResponse({"models": [model | {"context_length": self._service.llm.n_ctx} for model in models]})

    async def show(self, request: Request) -> Response:
        async with self._service.bodies.json(request) as body:
            asked = read(OllamaShowBody, body)
        name = asked.model or asked.name
        if name is None:
            raise invalid("model is missing", "model", "missing_required_parameter")
        self._service.check_model(name)
        header = await asyncio.to_thread(lambda: self._header)
        defaults = "\n".join(f"{key} {value}" for key, value in self._service.llm.chat_defaults.items())
        own = {"modelfile": f"FROM {self._service.names[0]}\n", "parameters": defaults}
        return JSONResponse(header | own | {"capabilities": self._capabilities()})

    def _capabilities(self) -> list[str]:
        llm = self._service.llm
        more = {"insert": "fim_mid" in llm.vocab.fim, "thinking": llm.thinking is not None}
        return ["completion", "tools", *(name for name, can in more.items() if can)]


async def version(request: Request) -> Response:
    return JSONResponse({"version": OLLAMA_VERSION, "localspec": __version__})


def _scalar(value: Any) -> Any:
    """A scalar of the header; of a path, which quantisers write into it, only the end."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return public_name(value) if _PATH.fullmatch(value) else value
    return value if isinstance(value, int | float) else None


def _rounded(n: int) -> str:
    """A number of parameters, such as 1.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)
