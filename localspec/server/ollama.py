"""Ollama's ``POST /api/chat`` and ``/api/generate``."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec._version import __version__
from localspec.model_files.gguf import GGUFFile
from localspec.prompts.folding import merged
from localspec.server import known_fields as known
from localspec.server.access import public_name
from localspec.server.blocks import AnswerBlock, BlockAnswer, Change
from localspec.server.events import Wire
from localspec.server.fields import Fields, invalid
from localspec.server.openai import completion_tasks
from localspec.server.requests import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_TOOLS,
    SHARED,
    AnswerOptions,
    ChatRequest,
    CompletionRequest,
    ServedModel,
    chat_request,
    completion_request,
)
from localspec.server.service import Service

_ROLES = ("system", "user", "assistant", "tool")


def _line(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# No sign of life while a request waits: clients take every line for a piece of the answer.
WIRE = Wire("application/x-ndjson", lambda error, n: _line(error.as_ollama()))


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """The body of ``/api/chat`` or ``/api/generate``.

    Attributes:
        options: of the answer.
        asked: a chat, or a text to continue or to fill in; None only asks whether the model is loaded.
    """

    options: AnswerOptions
    asked: ChatRequest | CompletionRequest | None


def ollama_chat_request(fields: Fields, served: ServedModel) -> OllamaRequest:
    """Check the body of ``/api/chat``.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    fields.known(known.OLLAMA_CHAT)
    items = [Fields(item, f"messages[{i}]") for i, item in enumerate(fields.items("messages", MAX_MESSAGES))]
    body = _body(fields) | {"tools": fields.items("tools", MAX_TOOLS)}
    messages = merged(_message(item) for item in items)
    last = messages[-1] if messages else {}
    # Ollama's own templates leave a last answer open too.
    body["continue_final_message"] = (
        last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last
    )
    return _chat(body, messages, served)


def ollama_generate_request(fields: Fields, served: ServedModel) -> OllamaRequest:
    """Check the body of ``/api/generate``.

    Raises:
        ApiError: as above.
    """
    prompt, body = fields.known(known.OLLAMA_GENERATE).text("prompt") or "", _body(fields)
    suffix, system = fields.text("suffix"), fields.text("system")
    if suffix or (prompt and fields.flag("raw")):
        if system:
            raise invalid("system and raw or suffix exclude each other: write it into the prompt", "system")
        request = completion_request(Fields(body | {"prompt": prompt, "suffix": suffix}), served)
        return OllamaRequest(request.options, request)
    head = [{"role": "system", "content": system}] if system else []
    return _chat(body, [*head, {"role": "user", "content": prompt}] if prompt else [], served)


def _chat(body: dict[str, Any], messages: Sequence[Any], served: ServedModel) -> OllamaRequest:
    if not messages:  # how clients load a model beforehand
        return OllamaRequest(AnswerOptions(served.params, stream=body["stream"]), None)
    request = chat_request(Fields(body | {"messages": messages}), served)
    return OllamaRequest(request.options, request)


def _body(fields: Fields) -> dict[str, Any]:
    """What both have in common, as OpenAI has it."""
    options = (fields.object("options") or Fields({}, "options")).known(known.OLLAMA_OPTIONS)
    body = options.those((*SHARED, "stop", "thinking_budget")) | fields.those(("prediction", "localspec"))
    budget = options.integer("num_predict", -2, MAX_COUNT) or 0
    if fields.has("think"):  # a switch, or how much
        think = fields.get("think")
        body["think"] = ("on" if think else "off") if isinstance(think, bool) else think
    body |= {"max_tokens": budget if budget > 0 else None, "stream": fields.flag("stream", True)}
    if options.get("repeat_last_n") == -1:
        body["repeat_last_n"] = MAX_COUNT
    form = fields.get("format")
    if form == "json":
        body["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    elif form not in (None, ""):
        raise fields.wrong("format", '"json" or a JSON schema')
    return body


def _message(item: Fields) -> dict[str, Any]:
    role = item.known(known.OLLAMA_MESSAGE).required_text("role")
    if role not in _ROLES:
        raise item.wrong("role", " or ".join(_ROLES))
    message: dict[str, Any] = {"role": role, "content": item.text("content") or ""}
    if thought := item.text("thinking"):
        message["reasoning_content"] = thought
    if calls := item.items("tool_calls", MAX_TOOLS):
        message["tool_calls"] = calls
    names = {"name": item.text("tool_name"), "tool_call_id": item.text("tool_call_id")}
    return message | {name: value for name, value in names.items() if value is not None}


class OllamaChat(BlockAnswer):
    """The answer to ``/api/chat``. Made in a thread: templates and grammars may take a while.

    Raises:
        LocalspecError: the messages do not fit the template or the context.
    """

    def __init__(self, service: Service, request: OllamaRequest) -> None:
        asked = request.asked
        if isinstance(asked, CompletionRequest):
            task = completion_tasks(service, asked)[0]
        else:
            assert asked is not None
            task = service.chat_task(asked.messages, asked.tools, request.options)
        super().__init__(service, request.options, task)

    @staticmethod
    def said(text: str, thinking: str = "", calls: Sequence[AnswerBlock] = ()) -> dict[str, Any]:
        """What a line says."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            functions = [{"index": i, "name": call.name, "arguments": call.arguments} for i, call in enumerate(calls)]
            message["tool_calls"] = [
                {"id": call.id, "function": function} for call, function in zip(calls, functions, strict=True)
            ]
        return {"message": message}

    def begin(self) -> Iterable[bytes]:
        return ()

    def change(self, change: Change) -> Iterator[bytes]:
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
        stats = self.reply.stats
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            "total_duration": _ns(time.time() - self.created),
            "load_duration": 0,
            "prompt_eval_count": len(self.task.prompt),
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


class _LoadedAnswer:
    """The answer to a request that asks nothing: the model is there."""

    def __init__(self, service: Service, said: dict[str, Any]) -> None:
        self._line = _head(service) | said | {"done": True, "done_reason": "load"}

    async def whole(self) -> dict[str, Any]:
        return self._line

    async def events(self) -> AsyncGenerator[bytes, None]:
        yield _line(self._line)


def ollama_chat(service: Service, request: OllamaRequest) -> Any:
    """What answers ``/api/chat``."""
    return _LoadedAnswer(service, OllamaChat.said("")) if request.asked is None else OllamaChat(service, request)


def ollama_generate(service: Service, request: OllamaRequest) -> Any:
    """What answers ``/api/generate``."""
    if request.asked is None:
        return _LoadedAnswer(service, OllamaGenerate.said(""))
    return OllamaGenerate(service, request)


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
    """The endpoints.

    Args:
        service: whose model is shown.
    """

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
            fields = Fields(body).known(known.OLLAMA_SHOW)
        name = fields.text("model") or fields.required_text("name")
        self._service.check_model(name)
        header = await asyncio.to_thread(lambda: self._header)
        defaults = "\n".join(f"{key} {value}" for key, value in self._service.llm.chat_defaults.items())
        own = {"modelfile": f"FROM {self._service.names[0]}\n", "parameters": defaults}
        return JSONResponse(header | own | {"capabilities": self._capabilities()})

    def _capabilities(self) -> list[str]:
        llm = self._service.llm
        more = {"insert": "fim_mid" in llm.vocab.fim, "thinking": llm.thinking is not None}
        return ["completion", "tools", *(name for name, can in more.items() if can)]

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION, "localspec": __version__})


def _scalar(value: Any) -> Any:
    """A value of the header that is no list; of a path, as quantisers write that of their statistics, only its end."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return public_name(value) if _PATH.fullmatch(value) else value
    return value if isinstance(value, int | float) else None


def _rounded(n: int) -> str:
    """A number of parameters as people say it, such as 1.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)
