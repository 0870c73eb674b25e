"""Tool calls read out of text: every way of writing them, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localspec.server.tool_calls import MARKS, CallArguments, CallStart, TextPiece, ToolCallReader
from tests.support.steps import n_steps

Call = tuple[str, dict[str, Any]]
Writer = Callable[[str, dict[str, Any]], str]

TYPES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "places": {"type": "array", "items": {"type": "string"}},
    "near": {"type": "object", "properties": {"zip": {"type": "string"}}},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("weather", TYPES), ("now", {}))
]
PARIS = {"city": "Paris", "days": 3}
P = json.dumps(PARIS)
WEATHER: list[Call] = [("weather", PARIS)]
BOTH: list[Call] = [*WEATHER, ("now", {})]


def raw(value: Any) -> str:
    """A value between tags, as templates print it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def joined(before: str, each: Writer, between: str, after: str) -> Callable[..., str]:
    return lambda calls: before + between.join(each(name, arguments) for name, arguments in calls) + after


def json_call(name: str, arguments: dict[str, Any], key: str = "arguments", called: str = "name") -> str:
    return json.dumps({called: name, key: arguments}, ensure_ascii=False)


def around(before: str, between: str, after: str) -> Writer:
    """A name and its arguments as JSON, with marks around them."""
    return lambda name, arguments: f"{before}{name}{between}{json.dumps(arguments)}{after}"


def tags(before: str, parameter: str, after: str) -> Writer:
    """Values between tags: ``{0}`` is the name, ``{1}`` the value, ``{2}`` whether that is a string."""

    def written(name: str, arguments: dict[str, Any]) -> str:
        said = [(key, raw(value), str(isinstance(value, str)).lower()) for key, value in arguments.items()]
        return before.format(name) + "".join(parameter.format(*each) for each in said) + after

    return written


TAGGED = tags("<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>")
INVOKED = tags('<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>\n")
DSML = tags(
    '<｜DSML｜invoke name="{}">\n',
    '<｜DSML｜parameter name="{0}" string="{2}">{1}</｜DSML｜parameter>\n',
    "</｜DSML｜invoke>\n",
)
GLM = tags("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>")
CALLED, SEPARATED, ENDED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def gemma(before: str, quote: str, after: str) -> Writer:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)

    return lambda name, arguments: f"{before}call:{name}{written(arguments)}{after}"


def llama(name: str, arguments: dict[str, Any]) -> str:
    return json_call(name, arguments, "parameters")


def command_r(name: str, arguments: dict[str, Any]) -> str:
    return json_call(name, arguments, "parameters", "tool_name")


GPT_OSS = " <|constrain|>json<|message|>"
KIMI = around("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>")

FORMATS: dict[str, Callable[[list[Call]], str]] = {
    "Hermes": joined("", lambda *call: f"<tool_call>\n{json_call(*call)}\n</tool_call>", "\n", ""),
    "SmolLM2": joined("<tool_call>[", json_call, ", ", "]</tool_call>"),
    "Qwen3-Coder": joined("", lambda *call: f"<tool_call>\n{TAGGED(*call)}\n</tool_call>", "\n", ""),
    "Qwen3-Coder without the outer mark": joined("", TAGGED, "\n", "\n</tool_call>"),
    "Seed-OSS": joined("<seed:tool_call>\n", TAGGED, "\n", "\n</seed:tool_call>"),
    "Functionary": joined("", around("<function=", ">", "</function>"), "", ""),
    "Llama 3": joined("", llama, "; ", ""),
    "Llama 3, marked": joined("<|python_tag|>", llama, "; ", ""),
    "Llama 4": joined("<|python_start|>[", python, ", ", "]<|python_end|>"),
    "Llama 3.2, in Python's notation": joined("[", python, ", ", "]"),
    "Gemma 3": joined("```tool_code\n", python, "\n", "\n```"),
    "Olmo 3": joined("<function_calls>\n", python, "\n", "\n</function_calls>"),
    "LFM2": joined("<|tool_call_start|>[", python, ", ", "]<|tool_call_end|>"),
    "Mistral, a list": joined("[TOOL_CALLS][", json_call, ", ", "]"),
    "Mistral": joined("", around("[TOOL_CALLS]", "[ARGS]", ""), "", ""),
    "Mistral with ids": joined("", around("[TOOL_CALLS]", "[CALL_ID]a1b2c3[ARGS]", ""), "", ""),
    "DeepSeek R1": joined(
        "<｜tool▁calls▁begin｜>",
        around(f"{CALLED}function{SEPARATED}", "\n```json\n", f"\n```{ENDED}"),
        *("\n", "<｜tool▁calls▁end｜>"),
    ),
    "DeepSeek V3.1": joined("<｜tool▁calls▁begin｜>", around(CALLED, SEPARATED, ENDED), "", "<｜tool▁calls▁end｜>"),
    "DeepSeek V3.2": joined("<｜DSML｜function_calls>\n", DSML, "", "</｜DSML｜function_calls>"),
    "GLM-4.5": joined("", GLM, "\n", ""),
    "gpt-oss": joined("", around("<|channel|>commentary to=functions.", GPT_OSS, ""), "<|call|>", ""),
    "Gemma 4": joined("", gemma("<|tool_call>", '<|"|>', "<tool_call|>"), "", ""),
    "FunctionGemma": joined("", gemma("<start_function_call>", "<escape>", "<end_function_call>"), "", ""),
    "Granite": joined("<|tool_call|>[", json_call, ", ", "]"),
    "Phi-4-mini": joined("<|tool_call|>[", json_call, ", ", "]<|/tool_call|>"),
    "Command-R7B": joined(
        "<|START_ACTION|>[\n",
        lambda name, args: json.dumps({"tool_call_id": "0", "tool_name": name, "parameters": args}),
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "Command-R": joined("Action: ```json\n[\n", command_r, ",\n", "\n]\n```"),
    "Kimi K2": joined("<|tool_calls_section_begin|>", KIMI, "", "<|tool_calls_section_end|>"),
    "MiniMax M2": joined("<minimax:tool_call>\n", INVOKED, "", "</minimax:tool_call>"),
    "Nemotron": joined("<TOOLCALL>[", json_call, ", ", "]</TOOLCALL>"),
    "Apertus": joined("<|tools_prefix|>[", lambda name, args: json.dumps({name: args}), ", ", "]<|tools_suffix|>"),
    "InternLM": joined("<|action_start|><|plugin|>", json_call, "\n", "<|action_end|>"),
    "Firefunction": joined(" functools[", json_call, ", ", "]"),
    "Hunyuan": joined("<tool_calls>[", json_call, ", ", "]</tool_calls>"),
    "Qwen2.5-Coder, fenced": joined("```json\n", json_call, "\n", "\n```"),
    "Qwen2.5-Coder, <tools>": joined("<tools>\n", json_call, "\n", "\n</tools>"),
    "a bare list": joined("[", json_call, ", ", "]"),
    "a mark in a code block": joined("```xml\n<tool_call>\n", json_call, "\n", "\n</tool_call>\n```"),
}
AT_THE_BEGINNING = ("{", "[{", "[w", "```", "Action:", "functools")
MARKED = [name for name, write in FORMATS.items() if not write(WEATHER).lstrip().startswith(AT_THE_BEGINNING)]
"""Those whose calls may stand anywhere in an answer."""


TABLES = json.loads((Path(__file__).parent / "tool_calls.json").read_text("utf-8"))
"""Cases: a text, what is said, the calls; texts that are none; schemas of texts; values: a schema, a text, what it is
read as."""


def read(text: str, cuts: list[int], *, cut: bool = False, parallel: bool = True) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls, with the text fed in pieces."""
    reader = ToolCallReader(TOOLS, parallel=parallel)
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [piece for a, b in pairwise(bounds) for piece in reader.push(text[a:b])]
    pieces += reader.finish(cut=cut)
    said, ids = "", set()
    calls: list[list[str]] = []
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
            assert piece.index == len(calls) - 1
            calls[piece.index][1] += piece.text
    assert len(ids) == len(calls) == reader.n_calls
    return said, [(name, arguments) for name, arguments in calls]


def calls_of(found: list[tuple[str, Any]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in found]


def singly(text: str) -> list[int]:
    return list(range(1, len(text)))


@pytest.mark.parametrize("name", TABLES["cases"])
def test_cases(name: str) -> None:
    text, said, calls = TABLES["cases"][name]
    for cuts in ([], singly(text)):
        found, read_calls = read(text, cuts)
        assert found == said
        assert calls_of(read_calls) == [tuple(call) for call in calls]


ODD = ["007", "12", "true", "null", "</tool_call>", '"quoted" } ]', "it's", "\\n \\ \n", "<parameter="]
VALUES = {
    "city": st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8) | st.sampled_from(ODD),
    "days": st.integers(-(10**6), 10**18),
    "exact": st.booleans(),
    "places": st.lists(st.sampled_from(["a", "1", "it's", 'b "c"', "ü"]), max_size=3),
    "near": st.fixed_dictionaries({"zip": st.sampled_from(["01234", "x"])}),
    "note": st.none() | st.sampled_from(["n", "a b"]),
}
WEATHERS = st.fixed_dictionaries({}, optional=VALUES).map(lambda arguments: ("weather", arguments))
CALLS = st.lists(st.just(("now", {})) | WEATHERS, min_size=1, max_size=3)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(calls=CALLS, before=st.sampled_from(["", "Let me look:\n\n", "1 < 2 `"]), data=st.data())
def test_any_calls_come_back_however_the_text_is_cut(
    name: str, calls: list[Call], before: str, data: st.DataObject
) -> None:
    before = before if name in MARKED else ""
    assume("Gemma" not in name or not any(quote in raw(calls) for quote in ("|", "<escape>")))  # its quotes
    text = before + FORMATS[name](calls)
    said, found = read(text, [])
    assert said == before.rstrip()
    assert calls_of(found) == calls
    assert read(text, data.draw(st.lists(st.integers(0, len(text)), max_size=8))) == (said, found)
    assert read(text, singly(text)) == (said, found)


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_budget_cuts_is_read_alike_and_never_made_whole(name: str) -> None:
    text = FORMATS[name](BOTH)
    for end in range(0, len(text), 7):
        said, found = read(text[:end], [], cut=True)
        assert (said, found) == read(text[:end], singly(text[:end]), cut=True)
        for (called, arguments), (meant, whole) in zip(found, BOTH, strict=False):
            assert called == meant
            with suppress(ValueError):  # whole or no JSON: nobody runs a tool with half of what it was to get
                assert json.loads(arguments) == whole
    text = FORMATS[name]([*WEATHER, *BOTH])
    for cuts in ([], singly(text)):  # and where one call is wanted, one is read
        said, found = read(text, cuts, parallel=False)
        assert (said, calls_of(found)) == ("", WEATHER)


# Clients parse arguments as a JSON object: what is none stays text, behind a sure mark too.
NO_OBJECTS = ['"hello"', "5", "[1]", "true", '"{not JSON"', '"[1]"']
ORDERS = ['{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}']
NO_CALLS = [f"<tool_call>\n{order % value}\n</tool_call>" for order in ORDERS for value in NO_OBJECTS]


@pytest.mark.parametrize("text", [*TABLES["texts"], *NO_CALLS])
def test_what_is_no_call_is_text(text: str) -> None:
    for cuts in ([], singly(text)):
        assert read(text, cuts) == (text, [])


_SCRAPS = [*MARKS, "</tool_call>", '{"name": "', "weather", "now", '"arguments": ', "{}", "<parameter=city>", "(", ")"]
_SCRAPS += ["[ARGS]", "<arg_key>", "</arg_key>", "```", *"[]\"',:}\n x\\=1"]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Calls of any form with other scraps in the place of some characters."""
    text = FORMATS[draw(st.sampled_from([*FORMATS]))](BOTH)
    for _ in range(draw(st.integers(1, 3))):
        start, size = draw(st.integers(0, len(text))), draw(st.integers(0, 6))
        text = text[:start] + draw(st.sampled_from(["", *_SCRAPS])) + text[start + size :]
    return text


@settings(max_examples=350, deadline=None)
@given(
    st.lists(st.sampled_from(_SCRAPS), max_size=14).map("".join) | damaged(), st.booleans(), st.booleans(), st.data()
)
def test_no_text_is_lost_and_cuts_never_matter(text: str, parallel: bool, cut: bool, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    said, calls = read(text, [], parallel=parallel, cut=cut)
    assert read(text, cuts, parallel=parallel, cut=cut) == (said, calls)
    assert read(text, singly(text), parallel=parallel, cut=cut) == (said, calls)
    if not calls:
        assert said == text


def reading(text: str, size: int, tools: list[Any] = TOOLS) -> Callable[[], None]:
    """Reads a text in pieces of a size."""
    reader = ToolCallReader(tools)

    def read() -> None:
        for start in range(0, len(text), size):
            reader.push(text[start : start + size])
        reader.finish()

    return read


@pytest.mark.parametrize("name", [*FORMATS, "arguments first", "text", "white space", "no call"])
@pytest.mark.parametrize("size", [3, 1_000_000])
def test_the_work_grows_with_the_text_only(name: str, size: int) -> None:
    def text(n: int) -> str:
        long = "word \\ \n" * n
        if name in FORMATS:
            return FORMATS[name]([("weather", {"city": long, "places": [long, long]})])
        return {
            "arguments first": f'{{"arguments": {json.dumps({"city": long})}, "name": "weather"}}',
            "text": f"<tool_call> {long}",
            "white space": "a" + " \n" * 4 * n + "<tool_call>",
            "no call": '<tool_call>{"nome": "' * n,
        }[name]

    assert n_steps(reading(text(120), size)) < 2.3 * n_steps(reading(text(60), size)) + 200


def test_no_schema_takes_long() -> None:
    """Schemas whose references branch, or lead in circles, cost no more than others."""
    branching = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)} | {"40": {"type": "string"}}
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}
    for definitions, first in ((branching, "0"), (circle, "a")):
        parameters = {"$defs": definitions, "properties": {"x": {"$ref": f"#/$defs/{first}"}}}
        reader = ToolCallReader([{"function": {"name": "f", "parameters": parameters}}])
        pieces = reader.push("<tool_call><function=f><parameter=x>007</parameter></function></tool_call>")
        assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == '{"x": "007"}'


@pytest.mark.parametrize("n", [5_000, 50_000])
@pytest.mark.parametrize("kind", ["enum", "anyOf"])
def test_a_schema_of_many_values_is_read_once(kind: str, n: int) -> None:
    items: Any = {"enum": [*range(n)]} if kind == "enum" else {"anyOf": [{"const": i} for i in range(n)]}
    parameters = {"properties": {"x": {"type": "array", "items": items}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]

    def written(n_items: int) -> str:
        return f"[TOOL_CALLS]f[ARGS]{json.dumps({'x': [3] * n_items})}"

    few, many = (n_steps(reading(written(n_items), 10, tools)) for n_items in (1, 5))
    assert few < 200_000
    assert many < few + 20_000


# -- types -------------------------------------------------------------------------------------------------------------

DEFINITIONS = {"Text": {"type": "string"}, "Zip": {"enum": ["007", "123", "true", "1e5", "-0", "[1]"]}}


ODD_TEXTS = ("007", "123", "true", "1e5", "-0", "[1]")
"""What stays as it is where a text may stand."""


def arguments_of(text: str, schema: Any) -> Any:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS, "definitions": DEFINITIONS}
    reader = ToolCallReader([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    pieces = [*reader.push(text), *reader.finish()]
    return json.loads("".join(piece.text for piece in pieces if isinstance(piece, CallArguments)))


KEPT = [[schema, text, text] for schema in TABLES["texts between tags"] for text in ODD_TEXTS]


@pytest.mark.parametrize(("schema", "text", "value"), [*KEPT, *TABLES["between tags"]])
def test_text_between_tags_has_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    for written in (
        f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{text}</parameter>\n</invoke>',
    ):
        found = arguments_of(written, schema)["x"]
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("schema", "text", "value"), TABLES["with a type"])
def test_values_that_have_a_type_get_another_only_where_the_schema_asks_for_it(
    schema: Any, text: str, value: Any
) -> None:
    written = [f'<tool_call>{{"name": "f", "arguments": {{"x": {text}}}}}</tool_call>']
    written += [f"[TOOL_CALLS]f[ARGS]{{'x': {text}}}", f"<|tool_call>call:f{{x:{text}}}<tool_call|>"]
    written += [f'{{"arguments": {{"x": {text}}}, "name": "f"}}', f"<|tool_call_start|>[f(x={text})]<|tool_call_end|>"]
    for one in written:
        found = arguments_of(one, schema)["x"]
        assert (found, type(found)) == (value, type(value)), one


STREAMS: dict[str, list[tuple[str, str]]] = {
    "text while no call can begin": [("Hello there", "Hello there"), (" <tool", ""), ("s are", " <tools are")],
    "an object that cannot be a call": [('{"answ', ""), ('er": 4', '{"answer": 4')],
    "arguments behind a mark": [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Par', '>weather{"city": "Par'),
        ('is"', 'is"'),
    ],
    "arguments behind a name": [('[TOOL_CALLS]weather[ARGS]{"city": "Par', '>weather{"city": "Par'), ('is"', 'is"')],
    "strings between tags": [
        ('<tool_call>\n<function=weather>\n<parameter=city>\nParis "', '>weather{"city": "Paris \\"'),
        ("\n", ""),
        ("in spring</par", "\\nin spring"),
        ("ameter>\n</function>", '"}'),
    ],
    "a bare call once its tool is known": [
        ('{"name": "weather", "arguments": ', ""),
        ('{"city": "P', '>weather{"city": "P'),
    ],
}
"""What comes, and what is given at once: ``>`` begins a call."""


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_sure_is_given_at_once(name: str) -> None:
    reader = ToolCallReader(TOOLS)
    for text, at_once in STREAMS[name]:
        pieces = reader.push(text)
        assert "".join(f">{piece.name}" if isinstance(piece, CallStart) else piece.text for piece in pieces) == at_once


def test_what_has_no_end_is_completed_unless_the_budget_cut_it() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n"
    assert read(text, [])[1] == [("weather", '{"city": "Paris"}')]
    assert read(text, [], cut=True)[1] == [("weather", '{"city": "Paris\\n')]
    assert read('<tool_call>{"name": "weather", "arguments": {"city": "Pa', [])[1] == [("weather", '{"city": "Pa')]


def test_what_may_be_a_call_waits_for_so_long_only() -> None:
    text = '{"arguments": {"city": "' + "x" * 150_000
    for size in (1000, len(text)):
        reader = ToolCallReader(TOOLS)
        pieces = [piece for i in range(0, len(text), size) for piece in reader.push(text[i : i + size])]
        assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text
