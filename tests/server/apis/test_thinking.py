"""Thinking in every API, with each one's own package: in its own place, streamed and whole, sent back, and off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from localspec import LLM
from tests.server.apis.packages import APIS, Answer, Api
from tests.support.serving import Server, serve
from tests.support.thinkers import QWEN, write_thinker

BUDGET = 12
ASKED: dict[str, Any] = {"text": "in the and", "n": 40, "own": {"temperature": 1, "seed": 1}}


@pytest.fixture(scope="module", params=["opens", "shows"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, module_home: Path
) -> Iterator[Server]:
    """One model's template opens the block and hides earlier thinking, the other's shows all of it."""
    shows = ("qwen", QWEN.replace(" and loop.index0 > ns.last", ""))
    path = write_thinker(tmp_path_factory.mktemp("thinker"), *(("deepseek",) if request.param == "opens" else shows))
    with LLM(path, draft="ngram", backend="reference", n_ctx=512, idle=False) as llm, serve(llm) as server:
        yield server


@pytest.fixture(scope="module")
def opens(server: Server) -> bool:
    """Whether the template opens the block: a tiny model never does."""
    return server.service.llm.model_name == "deepseek"


@pytest.fixture(scope="module")
def chat(server: Server, opens: bool) -> Answer:
    """What ``/v1/chat/completions`` says."""
    found = APIS["chat"](server.url, server.service.names[0]).ask(**ASKED, budget=BUDGET)
    assert "think>" not in found.thinking + found.text
    n = found.raw.usage.completion_tokens_details.reasoning_tokens
    assert n in (range(BUDGET + 1, BUDGET + len(server.service.llm.thinking.forced) + 1) if opens else (0,))
    return found


def test_thoughts_have_their_own_place(api: Api, opens: bool, chat: Answer) -> None:
    for stream in (False, True):
        assert api.ask(**ASKED, budget=BUDGET, stream=stream) == chat
    off = api.ask(**ASKED, think="off")
    assert off.thinking == ""
    assert off.n_prompt > chat.n_prompt or not opens  # the closed block
    # A given form switches thinking off.
    formed = api.ask(**ASKED, form={"type": "object", "additionalProperties": False})
    assert formed.thinking == ""
    # They are sent back, and the template decides.
    without, with_it = (
        api.ask(**ASKED, history=[*api.said("Hi.", thought), {"role": "user", "content": "and"}]).n_prompt
        for thought in ("", "a long thought of mine")
    )
    assert (with_it > without) == (not opens)


@pytest.mark.parametrize("api", ["chat"], indirect=True)
def test_chats(api: Api, chat: Answer) -> None:
    # Log-probabilities are of the content.
    (scored,) = api.ask(**ASKED | {"own": ASKED["own"] | {"logprobs": True}}, budget=BUDGET).raw.choices
    thought = chat.raw.usage.completion_tokens_details.reasoning_tokens
    assert len(scored.logprobs.content) <= chat.n - thought
    off = api.ask(**ASKED | {"own": ASKED["own"] | {"chat_template_kwargs": {"enable_thinking": False}}})
    assert (off.thinking, off.raw.usage.completion_tokens_details.reasoning_tokens) == ("", 0)


@pytest.mark.parametrize("api", ["messages"], indirect=True)
def test_messages(api: Api, opens: bool) -> None:
    asked: Any = {"model": api.model, "messages": [{"role": "user", "content": ASKED["text"]}]}
    thinks = {"thinking": {"type": "enabled", "budget_tokens": BUDGET}, "extra_body": ASKED["own"]}
    with api.package.messages.stream(**asked, max_tokens=ASKED["n"], **thinks) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
    assert set(kinds) == {"thinking_delta", "text_delta"} if opens else {"text_delta"}
    assert kinds == sorted(kinds, reverse=True)
    # A form switches thinking off for what is counted too.
    form = {"type": "object", "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": form}}
    counted = api.package.messages.count_tokens(**asked, output_config=config)
    assert counted.input_tokens == api.ask(**ASKED, form=form).n_prompt


@pytest.mark.parametrize("api", ["responses"], indirect=True)
def test_responses(api: Api, client: openai.OpenAI, opens: bool, chat: Answer) -> None:
    found = api.ask(**ASKED, budget=BUDGET)
    assert [item.type for item in found.raw.output] == ["reasoning", "message"][not opens :]
    n_thought = chat.raw.usage.completion_tokens_details.reasoning_tokens
    assert found.raw.usage.output_tokens_details.reasoning_tokens == n_thought
    asked: Any = {"model": "", "input": ASKED["text"], "max_output_tokens": ASKED["n"]}
    extra = ASKED["own"] | {"thinking_budget": BUDGET}
    events: list[Any] = list(client.responses.create(**asked, extra_body=extra, stream=True))
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.item.content for event in added] == [[]] * len(added)  # what follows is added to it
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert ("".join(deltas), len(deltas) > 1) == (chat.thinking, opens)
    done = [(event.text, event.item_id) for event in events if event.type == "response.reasoning_text.done"]
    assert done == [(chat.thinking, event.item.id) for event in added[:-1]]
    # An answer that is gone on from, and all that was said sent back, is the same to the model.
    by_name: Any = client.responses.create(**asked, previous_response_id=found.raw.id)
    assert (
        by_name.usage.input_tokens
        == api.ask(**ASKED, history=[*found.history, {"role": "user", "content": ASKED["text"]}]).n_prompt
    )


@pytest.mark.parametrize("api", ["ollama"], indirect=True)
def test_ollama(api: Api, chat: Answer) -> None:
    options = ASKED["own"] | {"num_predict": ASKED["n"], "thinking_budget": BUDGET}
    made = api.package.generate(api.model, ASKED["text"], options=options, think="high")
    assert (made.thinking or "", made.response) == (chat.thinking, chat.text)
    assert api.ask(**ASKED, budget=BUDGET, think="on") == chat
    assert "thinking" in api.package.show(api.model).capabilities
