"""The addresses that the server answers at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from localspec import __version__
from localspec.commands.serve.answers import ApiAnswer
from localspec.commands.serve.chat import ChatAnswer
from localspec.commands.serve.completions import CompletionAnswer
from localspec.commands.serve.disconnects import while_connected
from localspec.commands.serve.errors import ApiError, on_error
from localspec.commands.serve.events import EventStream
from localspec.commands.serve.fields import Fields
from localspec.commands.serve.guard import Guard
from localspec.commands.serve.requests import chat_request, completion_request
from localspec.commands.serve.service import Service
from localspec.errors import LocalspecError

PAGE = Path(__file__).parent / "page"

_ANSWERS: dict[str, Any] = {
    "chat": (chat_request, ChatAnswer),
    "completions": (completion_request, CompletionAnswer),
}
"""Endpoint -> what checks a request to it, and what answers it."""


def build(service: Service) -> Starlette:
    """The application.

    Args:
        service: what answers.
    """
    what_is_there = _WhatIsThere(service)
    routes = [
        Route("/v1/chat/completions", _answer_at(service, "chat"), methods=["POST"]),
        Route("/v1/completions", _answer_at(service, "completions"), methods=["POST"]),
        Route("/v1/models", what_is_there.models, methods=["GET"]),
        Route("/v1/models/{model:path}", what_is_there.model, methods=["GET"]),
        Route("/v1/localspec/stats", what_is_there.stats, methods=["GET"]),
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
    check, answer = _ANSWERS[kind]

    async def whole(request: Any) -> dict[str, Any]:
        prepared: ApiAnswer = await asyncio.to_thread(answer, service, request)
        return await prepared.whole()

    async def events(request: Any, started: float) -> AsyncGenerator[bytes, None]:
        with service.counted(kind, started):
            prepared: ApiAnswer = await asyncio.to_thread(answer, service, request)
            async with aclosing(prepared.events()) as encoded:
                async for event in encoded:
                    yield event

    async def endpoint(http: Request) -> Response:
        started = time.monotonic()
        try:
            with service.counted(kind, started, goes_on=True):
                service.check_open()
                fields = Fields(await service.bodies.json(http))
                _check_model(service, fields.text("model"))
                # Grammars are compiled here, and templates rendered above: nothing that others should wait for.
                request = await asyncio.to_thread(check, fields, service.served())
            if request.options.stream:
                return EventStream(events(request, started), service.ending)
            with service.counted(kind, started):
                return JSONResponse(await while_connected(http.receive, service.ending, whole(request)))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    return endpoint


def _check_model(service: Service, name: str | None) -> None:
    if name and name not in service.names:
        message = f"there is no model {name!r:.80} here; this server answers with {service.names[0]}"
        raise ApiError(404, message, param="model", code="model_not_found")


class _WhatIsThere:
    """The endpoints that only look."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _named(self, name: str) -> dict[str, Any]:
        llm = self._service.llm
        return {
            "id": name,
            "object": "model",
            "created": int(self._service.started),
            "owned_by": "localspec",
            "localspec": {"context": llm.n_ctx, "backend": llm.backend_name, "draft": llm.draft_names},
        }

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._named(name) for name in self._service.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        _check_model(self._service, name)
        return JSONResponse(self._named(name))

    async def stats(self, request: Request) -> Response:
        service, llm = self._service, self._service.llm
        return JSONResponse(
            {
                "model": service.names[0],
                "version": __version__,
                "backend": llm.backend_name,
                "drafters": llm.draft_names,
                "draft_length": llm.draft_length,
                "context": llm.n_ctx,
                "plain_tokens_per_second": llm.plain_tokens_per_second,
                "explanation": llm.explain(),
                "uptime_s": round(time.time() - service.started, 3),
                "queue": {"running": llm.busy, "waiting": llm.queue_length, "limit": llm.max_queue},
                "prefix_cache": llm.cache_info(),
                "totals": service.metrics.as_dict(),
            }
        )

    async def metrics(self, request: Request) -> Response:
        service, llm = self._service, self._service.llm
        gauges = [
            ("localspec_requests_running", "Requests being answered.", float(llm.busy)),
            ("localspec_requests_waiting", "Requests in the queue.", float(llm.queue_length)),
            ("localspec_queue_limit", "Most requests that may wait.", float(llm.max_queue or 0)),
            ("localspec_plain_tokens_per_second", "Expected speed without drafting.", llm.plain_tokens_per_second),
            ("localspec_uptime_seconds", "Since the start.", time.time() - service.started),
        ]
        names = {"version": __version__, "model": service.names[0], "backend": llm.backend_name}
        text = service.metrics.prometheus(gauges, names | {"draft": ",".join(llm.draft_names)})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        if self._service.ending.is_set():
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")
