"""What every API has in common, as its own Python package sees it: answers, streams, tools, forms, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from tests.server.apis.packages import CALL, SCHEMA, Api, says

both = pytest.mark.parametrize("stream", [False, True])


def test_an_answer_is_the_library_s(llm: LLM, api: Api) -> None:
    found = api.ask(system="Be terse.", n=20, own={"temperature": 0})
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Say something."}]
    expected = llm.chat(messages, SamplingParams(max_tokens=20))
    assert (found.text, found.is_whole) == (expected.text, expected.finish_reason == "stop")
    assert (found.n_prompt, found.n) == (expected.stats["prompt_tokens"], expected.stats["completion_tokens"])


def test_a_stream_is_the_answer_in_pieces(api: Api) -> None:
    asked: dict[str, Any] = {"n": 24, "own": {"temperature": 1, "seed": 3}}
    streamed = api.ask(**asked, stream=True)
    assert streamed == api.ask(**asked)
    assert streamed.n_pieces > 1


@both
@pytest.mark.parametrize("text", ["", "I look.\n"])
def test_a_tool_is_called_and_its_result_read(api: Api, text: str, stream: bool) -> None:
    found = api.ask(tools=True, own=says(text + CALL), stream=stream)
    assert (found.text.strip(), found.calls) == (text.strip(), [("weather", {"city": "Rome"})])
    answer = api.ask(tools=True, history=found.history, own=says("It is sunny."))
    assert (answer.text, answer.calls) == ("It is sunny.", [])
    assert api.ask(n=1).n_prompt < found.n_prompt < answer.n_prompt - 20
    assert api.ask(own=says(CALL), stream=stream).text == CALL  # without tools it is text


def test_forms_and_stops(api: Api) -> None:
    assert json.loads(api.ask(form=SCHEMA).text)["city"] in ("Rome", "Oslo")
    # A schema says what the answer is, also where there are tools.
    found = api.ask(form=SCHEMA, tools=True)
    assert (json.loads(found.text)["city"] in ("Rome", "Oslo"), found.calls) == (True, [])
    found = api.ask(stop=["zzz", " on"], own=says("the cat sat on the mat"))
    assert (found.text, found.is_whole) == ("the cat sat", True)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"], indirect=True)
def test_a_call_can_be_asked_for(api: Api) -> None:
    ((name, arguments),) = api.ask(tools=True, forced=True).calls
    assert (name, arguments["city"] in ("Rome", "Oslo")) == ("weather", True)


@both
def test_a_wrong_request_is_an_error_of_the_package(api: Api, stream: bool) -> None:
    """Every field that is refused: test_known_fields."""
    for change, status, word in (
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"text": "word " * 4000}, 400, "2048"),
        ({"form": {"type": "nothing"}}, 400, "schema"),
        ({"own": {"mirostat": 1}}, 400, "mirostat"),
    ):
        with pytest.raises(api.error, match=word) as caught:
            api.ask(**change, stream=stream)
        assert getattr(caught.value, "status_code", None) == status
