"""A real server in a thread, for tests: uvicorn, a socket, an ``LLM``."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from localspec import LLM
from localspec.backends.llama.embedding import EmbeddingModel
from localspec.engine.loading import Report
from localspec.engine.options import LoadOptions
from localspec.server.app import Runner, listen, url_of
from localspec.server.hosting import Host, LoadPlan, Opening, ServedFile
from localspec.server.http import ServerSettings
from localspec.server.service import Service
from tests.support.waiting import PATIENCE, wait_until


class Server:
    """A server that runs.

    Attributes:
        url: without a slash at its end.
        port: on 127.0.0.1.
        loop: of a server of several models, which its host is used from.
    """

    def __init__(self, runner: Runner, url: str) -> None:
        self.runner = runner
        self.loop: asyncio.AbstractEventLoop | None = None
        self.url = url
        self.port = int(url.rpartition(":")[2])

    @property
    def host(self) -> Host:
        return self.runner.host

    @property
    def service(self) -> Service:
        """Of a server of one ``LLM``."""
        service = self.host.models[0].service
        assert isinstance(service, Service)
        return service

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """A request by the standard library: (status, headers in lower case, body). Text and bytes go as they are."""
        headers = {"Content-Type": "application/json"} | (headers or {})
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, data, {name: value for name, value in headers.items() if value})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def wait_idle(self) -> None:
        """Until nothing runs and nobody waits, in the server and in the engine."""
        llm = self.service.llm
        wait_until(lambda: not (llm.busy or llm.queue_length), "no request is stuck")


def post(body: Any, path: str = "/v1/chat/completions", *, length: int | None = None, extra: str = "") -> bytes:
    """A request as it is sent; ``length`` is what it says of its body, ``extra`` more lines of its head."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
        f"Content-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return head.encode() + data


def asking(text: str, n: int, **own: Any) -> dict[str, dict[str, Any]]:
    """A body for each API, by its address, that asks for so many tokens after a text; the rest is sampling and ours."""
    chat, options = {"messages": [{"role": "user", "content": text}]}, {"options": {"num_predict": n} | own}
    return {
        "/v1/chat/completions": chat | {"max_tokens": n} | own,
        "/v1/completions": {"prompt": text, "max_tokens": n} | own,
        "/v1/messages": chat | {"max_tokens": n} | own,
        "/v1/responses": {"input": text, "max_output_tokens": n} | own,
        "/api/chat": chat | options,
        "/api/generate": {"prompt": text} | options,
        "/infill": {"input_prefix": text, "input_suffix": "b", "n_predict": n} | own,
    }


TEXTS = ("content", "text", "response", "delta", "embeddings")
REASONS = ("finish_reason", "stop_reason", "done_reason", "stop_type", "status")


def said_by(answer: bytes) -> str:
    """All texts and numbers of an answer of any API, whole or in events, and why it ended."""

    def of(value: Any, name: str = "") -> str:
        if isinstance(value, dict):
            return "".join(of(item, key) for key, item in value.items())
        if isinstance(value, list):
            return "".join(of(item, name) for item in value)
        return str(value) if name in (*TEXTS, *REASONS) and value is not None else ""

    lines = [line.removeprefix("data: ") for line in answer.decode().splitlines()]
    found = "".join(of(json.loads(line)) for line in lines if line.startswith("{"))
    assert found, answer
    return found


def read_all(sock: socket.socket, at_once: int = 65536) -> bytes:
    """Until the server closes."""
    received = b""
    with suppress(ConnectionError):
        while chunk := sock.recv(at_once):
            received += chunk
    return received


@contextmanager
def serve(model: LLM | EmbeddingModel, *, port: int = 0, **settings: Any) -> Iterator[Server]:
    """Serve a model on a free port of 127.0.0.1, or on a given one; settings as in ``ServerSettings``."""
    with listen("127.0.0.1", port) as sock:
        queue_before = getattr(model, "max_queue", None)
        runner = Runner(Host.of_one(model, ServerSettings(**settings)))
        try:
            with _running(runner, sock):
                yield Server(runner, url_of(sock))
        finally:
            if isinstance(model, LLM):
                model.max_queue = queue_before


def opening(load: Mapping[str, Any] | None = None, **more: Any) -> Opening:
    """How tiny models are loaded, by the reference engine; ``load``: fields of ``LoadOptions``."""

    def text(file: ServedFile, plan: LoadPlan, report: Report, cancel: threading.Event) -> LLM:
        how = replace(plan.load, parallel=1, n_gpu_layers=None).as_arguments()
        return LLM(file.path, "ngram", progress=report, cancel=cancel, **how)

    usual = LoadOptions(**({"n_ctx": 512, "backend": "reference"} | dict(load or {})))
    return Opening(text, lambda file, plan: EmbeddingModel(file.path), load=usual, drafts=False, **more)


@contextmanager
def serve_several(
    how: Opening | None = None,
    *,
    memory: int = 1 << 30,
    gpu_memory: int = 0,
    keep_alive: float | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Serve several models, by default all on the disk."""
    with listen("127.0.0.1", 0) as sock:
        budgets = {"memory": memory, "gpu_memory": gpu_memory}
        host = Host(ServerSettings(**settings), how or opening(), **budgets, keep_alive=keep_alive)
        loops: list[asyncio.AbstractEventLoop] = []
        runner = Runner(host, on_start=lambda: loops.append(asyncio.get_running_loop()))
        with _running(runner, sock):
            server = Server(runner, url_of(sock))
            wait_until(lambda: bool(loops), "it has begun")
            (server.loop,) = loops
            yield server


@contextmanager
def _running(runner: Runner, sock: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=runner.run, args=([sock],), daemon=True)
    thread.start()
    while not runner.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield
    finally:
        runner.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"
