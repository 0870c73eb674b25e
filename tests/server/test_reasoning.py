"""Thinking in the chat API, with OpenAI's own package: apart from the content, streamed and whole, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from localspec import LLM
from tests.conftest import TinyFiles
from tests.support.serving import Server, serve
from tests.support.thinkers import write_thinker

ASKED: Any = [{"role": "user", "content": "in the and"}]
BUDGET = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_thinker(tmp_path_factory.mktemp("thinker"), "deepseek")
    with LLM(path, draft="ngram", backend="reference", n_ctx=512, idle=False) as llm, serve(llm) as server:
        yield server


def ask(server: Server, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body = {"thinking_budget": BUDGET} | (extra or {})
    given = {"model": "", "messages": ASKED, "max_tokens": 40, "temperature": 1.0, "seed": 1} | options
    return client.chat.completions.create(extra_body=body, **given)


def test_thinking_has_a_field_of_its_own_streamed_and_whole(server: Server) -> None:
    reply = server.service.llm
    whole = ask(server)
    message, usage = whole.choices[0].message, whole.usage
    assert message.reasoning_content
    assert "<think>" not in message.reasoning_content + message.content
    assert "</think>" not in message.reasoning_content + message.content
    forced = len(reply.thinking.forced)
    assert usage.completion_tokens_details.reasoning_tokens in range(BUDGET + 1, BUDGET + forced + 1)
    deltas = [chunk.choices[0].delta for chunk in ask(server, stream=True) if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    contents = [delta.content or "" for delta in deltas]
    assert ("".join(thoughts), "".join(contents)) == (message.reasoning_content, message.content)
    assert max(i for i, text in enumerate(thoughts) if text) <= min(
        (i for i, text in enumerate(contents) if text), default=len(contents)
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"think": "off"},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_an_answer_may_be_had_without_thinking(server: Server, extra: dict[str, Any]) -> None:
    answered = ask(server, extra | {"thinking_budget": None})
    assert getattr(answered.choices[0].message, "reasoning_content", None) is None
    assert answered.usage.completion_tokens_details.reasoning_tokens == 0
    assert answered.usage.prompt_tokens > ask(server).usage.prompt_tokens  # the closed block


def test_log_probabilities_are_of_the_content(server: Server) -> None:
    whole = ask(server, logprobs=True, top_logprobs=0)
    entries = whole.choices[0].logprobs.content
    thought = whole.usage.completion_tokens_details.reasoning_tokens
    assert len(entries) <= whole.usage.completion_tokens - thought


def test_nonsense_is_refused(server: Server, tiny: TinyFiles) -> None:
    for extra, name in (
        ({"think": "much"}, "think"), ({"thinking_budget": -1}, "thinking_budget"), ({"reasoning_effort": 3}, "effort"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=name):
            ask(server, extra)
    plain = tiny.quick.target
    with LLM(plain, draft=None, backend="reference", n_ctx=512, idle=False) as llm, serve(llm) as other:
        assert ask(other, {"reasoning_effort": "high"}).choices[0].message.content is not None
        with pytest.raises(openai.BadRequestError, match="not known to think"):
            ask(other, {"think": "on"})
