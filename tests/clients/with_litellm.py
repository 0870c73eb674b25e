"""LiteLLM: the OpenAI, Ollama and Anthropic providers, plain and streamed, with a tool and with a schema."""

from __future__ import annotations

import json

import litellm
from asking import ASK, CALL, MODEL, TEXT, TOOL, URL, Weather, says

litellm.telemetry = False
PROVIDERS = {
    f"openai/{MODEL}": {"api_base": f"{URL}/v1", "api_key": "none"},
    f"ollama/{MODEL}": {"api_base": URL},
    f"ollama_chat/{MODEL}": {"api_base": URL},
    f"anthropic/{MODEL}": {"api_base": URL, "api_key": "none"},
}

for name, where in PROVIDERS.items():
    asked = {"model": name, "messages": ASK, "max_tokens": 100, "temperature": 0} | where | says(TEXT)
    whole = litellm.completion(**asked)
    pieces = list(litellm.completion(**asked, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content == TEXT, (name, text, whole)
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop", (name, pieces[-1])
    assert whole.usage.completion_tokens > 0, (name, whole)

for name in (f"openai/{MODEL}", f"anthropic/{MODEL}"):
    asked = {"model": name, "messages": ASK, "tools": [TOOL], "max_tokens": 200} | PROVIDERS[name]
    asked["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    Weather.model_validate_json(rebuilt.choices[0].message.tool_calls[0].function.arguments)
    answered = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    answered += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    asked = {"model": name, "messages": answered, "tools": [TOOL], "max_tokens": 100} | PROVIDERS[name]
    last = litellm.completion(**asked, **says(TEXT))
    assert last.choices[0].message.content == TEXT, last

openai = PROVIDERS[f"openai/{MODEL}"]
said = litellm.completion(model=f"openai/{MODEL}", messages=ASK, tools=[TOOL], **says(CALL), **openai)
assert json.loads(said.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome", "days": 2}
for name in (f"openai/{MODEL}", f"ollama_chat/{MODEL}"):
    held = litellm.completion(model=name, messages=ASK, response_format=Weather, max_tokens=100, **PROVIDERS[name])
    Weather.model_validate_json(held.choices[0].message.content)
