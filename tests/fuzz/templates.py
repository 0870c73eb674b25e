"""Chat templates that nobody vouches for: a text, or a TemplateError of one line, in bounded time and memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from localspec.errors import LocalspecError, TemplateError
from localspec.prompts.templates import CHATML, ChatTemplate
from tests.fuzz.target import Check, Target, one_line, peak_bytes, table, timed

MAX_BYTES = 512 << 20
CANARY = "canary-5d1f"  # Stands in the environment of the process, where no template may read it

MESSAGES: list[dict[str, Any]] = table("templates", "MESSAGES")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": ["ä", 1, None, True]}}}]

FILTERS, TESTS, METHODS, HIDDEN, NAMES, TEXTS, NUMBERS = (
    table("templates", name) for name in ("FILTERS", "TESTS", "METHODS", "HIDDEN", "NAMES", "TEXTS", "NUMBERS")
)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


ATOMS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.sampled_from(TEXTS).map(_quoted),
    st.sampled_from(NUMBERS),
    st.sampled_from(["[]", "{}", "()", "[1,2,3]", "messages[1].content", "messages[0]", "range(10**6)", "('a'*10**6)"]),
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arguments = st.lists(inner, max_size=3).map(", ".join)
    name = st.one_of(st.sampled_from(METHODS), st.sampled_from(HIDDEN), st.sampled_from(["role", "content", "x"]))
    operator = st.sampled_from([*"+-*/%~<>", "//", "**", "==", "!=", "<=", ">=", "and", "or", "in"])
    return st.one_of(
        st.tuples(inner, operator, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(FILTERS)).map(lambda t: f"({t[0]}|{t[1]})"),
        st.tuples(inner, st.sampled_from(FILTERS), arguments).map(lambda t: f"({t[0]}|{t[1]}({t[2]}))"),
        st.tuples(inner, st.sampled_from(TESTS)).map(lambda t: f"({t[0]} is {t[1]})"),
        st.tuples(inner, st.sampled_from(TESTS), inner).map(lambda t: f"({t[0]} is {t[1]}({t[2]}))"),
        st.tuples(inner, name).map(lambda t: f"{t[0]}.{t[1]}"),
        st.tuples(inner, name, arguments).map(lambda t: f"{t[0]}.{t[1]}({t[2]})"),
        st.tuples(inner, name).map(lambda t: f"{t[0]}['{t[1]}']"),
        st.tuples(inner, name).map(lambda t: f"({t[0]}|attr('{t[1]}'))"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]}[{t[1]}]"),
        st.tuples(inner, inner, inner).map(lambda t: f"{t[0]}[{t[1]}:{t[2]}]"),
        st.tuples(inner, arguments).map(lambda t: f"{t[0]}({t[1]})"),
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.lists(inner, max_size=3).map(lambda items: "(" + ", ".join([*items, ""]) + ")"),
        st.lists(st.tuples(inner, inner), max_size=2).map(lambda d: "{" + ", ".join(f"{k}: {v}" for k, v in d) + "}"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        inner.map(lambda e: f"(not {e})"),
        inner.map(lambda e: f"(-{e})"),
        inner.map(lambda e: f"dict(a={e})"),
        inner.map(lambda e: f"({e}|tojson(indent=2))"),
        inner.map(lambda e: f"({e}|map('upper')|list)"),
    )


EXPRESSIONS = st.recursive(ATOMS, _larger, max_leaves=6)


def _wrapped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    loop = st.tuples(
        st.sampled_from(["m", "x", "k, v"]), EXPRESSIONS, st.sampled_from(["", " recursive", " if m"]), inner
    )
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        loop.map(lambda t: "{% for " + t[0] + " in " + t[1] + t[2] + " %}" + t[3] + "{% endfor %}"),
        st.tuples(EXPRESSIONS, inner, inner).map(
            lambda t: "{% if " + t[0] + " %}" + t[1] + "{% else %}" + t[2] + "{% endif %}"
        ),
        inner.map(lambda s: "{% macro f(x, y=1) %}" + s + "{% endmacro %}{{ f(messages) }}"),
        inner.map(lambda s: "{% macro f(x) %}" + s + "{{ f(x) }}{% endmacro %}{{ f(1) }}"),
        inner.map(lambda s: "{% set x %}" + s + "{% endset %}"),
        st.tuples(inner, inner).map(
            lambda t: "{% macro f(x) %}{{ caller() }}" + t[0] + "{% endmacro %}{% call f(1) %}" + t[1] + "{% endcall %}"
        ),
        st.tuples(st.sampled_from(FILTERS), inner).map(
            lambda t: "{% filter " + t[0] + " %}" + t[1] + "{% endfilter %}"
        ),
        inner.map(lambda s: "{% block a %}" + s + "{{ self.a() }}{% endblock %}"),
        inner.map(lambda s: "{% generation %}" + s + "{% endgeneration %}"),
        inner.map(lambda s: "{% set ns = namespace(x='ab', y=[]) %}{% for m in range(200) %}" + s + "{% endfor %}"),
        st.tuples(EXPRESSIONS, inner).map(lambda t: "{% with x = " + t[0] + " %}" + t[1] + "{% endwith %}"),
    )


STATEMENTS = st.one_of(
    EXPRESSIONS.map(lambda e: "{{ " + e + " }}"),
    EXPRESSIONS.map(lambda e: "{% set x = " + e + " %}"),
    EXPRESSIONS.map(lambda e: "{% set ns.x = " + e + " %}"),
    st.sampled_from([CHATML, "text", "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.y = [ns.y, ns.y] %}", "{{", "{#"]),
    st.sampled_from(["break", "continue", "include x", "import 'os' as os", "extends x", "for", "raw"]).map(
        lambda inner: "{% " + inner + " %}"
    ),
    st.text(max_size=8),
)

SOURCES = st.recursive(STATEMENTS, _wrapped, max_leaves=4)

REPEATED = st.tuples(
    st.sampled_from(table("templates", "repeated")),
    st.sampled_from([10, 100, 400, 1000, 5000, 20000]),
).map(lambda t: "{{ " + t[0] * t[1] + "1" if not t[0].startswith("{") else (t[0] * t[1])[:79_000])
"""Sources that are deep or long rather than clever."""

CASES = st.one_of(SOURCES, SOURCES, SOURCES, SOURCES, REPEATED)


@contextmanager
def _opened(folder: Path) -> Iterator[Check]:
    messages, tools = copy.deepcopy(MESSAGES), copy.deepcopy(TOOLS)

    def check(source: str) -> None:
        template = ChatTemplate(source, "<s>", "</s>", ["<|im_end|>", "<s>"])
        for render in (template.render, template.render_segments):
            before = peak_bytes()
            try:
                with timed("rendering"):
                    rendered = render(messages, tools=tools)
                assert CANARY not in str(rendered)
            except LocalspecError as error:
                line = one_line(error, TemplateError)
                assert "too much memory" not in line, "the system's limit came before ours"
                assert CANARY not in line
            finally:
                peak = peak_bytes() - before
            assert peak < MAX_BYTES, f"it took {peak / 1e6:.0f} MB"
            assert (messages, tools) == (MESSAGES, TOOLS), "the template changed what it was given"

    with mock.patch.dict(os.environ, {"LOCALSPEC_FUZZ": CANARY}):
        check(CHATML)
        yield check


TARGET = Target("chat templates", CASES, _opened, in_suite=50)
