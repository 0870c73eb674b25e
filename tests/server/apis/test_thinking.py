"""Thinking in the other APIs, with each one's own package: in its own place, streamed and whole, sent back, and off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from localspec import LLM
from tests.support.serving import Server, serve
from tests.support.thinkers import QWEN, write_thinker
from tests.support.waiting import PATIENCE

BUDGET, MAX_TOKENS = 12, 40
SEED = {"temperature": 1, "seed": 1}
QUESTION: Any = {"role": "user", "content": "in the and"}
THOUGHT = "a long thought of mine"


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


def ask(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    given: Any = {"model": "", "messages": [QUESTION], "max_tokens": MAX_TOKENS} | options
    return client.chat.completions.create(**given, extra_body=SEED | {"thinking_budget": BUDGET} | (extra or {}))


@pytest.fixture(scope="module")
def chat(client: openai.OpenAI) -> tuple[str, str, int]:
    """What ``/v1/chat/completions`` says: thinking, answer, and how many tokens the first took."""
    found = ask(client)
    message = found.choices[0].message
    thought = getattr(message, "reasoning_content", None) or ""
    return thought, message.content, found.usage.completion_tokens_details.reasoning_tokens


def test_chats(server: Server, client: openai.OpenAI, opens: bool, chat: tuple[str, str, int]) -> None:
    thought, answer, n_thought = chat
    assert "think>" not in thought + answer
    forced = len(server.service.llm.thinking.forced)
    assert n_thought in (range(BUDGET + 1, BUDGET + forced + 1) if opens else (0,))
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True) if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    contents = [delta.content or "" for delta in deltas]
    assert ("".join(thoughts), "".join(contents)) == (thought, answer)
    begins = next((i for i, text in enumerate(contents) if text), len(contents))
    assert not any(thoughts[begins:])
    # Log-probabilities are of the content.
    scored = ask(client, logprobs=True, top_logprobs=0)
    assert len(scored.choices[0].logprobs.content) <= scored.usage.completion_tokens - n_thought
    n_prompt = scored.usage.prompt_tokens
    form = {"response_format": {"type": "json_object"}}
    for extra in ({"think": "off"}, {"chat_template_kwargs": {"enable_thinking": False}}, form):
        off = ask(client, extra | {"thinking_budget": None})
        assert getattr(off.choices[0].message, "reasoning_content", None) is None
        assert off.usage.completion_tokens_details.reasoning_tokens == 0
        assert off.usage.prompt_tokens > n_prompt or not opens  # the closed block


def test_messages(server: Server, opens: bool, chat: tuple[str, str, int]) -> None:
    anthropic = pytest.importorskip("anthropic")
    asked: Any = {"model": server.service.names[0], "max_tokens": MAX_TOKENS, "messages": [QUESTION]}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        given = asked | {"thinking": {"type": "enabled", "budget_tokens": BUDGET}, "extra_body": SEED}
        whole = client.messages.create(**given)
        said = [(block.type, getattr(block, block.type)) for block in whole.content]
        assert said == [("thinking", chat[0]), ("text", chat[1])][not opens :]
        with client.messages.stream(**given) as stream:
            kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
            final = stream.get_final_message().content
        assert [(block.type, getattr(block, block.type)) for block in final] == said
        assert set(kinds) == {"thinking_delta", "text_delta"} if opens else {"text_delta"}
        assert kinds == sorted(kinds, reverse=True)
        off = client.messages.create(**asked | {"thinking": {"type": "disabled"}, "extra_body": SEED})
        assert [block.type for block in off.content] == ["text"]
        # A given form switches thinking off, for what is counted too.
        form = {"format": {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}}
        usage = client.messages.create(**asked, output_config=form).usage
        counted = client.messages.count_tokens(model=asked["model"], messages=[QUESTION], output_config=form)
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        counts = []
        for thought in ([], [{"type": "thinking", "thinking": THOUGHT, "signature": ""}]):
            said = {"role": "assistant", "content": [*thought, {"type": "text", "text": "Hi."}]}
            sent = client.messages.count_tokens(model=asked["model"], messages=[QUESTION, said, QUESTION])
            counts.append(sent.input_tokens)
        assert (counts[1] > counts[0]) == (not opens)


def test_responses(client: openai.OpenAI, opens: bool, chat: tuple[str, str, int]) -> None:
    asked: Any = {"model": "", "input": [QUESTION], "max_output_tokens": MAX_TOKENS}
    extra = SEED | {"thinking_budget": BUDGET}
    whole: Any = client.responses.create(**asked, extra_body=extra)
    assert [item.type for item in whole.output] == ["reasoning", "message"][not opens :]
    assert whole.output_text == chat[1]
    assert whole.usage.output_tokens_details.reasoning_tokens == chat[2]
    events: list[Any] = list(client.responses.create(**asked, extra_body=extra, stream=True))
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.item.content for event in added] == [[]] * len(added)  # what follows is added to it
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == chat[0]
    if opens:
        assert len(deltas) > 1
        (done,) = [event for event in events if event.type == "response.reasoning_text.done"]
        assert done.text == whole.output[0].content[0].text == chat[0]
        assert done.item_id == added[0].item.id != added[1].item.id
    off: Any = client.responses.create(**asked, reasoning={"effort": "none"}, extra_body=SEED)
    assert off.usage.output_tokens_details.reasoning_tokens == 0
    assert [item.type for item in off.output] == ["message"]
    # An answer that is gone on from, and all that was said sent back, is the same to the model.
    by_name: Any = client.responses.create(**asked, previous_response_id=whole.id)
    said = [item.model_dump() for item in whole.output]
    in_full: Any = client.responses.create(**asked | {"input": [QUESTION, *said, QUESTION]})
    assert by_name.usage.input_tokens == in_full.usage.input_tokens
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    counts = []
    for content in ([], [{"type": "reasoning_text", "text": THOUGHT}]):
        asked["input"] = [QUESTION, thought | {"content": content}, {"role": "assistant", "content": "Hi."}, QUESTION]
        counts.append(client.responses.create(**asked).usage.input_tokens)
    assert (counts[1] > counts[0]) == (not opens)


def test_ollama(server: Server, opens: bool, chat: tuple[str, str, int]) -> None:
    ollama = pytest.importorskip("ollama")
    options = SEED | {"num_predict": MAX_TOKENS, "thinking_budget": BUDGET}
    asked: Any = {"model": server.service.names[0], "messages": [QUESTION], "options": options}
    client = ollama.Client(host=server.url, timeout=PATIENCE)
    whole = client.chat(**asked, think=True).message
    assert (whole.thinking or "", whole.content) == chat[:2]
    pieces = [piece.message for piece in client.chat(**asked, stream=True)]
    assert "".join(piece.thinking or "" for piece in pieces) == chat[0]
    assert "".join(piece.content for piece in pieces) == chat[1]
    made = client.generate(asked["model"], QUESTION["content"], options=options, think="high")
    assert (made.thinking or "", made.response) == chat[:2]
    assert not client.chat(**asked, think=False).message.thinking
    assert "thinking" in client.show(asked["model"]).capabilities
    counts = []
    for thinking in ("", THOUGHT):
        said = {"role": "assistant", "content": "Hi.", "thinking": thinking}
        counts.append(client.chat(**asked | {"messages": [QUESTION, said, QUESTION]}).prompt_eval_count)
    assert (counts[1] > counts[0]) == (not opens)
    client.close()
