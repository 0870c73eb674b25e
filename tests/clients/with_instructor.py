"""instructor: an object by a tool, by a schema and by JSON, whole and partial, from OpenAI's and Anthropic's API."""

from __future__ import annotations

import anthropic
import instructor
import openai
from asking import ASK, MODEL, URL, Weather

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 200, "response_model": Weather, "max_retries": 0}
    made = instructor.from_openai(client, mode=mode)
    assert isinstance(made.chat.completions.create(**asked), Weather), mode
    *_, last = made.chat.completions.create_partial(**asked)
    Weather.model_validate(last.model_dump())

made = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none"), mode=instructor.Mode.TOOLS)
assert isinstance(
    made.chat.completions.create(model=MODEL, messages=ASK, max_tokens=200, response_model=Weather, max_retries=0),
    Weather,
)
