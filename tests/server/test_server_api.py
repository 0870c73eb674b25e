"""The server as OpenAI's own Python package sees it: a real socket, a real (tiny) pair on the reference engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from localspec import LLM, SamplingParams
from tests.conftest import TinyFiles
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE

LOAD: dict[str, Any] = {"draft": ["ngram", "model"]}

CHAT: Any = [{"role": "user", "content": "Say something."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def says(text: str) -> dict[str, str]:
    """A grammar that lets a model say nothing but this."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_an_answer_is_the_library_s(llm: LLM, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=model(client), messages=CHAT, max_tokens=20, temperature=0)
    expected = llm.chat(CHAT, SamplingParams(max_tokens=20))
    (choice,) = found.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert found.object == "chat.completion"
    assert found.usage.prompt_tokens == expected.stats["prompt_tokens"]
    assert found.usage.completion_tokens == expected.stats["completion_tokens"]
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "max_tokens": 24, "temperature": 1, "seed": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_usage_counts_guesses(llm: LLM, client: openai.OpenAI) -> None:
    own = {"localspec": {"draft_length": 4}, "ignore_eos": True}
    found = client.chat.completions.create(model=model(client), messages=CHAT, max_tokens=40, extra_body=own)
    details = found.usage.completion_tokens_details
    stats = found.localspec["stats"]
    assert stats["num_draft_tokens"] > 0
    assert details.accepted_prediction_tokens == stats["num_accepted_tokens"]
    assert details.rejected_prediction_tokens == stats["num_draft_tokens"] - stats["num_accepted_tokens"]
    assert 0 < details.accepted_prediction_tokens <= found.usage.completion_tokens


def test_usage_ends_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "max_tokens": 8}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens > 0
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_several_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "max_tokens": 12, "temperature": 1.5, "seed": 1}
    found = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert client.chat.completions.create(**asked).choices[0].message.content == texts[0]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_and_budget(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "extra_body": says("the cat sat on the mat")}
    found = client.chat.completions.create(**asked, stop=["zzz", " on"]).choices[0]
    assert (found.message.content, found.finish_reason) == ("the cat sat", "stop")
    found = client.chat.completions.create(**asked, max_completion_tokens=3).choices[0]
    assert found.finish_reason == "length"
    found = client.chat.completions.create(**asked, max_tokens=1, max_completion_tokens=200).choices[0]
    assert (found.message.content, found.finish_reason) == ("the cat sat on the mat", "stop")


def test_logit_bias_and_penalties(llm: LLM, client: openai.OpenAI) -> None:
    (token,) = llm.tokenize("A")
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "max_tokens": 5}
    found = client.chat.completions.create(**asked, logit_bias={str(token): 100})
    assert found.choices[0].message.content == "AAAAA"
    penal = client.chat.completions.create(**asked, logit_bias={str(token): 5}, frequency_penalty=2)
    assert penal.choices[0].message.content != "AAAAA"


def test_logprobs(llm: LLM, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "max_tokens": 9, "logprobs": True}
    choice = client.chat.completions.create(**asked, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    expected = [token for token in llm.chat(CHAT, SamplingParams(max_tokens=9), logprobs=3).tokens if token.text]
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode("utf-8", "replace") == choice.message.content
    assert content[0].logprob == pytest.approx(expected[0].logprobs.logprob)
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    streamed = []
    for chunk in client.chat.completions.create(**asked, top_logprobs=3, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_logprobs_leave_out_the_stop_string(client: openai.OpenAI) -> None:
    own = says("abcXYZdef")
    choice = client.chat.completions.create(
        model=model(client), messages=CHAT, stop="XYZ", logprobs=True, extra_body=own
    ).choices[0]
    assert choice.message.content == "abc"
    assert "".join(entry.token for entry in choice.logprobs.content or []) == "abc"


def test_response_format(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    found = client.chat.completions.create(model=model(client), messages=CHAT, response_format=form)
    value = json.loads(found.choices[0].message.content or "")
    assert set(value) == {"ok", "size"}
    assert value["size"] in ("small", "large")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model=model(client), messages=CHAT, response_format={"type": "xml"})


def test_completions(llm: LLM, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "max_tokens": 10, "temperature": 0}
    expected = llm.generate("the cat", SamplingParams(max_tokens=10))
    found = client.completions.create(**asked, prompt="the cat")
    assert found.choices[0].text == expected.text
    assert found.object == "text_completion"
    streamed = client.completions.create(**asked, prompt="the cat", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text
    by_ids = client.completions.create(**asked, prompt=llm.encode("the cat"))
    assert by_ids.choices[0].text == expected.text
    both = client.completions.create(**asked, prompt=["the cat", "an"], echo=True)
    assert both.choices[0].text == "the cat" + expected.text
    assert both.choices[1].text.startswith("an")
    assert both.usage.prompt_tokens == llm.count_tokens("the cat") + llm.count_tokens("an")
    scored = client.completions.create(**asked, prompt="the cat", logprobs=2).choices[0].logprobs
    assert len(scored.tokens or []) == len(scored.token_logprobs or []) == len(scored.text_offset or [])
    assert all(len(top) <= 2 for top in scored.top_logprobs or [])


def test_rounds_are_events_that_the_openai_package_steps_over(server: Server, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "max_tokens": 30}
    own = {"localspec": {"draft_length": 3}, "ignore_eos": True}
    whole = client.chat.completions.create(**asked, extra_body=own)
    options: Any = {"include_usage": True, "localspec_rounds": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options, extra_body=own))
    # As any program reads a stream: what has no choices is skipped.
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    rounds = [chunk.localspec["round"] for chunk in chunks if not chunk.choices and chunk.usage is None]
    stats = whole.localspec["stats"]
    assert len(rounds) == stats["num_rounds"]
    assert "".join(round_["text"] for round_ in rounds) == text
    guesses = [guess for round_ in rounds for guess in round_["draft"]]
    assert len(guesses) == stats["num_draft_tokens"]
    assert sum(guess["accepted"] for guess in guesses) == stats["num_accepted_tokens"]
    assert any(not guess["accepted"] for guess in guesses)
    # The package's own accumulator is not confused either.
    with client.chat.completions.stream(**asked, stream_options=options, extra_body=says("the cat")) as stream:
        assert stream.get_final_completion().choices[0].message.content == "the cat"


def test_rounds_come_under_an_event_name_of_their_own(server: Server) -> None:
    body = {"messages": CHAT, "max_tokens": 4, "stream": True, "stream_options": {"localspec_rounds": True}}
    status, headers, answer = server.ask("POST", "/v1/chat/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    blocks = answer.decode().strip().split("\n\n")
    named = [block for block in blocks if block.startswith("event: ")]
    assert named
    for block in named:
        name, data = block.split("\n")
        assert name == "event: localspec.round"
        assert set(json.loads(data.removeprefix("data: "))["localspec"]) == {"choice", "round"}
    assert blocks[-1] == "data: [DONE]"


def test_speculation_per_request_changes_speed_only(client: openai.OpenAI) -> None:
    def ask(own: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        body = {"localspec": own, "ignore_eos": True}
        found = client.chat.completions.create(model=model(client), messages=CHAT, max_tokens=40, extra_body=body)
        return found.choices[0].message.content, found.localspec["stats"]

    text, stats = ask({"off": True})
    assert stats["num_draft_tokens"] == 0
    for own, sources in (
        ({"draft_length": 0}, set()),
        ({"draft": "none"}, set()),
        ({"draft_length": 5}, {"model", "ngram"}),
        ({"draft": "quick-draft", "draft_length": 2}, {"model"}),
        ({"draft": ["ngram"], "draft_length": 2}, {"ngram"}),
        ({"draft": ["ngram"]}, {"ngram"}),
        ({"draft": "auto", "draft_length": "auto"}, {"model", "ngram"}),
    ):
        found, stats = ask(own)
        assert found == text, own
        assert set(stats["by_source"]) <= sources, own
    assert ask({"draft": "quick-draft", "draft_length": 2})[1]["num_draft_tokens"] > 0


def test_a_prediction_is_guessed_from(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "max_tokens": 60}
    own = {"localspec": {"draft": ["ngram"], "draft_length": 8}, "ignore_eos": True}
    without = client.chat.completions.create(**asked, extra_body=own)
    text = without.choices[0].message.content
    prediction: Any = {"type": "content", "content": text}
    found = client.chat.completions.create(**asked, prediction=prediction, extra_body=own)
    assert found.choices[0].message.content == text
    details, before = found.usage.completion_tokens_details, without.usage.completion_tokens_details
    # The gibberish of a random model has invalid bytes, which a text cannot carry; what it can is copied.
    assert details.accepted_prediction_tokens > before.accepted_prediction_tokens
    parts: Any = {"type": "content", "content": [{"type": "text", "text": text}]}
    again = client.chat.completions.create(**asked, prediction=parts, extra_body=own)
    assert again.usage == found.usage
    wrong: Any = {"type": "content", "content": "nothing like it " * 20}
    assert client.chat.completions.create(**asked, prediction=wrong, extra_body=own).choices[0].message.content == text


def test_a_call_that_a_model_writes_is_a_tool_call(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=model(client), messages=CHAT, tools=TOOLS, extra_body=says(f"I look.\n{CALL}")
    ).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content == "I look."
    (call,) = found.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_tool_calls_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "tools": TOOLS}
    # A token a round: how many auto would copy of what is forced depends on what passes cost here.
    asked["extra_body"] = says(f"{CALL}\n{CALL.replace('weather', 'population')}") | {"localspec": {"off": True}}
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert not any(delta.content for delta in deltas)
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert [(piece.index, piece.function.name) for piece in pieces if piece.id] == [(0, "weather"), (1, "population")]
    assert len(pieces) > 6, "arguments come in pieces"
    with client.chat.completions.stream(**asked) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == ["weather", "population"]
    assert all(json.loads(call.function.arguments) == {"city": "Rome"} for call in message.tool_calls or [])


def test_one_call_only_where_the_client_wants_one(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=model(client), messages=CHAT, tools=TOOLS, parallel_tool_calls=False, extra_body=says(f"{CALL}\n{CALL}")
    ).choices[0]
    assert found.finish_reason == "tool_calls"
    assert len(found.message.tool_calls or []) == 1


def test_a_call_can_be_forced_from_any_model(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": model(client), "messages": CHAT, "tools": TOOLS, "max_tokens": 200}
    for choice, names in (
        ("required", {"weather", "population"}),
        ({"type": "function", "function": {"name": "population"}}, {"population"}),
    ):
        found = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert found.finish_reason == "tool_calls"
        (call,) = found.message.tool_calls or []
        assert call.function.name in names
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_no_tools_no_calls(client: openai.OpenAI) -> None:
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        found = client.chat.completions.create(model=model(client), messages=CHAT, extra_body=says(CALL), **extra)
        assert found.choices[0].message.content == CALL
        assert found.choices[0].message.tool_calls is None
        assert found.choices[0].finish_reason == "stop"


def test_tools_and_results_reach_the_model(client: openai.OpenAI) -> None:
    def n_prompt(messages: Any, **extra: Any) -> int:
        found = client.chat.completions.create(model=model(client), messages=messages, max_tokens=1, **extra)
        return found.usage.prompt_tokens

    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talk = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
    ]
    assert n_prompt(CHAT) < n_prompt(CHAT, tools=TOOLS[:1]) < n_prompt(CHAT, tools=TOOLS)
    assert n_prompt(talk, tools=TOOLS) > n_prompt(CHAT, tools=TOOLS) + 20


def test_answers_are_not_mixed(llm: LLM, server: Server, client: openai.OpenAI) -> None:
    prompts = [f"the {word} of" for word in ("cat", "dog", "sea", "man", "sun", "tree", "end", "day")] * 3
    expected = {prompt: llm.generate(prompt, SamplingParams(max_tokens=12)).text for prompt in prompts}

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as asking:
            name = model(client)
            answers = [
                asking.completions.create(model=name, prompt=prompt, max_tokens=12, temperature=0) for prompt in prompts
            ]
            return [found.choices[0].text for found in await asyncio.gather(*answers)]

    assert asyncio.run(ask_all()) == [expected[prompt] for prompt in prompts]


def test_errors_are_openai_s(llm: LLM, client: openai.OpenAI) -> None:
    name = model(client)
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", messages=CHAT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model=name, messages=CHAT, temperature=-1)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        create(model=name, messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    picture: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="only text parts"):
        create(model=name, messages=[{"role": "user", "content": picture}])
    with pytest.raises(openai.BadRequestError) as long:  # also where a stream was asked for
        create(model=name, messages=[{"role": "user", "content": "word " * 3000}], stream=True)
    assert long.value.code == "context_length_exceeded"
    assert create(model=name, messages=CHAT, max_tokens=2).choices[0].message.content is not None


def test_models(llm: LLM, server: Server, client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [entry.id for entry in listed] == [llm.model_name]
    assert client.models.retrieve(llm.model_name).id == llm.model_name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    with (
        serve(llm, aliases=("gpt-4o",)) as other,
        openai.OpenAI(base_url=f"{other.url}/v1", api_key="none") as asking,
    ):
        assert asking.chat.completions.create(model="gpt-4o", messages=CHAT, max_tokens=2).model == llm.model_name


def test_a_request_can_ask_for_a_corpus_that_was_allowed(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not otherwise, and for no other path: such a request is refused, and no file is opened."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    options: Any = {"backend": "reference", "n_ctx": 1024, "draft_length": 4, "idle": False}
    with LLM(tiny.quick.target, None, **options) as plain:
        text = plain.chat(CHAT, SamplingParams(max_tokens=40, ignore_eos=True)).text
    (project / "a.txt").write_text("assistant\n" + text, encoding="utf-8", newline="")
    name = f"corpus:{project}"
    with (
        LLM(tiny.quick.target, ["ngram", name], **options) as llm,
        serve(llm, corpora=[name]) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
    ):

        def sources(own: dict[str, Any] | None) -> set[str]:
            body = {"localspec": own, "ignore_eos": True}
            found = client.chat.completions.create(model=model(client), messages=CHAT, max_tokens=40, extra_body=body)
            assert found.choices[0].message.content == text
            return set(found.localspec["stats"]["by_source"])

        assert sources(None) <= {"ngram"}
        assert sources({"draft": "auto"}) <= {"ngram"}
        assert "corpus" in sources({"draft": ["auto", name]})
        assert sources({"draft": name}) == sources({"draft": "corpus"}) == {"corpus"}
        for other in (f"corpus:{tmp_path}", f"corpus:{project}/../project", "corpus:/", "corpus2"):
            with pytest.raises(openai.BadRequestError, match="is loaded"):
                sources({"draft": other})


def test_names_of_special_tokens_mean_them_where_the_format_is_the_client_s(llm: LLM, client: openai.OpenAI) -> None:
    name, create = model(client), client.completions.create
    question = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    as_text = create(model=name, prompt=question, max_tokens=1)
    as_ids = create(model=name, prompt=llm.encode([{"role": "user", "content": "hi"}]), max_tokens=1)
    assert as_text.usage.prompt_tokens == as_ids.usage.prompt_tokens
    assert llm.encode(question) == llm.encode([{"role": "user", "content": "hi"}])
    forged = client.chat.completions.create(model=name, messages=[{"role": "user", "content": question}], max_tokens=1)
    assert forged.usage.prompt_tokens > as_text.usage.prompt_tokens + 20


def test_a_stop_that_names_a_special_token_is_that_token(llm: LLM, client: openai.OpenAI) -> None:
    token = llm.encode("<|im_start|>")[-1]
    bias: Any = {str(token): 100}
    create, name = client.completions.create, model(client)
    for stop, n in (("<|im_start|>", 1), ("<|im_start|><|im_start|>", 2), ("<|im_start|>x", 5)):
        found = create(model=name, prompt="la", logit_bias=bias, stop=[stop], max_tokens=5, temperature=0)
        assert (found.choices[0].text, found.usage.completion_tokens) == ("", n), stop
        assert found.choices[0].finish_reason == ("stop" if n < 5 else "length")


def test_an_answer_that_was_begun_is_gone_on_with(llm: LLM, client: openai.OpenAI) -> None:
    turns: Any = [*CHAT, {"role": "assistant", "content": "the cat sat on"}]

    def n_prompt(**more: Any) -> int:
        found = client.chat.completions.create(model=model(client), messages=turns, max_tokens=2, extra_body=more)
        return found.usage.prompt_tokens

    begun = len(llm.encode(CHAT) + llm.tokenize("the cat sat on"))
    assert n_prompt(continue_final_message=True, add_generation_prompt=False) == begun
    assert begun < n_prompt(add_generation_prompt=False) < n_prompt()


def test_a_variable_that_the_template_does_not_know_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model(client), messages=CHAT, extra_body={"chat_template_kwargs": {"mood": "calm"}}
        )
    assert caught.value.param == "chat_template_kwargs.mood"
