"""Embeddings as OpenAI's and Ollama's own Python packages see them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest

from localspec.backends.llama.embedding import EmbeddingModel
from localspec.errors import EngineUnavailable
from tests.support.embedders import N_CTX, N_EMBD, write_bert
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE

TEXTS = ["the cat sat on the mat.", "a dog", "the cat sat on the mat."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingModel]:
    try:
        model = EmbeddingModel(write_bert(tmp_path_factory.mktemp("bert") / "tiny-bert.gguf"))
    except EngineUnavailable as error:
        pytest.skip(str(error))
    yield model
    model.close()


@pytest.fixture(autouse=True)
def _everything_ends() -> None:
    """In place of the other APIs': there is no chat to wait for."""


@pytest.fixture(scope="module")
def server(model: EmbeddingModel) -> Iterator[Server]:
    with serve(model, aliases=["embed"]) as running:
        yield running


def test_openai_s(model: EmbeddingModel, client: openai.OpenAI) -> None:
    expected = [model.embed(model.tokenize(text)).tolist() for text in TEXTS]
    n_tokens = sum(len(model.tokenize(text)) for text in TEXTS)
    for form in ({}, {"encoding_format": "float"}):  # without, the package asks for base64, and decodes it
        found = client.embeddings.create(model="embed", input=TEXTS, **form)
        assert [(item.index, item.embedding) for item in found.data] == list(enumerate(expected))
        assert found.usage.total_tokens == found.usage.prompt_tokens == n_tokens
    assert client.embeddings.create(model="tiny-bert", input=TEXTS[1]).data[0].embedding == expected[1]
    tokens = model.tokenize(TEXTS[0])
    assert client.embeddings.create(model="embed", input=tokens, dimensions=N_EMBD).data[0].embedding == expected[0]
    assert client.embeddings.create(model="embed", input=[tokens]).data[0].embedding == expected[0]
    assert [each.id for each in client.models.list()] == ["tiny-bert", "embed"]
    found = client.embeddings.create(model="GPT-4", input=TEXTS[1])  # as llama.vscode calls every model
    assert (found.model, found.data[0].embedding) == ("tiny-bert", expected[1])
    with pytest.raises(openai.BadRequestError, match="makes embeddings"):
        client.chat.completions.create(model="embed", messages=[{"role": "user", "content": "x"}])


def test_ollama_s(model: EmbeddingModel, server: Server) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url, timeout=PATIENCE)
    found = client.embed("embed:latest", TEXTS)
    assert [list(row) for row in found.embeddings] == [model.embed(model.tokenize(text)).tolist() for text in TEXTS]
    assert list(client.embeddings("embed", TEXTS[1]).embedding) == list(found.embeddings[1])
    long = "cat " * 100
    tokens = model.tokenize(long)
    cut = [*tokens[: N_CTX - 1], tokens[-1]]
    assert list(client.embed("embed", long).embeddings[0]) == model.embed(cut).tolist()
    with pytest.raises(ollama.ResponseError, match=f"and {N_CTX} fit") as caught:
        client.embed("embed", long, truncate=False)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="makes embeddings"):
        client.chat("embed", [{"role": "user", "content": "x"}])
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'"):
        client.embed("other", TEXTS)
    client.close()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"input": "cat " * 100}, f"and {N_CTX} fit"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "none empty"),
        ({"input": [["a"]]}, "token ids"),
        ({"input": [99]}, "token id"),
        ({"input": ["a"] * 2049}, "2048"),
        ({"dimensions": 7}, "dimensions"),
    ],
)
def test_a_wrong_request_is_one_clear_error(client: openai.OpenAI, change: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        client.embeddings.create(**{"model": "embed", "input": "a"} | change)


def test_the_command_tells_such_files_by_themselves(model: EmbeddingModel) -> None:
    command = [sys.executable, "-m", "localspec", "serve", str(model.path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client:
            assert len(client.embeddings.create(model="", input="a dog").data[0].embedding) == N_EMBD
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        said = process.stderr.read()
    assert f"embeddings of {N_EMBD} numbers" in said
    assert "Traceback" not in said


def test_a_request_of_many_texts_lets_others_in_between(
    model: EmbeddingModel, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, order = EmbeddingModel.embed, list[int]()
    begun, go_on = threading.Event(), threading.Event()

    def recorded(model: EmbeddingModel, tokens: Any) -> Any:
        order.append(len(tokens))
        begun.set()
        assert go_on.wait(PATIENCE)
        return embed(model, tokens)

    monkeypatch.setattr(EmbeddingModel, "embed", recorded)
    create = partial(client.embeddings.create, model="embed")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(create, input=[[1]] * 300)
        assert begun.wait(PATIENCE)
        pool.submit(create, input=[[1, 2, 3]])
        go_on.set()  # there are texts enough for the other request to come meanwhile
    assert sorted(order) == [1] * 300 + [3]
    assert order[-1] == 1
