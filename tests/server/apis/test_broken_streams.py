"""Streams that do not reach their end: the server goes down, or the client leaves."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from tests.support.endless import N_CTX, write_endless
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE, wait_until

CHAT = [{"role": "user", "content": "Say something."}]
ASKED: dict[str, Any] = {
    "/v1/responses": {"input": "Say something.", "stream": True},
    "/v1/messages": {"messages": CHAT, "max_tokens": N_CTX, "stream": True},
    "/api/chat": {"messages": CHAT},
    "/api/generate": {"prompt": "la"},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, module_home: Path) -> Iterator[LLM]:
    path = write_endless(tmp_path_factory.mktemp("endless") / "endless.gguf")
    with LLM(path, draft=None, backend="reference", n_ctx=N_CTX) as loaded:
        yield loaded


def begun(server: Server, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream of which something has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("POST", path, json.dumps(ASKED[path]).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline()
    return connection, response


@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_leaves_frees_the_engine(server: Server, path: str) -> None:
    connection, response = begun(server, path)
    assert server.service.llm.busy
    response.close()
    connection.close()
    server.wait_idle()


@pytest.mark.parametrize("path", ASKED)
def test_what_breaks_off_says_so_in_the_api_s_form(llm: LLM, server: Server, path: str) -> None:
    with serve(llm) as mortal:
        connection, response = begun(mortal, path)
        mortal.runner.stop()
        lines = [line for line in response.read().decode().splitlines() if line]
        connection.close()
    last = json.loads(lines[-1].removeprefix("data: "))
    if path.startswith("/api/"):
        assert last == {"error": "the server is shutting down"}
        return
    assert lines[-2] == "event: error"
    if path == "/v1/messages":
        assert last == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "the server is shutting down"},
        }
        return
    n_before = sum(line.startswith("data: ") for line in lines) - 1
    assert (last["type"], last["code"], last["message"]) == ("error", "shutting_down", "the server is shutting down")
    # The first line was read apart: it named the event whose data is the first of these.
    assert last["sequence_number"] == n_before
    wait_until(lambda: not llm.busy, "the engine is free")
