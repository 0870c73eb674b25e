"""Clients that misbehave: slow, half-closed, huge, malformed, gone, or two hundred at once; a server that goes down."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from localspec import LLM
from localspec.server.app import ServerProtocol
from tests.support.endless import N_CTX
from tests.support.serving import Server, asking, post, read_all, serve
from tests.support.waiting import PATIENCE, Brake, wait_until

SERVE: dict[str, Any] = {"queue": 4, "body_bytes": 100_000}

CHAT = [{"role": "user", "content": "hi"}]
LONG = {"messages": CHAT, "max_tokens": 600, "ignore_eos": True}
SHORT = {"messages": CHAT, "max_tokens": 1}


@pytest.fixture(autouse=True)
def still_well(server: Server) -> Iterator[None]:
    """Whatever a client did, the next one is answered, and nothing is left behind."""
    yield
    server.wait_idle()
    assert server.ask("POST", "/v1/chat/completions", SHORT)[0] == 200


def read_until(sock: socket.socket, part: bytes) -> bytes:
    """To the end of a part, and nothing behind it."""
    received = b""
    while not received.endswith(part):
        byte = sock.recv(1)
        assert byte, received
        received += byte
    return received


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("how", ["leaves", "leaves its stream", "is half closed"])
def test_a_client_that_leaves_frees_the_engine(server: Server, llm: LLM, how: str) -> None:
    with Brake(llm, after=5) as brake:
        with server.connect() as sock:
            sock.sendall(post(LONG | {"stream": "stream" in how}))
            brake.wait()
            if "stream" in how:
                read_until(sock, b"chat.completion.chunk")
            if how == "is half closed":
                sock.shutdown(socket.SHUT_WR)
                assert read_all(sock) == b""
        server.wait_idle()
        assert brake.n_passes == 6, "it went on"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/show", "/v1/localspec/conversations"])
def test_a_client_that_leaves_within_its_body_is_no_failure(
    server: Server, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server.connect() as sock:
        sock.sendall(post(SHORT, path, length=9999))
        wait_until(lambda: server.host.bodies.n_held, "the body has not begun")
    wait_until(lambda: not server.host.bodies.n_held, "the body is still waited for")
    assert server.ask("GET", "/health")[0] == 200  # and what it might have said has been said
    assert capsys.readouterr().err == ""


def test_a_head_that_does_not_come_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerProtocol, "head_seconds", 0.1)
    with server.connect() as silent, server.connect() as dripping:
        with suppress(ConnectionError):
            dripping.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: ")
            while not select.select([dripping], [], [], 0.01)[0]:  # it goes on for as long as nothing is said to it
                dripping.sendall(b"x")
        for sock in (silent, dripping):
            answer = read_all(sock)
            assert not answer or status_of(answer) == 408


def test_a_second_request_that_does_not_come_is_given_up(
    server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Brake(llm, after=0) as brake, server.connect() as sock:
        sock.sendall(post(SHORT) + b"G")
        brake.wait()
        monkeypatch.setattr(ServerProtocol, "head_seconds", 0.1)  # from here on: the first one had its time
        brake.release()
        answer = read_all(sock)
        assert status_of(answer) == 200
        assert b"HTTP/1.1 408" in answer


def test_a_body_that_does_not_come_is_given_up(llm: LLM) -> None:
    with serve(llm, body_seconds=0.1) as other, other.connect() as sock:
        sock.sendall(post(SHORT, length=5000))
        answer = read_all(sock)
        assert status_of(answer) == 408
        assert b"request_timeout" in answer


HERE = b" HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
        b"HELO there\r\n\r\n",
        *(b"GET / HTTP/" + version + b"\r\n\r\n" for version in (b"9.9", b"1.1")),
        *(b"GET /" + target + HERE + b"\r\n" for target in (b"\x00", b"x" * 200_000)),
        *(b"GET /" + HERE + line + b"\r\n\r\n" for line in (b"Host: localhost", b"Broken", b"X: " + b"x" * 200_000)),
        b"POST /v1/completions" + HERE + b"Content-Length: -1\r\n\r\n",
        b"POST /v1/completions" + HERE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/completions" + HERE + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"\r\n" * 1000,
    ],
    ids=range(13),
)
def test_what_is_no_http_is_answered_or_dropped(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: bytes
) -> None:
    monkeypatch.setattr(ServerProtocol, "head_seconds", 0.1)
    with server.connect() as sock:
        with suppress(ConnectionError):
            sock.sendall(data)
        answer = read_all(sock)
    assert not answer or 400 <= status_of(answer) < 500
    assert b"Traceback" not in answer
    assert "Traceback" not in capfd.readouterr().err


def test_websockets_and_upgrades_are_ignored(server: Server) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    assert server.ask("GET", "/v1/models", None, headers)[0] == 200


def test_too_large_a_body_is_413(server: Server) -> None:
    with server.connect() as declared:
        declared.sendall(post(SHORT, length=10**9))
        assert status_of(declared.recv(65536)) == 413
    with server.connect() as chunked:
        with suppress(ConnectionError):
            chunked.sendall(post(SHORT).split(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(300):
                chunked.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        answer = read_all(chunked)
        assert not answer or status_of(answer) == 413
    status, _, answer = server.ask("POST", "/v1/completions", b" " * 200_000)
    assert (status, json.loads(answer)["error"]["code"]) == (413, "request_too_large")


def test_all_bodies_together_are_bounded(llm: LLM) -> None:
    with serve(llm, body_bytes=50_000, bodies_bytes=100_000, body_seconds=PATIENCE) as other:
        held = [other.connect() for _ in range(3)]
        for n, sock in enumerate(held, 1):
            sock.sendall(post(SHORT, length=45_000) + b" " * 40_000)
            wait_until(lambda n=n: other.host.bodies.n_held >= 40_000 * min(n, 2))
        assert status_of(held[2].recv(65536)) == 503
        for sock in held:
            sock.close()
        wait_until(lambda: other.host.bodies.n_held == 0)


def test_two_hundred_clients_at_once(server: Server, llm: LLM) -> None:
    with ThreadPoolExecutor(200) as pool, Brake(llm) as brake, server.connect() as first:
        first.sendall(post(LONG))
        brake.wait()
        asked = [pool.submit(server.ask, "POST", "/v1/chat/completions", SHORT | {"max_tokens": 4}) for _ in range(200)]
        wait_until(lambda: sum(each.done() for each in asked) == 196)  # all but the four that wait
        first.close()
        brake.release()
    answers = [each.result() for each in asked]
    refused = [(headers, json.loads(body)["error"]) for status, headers, body in answers if status == 429]
    assert len(refused) == 196
    assert [status for status, _, _ in answers].count(200) == 4
    for headers, error in refused:
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60


def test_connections_beyond_the_limit_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerProtocol, "max_connections", 10)
    held = [server.connect() for _ in range(10)]
    wait_until(lambda: len(server.runner.server_state.connections) == 10)
    with server.connect() as one_more:
        answer = read_all(one_more)
        assert status_of(answer) == 503
    for sock in held:
        sock.close()
    wait_until(lambda: not server.runner.server_state.connections)


def test_a_request_whose_turn_does_not_come_in_time_is_told_so(llm: LLM) -> None:
    with serve(llm, time_limit=0.2) as other, Brake(llm) as brake:
        stream = llm.rounds("x")  # has no limit
        brake.wait()
        status, headers, answer = other.ask("POST", "/v1/chat/completions", SHORT)
        assert (status, headers["retry-after"]) == (503, "10")
        assert json.loads(answer)["error"]["code"] == "timeout"
        stream.close()


DOWN = "the server is shutting down"
LAST: dict[str, dict[str, Any]] = {
    "/v1/responses": {"type": "error", "code": "shutting_down", "message": DOWN},
    "/v1/messages": {"type": "error", "error": {"type": "overloaded_error", "message": DOWN}},
    "/api/chat": {"error": DOWN},
    "/api/generate": {"error": DOWN},
}


@pytest.mark.parametrize("path", LAST)
def test_what_breaks_off_says_so_in_the_api_s_form(endless: Server, path: str) -> None:
    is_ollama = path.startswith("/api/")
    body = asking("Say something.", N_CTX)[path] | ({} if is_ollama else {"stream": True})  # which Ollama's are anyway
    with serve(endless.service.llm) as mortal, mortal.connect() as sock:
        sock.sendall(post(body, path, extra="Connection: close\r\n"))
        begin = sock.recv(12)
        mortal.runner.stop()
        said = (begin + read_all(sock)).decode()
    lines = [line for line in said.splitlines() if line.startswith(("{", "data: ", "event: "))]
    last = json.loads(lines[-1].removeprefix("data: "))
    number = {"sequence_number": sum(line.startswith("data: ") for line in lines) - 1} if "code" in last else {}
    assert last.items() >= (LAST[path] | number).items()
    assert ("application/x-ndjson" in said, lines[-2:-1] == ["event: error"]) == (is_ollama, not is_ollama)
