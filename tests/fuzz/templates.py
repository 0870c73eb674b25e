"""Chat templates that nobody vouches for: a text, or a TemplateError of one line, in bounded time and memory."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator
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


def filled(patterns: Iterable[str], **kinds: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """One of some texts, in which every capital letter that stands alone is something of that kind."""
    parts = (re.split(r"(\b[A-Z]\b)", pattern) for pattern in patterns)
    return st.one_of([st.tuples(*(kinds.get(part, st.just(part)) for part in each)).map("".join) for each in parts])


ATOMS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.sampled_from(TEXTS).map(lambda text: "'" + text.replace("'", "\\'") + "'"),
    st.sampled_from(NUMBERS),
    st.sampled_from(["[]", "{}", "()", "[1,2,3]", "messages[1].content", "messages[0]", "range(10**6)", "('a'*10**6)"]),
)
# E an expression, O an operator, F a filter, T a test, N a name, A arguments
EXPRESSION_PATTERNS = (
    "(E O E)", "(E|F)", "(E|F(A))", "(E is T)", "(E is T(E))", "E.N", "E.N(A)", "E['N']", "(E|attr('N'))", "E[E]",
    "E[E:E]", "E(A)", "[A]", "(E, A)", "{E: E}", "{E: E, E: E}", "(E if E else E)", "(not E)", "(-E)", "dict(a=E)",
    "(E|tojson(indent=2))", "(E|map('upper')|list)",
)  # fmt: skip
# S statements, L what a loop assigns to, W where it ends
STATEMENT_PATTERNS = (
    "S{##}S",
    "{% for L in E W %}S{% endfor %}",
    "{% if E %}S{% else %}S{% endif %}",
    "{% macro f(x, y=1) %}S{% endmacro %}{{ f(messages) }}",
    "{% macro f(x) %}S{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% set x %}S{% endset %}",
    "{% macro f(x) %}{{ caller() }}S{% endmacro %}{% call f(1) %}S{% endcall %}",
    "{% filter F %}S{% endfilter %}",
    "{% block a %}S{{ self.a() }}{% endblock %}",
    "{% generation %}S{% endgeneration %}",
    "{% set ns = namespace(x='ab', y=[]) %}{% for m in range(200) %}S{% endfor %}",
    "{% with x = E %}S{% endwith %}",
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return filled(
        EXPRESSION_PATTERNS,
        E=inner,
        O=st.sampled_from([*"+-*/%~<>", "//", "**", "==", "!=", "<=", ">=", "and", "or", "in"]),
        F=st.sampled_from(FILTERS),
        T=st.sampled_from(TESTS),
        N=st.one_of(st.sampled_from(METHODS), st.sampled_from(HIDDEN), st.sampled_from(["role", "content", "x"])),
        A=st.lists(inner, max_size=3).map(", ".join),
    )


EXPRESSIONS = st.recursive(ATOMS, _larger, max_leaves=6)


def _wrapped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return filled(
        STATEMENT_PATTERNS,
        E=EXPRESSIONS,
        F=st.sampled_from(FILTERS),
        L=st.sampled_from(["m", "x", "k, v"]),
        S=inner,
        W=st.sampled_from(["", "recursive", "if m"]),
    )


STATEMENTS = st.one_of(
    filled(["{{ E }}", "{% set x = E %}", "{% set ns.x = E %}"], E=EXPRESSIONS),
    st.sampled_from([CHATML, "text", "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.y = [ns.y, ns.y] %}", "{{", "{#"]),
    st.sampled_from(["break", "continue", "include x", "import 'os' as os", "extends x", "for", "raw"]).map(
        "{{% {} %}}".format
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
