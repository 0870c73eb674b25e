"""What was said is in the prompt, whatever the template knows: templates of many kinds, times conversations."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

TURNS = [S, U, A, U2]
PIECES: list[list[dict[str, Any]]] = [
    *([message] for message in (S, S2, U, U2, A, A2)),
    [A | {"content": ""}],
    [A | {"content": None}],
    [A | {"tool_calls": []}],
    [A | {"reasoning_content": "Hm, north."}],
    [{"role": "assistant", "content": None, "reasoning_content": "Hm, north."}],
    [{"role": "user", "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": " it cold?"}]}],
    [CALLS, RESULT],
    [CALLS | {"content": "Let me look it up."}, RESULT],
    [TWO_CALLS, RESULT, RESULT_2],
    [
        CALLS | {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "minus seven degrees"},
    ],
    [U | {"content": "Hvor er det kaldt? ❄️ 北 \U0001f427 'q\" \\n"}],
]
"""What conversations are put together from."""

TALK = st.lists(st.sampled_from(PIECES), max_size=3).map(lambda pieces: [*chain(*pieces)])
CONVERSATIONS = st.builds(lambda before, after: [*before, U, *after], TALK, TALK)
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


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30)
@given(conversation=CONVERSATIONS, tools=st.sampled_from([None, TOOLS]))
def test_what_was_said_is_in_the_prompt(name: str, conversation: list[Any], tools: list[Any] | None) -> None:
    """And what a template prints whole is left as it is."""
    template, messages, plain = ChatTemplate(TEMPLATES[name], "<s>", "</s>"), messages_for(conversation), ""
    prompt, texts = prompt_of(template, conversation, tools), texts_of(conversation)
    assert all(holds(prompt, text) for text in texts)
    assert not tools or "Reads a thermometer." in prompt
    assert not re.search("None|{'type': 'text'", prompt)
    turns = [m["content"] for m in messages if m["role"] in ("user", "assistant") and not m.get("tool_calls")]
    assert is_in_order(prompt, [text for text in turns if "\\" not in text])
    with suppress(TemplateError):
        plain = template.render(messages)
    calls = any(message.get("tool_calls") for message in messages)
    if not tools and not calls and is_in_order(plain, texts):
        assert prompt == plain


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_answer_is_gone_on_with(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
    for messages in ([U, A], [U, A, A2]):
        prompt = prompt_of(template, messages, None, continue_final_message=True, add_generation_prompt=False)
        assert prompt.endswith(messages[-1]["content"])
        assert all(holds(prompt, text) for text in texts_of(messages))


def test_what_is_found_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    template, known = ChatTemplate(TEMPLATES["gemma 2"], "<s>", "</s>"), dict[Any, Any]()
    calls, render = list[int](), ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args, **options: calls.append(1) or render(*args, **options))
    messages = messages_for(TURNS)
    folded(template, messages, None, known)
    assert len(calls) > 1
    calls.clear()
    folded(template, [*messages, *messages[2:]], None, known)
    assert len(calls) == 1


def test_what_no_template_way_can_say_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(TemplateError, match=r"leaves out message 1 \(assistant\)") as caught:
        folded(template, TURNS[1:], None, {})
    assert "\n" not in str(caught.value)
    criticised = [U, {"role": "critic", "content": "Meh."}]
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
        for piece, tools in product(PIECES, (None, TOOLS)):
            conversation = [S, *piece, U, A, U2]
            prompt = prompt_of(template, conversation, tools)
            missing = [text for text in texts_of(conversation) if not holds(prompt, text)]
            assert not missing, (path.name, piece, missing)
