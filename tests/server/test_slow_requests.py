"""One slow request slows nobody: others are answered while it is still under way, whatever of it takes long."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from localspec.backends.base import Model
from localspec.prompts.template_sandbox import SandboxedTemplate
from localspec.sampling import grammar as structured
from localspec.server import http as bodies
from localspec.server.service import ResponseStore
from tests.support.serving import Server, asking
from tests.support.waiting import PATIENCE, wait_until

LOAD: dict[str, Any] = {"draft": [], "n_ctx": 256, "idle": False}

SLOW = "slow"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LONG = {"messages": [{"role": "user", "content": SLOW}], "max_tokens": 1}
MANY = 12
"""Slow requests at a time: more than asyncio has threads by itself on the machines that tests run on."""


FORM = {"type": "object", "properties": {SLOW: {"type": "integer"}}}
FORMED = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}}
LARGE = CHAT | {"user": SLOW * bodies.LARGE_BYTES}
KEPT = {"input": SLOW, "max_output_tokens": 1}


@pytest.mark.parametrize(
    ("place", "name", "is_slow", "body", "n", "at_a_time"),
    [
        (Model, "tokenize", lambda model, text, **_: SLOW in text, LONG, MANY, MANY),
        (SandboxedTemplate, "run", lambda template, variables: SLOW in str(variables["messages"]), LONG, MANY, MANY),
        (bodies, "parse", lambda body: SLOW.encode() in body, LARGE, MANY, bodies.N_LARGE),
        (structured, "_checked", lambda text, _: SLOW in text, FORMED, 1, 1),
        (ResponseStore, "put", lambda store, name, stored: SLOW in str(stored), KEPT, 1, 1),
    ],
    ids=["tokens", "template", "large body", "grammar", "what was said before"],
)
def test_others_are_answered_meanwhile(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    is_slow: Any,
    body: Any,
    n: int,
    at_a_time: int,
) -> None:
    pytest.importorskip("llguidance")
    begun, go_on, work = list[None](), threading.Event(), getattr(place, name)

    def held(*given: Any, **options: Any) -> Any:
        if is_slow(*given, **options):
            begun.append(None)
            assert go_on.wait(PATIENCE)
        return work(*given, **options)

    monkeypatch.setattr(place, name, held)
    with ThreadPoolExecutor(n) as pool:
        path = "/v1/responses" if body is KEPT else "/v1/chat/completions"
        asked = [pool.submit(server.ask, "POST", path, body) for _ in range(n)]
        try:
            wait_until(lambda: len(begun) == at_a_time, "they wait for each other")
            assert server.ask("POST", "/v1/chat/completions", CHAT)[0] == 200
            assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
            assert server.ask("POST", "/v1/messages/count_tokens", {"messages": CHAT["messages"]})[0] == 200
            for other in ("/health", "/v1/models", "/v1/localspec/stats"):
                assert server.ask("GET", other)[0] == 200
            assert len(begun) == at_a_time
        finally:
            go_on.set()
    assert [each.result()[0] for each in asked] == [200] * n


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that are cut into tokens."""
    found: list[int] = []
    tokenize = Model.tokenize

    def measured(model: Model, text: str, **options: Any) -> list[int]:
        found.append(len(text))
        return tokenize(model, text, **options)

    monkeypatch.setattr(Model, "tokenize", measured)
    return found


def test_what_cannot_fit_is_refused_by_its_length(server: Server, lengths: list[int]) -> None:
    most = server.service.llm.n_ctx * server.service.llm.vocab.longest
    text = " " * 4 * most
    asked = [(path, body) for path, body in asking(text, 1).items() if path != "/infill"]
    asked += [("/v1/responses", {"input": "x", "instructions": text}), ("/api/generate", {"prompt": text, "raw": True})]
    for path, body in asked:
        status, _, answer = server.ask("POST", path, body)
        assert (status, b"and the context holds 256" in answer) == (400, True), path
        assert max(lengths, default=0) <= most


def test_of_a_prediction_no_more_is_read_than_an_answer_can_have(server: Server, lengths: list[int]) -> None:
    most = server.service.llm.n_ctx * server.service.llm.vocab.longest
    body = CHAT | {"prediction": {"type": "content", "content": "word " * most}}
    assert server.ask("POST", "/v1/chat/completions", body)[0] == 200
    assert max(lengths) <= most


CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, CIRCLE])
def test_a_schema_that_no_answer_can_follow_is_400(server: Server, schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        body = CHAT | {"response_format": form, "stream": stream}
        status, _, answer = server.ask("POST", "/v1/chat/completions", body)
        assert (status, b"schema" in answer) == (400, True), answer


def test_properties_within_the_bound_work(server: Server) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(structured.MAX_OPTIONAL)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert server.ask("POST", "/v1/chat/completions", CHAT | {"response_format": form, "max_tokens": 8})[0] == 200
