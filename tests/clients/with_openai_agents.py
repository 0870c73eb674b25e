"""OpenAI's Agents SDK: chat completions and responses; a tool that the run calls, an output type, a stream."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asking import MODEL, TEXT, URL, Weather, says
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
ASK = "How is the weather in Rome?"
heard: list[Weather] = []


@function_tool
def weather(where: Weather) -> str:
    """Says the weather."""
    heard.append(where)
    return "sunny"


async def main() -> None:
    for model in (OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)):
        brief = ModelSettings(max_tokens=100, temperature=0, extra_body=says(TEXT))
        plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=brief)
        first = await Runner.run(plain, ASK)
        assert first.final_output == TEXT, model
        again = [*first.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
        assert (await Runner.run(plain, again)).final_output == TEXT, model

        streamed = Runner.run_streamed(plain, ASK)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == TEXT, model

        held = Agent(name="held", model=model, output_type=Weather, model_settings=ModelSettings(max_tokens=200))
        assert isinstance((await Runner.run(held, ASK)).final_output, Weather), model

        heard.clear()
        must = ModelSettings(max_tokens=200, tool_choice="required")
        caller = Agent(
            name="caller", model=model, tools=[weather], model_settings=must, tool_use_behavior="stop_on_first_tool"
        )
        assert (await Runner.run(caller, ASK)).final_output == "sunny", model
        assert len(heard) == 1, model
        both = Agent(name="both", model=model, tools=[weather], output_type=Weather, model_settings=must)
        assert isinstance((await Runner.run(both, ASK)).final_output, Weather), model


asyncio.run(main())
