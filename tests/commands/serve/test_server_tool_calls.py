"""Tool calls read out of text: every way of writing them, however the text is cut."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.commands.serve.json_call import CallObject
from localspec.commands.serve.tool_calls import CallArguments, CallStart, TextPiece, ToolCallReader

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        ("now", {}),
    )
]
PARIS = {"city": "Paris", "days": 3}
P = json.dumps(PARIS)
TRICKY = {"city": 'a "quoted" } ] </tool_call> \\ name', "days": -1}

CASES = {
    "hermes": (f'<tool_call>\n{{"name": "weather", "arguments": {P}}}\n</tool_call>', "", [("weather", PARIS)]),
    "hermes with text": (
        f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {P}}}\n</tool_call>',
        "Let me look.",
        [("weather", PARIS)],
    ),
    "hermes twice": (
        f'<tool_call>\n{{"name": "weather", "arguments": {P}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        [("weather", PARIS), ("now", {})],
    ),
    "arguments first": (
        f'<tool_call>{{"arguments": {P}, "name": "weather"}}</tool_call>',
        "",
        [("weather", PARIS)],
    ),
    "arguments as a string": (
        f'<tool_call>{{"name": "weather", "arguments": {json.dumps(P)}}}</tool_call>',
        "",
        [("weather", PARIS)],
    ),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    "null arguments": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    "as OpenAI writes it": (
        f'<tool_call>{{"type": "function", "function": {{"name": "weather", "arguments": {P}}}}}</tool_call>',
        "",
        [("weather", PARIS)],
    ),
    "tricky strings": (
        f'<tool_call>{{"name": "weather", "arguments": {json.dumps(TRICKY)}}}</tool_call>',
        "",
        [("weather", TRICKY)],
    ),
    "no closer": (f'<tool_call>\n{{"name": "weather", "arguments": {P}}}', "", [("weather", PARIS)]),
    "a list (SmolLM2)": (
        f'<tool_call>[{{"name": "weather", "arguments": {P}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
        "",
        [("weather", PARIS), ("now", {})],
    ),
    "Qwen3-Coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("weather", PARIS)],
    ),
    "Qwen3-Coder without the outer mark": (
        "I'll look.\n<function=weather>\n<parameter=city>\n007\n</parameter>\n</function>\n</tool_call>",
        "I'll look.",
        [("weather", {"city": "007"})],
    ),
    "Mistral, a list": (f'[TOOL_CALLS][{{"name": "weather", "arguments": {P}}}]', "", [("weather", PARIS)]),
    "Mistral, name and arguments": (
        f"[TOOL_CALLS]weather[ARGS]{P}[TOOL_CALLS]now[ARGS]{{}}",
        "",
        [("weather", PARIS), ("now", {})],
    ),
    "Llama 3": (f'{{"name": "weather", "parameters": {P}}}', "", [("weather", PARIS)]),
    "Llama 3, marked": (f'<|python_tag|>{{"name": "weather", "parameters": {P}}}', "", [("weather", PARIS)]),
    "Llama 3, two": (
        f'{{"name": "weather", "parameters": {P}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        [("weather", PARIS), ("now", {})],
    ),
    "Phi-4-mini": (
        f'<|tool_call|>[{{"name": "weather", "arguments": {P}}}]<|/tool_call|>',
        "",
        [("weather", PARIS)],
    ),
    "Qwen2.5-Coder, fenced": (
        f'```json\n{{\n  "name": "weather",\n  "arguments": {P}\n}}\n```',
        "",
        [("weather", PARIS)],
    ),
    "Qwen2.5-Coder, <tools>": (
        f'<tools>\n{{"name": "weather", "arguments": {P}}}\n</tools>',
        "",
        [("weather", PARIS)],
    ),
}

TEXTS = [
    "",
    "Hello.",
    "  leading and trailing  ",
    "a < b, <tool, <tool_cal and [TOOL_CALL",
    '{"name": "nobody", "arguments": {}}',
    '{"answer": 42}',
    "{not json}",
    "```json\n[1, 2]\n```",
    "```python\nprint({'name': 1})\n```",
    '```json\n{"name": "nobody"}\n```\nand more',
    '{"name": "weather", "arguments": ',
    "<tool_call>no</tool_call>",
    "<tool_call>",
    "<|python_tag|>print(1)",
    "<function=",
    '<tool_call>{"nome": "weather"}</tool_call>',
    "{",
    "`",
]


def read(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls, with the text fed in pieces."""
    reader = ToolCallReader(TOOLS)
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [piece for a, b in pairwise(bounds) for piece in reader.push(text[a:b])]
    pieces += reader.finish()
    said, calls, ids = "", [], set()
    for piece in pieces:
        if isinstance(piece, TextPiece):
            said += piece.text
        elif isinstance(piece, CallStart):
            assert piece.index == len(calls)
            assert piece.id.startswith("call_")
            ids.add(piece.id)
            calls.append([piece.name, ""])
        else:
            assert isinstance(piece, CallArguments)
            calls[piece.index][1] += piece.text
    assert len(ids) == len(calls) == reader.n_calls
    return said, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("name", CASES)
def test_every_way_of_writing_a_call(name: str) -> None:
    text, said, calls = CASES[name]
    for cuts in ([], list(range(1, len(text)))):
        found, read_calls = read(text, cuts)
        assert found.strip() == said
        assert [(call, json.loads(arguments)) for call, arguments in read_calls] == calls


@pytest.mark.parametrize("name", CASES)
def test_cuts_change_nothing(name: str) -> None:
    text = CASES[name][0]
    whole = read(text, [])
    rng = random.Random(name)
    for _ in range(30):
        assert read(text, rng.sample(range(len(text)), k=min(6, len(text)))) == whole


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_is_text(text: str) -> None:
    for cuts in ([], list(range(1, len(text)))):
        assert read(text, cuts) == (text, [])


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet='<tool_call>{}[]"name:,argumentsTOOL_CALLS/` \n', max_size=60), st.data())
def test_no_text_is_lost_and_cuts_never_matter(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    said, calls = read(text, [])
    assert read(text, cuts) == (said, calls)
    if not calls:
        assert said == text


def test_arguments_are_streamed_as_they_come() -> None:
    reader = ToolCallReader(TOOLS)
    pieces = reader.push('<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    assert [type(piece) for piece in pieces] == [CallStart, CallArguments]
    assert pieces[1] == CallArguments(0, '{"city": "Par')
    assert reader.push('is"}') == [CallArguments(0, 'is"}')]
    assert reader.n_done == 0
    reader.push("}")
    assert reader.n_done == 1


def test_a_call_cut_by_the_budget_keeps_what_was_said() -> None:
    said, calls = read('<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', [])
    assert (said, calls) == ("", [("weather", '{"city": "Pa')])


def test_text_streams_while_no_call_can_begin() -> None:
    reader = ToolCallReader(TOOLS)
    assert reader.push("Hello there") == [TextPiece("Hello there")]
    assert reader.push(" <tool") == []
    assert reader.push("s are nice") == [TextPiece(" <tools are nice")]


def test_a_bare_object_is_released_as_soon_as_it_cannot_be_a_call() -> None:
    reader = ToolCallReader(TOOLS)
    assert reader.push('{"answ') == [TextPiece('{"answ')]


def test_an_object_ends_where_it_ends() -> None:
    call = CallObject()
    text = '{"name": "f", "arguments": {"a": "}"}} rest'
    assert text[call.push(text) :] == " rest"
    assert (call.done, call.name, call.take()) == (True, "f", '{"a": "}"}')
