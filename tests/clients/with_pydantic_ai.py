"""pydantic-ai: chat completions, responses and Anthropic's messages; tools, and output by tool and by schema."""

from __future__ import annotations

from asking import CALL, MODEL, TEXT, URL, Weather, says
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "messages": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
}
ASK = "How is the weather in Rome?"

for name, model in MODELS.items():
    brief = {"max_tokens": 100, "temperature": 0, "extra_body": says(TEXT)}
    plain = Agent(model, instructions="Be brief.", model_settings=brief)
    first = plain.run_sync(ASK)
    assert first.output == TEXT, name
    assert plain.run_sync("And tomorrow?", message_history=first.all_messages()).output == TEXT, name
    assert plain.run_stream_sync(ASK).get_output() == TEXT, name
    assert first.usage.output_tokens > 0, (name, first.usage)

    for kind in (ToolOutput(Weather), NativeOutput(Weather)):
        if name == "messages" and isinstance(kind, NativeOutput):
            continue  # the library sends none to a model that it does not know
        held = Agent(model, output_type=kind, model_settings={"max_tokens": 200, "temperature": 0})
        assert isinstance(held.run_sync(ASK).output, Weather), (name, kind)
        assert isinstance(held.run_stream_sync(ASK).get_output(), Weather), (name, kind)

# A tool of the app, which the model calls of its own accord.
heard: list[Weather] = []
agent = Agent(MODELS["chat"])


@agent.tool_plain
def weather(city: str, days: int) -> str:
    """Says the weather."""
    heard.append(Weather(city=city, days=days))
    return "sunny"


with agent.override(model_settings=lambda run: {"max_tokens": 200, "extra_body": says(TEXT if heard else CALL)}):
    assert agent.run_sync(ASK).output == TEXT
assert heard == [Weather(city="Rome", days=2)]
