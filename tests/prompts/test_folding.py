"""What was said is in the prompt, whatever the template knows: templates of many kinds, times conversations."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from localspec.errors import TemplateError, UsageError
from localspec.prompts import template_sandbox
from localspec.prompts.folding import folded
from localspec.prompts.templates import ChatTemplate
from localspec.server.tools import messages_for
from tests.support.steps import n_steps

TEMPLATES: dict[str, str] = tomllib.loads(
    (Path(__file__).parents[1] / "data/chat_templates.toml").read_text(encoding="utf-8")
)


def _call(name: str = "look", id: str = "call_1f3a", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {"place": "Oslo"}}}


S, S2 = {"role": "system", "content": "Answer in rhymes."}, {"role": "system", "content": "The user likes herons."}
U, U2 = {"role": "user", "content": "Where is it cold?"}, {"role": "user", "content": "And where warm, pray?"}
A, A2 = {"role": "assistant", "content": "Up north, of old."}, {"role": "assistant", "content": "Down south, they say."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [_call()]}
RESULT = {"role": "tool", "tool_call_id": "call_1f3a", "name": "look", "content": "minus seven degrees"}
TWO_CALLS = CALLS | {"tool_calls": [_call(), _call(id="call_2b", place="Rome")]}
RESULT_2 = RESULT | {"tool_call_id": "call_2b", "content": "plus thirty degrees"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [U],
    "a system prompt": [S, U],
    "two system prompts": [S, S2, U],
    "a system prompt behind": [U, S],
    "a system prompt between": [S, U, A, S2, U2],
    "turns": [S, U, A, U2],
    "two questions": [S, U, U2],
    "two answers": [U, A, A2, U2],
    "an answer first": [A, U],
    "an answer last": [U, A],
    "an empty answer": [U, A | {"content": ""}, U2],
    "no answer": [U, A | {"content": None}, U2],
    "no calls": [U, A | {"tool_calls": []}, U2],
    "only thoughts": [U, {"role": "assistant", "content": None, "reasoning_content": "Hm, north."}, U2],
    "thoughts": [U, A | {"reasoning_content": "Hm, north."}, U2],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": " it cold?"}]},
        A,
        {"role": "user", "content": [{"type": "text", "text": "And where warm?"}]},
    ],
    "a call": [S, U, CALLS, RESULT],
    "a call and what follows": [S, U, CALLS, RESULT, A, U2],
    "a call beside a text": [U, CALLS | {"content": "Let me look it up."}, RESULT, A, U2],
    "two calls": [U, TWO_CALLS, RESULT, RESULT_2],
    "calls one after the other": [U, CALLS, RESULT, CALLS, RESULT, A, U2],
    "a call without ids": [
        U,
        CALLS | {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "minus seven degrees"},
    ],
    "a call and a note": [S, U, CALLS, RESULT, S2, U2],
    "unicode": [U | {"content": "Hvor er det kaldt? ❄️ 北 \U0001f427 'q\" \\n"}, A, U2],
    "long": [S, *[U, A] * 60, U2],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Reads a thermometer.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]

PUBLISHED = os.environ.get("LOCALSPEC_TEST_TEMPLATES")
"""A folder of published templates; files that are named by the SHA-256 of their text are held to it."""


def prompt_of(template: ChatTemplate, messages: list[Any], tools: list[Any] | None, **variables: Any) -> str:
    put = folded(template, messages_for(messages), tools, {}, **variables)
    return template.render(put.messages, tools=put.tools, **variables)


def texts_of(messages: list[Any]) -> list[str]:
    """All that must be in the prompt, in order; of thoughts the template decides."""
    texts = []
    for message in messages_for(messages):
        texts.append(message["content"].strip())
        for call in message.get("tool_calls", ()):
            texts += [value for value in call["function"]["arguments"].values()]
    return [text for text in texts if text]


def holds(prompt: str, text: str) -> bool:
    """As it is, or as JSON has it."""
    return text in prompt or text.replace("\\", "\\\\").replace('"', '\\"') in prompt


def is_in_order(prompt: str, texts: list[str]) -> bool:
    at = 0
    for text in texts:
        at = prompt.find(text, at)
        if at < 0:
            return False
        at += len(text)
    return True


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_was_said_is_in_the_prompt(name: str, with_tools: bool) -> None:
    template, tools = ChatTemplate(TEMPLATES[name], "<s>", "</s>"), TOOLS if with_tools else None
    for kind, messages in CONVERSATIONS.items():
        prompt = prompt_of(template, messages, tools)
        assert all(holds(prompt, text) for text in texts_of(messages)), (kind, prompt)
        assert not with_tools or "Reads a thermometer." in prompt, kind
        assert not re.search("None|{'type': 'text'", prompt), kind
        turns = [m for m in messages_for(messages) if m["role"] in ("user", "assistant") and not m.get("tool_calls")]
        assert is_in_order(prompt, [m["content"] for m in turns if m["content"] and kind != "unicode"]), (kind, prompt)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_prints_is_left_as_it_is_and_the_last_answer_is_gone_on_with(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
    for kind, conversation in CONVERSATIONS.items():
        messages, plain = messages_for(conversation), ""
        with suppress(TemplateError):
            plain = template.render(messages)
        calls = any(message.get("tool_calls") for message in messages)
        if plain and not calls and all(message["content"].strip() in plain for message in messages):
            assert prompt_of(template, messages, None) == plain, kind
    for kind in ("an answer last", "two answers"):
        messages = CONVERSATIONS[kind][:3]
        prompt = prompt_of(template, messages, None, continue_final_message=True, add_generation_prompt=False)
        assert prompt.endswith(messages[-1]["content"])
        assert all(holds(prompt, text) for text in texts_of(messages))


def test_what_is_found_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    template, known = ChatTemplate(TEMPLATES["gemma 2"], "<s>", "</s>"), dict[Any, Any]()
    calls, render = list[int](), ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args, **options: calls.append(1) or render(*args, **options))
    messages = messages_for(CONVERSATIONS["turns"])
    folded(template, messages, None, known)
    assert len(calls) > 1
    calls.clear()
    folded(template, [*messages, *messages[2:]], None, known)
    assert len(calls) == 1


def test_what_no_template_way_can_say_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(TemplateError, match=r"leaves out message 1 \(assistant\)") as caught:
        folded(template, CONVERSATIONS["turns"][1:], None, {})
    assert "\n" not in str(caught.value)
    criticised = [*CONVERSATIONS["a question"], {"role": "critic", "content": "Meh."}]
    with pytest.raises(TemplateError, match=r"leaves out message 1 \(critic\)"):
        folded(ChatTemplate(TEMPLATES["zephyr"]), criticised, None, {})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "tool_calls": "calls"},
        {"role": "assistant", "content": "x", "tool_calls": [1, {"function": 5}, {}]},
        {"role": "assistant", "content": "x", "tool_calls": {"a": 1}},
        {"role": "developer", "content": "It is cold."},
        {"role": "function", "name": "f", "content": "It is cold."},
    ],
)
def test_odd_messages_of_a_program_are_no_crash(message: Any) -> None:
    for name in ("zephyr", "qwen 2.5", "llama 3", "nemo"):
        with suppress(TemplateError, UsageError):
            folded(ChatTemplate(TEMPLATES[name], "<s>", "</s>"), [U, message, U], cast(Any, [1, {}, *TOOLS]), {})
    if message["role"] in ("developer", "function"):  # which have another name today
        template = ChatTemplate(TEMPLATES["qwen 2.5"], "<s>", "</s>")
        assert message["content"] in template.render(folded(template, [U, message, U], None, {}).messages)


def test_results_in_any_order_stand_behind_their_calls() -> None:
    def talk(n: int) -> list[Any]:
        calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": {"a": f"ask{i}"}}} for i in range(n)]
        results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"say{i}"} for i in reversed(range(n))]
        return [U, A | {"content": "", "tool_calls": calls}, *results]

    template = ChatTemplate(TEMPLATES["llama 3"], "<s>", "</s>")
    prompt = prompt_of(template, talk(9), None)
    assert is_in_order(prompt, [text for i in reversed(range(9)) for text in (f"ask{i}", f"say{i}")])
    small, large = (n_steps(lambda n=n: folded(template, talk(n), None, {})) for n in (225, 900))
    assert large < 4.5 * small


def test_ten_thousand_short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS", 60.0)  # of the machine's speed this says nothing
    talk = [U | {"content": "yes!"}, A | {"content": "nay!"}] * 5000
    for name in ("chatml", "qwen 3"):
        template = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
        prompt = prompt_of(template, talk, None)
        assert (prompt.count("yes!"), prompt.count("nay!")) == (5000, 5000), name


@pytest.mark.skipif(not PUBLISHED, reason="LOCALSPEC_TEST_TEMPLATES names no folder of published templates")
def test_published_templates() -> None:
    files = sorted(path for path in Path(PUBLISHED or "").iterdir() if path.is_file())
    assert files
    for path in files:
        source = path.read_text(encoding="utf-8")
        if len(path.stem) == 64:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
        template = ChatTemplate(source, "<s>", "</s>")
        for kind, conversation in CONVERSATIONS.items():
            for tools in (None, TOOLS):
                prompt = prompt_of(template, conversation, tools)
                missing = [text for text in texts_of(conversation) if not holds(prompt, text)]
                assert not missing, (path.name, kind, missing)
