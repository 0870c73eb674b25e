"""Streams that do not reach their end: the server goes down, or the client leaves."""

from __future__ import annotations

import json

import pytest

from tests.support.endless import N_CTX
from tests.support.serving import Server, asking, post, read_all, serve
from tests.support.waiting import wait_until

BODIES = asking("Say something.", N_CTX)
ASKED = {path: BODIES[path] | {"stream": True} for path in ("/v1/responses", "/v1/messages")}
ASKED |= {path: BODIES[path] for path in ("/api/chat", "/api/generate")}  # which stream unless told otherwise


@pytest.fixture(scope="module")
def server(endless: Server) -> Server:
    return endless


@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_leaves_frees_the_engine(server: Server, path: str) -> None:
    with server.connect() as sock:
        sock.sendall(post(ASKED[path], path))
        assert sock.recv(12) == b"HTTP/1.1 200"
        assert server.service.llm.busy
    server.wait_idle()


@pytest.mark.parametrize("path", ASKED)
def test_what_breaks_off_says_so_in_the_api_s_form(server: Server, path: str) -> None:
    llm = server.service.llm
    with serve(llm) as mortal, mortal.connect() as sock:
        sock.sendall(post(ASKED[path], path, extra="Connection: close\r\n"))
        begin = sock.recv(12)
        mortal.runner.stop()
        head, _, said = (begin + read_all(sock)).decode().partition("\r\n\r\n")
    lines = [line for line in said.splitlines() if line.startswith(("{", "data: ", "event: "))]
    last = json.loads(lines[-1].removeprefix("data: "))
    if path.startswith("/api/"):
        assert last == {"error": "the server is shutting down"}
        assert "application/x-ndjson" in head  # and it streams unless told otherwise, as Ollama does
        return
    assert lines[-2] == "event: error"
    if path == "/v1/messages":
        error = {"type": "overloaded_error", "message": "the server is shutting down"}
        assert last == {"type": "error", "error": error}
        return
    assert (last["type"], last["code"], last["message"]) == ("error", "shutting_down", "the server is shutting down")
    assert last["sequence_number"] == sum(line.startswith("data: ") for line in lines) - 1
    wait_until(lambda: not llm.busy, "the engine is free")
