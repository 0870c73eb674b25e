"""A field of a request is honoured, refused by name, or on the list of ignored ones: never dropped silently."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from localspec import SamplingParams
from localspec.server import anthropic, embeddings, infill, models, ollama, openai, requests, responses
from localspec.server.bodies import UNREAD, Body, read
from localspec.server.http import ApiError
from localspec.server.requests import MAX_BIASES, MAX_STOP, MAX_STOPS, ApiBody, ServedModel

SERVED = ServedModel(SamplingParams(temperature=0.7, max_tokens=99, seed=5), {"ngram": "ngram"}, 1000)
THINKER = replace(SERVED, thinks=True)
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object"}

REQUESTS: dict[str, tuple[type[ApiBody], dict[str, Any]]] = {
    "chat": (openai.ChatBody, {"messages": [USER]}),
    "completions": (openai.CompletionBody, {"prompt": "hi"}),
    "responses": (responses.ResponsesBody, {"input": "hi"}),
    "messages": (anthropic.MessagesBody, {"max_tokens": 9, "messages": [USER]}),
    "count": (anthropic.CountBody, {"messages": [USER]}),
    "ollama chat": (ollama.OllamaChatBody, {"messages": [USER]}),
    "ollama generate": (ollama.OllamaGenerateBody, {"prompt": "hi"}),
    "infill": (infill.InfillBody, {"input_prefix": "a", "input_suffix": "b"}),
}


def rows(what: str) -> list[tuple[Any, ...]]:
    """Requests of one kind, from ``requests.jsonl``."""
    lines = (Path(__file__).parent / "requests.jsonl").read_text("utf-8").splitlines()
    return [tuple(row[1:]) for row in map(json.loads, lines) if row[0] == what]


def asked(kind: str, change: Mapping[str, Any], served: ServedModel = SERVED) -> Any:
    body, least = REQUESTS[kind]
    return read(body, {**least, **change}).asked(served)


def refusal(kind: str, change: Mapping[str, Any], served: ServedModel = SERVED) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(kind, change, served)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("kind", "change", "path", "near"), [*rows("unknown"), ("chat", {"x" * 100_000: 1}, "x" * 60, "")]
)
def test_a_field_that_is_unknown_is_refused_and_the_nearest_named(
    kind: str, change: dict[str, Any], path: str, near: str
) -> None:
    error = refusal(kind, change)
    assert error.code == "unknown_parameter"
    assert (error.param or "").endswith(path)
    assert path in error.message
    assert not near or near in error.message.partition("did you mean")[2]


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_field_without_a_value_is_absent(kind: str) -> None:
    asked(kind, {"no_such_field": None})


MANY = {"logit_bias": {str(i): "x" for i in range(2000)}}  # refused as a whole, not one by one


@pytest.mark.parametrize(("kind", "change", "path"), [*rows("refused"), ("chat", MANY, "logit_bias")])
def test_what_cannot_be_had_is_refused_by_name(kind: str, change: dict[str, Any], path: str) -> None:
    error = refusal(kind, change)
    assert error.param == path
    assert str(error)


@pytest.mark.parametrize(("kind", "change"), rows("passes"))
def test_what_asks_for_nothing_passes(kind: str, change: dict[str, Any]) -> None:
    asked(kind, change)


def at(value: Any, path: str) -> Any:
    """What stands in a request at a place: names of fields and keys, and places in lists."""
    for part in path.split("."):
        if part.isdecimal():
            value = value[int(part)]
        else:
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("kind", "change", "expected"), rows("asked"))
def test_what_is_said_holds(kind: str, change: dict[str, Any], expected: dict[str, Any]) -> None:
    found = asked(kind, change, THINKER)
    assert {path: at(found, path) for path in expected} == expected


@pytest.mark.parametrize("kind", REQUESTS)
def test_seed_minus_one_is_a_fresh_one(kind: str) -> None:
    for number, seed in ((-1, None), (7, 7)):  # not the server's own 5
        change = {"options": {"seed": number}} if kind.startswith("ollama") else {"seed": number}
        assert asked(kind, change).params.seed == seed


@pytest.mark.parametrize("kind", ["chat", "completions", "messages", "ollama chat"])
def test_stop_strings_are_bounded(kind: str) -> None:
    def change(stops: list[str]) -> dict[str, Any]:
        given = {"stop_sequences" if kind == "messages" else "stop": stops}
        return {"options": given} if kind == "ollama chat" else given

    asked(kind, change(["a" * MAX_STOP] * MAX_STOPS))
    for stops in (["a" * (MAX_STOP + 1)], ["x"] * (MAX_STOPS + 1)):
        assert "stop" in str(refusal(kind, change(stops)).param)


def test_biases_and_metadata_are_bounded() -> None:
    asked("responses", {"metadata": {f"{i:064}": "x" * 512 for i in range(16)}})
    for metadata in ({"a": "x" * 513}, {"a" * 65: "x"}, {str(i): "x" for i in range(17)}, {"a": {"b": [1]}}):
        assert refusal("responses", {"metadata": metadata}).param == "metadata"
    assert refusal("chat", {"logit_bias": {str(i): -1 for i in range(MAX_BIASES + 1)}}).param == "logit_bias"


def test_efforts() -> None:
    efforts = {"none": "off", "minimal": "low", "xhigh": "high", "max": "high"}
    for effort, think in (efforts | {level: level for level in ("low", "medium", "high")}).items():
        asking = [("chat", {"reasoning_effort": effort}), ("responses", {"reasoning": {"effort": effort}})]
        asking.append(("chat", {"chat_template_kwargs": {"reasoning_effort": effort}}))
        if effort not in ("none", "minimal"):
            asking += [("messages", {"output_config": {"effort": effort}}), ("ollama chat", {"think": effort})]
        for kind, change in asking:
            assert asked(kind, change, THINKER).options["think"] == think
            assert kind == "ollama chat" or asked(kind, change).options["think"] == "auto"  # they are sent to any model


CHAT, ITEMS, BLOCKS = "openai.types.chat", "openai.types.responses", "anthropic.types"
CALLS = f"{CHAT}.chat_completion_message_{{}}_tool_call_param"
TYPES: list[tuple[type[Body], str, str]] = [
    (openai.ChatBody, f"{CHAT}.completion_create_params", "CompletionCreateParams: Base Streaming"),
    (openai.CompletionBody, "openai.types.completion_create_params", "CompletionCreateParamsBase"),
    (embeddings.EmbeddingsBody, "openai.types.embedding_create_params", "EmbeddingCreateParams"),
    (openai.ChatMessage, CHAT, "ChatCompletion:MessageParam Developer System User Assistant Tool"),
    (requests.TextPart, CHAT, "ChatCompletionContentPartTextParam"),
    (requests.RefusalPart, CHAT, "ChatCompletionContentPartRefusalParam"),
    (requests.ToolCall, CALLS.format("function"), "ChatCompletionMessageFunctionToolCallParam"),
    (requests.ToolCall, CALLS.format("custom"), "ChatCompletionMessageCustomToolCallParam"),
    (requests.CalledFunction, CALLS.format("function"), "Function"),
    (requests.Tool, CHAT, "ChatCompletion:ToolParam Function Custom"),
    (requests.Function, "openai.types.shared_params", "FunctionDefinition"),
    (openai.ToolChoice, CHAT, "ChatCompletion:Param NamedToolChoice AllowedToolChoice NamedToolChoiceCustom"),
    (openai.AllowedTools, CHAT, "ChatCompletionAllowedToolsParam"),
    (openai.StreamOptions, CHAT, "ChatCompletionStreamOptionsParam"),
    (requests.Prediction, CHAT, "ChatCompletionPredictionContentParam"),
    (openai.ResponseFormat, "openai.types.shared_params", "ResponseFormatJSONSchema"),
    (requests.JsonSchema, "openai.types.shared_params.response_format_json_schema", "JSONSchema"),
    (responses.ResponsesBody, f"{ITEMS}.response_create_params", "ResponseCreateParams: Base Streaming"),
    (responses.MessageItem, ITEMS, ":MessageParam EasyInput ResponseOutput"),
    (requests.TextPart, ITEMS, "Response:TextParam Input Output"),
    (requests.RefusalPart, ITEMS, "ResponseOutputRefusalParam"),
    (responses.FunctionCallItem, ITEMS, "ResponseFunctionToolCallParam"),
    (responses.FunctionCallOutputItem, f"{ITEMS}.response_input_item_param", "FunctionCallOutput"),
    (responses.ReasoningItem, ITEMS, "ResponseReasoningItemParam"),
    (responses.ItemReference, f"{ITEMS}.response_input_item_param", "ItemReference"),
    (responses.ResponsesTool, ITEMS, "FunctionToolParam"),
    (responses.ResponsesToolChoice, ITEMS, "ToolChoice:Param Function Allowed"),
    (responses.Reasoning, "openai.types.shared_params", "Reasoning"),
    (responses.TextConfig, ITEMS, "ResponseTextConfigParam"),
    (responses.TextFormat, ITEMS, "ResponseFormatTextJSONSchemaConfigParam"),
    (anthropic.MessagesBody, f"{BLOCKS}.message_create_params", "MessageCreateParams: Base Streaming"),
    (anthropic.MessagesBody, f"{BLOCKS}.beta.message_create_params", "MessageCreateParamsBase"),
    (anthropic.CountBody, f"{BLOCKS}.message_count_tokens_params", "MessageCountTokensParams"),
    (anthropic.CountBody, f"{BLOCKS}.beta.message_count_tokens_params", "MessageCountTokensParams"),
    (anthropic.AnthropicMessage, f"{BLOCKS}.user_message_param", "UserMessageParam"),
    (anthropic.AnthropicMessage, f"{BLOCKS}.assistant_message_param", "AssistantMessageParam"),
    (anthropic.AnthropicMessage, f"{BLOCKS}.system_message_param", "SystemMessageParam"),
    (requests.TextPart, BLOCKS, "TextBlockParam"),
    (anthropic.ToolUseBlock, BLOCKS, "ToolUseBlockParam"),
    (anthropic.ToolResultBlock, BLOCKS, "ToolResultBlockParam"),
    (anthropic.ThinkingBlock, BLOCKS, "ThinkingBlockParam"),
    (anthropic.ThinkingBlock, BLOCKS, "RedactedThinkingBlockParam"),
    (anthropic.AnthropicTool, BLOCKS, "ToolParam"),
    (anthropic.AnthropicToolChoice, BLOCKS, "ToolChoiceToolParam"),
    (anthropic.OutputConfig, BLOCKS, "OutputConfigParam"),
    (anthropic.OutputConfig, f"{BLOCKS}.beta", "BetaOutputConfigParam"),
    (anthropic.Thinking, BLOCKS, "ThinkingConfig:Param Enabled Adaptive"),
    (anthropic.OutputFormat, BLOCKS, "JSONOutputFormatParam"),
    (ollama.OllamaChatBody, "ollama._types", "ChatRequest"),
    (ollama.OllamaGenerateBody, "ollama._types", "GenerateRequest"),
    (embeddings.OllamaEmbedBody, "ollama._types", "EmbedRequest"),
    (embeddings.OllamaEmbeddingsBody, "ollama._types", "EmbeddingsRequest"),
    (models.OllamaShowBody, "ollama._types", "ShowRequest"),
    (models.OllamaPullBody, "ollama._types", "PullRequest"),
    (ollama.OllamaOptions, "ollama._types", "Options"),
    (ollama.OllamaMessage, "ollama._types", "Message"),
    (requests.Tool, "ollama._types", "Tool"),
]
"""A body, a module, and the names of its types there; words behind a name with a colon stand in its place."""


@pytest.mark.parametrize(("body", "module", "names"), TYPES, ids=[names for _, _, names in TYPES])
def test_all_that_the_apis_own_packages_can_send_is_known(body: type[Body], module: str, names: str) -> None:
    package = pytest.importorskip(module)
    form, *words = names.split()
    for name in [form.replace(":", word) for word in words] or [form]:
        if not hasattr(package, name):
            pytest.skip(f"this version of the package has no {name}")
        kind = getattr(package, name)
        sent = set(getattr(kind, "model_fields", None) or get_type_hints(kind))
        assert sent
        assert sent - set(body.KNOWN.names) == set(), name


def _bodies(kind: type[Body] = Body) -> set[type[Body]]:
    return {kind}.union(*map(_bodies, kind.__subclasses__()))


def test_the_documentation_lists_what_is_ignored() -> None:
    reasons: dict[str, set[str]] = {}
    for body in _bodies():
        for name, reason in body.KNOWN.ignored.items():
            reasons.setdefault(reason, set()).add(name)
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| ((?:`\w+`(?:, )?)+) \|$", page.partition("## Ignored fields")[2], re.MULTILINE)
    assert {reason: set(re.findall(r"`(\w+)`", names)) for reason, names in rows} == reasons


def test_a_value_that_asks_for_nothing_is_of_a_field_that_is_known() -> None:
    assert set(UNREAD) <= {body.__name__ for body in _bodies()}
    for body in _bodies():
        assert set(body.KNOWN.off) <= set(body.KNOWN.names), body
