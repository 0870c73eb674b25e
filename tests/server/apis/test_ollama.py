"""Ollama's API as Ollama's own Python package sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from tests.conftest import TinyFiles
from tests.server.apis.conftest import CALL, SCHEMA, says
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE

ollama = pytest.importorskip("ollama")

MODEL = "claude-local:latest"
CHAT: Any = [{"role": "user", "content": "Say something."}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "?", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    made = ollama.Client(host=server.url, timeout=PATIENCE)
    yield made
    made.close()


def test_an_answer_is_the_library_s(llm: LLM, client: Any) -> None:
    found = client.chat(MODEL, CHAT, options={"num_predict": 20, "temperature": 0})
    expected = llm.chat(CHAT, SamplingParams(max_tokens=20))
    assert found.message.content == expected.text
    assert (found.done, found.done_reason) == (True, expected.finish_reason)
    assert found.prompt_eval_count == expected.stats["prompt_tokens"]
    assert found.eval_count == expected.stats["completion_tokens"]
    assert found.total_duration >= found.eval_duration > 10_000  # nanoseconds: no pass takes less than 10 µs


def test_a_stream_is_the_answer_in_pieces(client: Any) -> None:
    options = {"num_predict": 24, "temperature": 1, "seed": 3}
    whole = client.chat(MODEL, CHAT, options=options)
    *pieces, last = client.chat(MODEL, CHAT, options=options, stream=True)
    assert len(pieces) > 1
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert {(piece.done, piece.eval_count) for piece in pieces} == {(False, None)}
    assert (last.done, last.message.content) == (True, "")
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(client: Any, stream: bool) -> None:
    found = client.chat(MODEL, CHAT, tools=TOOLS, options=says(CALL), stream=stream)
    said = [part.message for part in found] if stream else [found.message]
    (call,) = [call for message in said for call in message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    (calling,) = [message for message in said if message.tool_calls]
    turns = [*CHAT, calling, {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    answer = client.chat(MODEL, turns, tools=TOOLS, options=says("It is sunny."))
    assert answer.message.content == "It is sunny."


def test_forms_and_stops(client: Any) -> None:
    place = client.chat(MODEL, CHAT, format=SCHEMA).message.content
    assert json.loads(place)["city"] in ("Rome", "Oslo")
    text = client.chat(MODEL, CHAT, format="json", options={"num_predict": 3}).message.content
    assert text.startswith("{")
    found = client.chat(MODEL, CHAT, options=says("the cat sat on the mat") | {"stop": ["zzz", " on"]})
    assert found.message.content == "the cat sat"


def test_a_prompt_goes_through_the_template_unless_raw(llm: LLM, client: Any) -> None:
    options = {"num_predict": 12, "temperature": 0}
    params, chat = SamplingParams(max_tokens=12), [{"role": "user", "content": "la la la"}]
    found = client.generate(MODEL, "la la la", system="Sing.", options=options)
    assert found.response == llm.chat([{"role": "system", "content": "Sing."}, *chat], params).text
    raw = client.generate(MODEL, "la la la", raw=True, options=options)
    assert raw.response == llm.generate("la la la", params).text
    assert raw.prompt_eval_count < found.prompt_eval_count
    parts = list(client.generate(MODEL, "la la la", raw=True, options=options, stream=True))
    assert "".join(part.response for part in parts) == raw.response
    assert parts[-1].done


def test_what_stands_before_a_suffix_is_filled_in(tiny: TinyFiles, client: Any) -> None:
    options = {"num_predict": 12, "temperature": 0}
    with LLM(tiny.fim.target, draft=None, backend="reference", n_ctx=512) as llm, serve(llm) as server:
        fills = ollama.Client(host=server.url, timeout=PATIENCE)
        found = fills.generate(llm.model_name, "def f(", suffix="):", options=options)
        assert found.response == llm.fill("def f(", "):", SamplingParams(max_tokens=12)).text
        assert "insert" in fills.show(llm.model_name).capabilities
        fills.close()
    assert "insert" not in client.show(MODEL).capabilities
    with pytest.raises(ollama.ResponseError, match="fill"):
        client.generate(MODEL, "def f(", suffix="):")


def test_asking_nothing_finds_the_model_loaded(client: Any) -> None:
    for found in (client.generate(MODEL), client.chat(MODEL, []), *client.generate(MODEL, stream=True)):
        assert (found.done, found.done_reason) == (True, "load")


def test_what_is_there(llm: LLM, server: Server, client: Any) -> None:
    models = client.list().models
    assert [model.model for model in models] == [llm.model_name, "claude-local"]
    assert models[0].size == llm.size_bytes
    assert len(models[0].digest) == 64
    assert models[0].details.format == "gguf"
    assert client.ps().models[0].context_length == llm.n_ctx
    shown = client.show(MODEL)
    family = shown.details.family
    assert shown.modelinfo["general.architecture"] == family
    assert shown.modelinfo[f"{family}.context_length"] > 0
    assert shown.template == llm.template.source
    assert "tools" in shown.capabilities
    assert str(llm.model_path.parent) not in shown.model_dump_json()
    version = json.loads(server.ask("GET", "/api/version")[2])["version"]
    assert tuple(map(int, version.split("."))) >= (0, 9, 0)  # which has tools and schemas


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"messages": [{"role": "user", "content": "x", "images": [b"aaaa"]}]}, 400, "images"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, 400, "2048"),
        ({"options": {"mirostat": 1}}, 400, "mirostat"),
        ({"format": {"type": "nothing"}}, 400, "schema"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_answered_in_ollama_s_form(
    client: Any, change: dict[str, Any], status: int, word: str, stream: bool
) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        list(client.chat(**{"model": MODEL, "messages": CHAT} | change, stream=stream))
    assert caught.value.status_code == status
    assert word in caught.value.error


def test_embeddings_are_refused(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="no embeddings"):
        client.embed(MODEL, "x")
