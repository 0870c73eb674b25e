"""What is Ollama's API's own, as Ollama's Python package sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from tests.conftest import TinyFiles
from tests.server.apis.packages import Ollama
from tests.support.serving import Server, serve

ollama = pytest.importorskip("ollama")

MODEL = "claude-local:latest"
CHAT: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    made = Ollama(server.url, "claude-local").package
    yield made
    made.close()


def test_figures_and_a_form_without_a_schema(client: Any) -> None:
    *pieces, last = client.chat(MODEL, CHAT, options={"num_predict": 24, "temperature": 1, "seed": 3}, stream=True)
    assert {(piece.done, piece.eval_count) for piece in pieces} == {(False, None)}
    assert (last.done, last.message.content) == (True, "")
    assert last.total_duration >= last.eval_duration > 10_000  # nanoseconds: no pass takes less than 10 µs
    text = client.chat(MODEL, CHAT, format="json", options={"num_predict": 3}).message.content
    assert text.startswith("{")


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
        fills = Ollama(server.url, "").package
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
    with pytest.raises(ollama.ResponseError, match="no embeddings"):
        client.embed(MODEL, "x")
