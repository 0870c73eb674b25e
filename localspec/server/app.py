"""The addresses that the server answers at."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec._version import __version__
from localspec.engine.saved_chats import CONVERSATIONS
from localspec.errors import LocalspecError, UsageError
from localspec.llm import LLM
from localspec.server import anthropic, ollama, responses
from localspec.server.access import Client, client_of
from localspec.server.bodies import read
from localspec.server.conversations import ConversationApi, ConversationStore
from localspec.server.events import LLAMA_SERVER, OPENAI, EventStream, Wire, while_connected
from localspec.server.fields import ApiError, ServerSettings, on_error
from localspec.server.guard import Guard
from localspec.server.infill import InfillAnswer, InfillBody
from localspec.server.ollama import OllamaModels, timestamp
from localspec.server.openai import ChatAnswer, ChatBody, CompletionAnswer, CompletionBody
from localspec.server.requests import ApiBody
from localspec.server.service import Service
from localspec.system.files import home
from localspec.system.machine import CPUTimes

PAGE = Path(__file__).parent / "page"

_ANSWERS: dict[str, tuple[type[ApiBody], Any, Wire]] = {
    "chat": (ChatBody, ChatAnswer, OPENAI),
    "completions": (CompletionBody, CompletionAnswer, OPENAI),
    "infill": (InfillBody, InfillAnswer, LLAMA_SERVER),
    "responses": (responses.ResponsesBody, responses.ResponsesAnswer, responses.WIRE),
    "messages": (anthropic.MessagesBody, anthropic.MessagesAnswer, anthropic.WIRE),
    "count_tokens": (anthropic.CountBody, anthropic.CountAnswer, anthropic.WIRE),
    "ollama_chat": (ollama.OllamaChatBody, ollama.ollama_chat, ollama.WIRE),
    "ollama_generate": (ollama.OllamaGenerateBody, ollama.ollama_generate, ollama.WIRE),
}
"""Endpoint -> the body of a request to it, what answers it, and how events are sent."""


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
    body_kind, answer, wire = _ANSWERS[kind]

    def prepared(seen: Service, body: Any) -> Any:
        """What answers, and whether as events. Grammars are compiled here, templates rendered, texts cut into tokens:
        nothing that others should wait for."""
        asked = read(body_kind, body)
        seen.check_model(asked.model)
        request = asked.asked(seen.served())
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
        registry = CollectorRegistry()
        names = {"version": __version__, "model": service.names[0], "backend": llm.backend_name}
        registry.register(service.metrics)
        Info("localspec", "What is served.", registry=registry).info(names | {"draft": ",".join(service.drafters)})
        for name, about, value in (
            ("requests_running", "Requests being answered.", llm.parallel_info()["running"]),
            ("requests_waiting", "Requests in the queue.", llm.queue_length),
            ("queue_limit", "Most requests that may wait.", llm.max_queue or 0),
            ("plain_tokens_per_second", "Expected speed without drafting.", llm.plain_tokens_per_second),
            ("uptime_seconds", "Since the start.", time.time() - service.started),
        ):
            Gauge(f"localspec_{name}", about, registry=registry).set(value)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        if self._service.ending.is_set():
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})


async def _no_embeddings(request: Request) -> Response:
    message = "this model continues text; it makes no embeddings: that takes a server of an embedding model"
    raise ApiError(400, message, code="unsupported_endpoint")


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")


# uvicorn's HTTP/1.1 protocol, less patient: with clients that are slow to ask, slow to read, or too many.

HEAD_SECONDS = 15.0
"""Longest time from a connection, or the end of an answer, to the end of the next request's head."""

STALL_SECONDS = 30.0
"""Longest time in which a client may take nothing of what is sent to it."""

MAX_CONNECTIONS = 256
"""A quarter of the 1,024 files that a process may commonly have open."""


class ServerProtocol(H11Protocol):
    """One connection."""

    head_seconds = HEAD_SECONDS
    stall_seconds = STALL_SECONDS
    max_connections = MAX_CONNECTIONS

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections", "overloaded")
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head_timer)

    def on_response_complete(self) -> None:
        _cancel(self._head_timer)
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, "the request did not arrive in time", "request_timeout")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in OpenAI's shape."""
        self._refuse(400, "that is no HTTP request", "bad_request")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer without the application, and close."""
        body = json.dumps(ApiError(status, message, code=code).as_dict()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        response = h11.Response(status_code=status, headers=headers)
        try:
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # in the middle of an answer
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


# Sockets and signals around the application.

BACKLOG = 256
GRACE_SECONDS = 5
"""How long clients have, once the server ends, to take what is left for them."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens: from here on the port is ours, and clients wait until they are answered.

    Raises:
        UsageError: no such address.
        LocalspecError: the port is in use, or not to be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError):
        raise UsageError(f"--host {host}: there is no such address") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LocalspecError(
                f"port {port} of {host} is in use: stop what uses it, or take another with --port (0 finds one)"
            ) from None
        if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES):
            raise LocalspecError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
        raise


def url_of(sock: socket.socket) -> str:
    """The address of a listening socket, for a browser."""
    name, port = sock.getsockname()[:2]
    if name in ("0.0.0.0", "::"):
        name = "127.0.0.1" if name == "0.0.0.0" else "::1"
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def ending_signals() -> list[int]:
    """What ends a server. On Windows no program can send another one SIGTERM, but Ctrl-Break."""
    names = ("SIGINT", "SIGTERM", "SIGBREAK")
    return [int(getattr(signal, name)) for name in names if hasattr(signal, name)]


class AppRunner(uvicorn.Server):
    """Serves an application until a signal stops it, or ``stop`` from any thread.

    Args:
        app: what is served.
        ending: is set once the server goes down.
        verbose: log every request to standard error.
        on_start: called once clients are answered, and signals heeded.

    Attributes:
        signal: the signal that ended it, or None.
    """

    def __init__(
        self,
        app: Starlette,
        ending: asyncio.Event,
        *,
        verbose: bool = False,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        if verbose:
            _log_requests()
        self._ending = ending
        self._on_start = on_start
        self.signal: int | None = None
        super().__init__(
            uvicorn.Config(
                app,
                http=ServerProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="info" if verbose else "critical",
                access_log=verbose,
                server_header=False,
                date_header=True,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=GRACE_SECONDS,
                backlog=BACKLOG,
            )
        )

    def stop(self) -> None:
        """End: requests that run or wait are ended too."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A thread for each client, made when first needed: what one asks for, such as a long text to be cut into
        # tokens, keeps nobody's waiting.
        threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="localspec-request")
        asyncio.get_running_loop().set_default_executor(threads)
        await super().startup(sockets)
        if self._on_start is not None:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal that ended the server is kept in ``signal`` instead of raised again."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in ending_signals()}
        except ValueError:  # not the main thread
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # asked twice
        self.should_exit = True
        self.signal = sig


class Runner(AppRunner):
    """Serves an ``LLM``; options as above.

    Args:
        llm: the loaded pair; it is not closed here.
        settings: how to behave.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, **options: Any) -> None:
        self.service = Service(llm, settings)
        super().__init__(build(self.service), self.service.ending, **options)


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("localspec: %(message)s"))
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate = [handler], False
