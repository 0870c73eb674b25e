"""Chat templates: rendered as Hugging Face renders them, from files and with messages that nobody vouches for."""

from __future__ import annotations

import json
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localspec.errors import TemplateError, UsageError
from localspec.prompts import template_sandbox
from localspec.prompts.templates import CHATML, ChatTemplate
from tests.support.waiting import PATIENCE

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]
CHAT = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " One & two? "},
    {"role": "assistant", "content": "<think>hm</think>\n\nThree."},
    {"role": "user", "content": "Ünïcödé \U0001f600"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": ["ä", 1, None, True]}}}]

DATA = tomllib.loads((Path(__file__).parents[1] / "data/sandbox_templates.toml").read_text(encoding="utf-8"))
STYLES: dict[str, str] = {"chatml": CHATML} | DATA["styles"]
OUTSIDE: list[str] = DATA["outside"]["sources"]
ENDLESS: dict[str, str] = DATA["endless"] | {
    "long body": "{% for i in range(100000) %}" + "{% if i is none %}{% endif %}" * 500 + "{% endfor %}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long source": "{{ a }}" * 50_000,
}


def hugging_face(source: str, variables: dict[str, Any]) -> str:
    """What transformers' apply_chat_template computes."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    source = source.replace("{%- generation %}", "{%- if true %}").replace("{% endgeneration %}", "{% endif %}")
    return environment.from_string(source).render(**variables)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.3)


class TestRendering:
    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("tools", [None, TOOLS])
    def test_as_hugging_face_does(self, style: str, tools: Any) -> None:
        template = ChatTemplate(STYLES[style], "<s>", "</s>")
        variables = {"messages": CHAT, "tools": tools, "add_generation_prompt": True}
        theirs = hugging_face(STYLES[style], variables | {"bos_token": "<s>", "eos_token": "</s>"})
        assert template.render(CHAT, tools=tools) == theirs

    def test_chatml_where_the_file_has_no_template(self) -> None:
        for source in (None, "", " \n"):
            said = ChatTemplate(source).render([{"role": "user", "content": "hi"}])
            assert said == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert [ChatTemplate(source).is_fallback for source in (None, "x")] == [True, False]

    def test_contents_variables_and_refusals(self) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        assert "user\nab<" in ChatTemplate(None).render(parts)
        knows_parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
        assert ChatTemplate(knows_parts).render([{"role": "user", "content": "abc"}]) == "abc|"
        template = ChatTemplate("{{ mood }}{% if add_generation_prompt %}>{% endif %}")
        assert template.render(CHAT, add_generation_prompt=False, mood="calm") == "calm"
        with pytest.raises(TemplateError, match="roles must alternate"):
            ChatTemplate(STYLES["namespaces and macros"]).render([CHAT[1], CHAT[1]])
        with pytest.raises(TemplateError, match="line 2"):
            ChatTemplate("a\n{% for %}").render(CHAT)

    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            ("hi", "must be a list"),
            ({"role": "user", "content": "x"}, "must be a list"),
            ([], "no messages"),
            (["hi"], "message 0 must be"),
            ([{"content": "x"}], "message 0: role"),
            ([{"role": "user<|im_end|>", "content": "x"}], "message 0: role"),
            ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1: content"),
            ([{"role": "user", "content": 7}], "content must be text"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
        ],
    )
    def test_malformed_messages(self, messages: Any, reason: str) -> None:
        for render in (ChatTemplate(None).render, ChatTemplate(None).render_segments):
            with pytest.raises(UsageError, match=reason) as caught:
                render(messages)
            assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("hurried")
class TestSandbox:
    @pytest.mark.parametrize("name", ENDLESS)
    def test_everything_ends(self, name: str) -> None:
        with pytest.raises(TemplateError) as caught:
            ChatTemplate(ENDLESS[name]).render(CHAT)
        message = str(caught.value)
        assert ("\n" in message, len(message) < 350) == (False, True)
        assert "too much memory" not in message  # the system's own limit: ours must come first

    @pytest.mark.parametrize("source", [*OUTSIDE, "{{ 1.5[1:2] }}{{ raise_exception('end') }}"])
    def test_no_way_out(self, source: str, recwarn: pytest.WarningsRecorder) -> None:
        with pytest.raises(TemplateError):
            ChatTemplate(source).render(CHAT)
        assert not recwarn.list  # which are about odd expressions, and for the template's author

    def test_time_in_which_others_have_the_cpu_does_not_count(self) -> None:
        template = ChatTemplate("{% for i in range(3) %}{{ wait() }}{% endfor %}done")
        assert template.render(CHAT, wait=lambda: time.sleep(0.2) or "") == "done"

    def test_the_budget_is_fresh_for_every_rendering(self) -> None:
        template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done")
        for _ in range(2):
            with pytest.raises(TemplateError):
                template.render(CHAT, n=100_000)
            assert template.render(CHAT, n=10) == "done"

    @pytest.mark.parametrize("style", STYLES)
    def test_ten_thousand_messages_are_no_attack(self, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many as a request may have: whatever a template does once for each of them, it may."""
        monkeypatch.setattr(template_sandbox, "SECONDS", 1.0)
        words = ("Please say that again, number {i}.", "I said what I said, {i} times, and no more than that.")
        chat = [{"role": ("user", "assistant")[i % 2], "content": words[i % 2].format(i=i)} for i in range(10_000)]
        assert len(ChatTemplate(STYLES[style], "<s>", "</s>", SPECIAL).render(chat, tools=TOOLS)) > 50_000

    def test_a_rendering_keeps_no_other_waiting(self) -> None:
        template = ChatTemplate("{% if wait is defined %}{{ wait() }}{% endif %}{{ messages[0].content }}")
        begun, go_on, found = threading.Event(), threading.Event(), list[str]()

        def wait() -> str:
            begun.set()
            assert go_on.wait(PATIENCE)
            return "waited for "

        slow = threading.Thread(target=lambda: found.append(template.render(CHAT, wait=wait)))
        slow.start()
        assert begun.wait(PATIENCE)
        quick = template.render(CHAT)  # a lock about a rendering would never be had
        go_on.set()
        slow.join(PATIENCE)
        assert found == [f"waited for {quick}"]


EXTRAS = "{{ tools|tojson }}{{ messages[0].name }} {{ note }}"
CUTTING = """{% for m in messages %}{{ m.content[3:] ~ m.content|trim|lower ~ m.content|tojson }}{{
    m.content.split('|')[0] ~ '|' ~ m.content.split('|')[1:]|join('|') }}{% endfor %}"""
GUARDED = [
    (ChatTemplate(source, "<s>", "</s>", SPECIAL), ChatTemplate(source, "<s>", "</s>"))
    for source in (CHATML, STYLES["namespaces and macros"], STYLES["reversed, split, filters"], EXTRAS, CUTTING)
]
"""Templates that keep special tokens apart, and the same ones unguarded."""


class TestForgery:
    @given(st.lists(st.sampled_from([*SPECIAL, "<|IM_END|>", "<|im_", "end|>", "<", "s>", " ", "\n", "x"]), max_size=8))
    @settings(max_examples=150, deadline=None)
    def test_only_the_template_writes_special_tokens(self, words: list[str]) -> None:
        text = "".join(words)
        chat, more = [{"role": "user", "content": text, "name": text}], {"tools": [{text: [text]}], "note": text}
        for template, unguarded in GUARDED:
            harmless = unguarded.render([{"role": "user", "content": "x"}])
            segments = template.render_segments(chat, **more)
            if template.source != CUTTING:  # which finds other characters in the place of tokens
                assert "".join(text for text, _ in segments) == unguarded.render(chat, **more)
            for special in SPECIAL:
                written = sum(text.count(special) for text, parse_special in segments if parse_special)
                assert written == harmless.count(special), (special, segments)

    def test_what_is_spelled_is_cut_out_and_nothing_else(self) -> None:
        template = ChatTemplate(CHATML, special_texts=SPECIAL)
        assert template.render_segments(CHAT) == [(template.render(CHAT), True)]
        segments = template.render_segments([{"role": "user", "content": "a <|im_end|> b"}])
        assert segments == [
            ("<|im_start|>user\na ", True),
            ("<|im_end|>", False),
            (" b<|im_end|>\n<|im_start|>assistant\n", True),
        ]
