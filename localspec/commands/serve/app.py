"""The addresses that the server answers at."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from localspec import __version__
from localspec.commands.serve.access import Client, client_of
from localspec.commands.serve.apis import messages, ollama, responses
from localspec.commands.serve.apis.ollama import timestamp
from localspec.commands.serve.apis.ollama_models import OllamaModels
from localspec.commands.serve.chat import ChatAnswer
from localspec.commands.serve.completions import CompletionAnswer
from localspec.commands.serve.conversation_api import ConversationApi
from localspec.commands.serve.conversations import ConversationStore
from localspec.commands.serve.disconnects import while_connected
from localspec.commands.serve.errors import ApiError, on_error
from localspec.commands.serve.events import LLAMA_SERVER, OPENAI, EventStream, Wire
from localspec.commands.serve.fields import Fields
from localspec.commands.serve.guard import Guard
from localspec.commands.serve.infill import InfillAnswer, infill_request
from localspec.commands.serve.requests import chat_request, completion_request
from localspec.commands.serve.service import Service
from localspec.errors import LocalspecError
from localspec.runtime.saved_chats import CONVERSATIONS
from localspec.system.home import home
from localspec.system.usage import CPUTimes

PAGE = Path(__file__).parent / "page"

_ANSWERS: dict[str, tuple[Any, Any, Wire]] = {
    "chat": (chat_request, ChatAnswer, OPENAI),
    "completions": (completion_request, CompletionAnswer, OPENAI),
    "infill": (infill_request, InfillAnswer, LLAMA_SERVER),
    "responses": (responses.responses_request, responses.ResponsesAnswer, responses.WIRE),
    "messages": (messages.messages_request, messages.MessagesAnswer, messages.WIRE),
    "count_tokens": (messages.count_request, messages.CountAnswer, messages.WIRE),
    "ollama_chat": (ollama.ollama_chat_request, ollama.ollama_chat, ollama.WIRE),
    "ollama_generate": (ollama.ollama_generate_request, ollama.ollama_generate, ollama.WIRE),
}
"""Endpoint -> what checks a request to it, what answers it, and how events are sent."""


def build(service: Service) -> Starlette:
    """The application.

    Args:
        service: what answers.
    """
    what_is_there, ollama_models = _WhatIsThere(service), OllamaModels(service)
    conversations = ConversationApi(service, ConversationStore(home() / CONVERSATIONS))
    routes = [
        Route("/v1/chat/completions", _answer_at(service, "chat"), methods=["POST"]),
        Route("/v1/completions", _answer_at(service, "completions"), methods=["POST"]),
        Route("/infill", _answer_at(service, "infill"), methods=["POST"]),
        Route("/v1/responses", _answer_at(service, "responses"), methods=["POST"]),
        Route("/v1/responses/{id}", what_is_there.response, methods=["GET", "DELETE"]),
        Route("/v1/messages", _answer_at(service, "messages"), methods=["POST"]),
        Route("/v1/messages/count_tokens", _answer_at(service, "count_tokens"), methods=["POST"]),
        Route("/api/chat", _answer_at(service, "ollama_chat"), methods=["POST"]),
        Route("/api/generate", _answer_at(service, "ollama_generate"), methods=["POST"]),
        Route("/api/tags", ollama_models.tags, methods=["GET"]),
        Route("/api/show", ollama_models.show, methods=["POST"]),
        Route("/api/ps", ollama_models.ps, methods=["GET"]),
        Route("/api/version", ollama_models.version, methods=["GET"]),
        *(
            Route(path, _no_embeddings, methods=["POST"])
            for path in ("/v1/embeddings", "/api/embed", "/api/embeddings")
        ),
        Route("/v1/models", what_is_there.models, methods=["GET"]),
        Route("/v1/models/{model:path}", what_is_there.model, methods=["GET"]),
        Route("/v1/localspec/stats", what_is_there.stats, methods=["GET"]),
        *conversations.routes(),
        Route("/metrics", what_is_there.metrics, methods=["GET"]),
        Route("/health", what_is_there.health, methods=["GET"]),
        Route("/", _page, methods=["GET"]),
        Mount("/page", StaticFiles(directory=PAGE, check_dir=False)),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, settings=service.settings)],
        exception_handlers={HTTPException: on_error, ApiError: on_error, LocalspecError: on_error},
    )
    app.router.redirect_slashes = False
    return app


def _answer_at(service: Service, kind: str) -> Any:
    """The endpoint that answers chats, or continues texts."""
    check, answer, wire = _ANSWERS[kind]

    def prepared(seen: Service, body: Any) -> Any:
        """What answers, and whether as events. Grammars are compiled here, templates rendered, texts cut into tokens:
        nothing that others should wait for."""
        fields = Fields(body)
        seen.check_model(fields.text("model"))
        request = check(fields, seen.served())
        return answer(seen, request), request.options.stream

    async def events(answering: Any, started: float) -> AsyncGenerator[bytes, None]:
        with service.counted(kind, started):
            async with aclosing(answering.events()) as encoded:
                async for event in encoded:
                    yield event

    async def endpoint(http: Request) -> Response:
        started = time.monotonic()
        with service.counted(kind, started, goes_on=True):
            service.check_open()
            seen = service.seen_by(client_of(http))
            async with service.bodies.json(http) as body:
                answering, is_stream = await asyncio.to_thread(prepared, seen, body)
        if is_stream:
            return EventStream(events(answering, started), service.ending, wire)
        with service.counted(kind, started):
            whole = await while_connected(http.receive, service.ending, answering.whole())
            return await asyncio.to_thread(JSONResponse, whole)  # it repeats as much as was sent

    return endpoint


class _WhatIsThere:
    """The endpoints that only look."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _named(self, name: str, client: Client) -> dict[str, Any]:
        llm, drafters = self._service.llm, list(self._service.seen_by(client).drafters)
        return {
            "id": name,
            "object": "model",
            "created": int(self._service.started),
            "type": "model",  # from here on, what Anthropic's clients read
            "display_name": name,
            "created_at": timestamp(self._service.started),
            "owned_by": "localspec",
            "localspec": {"context": llm.n_ctx, "backend": llm.backend_name, "draft": drafters},
        }

    async def models(self, request: Request) -> Response:
        names = self._service.names
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        data = [self._named(name, client_of(request)) for name in names]
        return JSONResponse({"object": "list", "data": data} | pages)

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._service.check_model(name)
        return JSONResponse(self._named(name, client_of(request)))

    async def response(self, request: Request) -> Response:
        """An answer of ``/v1/responses`` that is kept; or no longer."""
        name = request.path_params["id"]
        stored = responses.stored_response(self._service.seen_by(client_of(request)), name)
        if request.method != "DELETE":
            return await asyncio.to_thread(JSONResponse, stored.response)
        self._service.responses.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def stats(self, request: Request) -> Response:
        client = client_of(request)
        service, llm = self._service.seen_by(client), self._service.llm
        stats: dict[str, Any] = {
            "model": service.names[0],
            "version": __version__,
            "backend": llm.backend_name,
            "drafters": list(service.drafters),
            "draft_length": llm.draft_length,
            "context": llm.n_ctx,
            "thinks": service.served().thinks,
            "plain_tokens_per_second": llm.plain_tokens_per_second,
            "uptime_s": round(time.time() - service.started, 3),
            "queue": {"running": llm.busy, "waiting": llm.queue_length, "limit": llm.max_queue},
            "parallel": {n: value for n, value in llm.parallel_info().items() if n != "passes" or client.sees_others},
            "cpu": dataclasses.asdict(CPUTimes.now()),
        }
        if client.sees_others:
            stats["explanation"] = llm.explain()
            stats |= {"prefix_cache": llm.cache_info(), "totals": service.metrics.as_dict()}
        return JSONResponse(stats)

    async def metrics(self, request: Request) -> Response:
        service, llm = self._service.seen_by(client_of(request)), self._service.llm
        gauges = [
            ("localspec_requests_running", "Requests being answered.", float(llm.parallel_info()["running"])),
            ("localspec_requests_waiting", "Requests in the queue.", float(llm.queue_length)),
            ("localspec_queue_limit", "Most requests that may wait.", float(llm.max_queue or 0)),
            ("localspec_plain_tokens_per_second", "Expected speed without drafting.", llm.plain_tokens_per_second),
            ("localspec_uptime_seconds", "Since the start.", time.time() - service.started),
        ]
        names = {"version": __version__, "model": service.names[0], "backend": llm.backend_name}
        text = service.metrics.prometheus(gauges, names | {"draft": ",".join(service.drafters)})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        if self._service.ending.is_set():
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})


async def _no_embeddings(request: Request) -> Response:
    message = "this model continues text; it makes no embeddings: that takes a server of an embedding model"
    raise ApiError(400, message, code="unsupported_endpoint")


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")
