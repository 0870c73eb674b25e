"""The chat APIs by their own Python packages, asked and answered in one form: what all of them can is tested once."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.support.waiting import PATIENCE

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def says(text: str) -> dict[str, str]:
    """A grammar that lets a model say nothing but this."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


@dataclass(frozen=True)
class Asked:
    """A request: a question, and what follows it."""

    text: str = "Say something."
    history: Sequence[Any] = ()  # behind the question, as ``Api.said`` and ``Answer.history`` have it
    system: str = ""
    n: int = 100  # tokens at most
    tools: bool = False  # that there is ``TOOL``
    forced: bool = False  # that it is called
    form: Any = None  # the schema of the answer
    stop: Sequence[str] = ()
    budget: int | None = None  # of thinking
    think: str | None = None  # on, off, or what the model does by itself
    own: Mapping[str, Any] = field(default_factory=dict)  # sampling, and fields of ours
    model: str = ""  # another than the server's
    stream: bool = False


@dataclass(frozen=True)
class Answer:
    """An answer; streamed and whole are equal."""

    text: str
    thinking: str
    calls: list[tuple[str, Any]]  # name and arguments
    is_whole: bool  # else the budget ended it
    n_prompt: int
    n: int
    n_pieces: int = field(compare=False)  # of its text
    history: list[Any] = field(compare=False)  # it, and that it is sunny if it calls, as clients send them back
    raw: Any = field(compare=False)


def given(**fields: Any) -> Any:
    """The fields that say something."""
    return {name: value for name, value in fields.items() if value}


class Api(ABC):
    """One API."""

    error: type[Exception]  # what its package raises for a refusal; it has a ``status_code``

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self.package = self.opened(url)

    def ask(self, **asked: Any) -> Answer:
        return self.answer(Asked(**asked))

    @abstractmethod
    def opened(self, url: str) -> Any: ...

    @abstractmethod
    def answer(self, asked: Asked) -> Answer: ...

    def said(self, text: str, thinking: str) -> list[Any]:
        """An answer as it is sent back."""
        return [{"role": "assistant", "content": text, "reasoning_content": thinking}]


class Chat(Api):
    error = openai.APIStatusError

    def opened(self, url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def answer(self, asked: Asked) -> Answer:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked.form}}
        body = given(
            model=asked.model or self.model,
            messages=[*system, {"role": "user", "content": asked.text}, *asked.history],
            max_tokens=asked.n,
            tools=asked.tools and [TOOL],
            tool_choice=asked.forced and {"type": "function", "function": {"name": "weather"}},
            response_format=asked.form and form,
            stop=asked.stop,
            extra_body={**asked.own, "thinking_budget": asked.budget, "think": asked.think},
        )
        pieces = []
        if asked.stream:
            with self.package.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
                pieces = [event for event in stream if event.type == "content.delta"]
                try:
                    found = stream.get_final_completion()
                except openai.LengthFinishReasonError as cut:
                    found = cut.completion
        else:
            found = self.package.chat.completions.create(**body)
        (choice,) = found.choices
        message, calls = choice.message, choice.message.tool_calls or []
        assert (choice.finish_reason == "tool_calls") == bool(calls)
        said = [(each.id, {"name": each.function.name, "arguments": each.function.arguments}) for each in calls]
        sent = [{"id": name, "type": "function", "function": function} for name, function in said]
        history = [{"role": "assistant", "content": message.content, "tool_calls": sent}]
        history += [{"role": "tool", "tool_call_id": name, "content": "sunny"} for name, _ in said]
        return Answer(
            message.content or "",
            getattr(message, "reasoning_content", None) or "",
            [(function["name"], json.loads(function["arguments"])) for _, function in said],
            choice.finish_reason != "length",
            found.usage.prompt_tokens,
            found.usage.completion_tokens,
            len(pieces),
            history,
            found,
        )


class Responses(Chat):
    def answer(self, asked: Asked) -> Answer:
        body = given(
            model=asked.model or self.model,
            input=[{"role": "user", "content": asked.text}, *asked.history],
            instructions=asked.system,
            max_output_tokens=asked.n,
            reasoning=asked.think and {"effort": {"on": "high", "off": "none"}[asked.think]},
            tools=asked.tools and [{"type": "function"} | FUNCTION, {"type": "web_search"}],  # which is passed over
            tool_choice=asked.forced and {"type": "function", "name": "weather"},
            text=asked.form and {"format": {"type": "json_schema", "name": "x", "schema": asked.form}},
            extra_body={**asked.own, "thinking_budget": asked.budget, "stop": asked.stop or None},
        )
        pieces = []
        if asked.stream:
            events = list(self.package.responses.create(**body, stream=True))
            pieces = [event for event in events if event.type == "response.output_text.delta"]
            found = events[-1].response
        else:
            found = self.package.responses.create(**body)
        calls = [item for item in found.output if item.type == "function_call"]
        thoughts = [item for item in found.output if item.type == "reasoning"]
        output = [{"type": "function_call_output", "call_id": each.call_id, "output": "sunny"} for each in calls]
        return Answer(
            found.output_text,
            "".join(part.text for item in thoughts for part in item.content),
            [(each.name, json.loads(each.arguments)) for each in calls],
            found.status != "incomplete",
            found.usage.input_tokens,
            found.usage.output_tokens,
            len(pieces),
            [*(item.model_dump() for item in found.output), *output],
            found,
        )

    def said(self, text: str, thinking: str) -> list[Any]:
        content = [{"type": "reasoning_text", "text": thinking}] if thinking else []
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}
        return [thought, {"role": "assistant", "content": text}]


class Messages(Api):
    def opened(self, url: str) -> Any:
        anthropic = pytest.importorskip("anthropic")
        self.error = anthropic.APIStatusError
        return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)

    def answer(self, asked: Asked) -> Answer:
        thinking = {"off": {"type": "disabled"}}.get(asked.think, {"type": "enabled", "budget_tokens": asked.budget})
        body = given(
            model=asked.model or self.model,
            messages=[{"role": "user", "content": asked.text}, *asked.history],
            system=asked.system,
            max_tokens=asked.n,
            thinking=(asked.budget or asked.think) and thinking,
            tools=asked.tools and [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}],
            tool_choice=asked.forced and {"type": "tool", "name": "weather"},
            output_config=asked.form and {"format": {"type": "json_schema", "schema": asked.form}},
            stop_sequences=asked.stop,
            extra_body=dict(asked.own),
        )
        pieces = []
        if asked.stream:
            with self.package.messages.stream(**body) as stream:
                pieces = [event for event in stream if event.type == "text"]
                found = stream.get_final_message()
        else:
            found = self.package.messages.create(**body)
        texts = {kind: [block for block in found.content if block.type == kind] for kind in ("text", "thinking")}
        calls = [block for block in found.content if block.type == "tool_use"]
        assert (found.stop_reason == "tool_use") == bool(calls)
        history = [{"role": "assistant", "content": [block.model_dump() for block in found.content]}]
        sunny = [{"type": "text", "text": "sunny"}]
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": sunny} for each in calls]
        return Answer(
            "".join(block.text for block in texts["text"]),
            "".join(block.thinking for block in texts["thinking"]),
            [(each.name, each.input) for each in calls],
            found.stop_reason != "max_tokens",
            found.usage.input_tokens + found.usage.cache_read_input_tokens,
            found.usage.output_tokens,
            len(pieces),
            [*history, {"role": "user", "content": results}],
            found,
        )

    def said(self, text: str, thinking: str) -> list[Any]:
        thought = [{"type": "thinking", "thinking": thinking, "signature": ""}] if thinking else []
        return [{"role": "assistant", "content": [*thought, {"type": "text", "text": text}]}]


class Ollama(Api):
    def opened(self, url: str) -> Any:
        ollama = pytest.importorskip("ollama")
        self.error = ollama.ResponseError
        return ollama.Client(host=url, timeout=PATIENCE)

    def answer(self, asked: Asked) -> Answer:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        found = self.package.chat(
            asked.model or f"{self.model}:latest",
            [*system, {"role": "user", "content": asked.text}, *asked.history],
            tools=[TOOL] if asked.tools else None,
            think={"on": True, "off": False}.get(asked.think),
            format=asked.form,
            options={**asked.own, "num_predict": asked.n, "thinking_budget": asked.budget, "stop": asked.stop or None},
            stream=asked.stream,
        )
        parts = list(found) if asked.stream else [found]
        said, last = [part.message for part in parts], parts[-1]
        calls = [call for message in said for call in message.tool_calls or ()]
        result = {"role": "tool", "content": "sunny", "tool_name": "weather"}
        return Answer(
            "".join(message.content for message in said),
            "".join(message.thinking or "" for message in said),
            [(call.function.name, call.function.arguments) for call in calls],
            last.done_reason != "length",
            last.prompt_eval_count,
            last.eval_count,
            sum(bool(message.content) for message in said),
            [*(message for message in said if message.tool_calls), result],
            parts,
        )

    def said(self, text: str, thinking: str) -> list[Any]:
        return [{"role": "assistant", "content": text, "thinking": thinking}]


APIS = {"chat": Chat, "responses": Responses, "messages": Messages, "ollama": Ollama}
