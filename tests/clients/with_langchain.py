"""LangChain: its OpenAI, Anthropic and Ollama models; streams, tools, structured output."""

from __future__ import annotations

from asking import MODEL, TEXT, URL, Weather, says
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

ASK = "How is the weather in Rome?"
openai = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0}
MODELS = {
    "chat": ChatOpenAI(**openai, max_tokens=200),
    "responses": ChatOpenAI(**openai, max_tokens=200, use_responses_api=True),
    "messages": ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=200, temperature=0),
    "ollama": ChatOllama(base_url=URL, model=MODEL, num_predict=200, temperature=0),
}

for name, model in MODELS.items():
    held = {"options": says(TEXT)} if name == "ollama" else {"extra_body": says(TEXT)}
    whole = model.invoke(ASK, **held)
    pieces = list(model.stream(ASK, **held))
    assert "".join(piece.text for piece in pieces) == whole.text == TEXT, name
    assert whole.usage_metadata["output_tokens"] > 0, (name, whole)

    if name != "ollama":  # which has no way to ask for a call
        asked = model.bind_tools([Weather], tool_choice="Weather").invoke(ASK)
        (call,) = asked.tool_calls
        Weather.model_validate(call["args"])
        result = ToolMessage("sunny", tool_call_id=call["id"])
        last = model.bind_tools([Weather]).invoke([HumanMessage(ASK), asked, result], **held)
        assert last.text == TEXT, name
        form = model.with_structured_output(Weather, method="function_calling")
        assert isinstance(form.invoke(ASK), Weather), name
    if name != "messages":
        form = model.with_structured_output(Weather, method="json_schema")
        assert isinstance(form.invoke(ASK), Weather), name
        assert isinstance(list(form.stream(ASK))[-1], Weather), name
