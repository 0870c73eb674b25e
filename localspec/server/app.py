"""The addresses that the server answers at."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec.errors import LocalspecError, UsageError
from localspec.prompts.documents import document_text, is_document
from localspec.server import anthropic, ollama, responses
from localspec.server.access import ALL, Address, client_of
from localspec.server.bodies import Body, ModelBody, read
from localspec.server.conversations import ConversationApi
from localspec.server.embeddings import (
    EmbeddingsBody,
    OllamaEmbed,
    OllamaEmbedBody,
    OllamaEmbeddings,
    OllamaEmbeddingsBody,
    OpenAIEmbeddings,
)
from localspec.server.events import LLAMA_SERVER, OPENAI, EventStream, Result, Wire, event, while_connected
from localspec.server.guard import application
from localspec.server.hosting import Host, HostedModel, Use
from localspec.server.http import ApiError, BodyReader
from localspec.server.infill import InfillAnswer, InfillBody
from localspec.server.models import ModelEndpoints, OllamaModels
from localspec.server.openai import LOADING_EVENT, ChatAnswer, ChatBody, CompletionAnswer, CompletionBody
from localspec.server.service import Metrics, counted

PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True, slots=True)
class Api:
    """An address at which a model answers."""

    path: str
    name: str  # in the metrics
    body: type[ModelBody]
    answer: Callable[[Any, Any], Any]  # of a service and a body: has ``whole()``, and ``events()`` where that is asked
    wire: Wire = OPENAI
    use: Use = "text"
    # A model's name that is not known stands for none: llama.vscode calls every model GPT-4, and llama-server heeds no
    # name; the answer says whose it is.
    any_name: bool = False


APIS = (
    Api("/v1/chat/completions", "chat", ChatBody, ChatAnswer, OPENAI),
    Api("/v1/completions", "completions", CompletionBody, CompletionAnswer, OPENAI),
    Api("/infill", "infill", InfillBody, InfillAnswer, LLAMA_SERVER, "fill"),
    Api("/v1/responses", "responses", responses.ResponsesBody, responses.ResponsesAnswer, responses.WIRE),
    Api("/v1/messages", "messages", anthropic.MessagesBody, anthropic.MessagesAnswer, anthropic.WIRE),
    Api("/v1/messages/count_tokens", "count_tokens", anthropic.CountBody, anthropic.CountAnswer, anthropic.WIRE),
    Api("/api/chat", "ollama_chat", ollama.OllamaChatBody, ollama.OllamaChat, ollama.WIRE),
    Api("/api/generate", "ollama_generate", ollama.OllamaGenerateBody, ollama.OllamaGenerate, ollama.WIRE),
    Api("/v1/embeddings", "embeddings", EmbeddingsBody, OpenAIEmbeddings, use="embed", any_name=True),
    Api("/api/embed", "ollama_embed", OllamaEmbedBody, OllamaEmbed, use="embed"),
    Api("/api/embeddings", "ollama_embeddings", OllamaEmbeddingsBody, OllamaEmbeddings, use="embed"),
)


def addresses(host: Host) -> list[Address]:
    """All addresses of a server that answers, but for the page's files."""
    models, ollama_models, conversations = ModelEndpoints(host), OllamaModels(host), ConversationApi(host.bodies)
    return [
        *(Address(api.path, _answering(host, api), methods=("POST",)) for api in APIS),
        *models.addresses(),
        *ollama_models.addresses(),
        *conversations.addresses(),
        Address("/v1/localspec/text", _text_of_files(host.bodies), methods=("POST",)),
        Address("/health", partial(_health, host), ALL),
        Address("/", _page, ALL),  # which asks for the key
    ]


LOADING_SECONDS = 0.25  # between two looks at how far a model is loaded, for streams that tell it


def _answering(host: Host, api: Api) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(http: Request) -> Response:
        started = time.monotonic()
        model: HostedModel | None = None

        def metrics() -> Metrics:
            return (model or host.only or host).metrics

        async def prepared() -> Any:
            """What answers, once the model is loaded. Grammars are compiled here, templates rendered, texts cut into
            tokens: nothing that others should wait for."""
            assert model is not None
            asking = time.monotonic()
            held.callback(await host.take(model, asked.keep))
            seconds = time.monotonic() - asking
            assert model.service is not None
            answering = await _in_thread(api.answer, model.service.seen_by(client_of(http)), asked)
            answering.seconds_loading = seconds
            await reading.aclose()
            return answering

        async def events() -> AsyncGenerator[bytes, None]:
            assert model is not None
            with counted(metrics, api.name, started):
                preparing = asyncio.ensure_future(prepared())
                try:
                    if asked.tells_loading:
                        async for told in _loading(model, preparing):
                            yield told
                    answering = await preparing
                finally:
                    preparing.cancel()
                    await asyncio.gather(preparing, return_exceptions=True)
                async with aclosing(answering.events()) as encoded:
                    async for told in encoded:
                        yield told

        async with AsyncExitStack() as using:
            held = await using.enter_async_context(AsyncExitStack())
            with counted(metrics, api.name, started, goes_on=True):
                host.check_open(api.use)
                # A large body keeps its turn while its model is loaded: no answer needs one to end.
                reading = await using.enter_async_context(AsyncExitStack())
                body = await reading.enter_async_context(host.bodies.json(http))
                asked = await asyncio.to_thread(read, api.body, body)
                model = await host.find(asked.model, api.use, any_name=api.any_name)
            if asked.unloads and not model.fixed:
                host.leave(model)
                return JSONResponse(api.answer.unloaded(model.names[0]))  # type: ignore[attr-defined] # Ollama's
            if getattr(asked, "stream", False):  # which says that it lives while the model is loaded
                return EventStream(events(), host.ending, api.wire, using.pop_all().aclose)
            with counted(metrics, api.name, started):
                answering = await while_connected(http.receive, host.ending, prepared())
                whole = await while_connected(http.receive, host.ending, answering.whole())
                return await asyncio.to_thread(JSONResponse, whole)  # it repeats as much as was sent

    return endpoint


async def _in_thread(work: Callable[..., Result], *given: Any) -> Result:
    """``asyncio.to_thread``, whose end a cancellation waits for: the model that it uses may be freed next."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *given))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait((running,))


async def _loading(model: HostedModel, until: asyncio.Future[Any]) -> AsyncGenerator[bytes, None]:
    """Events of how far a model is loaded, or that it waits for its turn."""
    told = None
    while True:
        doing = model.doing if model.state == "loading" else ("waiting", None)
        doing = ("loaded", 1.0) if model.state == "loaded" else doing
        if doing != told and (told is not None or model.state != "loaded"):
            told = doing
            loading = {"type": "loading", "model": model.names[0], "doing": doing[0], "fraction": doing[1]}
            yield event({"choices": [], "localspec": {"loading": loading}}, LOADING_EVENT)
        if until.done():
            return
        await asyncio.wait((until,), timeout=LOADING_SECONDS)


async def _health(host: Host, request: Request) -> Response:
    if host.ending.is_set():
        return JSONResponse({"status": "shutting down"}, 503)
    return JSONResponse({"status": "ok"})


class FileBody(Body):
    """A document, in Base64."""

    name: str
    data: str


def _text_of_files(bodies: BodyReader) -> Callable[[Request], Awaitable[Response]]:
    """The text of PDF and Word documents, for the page."""
    readers = asyncio.Semaphore(2)  # processes read them, two at a time

    def text(sent: Any) -> str:
        body = read(FileBody, sent)
        if not is_document(body.name):
            raise ApiError(400, "name must end in .pdf or .docx")
        try:
            return document_text(body.name, base64.b64decode(body.data, validate=True))
        except UsageError as error:
            raise ApiError(422, str(error)) from None
        except ValueError:
            raise ApiError(400, "data must be Base64") from None

    async def endpoint(request: Request) -> Response:
        async with bodies.json(request) as sent, readers:
            return JSONResponse({"text": await asyncio.to_thread(text, sent)})

    return endpoint


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")


MAX_CONNECTIONS = 256  # a quarter of the 1,024 files that a process may commonly have open


class ServerProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, less patient with clients that are slow to ask, slow to read, or too many."""

    head_seconds = 15.0  # from a connection, or the end of an answer, to the end of the next request's head, at most
    stall_seconds = 30.0  # for which a client may take nothing of what is sent, at most
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


BACKLOG = 256
GRACE_SECONDS = 5  # how long clients have, once the server ends, to take what is left for them


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens: from here on the port is ours, and clients wait until they are answered. A
    ``LocalspecError``: there is no such address, or the port is in use or not to be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError):
        raise UsageError(f"--host {host}: there is no such address") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"cannot listen on port {port} of {host}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is in use: stop what uses it, or take another with --port (0 finds one)"
        raise LocalspecError(message) from None


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


class Runner(uvicorn.Server):
    """Serves the models of a host until a signal stops it, or ``stop`` from any thread; then they are freed.

    Args:
        host: what is served.
        verbose: log every request to standard error.
        on_start: called once clients are answered, and signals heeded.
    """

    def __init__(self, host: Host, *, verbose: bool = False, on_start: Callable[[], None] | None = None) -> None:
        if verbose:
            _log_requests()
        self.host = host
        self._on_start = on_start
        self.signal: int | None = None  # that ended it
        super().__init__(
            uvicorn.Config(
                application(host.settings, addresses(host), PAGE),
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

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self.host.close()

    def stop(self) -> None:
        """End: requests that run or wait are ended too."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A thread for each client, made when first needed: what one asks for, such as a long text to be cut into
        # tokens, delays no other.
        threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="localspec-request")
        asyncio.get_running_loop().set_default_executor(threads)
        await super().startup(sockets)
        if self._on_start is not None:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.host.end()
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


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("localspec: %(message)s"))
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate = [handler], False
