"""A model's tool calls, read out of its text as it comes.

Without a mark, an answer is a call where it begins with one, bare or in a code block, to a tool that was offered.
Arguments have the types that the tool's schema asks for. Text that turns out to be no call is given back as it was, and
what may still become a call waits.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from localspec.errors import written_json

# A mark says that calls follow; they have one of a few forms, whichever the mark:
#
# =========================================================  ======================================================
# ``{"name": …, "arguments": {…}}``, several, or a list      Hermes, Qwen 2.5 and 3, SmolLM, Granite, Phi-4-mini,
#                                                            Llama 3, Mistral, Command-R, Nemotron, our fallback
# ``name[ARGS]{…}``, ``name<｜tool▁sep｜>{…}``               Mistral, DeepSeek, Kimi K2, gpt-oss
# ``<function=name><parameter=…>…``, ``<invoke name="…">``   Qwen3-Coder, Seed-OSS, MiniMax, DeepSeek V3.2
# ``<function=name>{…}</function>``                          Llama 3.1, Functionary
# ``name <arg_key>…</arg_key><arg_value>…</arg_value>``      GLM-4.5
# ``[name(key="value")]``                                    LFM2, Llama 4, Olmo 3, Gemma 3
# ``call:name{key:<|"|>value<|"|>}``                         Gemma 4, FunctionGemma
# =========================================================  ======================================================


@dataclass(frozen=True, slots=True)
class Mark:
    """A text that announces calls."""

    closers: tuple[str, ...] = ()  # what may end them; an answer may also just go on, or end
    each: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # what each of several calls may begin and end with
    sure: bool = True  # only calls are written behind it; otherwise the call must be of a tool that was offered
    header: str = ""  # what ends the words between a call's name and its arguments
    first: bool = False  # it is a mark only at the beginning of an answer


def _deepseek(name: str) -> tuple[str, ...]:
    """A mark of DeepSeek's, as it and models that were distilled from it write it."""
    return tuple(f"<{bar}{name.replace('_', gap)}{bar}>" for bar in "｜|" for gap in ("▁", "_", " "))


_DEEPSEEK = Mark(_deepseek("tool_calls_end"), (_deepseek("tool_call_begin"), _deepseek("tool_call_end")))
_KIMI = Mark(
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"), (("<|tool_call_begin|>",), ("<|tool_call_end|>",))
)

MARKS: Mapping[str, Mark] = {
    "<tool_call>": Mark(("</tool_call>",)),
    "<|tool_call|>": Mark(("<|/tool_call|>", "</tool_call>")),
    "<|tool_call>": Mark(("<tool_call|>",)),
    "<|tool_call_start|>": Mark(("<|tool_call_end|>",)),
    "<tool_calls>": Mark(("</tool_calls>",), sure=False),
    "<tools>": Mark(("</tools>",), sure=False),
    "<function_call>": Mark(("</function_call>",), sure=False),
    "<function_calls>": Mark(("</function_calls>",), sure=False),
    "<TOOLCALL>": Mark(("</TOOLCALL>",)),
    "<minimax:tool_call>": Mark(("</minimax:tool_call>",)),
    "<seed:tool_call>": Mark(("</seed:tool_call>",)),
    "<function=": Mark(("</tool_call>",), sure=False),
    "[TOOL_CALLS]": Mark(),
    "<|python_tag|>": Mark(),
    "<|python_start|>": Mark(("<|python_end|>",)),
    "<|START_ACTION|>": Mark(("<|END_ACTION|>",)),
    "<|tools_prefix|>": Mark(("<|tools_suffix|>",)),
    "<|action_start|><|plugin|>": Mark(("<|action_end|>",)),
    "<start_function_call>": Mark(("<end_function_call>",)),
    "functools[": Mark(("]",), sure=False, first=True),
    "```tool_code\n": Mark(("```",), sure=False),
    "```tool_call\n": Mark(("```",), sure=False),
    "Action: ```json\n": Mark(("```",), sure=False, first=True),
    "Action:```json\n": Mark(("```",), sure=False, first=True),
    **{f"<｜DSML｜{name}>": Mark((f"</｜DSML｜{name}>",)) for name in ("function_calls", "tool_calls")},
    **dict.fromkeys((*_deepseek("tool_calls_begin"), *_DEEPSEEK.each[0]), _DEEPSEEK),
    **dict.fromkeys(("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", *_KIMI.each[0]), _KIMI),
    **{f"<|channel|>{name} to=": Mark(("<|call|>",), header="<|message|>") for name in ("commentary", "analysis")},
    "to=functions.": Mark(("<|call|>",), sure=False, header="<|message|>"),
}

SEPARATORS = ("[ARGS]", "<|tool_call_argument_begin|>", *_deepseek("tool_sep"))

MARKERS = (
    *(text for opener in MARKS for text in re.findall(r"<[^<]*>|\[\w+\]", opener) if text != "<|channel|>"),
    *(text for mark in MARKS.values() for text in (*mark.closers, *mark.each[1]) if len(text) > 3),
    *(*SEPARATORS, "[CALL_ID]", '<|"|>', "<escape>"),
)
"""Tokens that have no text of their own in some vocabularies, but are read here."""


@dataclass(frozen=True, slots=True)
class Tags:
    """A way of writing arguments as text between tags."""

    key: str  # what begins an argument, up to its name
    value_ends: str
    ends: str = ""  # what ends the call; "" where that is what ends the mark
    lines: bool = False  # values stand on lines of their own


TAGS = {
    "<function=": Tags("<parameter=", "</parameter>", "</function>", lines=True),
    '<invoke name="': Tags('<parameter name="', "</parameter>", "</invoke>"),
    '<｜DSML｜invoke name="': Tags('<｜DSML｜parameter name="', "</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    "<arg_key>": Tags("<arg_key>", "</arg_value>"),
}


# Values in calls, read as they come and written as JSON: JSON, Python's way (``'…'``, ``True``, ``None``, tuples), bare
# keys, Gemma's quotes, line breaks and single backslashes within strings, and a comma too many.

Schema = Any  # a JSON schema; what is none allows everything

Reading = Generator[None, None, Any]  # a reader: it yields where it needs more text

MAX_TAKEN = 100_000  # characters that wait for the end of what may be a call, at most
MAX_DEPTH = 100  # lists and objects within each other

SPACE = re.compile(r"\s+")
WORD = re.compile(r"""[^\s,:;{}\[\]()<>"'`=]+""")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "True": "true", "TRUE": "true", "false": "false", "False": "false", "FALSE": "false",
          "null": "null", "None": "null"}  # fmt: skip
_QUOTES = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_QUOTES |= {quote: re.compile(re.escape(quote)) for quote in ('<|"|>', "<escape>")}
"""What a string is put between -> what may end it or, within one-character quotes, escape."""


class NoCall(Exception):
    """What was read so far is no call, or the text ends within it."""


class IncomingText:
    """Text that comes in pieces and is read once.

    Attributes:
        final: no more text will come.
        taken: what was read since ``record``; None where it will not be given back.
    """

    def __init__(self) -> None:
        self.final = False
        self.taken: list[str] | None = None
        self._n_taken = 0
        self._text = ""
        self._at = 0

    def feed(self, text: str, *, final: bool = False) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self.final = final

    def record(self) -> None:
        """From here on, keep what is read: it may have to be given back."""
        self.taken, self._n_taken = [], 0

    @property
    def n_left(self) -> int:
        return len(self._text) - self._at

    def search(self, pattern: re.Pattern[str], partial: tuple[str, ...]) -> tuple[str, re.Match[str] | None]:
        """Read up to where a pattern is found, or one of the texts that it begins with may yet be; the match itself is
        not read."""
        match = pattern.search(self._text, self._at)
        if match:
            return self.take(match.start() - self._at), match
        return self.take(self.n_left - _overlap(self._text[max(self._at, len(self._text) - 64) :], partial)), None

    def take(self, n: int) -> str:
        if self.taken is not None:
            allowed = min(n, MAX_TAKEN - self._n_taken)
            self._n_taken += allowed
            self.taken.append(self._text[self._at : self._at + allowed])
            if allowed < n:
                self._at += allowed
                raise NoCall
        self._at += n
        return self._text[self._at - n : self._at]

    def more(self) -> Reading:
        if not self.final:
            yield
            return True
        return False

    def peek(self, n: int = 1) -> Generator[None, None, str]:
        """The next n characters, fewer at the end of the text; they are not read."""
        while self.n_left < n and (yield from self.more()):
            pass
        return self._text[self._at : self._at + n]

    def run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """All that is of one kind of characters; the pattern is ``[…]+``."""
        found = []
        while True:
            if match := pattern.match(self._text, self._at):
                found.append(self.take(match.end() - self._at))
            if self._at < len(self._text) or not (yield from self.more()):
                return "".join(found)

    def spaces(self) -> Generator[None, None, str]:
        return (yield from self.run(SPACE))

    def ahead(self, texts: Sequence[str], n: int = 0) -> Generator[None, None, bool]:
        """Whether one of these texts comes, or the end, n characters ahead and behind white space; nothing is read."""
        while True:
            window = self._text[self._at + n : self._at + n + 300]
            rest = window.lstrip()
            if any(rest.startswith(text) for text in texts):
                return True
            waits = not rest or any(text.startswith(rest) for text in texts)
            if not waits or len(window) == 300:
                return False
            if not (yield from self.more()):
                return not rest

    def sees(self, *texts: str) -> Generator[None, None, str]:
        """The first of these texts that comes next, "" where none does. A longer one goes before its beginning."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            for text in texts:
                if rest.startswith(text):
                    return text
                if text.startswith(rest) and not self.final:
                    break
            else:
                return ""
            yield

    def one_of(self, *texts: str) -> Generator[None, None, str]:
        """The same, which is read."""
        return self.take(len((yield from self.sees(*texts))))

    def next_of(self, *texts: str) -> Generator[None, None, str]:
        """The same behind white space, which is read too."""
        yield from self.spaces()
        return (yield from self.one_of(*texts))

    def need(self, *texts: str) -> Reading:
        """Read white space and one of these texts, which has to come next."""
        if not (yield from self.next_of(*texts)):
            raise NoCall

    def colon(self) -> Reading:
        yield from self.need(":")
        yield from self.spaces()

    def separated(self, closer: str) -> Reading:
        """Behind an item: read a comma, one too many as well, or see what ends the list."""
        if not (yield from self.next_of(",")) and (yield from self.peek()) != closer:
            raise NoCall
        yield from self.spaces()


def readings(text: str) -> Iterator[tuple[str, str]]:
    """What a text may be other than a string: kinds, and the value of each as JSON."""
    word = text.strip()
    if word in _WORDS:
        yield ("null" if _WORDS[word] == "null" else "boolean"), _WORDS[word]
    elif _NUMBER.fullmatch(word) and len(word) < 400 and math.isfinite(number := float(word)):
        yield "number", word
        if number.is_integer() and abs(number) < 1 << 53:
            yield "integer", str(int(number))
        elif word.lstrip("-").isdecimal():
            yield "integer", word
    elif word[:1] in ("{", "[", '"') and (value := as_json(word)) is not None:
        yield {"{": "object", "[": "array", '"': "quoted"}[word[0]], value


def as_json(text: str, type_: ArgumentType | None = None) -> str | None:
    """A whole value as JSON; None if it is none."""
    source, found = IncomingText(), list[str]()
    source.feed(text, final=True)
    try:
        for _ in chain(read_value(source, found.append, type_ or UNTYPED), source.spaces()):
            raise AssertionError("the text is all there")
    except NoCall:
        return None
    return None if source.n_left else "".join(found)


Put = Callable[[str], None]


def read_value(source: IncomingText, put: Put, type_: ArgumentType, depth: int = 0) -> Reading:
    """Read a value; its JSON goes out as it comes, of the type that is asked for."""
    first = yield from source.peek()
    if depth > MAX_DEPTH:
        raise NoCall
    if first == "{":
        yield from _read_members(source, put, type_, depth)
    elif first in ("[", "("):
        yield from _read_items(source, put, type_, depth)
    elif quote := (yield from source.one_of(*_QUOTES)):
        if type_.takes_strings:
            put('"')
            yield from read_string(source, put, quote)
            put('"')
        else:
            put(type_.typed((yield from _whole_string(source, quote))))
    elif word := (yield from source.run(WORD)):
        put(type_.literal(word))
    else:
        raise NoCall


def _read_members(source: IncomingText, put: Put, type_: ArgumentType, depth: int) -> Reading:
    before = source.take(1)
    yield from source.spaces()
    while not (yield from source.one_of("}")):
        key = yield from read_key(source)
        put(f"{before}{_quoted(key)}: ")
        yield from source.colon()
        yield from read_value(source, put, type_.member(key), depth + 1)
        yield from source.separated("}")
        before = ", "
    put("}" if before == ", " else "{}")


def _read_items(source: IncomingText, put: Put, type_: ArgumentType, depth: int) -> Reading:
    closer, before = ("]" if source.take(1) == "[" else ")"), "["
    yield from source.spaces()
    while not (yield from source.one_of(closer)):
        put(before)
        yield from read_value(source, put, type_.item, depth + 1)
        yield from source.separated(closer)
        before = ", "
    put("]" if before == ", " else "[]")


def read_key(source: IncomingText) -> Generator[None, None, str]:
    if quote := (yield from source.one_of(*_QUOTES)):
        return (yield from _whole_string(source, quote))
    word = yield from source.run(WORD)
    if not word:
        raise NoCall
    return word


def _whole_string(source: IncomingText, quote: str) -> Generator[None, None, str]:
    found: list[str] = []
    yield from read_string(source, found.append, quote)
    text: str = written_json('"' + "".join(found) + '"')
    return text


def read_string(source: IncomingText, put: Put, quote: str) -> Reading:
    """A string behind its quote, up to and with the other, written as JSON writes it within quotes."""
    while True:
        before, found = source.search(_QUOTES[quote], (quote,))
        if before:
            put(escaped(before))
        if found is None:
            if not (yield from source.more()):
                put(escaped(source.take(source.n_left)))
                raise NoCall
        elif found[0] == quote:
            source.take(len(quote))
            return
        else:
            put((yield from _escape(source)))


def _escape(source: IncomingText) -> Generator[None, None, str]:
    pair = yield from source.peek(2)
    if len(pair) < 2:
        raise NoCall
    source.take(2)
    if pair[1] in '"\\/bfnrt':
        return pair
    if pair[1] in "'\n":
        return escaped(pair[1])
    n = {"u": 4, "x": 2, "U": 8}.get(pair[1], 0)
    digits = yield from source.peek(n)
    if not n or not re.fullmatch(rf"[0-9a-fA-F]{{{n}}}", digits) or (n == 8 and int(digits, 16) > 0x10FFFF):
        return "\\\\" + escaped(pair[1])
    source.take(n)
    code = int(digits, 16)
    if not 0xD800 <= code < 0xE000:
        return escaped(chr(code))
    other = yield from source.peek(6)  # half of a character is none
    if n == 4 and code < 0xDC00 and re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", other):
        return "\\u" + digits + source.take(6)
    return "\\ufffd"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    return _quoted(text)[1:-1]


def _overlap(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of the text that is a beginning of one of the marks."""
    firsts = {mark[0] for mark in marks}
    ends = (text[at:] for at, character in enumerate(text) if character in firsts)
    return next((len(end) for end in ends if any(mark.startswith(end) and mark != end for mark in marks)), 0)


MAX_SCHEMAS = 256  # references and combinations that are followed; what lies beyond allows everything

MAX_VALUES = 5000  # longest ``enum`` that is looked at; a longer one allows everything

_KINDS = ("string", "boolean", "integer", "number", "null", "array", "object")
_SAYING = ("type", "enum", "const", "properties", "items", "additionalProperties")

Alternative = tuple[list[str] | None, frozenset[str] | None]
"""Types, None is all, and values in the form of ``_comparable``, None is any."""


class ArgumentType:
    """What a tool's arguments, or a value in them, may be by its JSON schema, for models that write values as text.

    Without a schema, or where it says nothing, a value is what it looks like, else a string.

    Args:
        schema: of this value.
        root: the schema that references are of; None: this one.
    """

    def __init__(self, schema: Schema, root: Schema = None) -> None:
        self._schema = schema
        self._root = schema if root is None else root
        self._members: dict[str, ArgumentType] = {}

    def member(self, key: str) -> ArgumentType:
        """An object's member."""
        if key not in self._members:
            found = (_object(one, "properties").get(key, one.get("additionalProperties")) for one in self._combined)
            self._members[key] = self._inner(found)
        return self._members[key]

    @cached_property
    def item(self) -> ArgumentType:
        """A list's items."""
        return self._inner(one.get("items") for one in self._combined)

    def _inner(self, schemas: Iterator[Schema]) -> ArgumentType:
        schema = next((each for each in schemas if isinstance(each, Mapping)), None)
        return UNTYPED if schema is None else ArgumentType(schema, self._root)

    @property
    def names(self) -> list[str]:
        """An object's members that are declared, in their order."""
        return list(dict.fromkeys(chain.from_iterable(_object(one, "properties") for one in self._combined)))

    @cached_property
    def takes_strings(self) -> bool:
        """Whether a value that is written as a string is one."""
        return any(
            "string" in kinds if kinds else values is None or any(value[0] == '"' for value in values)
            for kinds, values in self._alternatives
        )

    @property
    def is_text(self) -> bool:
        """Whether any text is a value as it is: nothing but strings is allowed, and any of them."""
        return self._alternatives == [(["string"], None)]

    def typed(self, text: str) -> str:
        """A value that was written as plain text, as JSON.

        The schema decides: where it asks for a string, ``007`` and ``true`` are strings. Null, lists and objects are
        taken for what they look like wherever the schema allows them; of a string and a number it takes the type that
        it names first. What fits nothing is a string where there may be one, else what it looks like.
        """
        found = dict(readings(text)) | {"string": _quoted(text)}
        for first in (("null", "array", "object"), found):
            for kinds, values in self._alternatives:
                for kind in kinds or found:
                    if kind in first and kind in found and _among(found[kind], values):
                        return found[kind]
        return found["string"] if self.takes_strings else next(iter(found.values()))

    def literal(self, word: str) -> str:
        """A value without quotes, as JSON: what it is, except where the schema asks for a string in its place."""
        found = dict(readings(word))
        fits = any(
            _among(value, values)
            for kinds, values in self._alternatives
            for kind, value in found.items()
            if kinds is None or kind in kinds
        )
        stays = fits or "null" in found or not self.takes_strings
        return next(iter(found.values())) if found and stays else self.typed(word)

    @cached_property
    def _alternatives(self) -> list[Alternative]:
        return [_alternative(one) for one in self._combined]

    @cached_property
    def _combined(self) -> list[Mapping[str, Any]]:
        """The schemas that a value may follow: references followed, ``anyOf`` and the like taken apart."""
        found, seen, nullable = list[Mapping[str, Any]](), set[int](), False
        left = [(self._schema, True)]  # and whether one that says nothing allows everything: not where others apply too
        while left and len(seen) < MAX_SCHEMAS:
            schema, alone = left.pop()
            if not isinstance(schema, Mapping):
                found += [{}] if alone else []
                continue
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            nullable = nullable or schema.get("nullable") is True
            parts = [self._referred(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
            for name in ("anyOf", "oneOf", "allOf"):
                parts += schema[name][:MAX_SCHEMAS] if isinstance(schema.get(name), list) else []
            says = any(name in schema for name in _SAYING)
            if says or (alone and not parts):
                found.append(schema)
            alone = alone and not says and "allOf" not in schema
            left += [(part, alone) for part in reversed(parts)]
        if nullable and found:
            found.append({"type": "null"})
        return [*found, {}] if left or not found else found

    def _referred(self, reference: str) -> Schema:
        found = self._root
        if not reference.startswith("#"):
            return None
        for part in reference[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found


UNTYPED = ArgumentType(None)


def _object(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _alternative(schema: Mapping[str, Any]) -> Alternative:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    given = schema.get("type")
    kinds = [kind for kind in (given if isinstance(given, list) else [given]) if kind in _KINDS]
    known = values if isinstance(values, list) and len(values) <= MAX_VALUES else None
    return kinds or None, None if known is None else frozenset(map(_comparable, known))


_encoded = json.JSONEncoder(sort_keys=True).encode


def _comparable(value: Any) -> str:
    """A JSON value as a text; equal values have the same."""
    return _encoded(int(value) if isinstance(value, float) and value.is_integer() else value)


def _among(value: str, values: Collection[str] | None) -> bool:
    return values is None or _comparable(json.loads(value)) in values


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: its place among the answer's calls, its id, the function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the pieces of one call, joined, are JSON."""

    index: int
    text: str


Piece = TextPiece | CallStart | CallArguments


_BARE = Mark(sure=False)  # no mark

_FIRST = tuple(sorted(MARKS, key=len, reverse=True))
_OPENERS = tuple(opener for opener in _FIRST if not MARKS[opener].first)
_OPENER = re.compile("|".join(map(re.escape, _OPENERS)))
_OTHERS = tuple(opener for opener in _OPENERS if opener != "<function=")  # which is one more call of the same mark
_NAME = re.compile(r"[\w.:/-]+")
_AROUND_NAME = re.compile(r"^(?:call:)?(?:functions\.)?|(?::\d+|\.call)$")
_IDENTIFIER = re.compile(r"[\w-]+")
_IN_TAG = re.compile(r"""[^<>\n"]+""")
_ATTRIBUTES = re.compile(r"[^<>]+")
_LANGUAGE = re.compile(r"[a-z_]+")
_LANGUAGES = ("", "json", "xml", "tool_call")
_HEADER = re.compile(r"[^<{]+")
_CALLED = ("name", "function", "tool_name")
_GIVEN = ("arguments", "parameters", "args")
_BESIDE = ("id", "type", "index", "tool_call_id")


class ToolCallReader:
    """Text in pieces -> text, and calls, in pieces.

    White space around calls is no text where nothing stands on its other side.

    Args:
        tools: the functions that may be called, as the request has them; without any, all is text.
        parallel: whether there may be several calls; if not, nothing is read behind the first.

    Attributes:
        n_calls, n_done: calls begun, and complete, so far.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> None:
        functions = [tool["function"] for tool in tools]
        self._functions = {each["name"]: ArgumentType(each.get("parameters")) for each in functions}
        self._parallel = parallel
        self._source = IncomingText()
        self._reading = self._read()
        self._over = False
        self._cut = False
        self._pieces: list[Piece] = []
        self._space: list[str] = []  # may turn out to stand around a call
        self._said = False
        self._n_sure, self._settled = 0, (0, 0)  # pieces, and calls begun and complete, that stay whatever comes
        self._holding = False  # a list that is all or nothing is being read
        self._muted = False  # a call that is left out is being read
        self.n_calls = 0
        self.n_done = 0

    def push(self, text: str) -> list[Piece]:
        """Read on; returns what is certain now."""
        return self._advance(text, final=False)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """The answer is over; returns the rest. Where it was ``cut``, a call that is not whole stays so."""
        self._cut = cut
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> list[Piece]:
        if not self._functions:
            return [TextPiece(text)] if text else []
        if not self._over:
            self._source.feed(text, final=final)
            self._over = next(self._reading, self) is self
        n = len(self._pieces) if self._source.taken is None else self._n_sure
        pieces, self._pieces, self._n_sure = self._pieces[:n], self._pieces[n:], 0
        return _joined(pieces)

    # -- text and calls in turns ---------------------------------------------------------------------------------------

    def _read(self) -> Reading:
        source = self._source
        self._record()
        yield from self._try(self._answer_begins())
        while self._parallel or not self.n_done:
            text, match = source.search(_OPENER, _OPENERS)
            self._say(text)
            if match:
                self._record()
                yield from self._try(self._marked(match[0]))
            elif not (yield from source.more()):
                self._say(source.take(source.n_left))
                break
        if not self.n_calls:
            self._pieces += map(TextPiece, self._space)

    def _try(self, reading: Reading) -> Reading:
        """Read calls; what was read since the last whole one is text."""
        try:
            yield from reading
        except NoCall:
            if self._source.taken is not None:
                self.n_calls, self.n_done = self._settled
                del self._pieces[self._n_sure :]
        self._holding, self._muted = False, False
        taken, self._source.taken = self._source.taken, None
        if self._parallel or not self.n_done:
            self._say("".join(taken or ()))

    def _say(self, text: str) -> None:
        body = text.rstrip()
        if body:
            if self._said or not self.n_calls:
                self._pieces += map(TextPiece, self._space)
                self._pieces.append(TextPiece(body))
            else:
                self._pieces.append(TextPiece(body.lstrip()))
            self._said, self._space = True, []
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _answer_begins(self) -> Reading:
        """Calls without a mark, or a code block of nothing but calls."""
        source = self._source
        yield from source.spaces()
        opener, fence = (yield from source.sees(*_FIRST)), ""
        if not opener and (fence := (yield from source.one_of("```"))):
            if (yield from source.run(_LANGUAGE)) not in _LANGUAGES:
                raise NoCall
            yield from source.spaces()
            opener = yield from source.sees(*_OPENERS)
        if opener:
            yield from self._marked(opener)
        else:
            while (self._parallel or not self.n_done) and (yield from source.peek()) in ("{", "["):
                yield from self._item(_BARE)
                yield from source.next_of(";", ",")
                yield from source.spaces()
        if fence and self.n_calls:
            yield from self._closed("```")

    def _marked(self, opener: str) -> Reading:
        """Calls behind a mark, and behind those that follow them at once."""
        source = self._source
        while opener:
            mark, n_before = MARKS[opener], self.n_calls
            if opener != "<function=" and opener not in mark.each[0]:  # those are of the call itself
                source.take(len(opener))
            opener = ""
            while not opener and (self._parallel or not self.n_done):
                yield from source.spaces()
                begun = (yield from source.one_of(*mark.each[0])) if mark.each[0] else ""
                if not begun and self.n_calls > n_before:
                    if mark.closers and (yield from source.one_of(*mark.closers)):
                        self._record()
                        return
                    if (yield from source.one_of(",", ";")):
                        continue
                    if (opener := (yield from source.sees(*_OTHERS))) or not (yield from source.peek()):
                        break
                if mark.each[0] and not begun:
                    raise NoCall
                yield from source.spaces()
                yield from self._item(mark)
                if mark.each[1]:
                    yield from self._closed(*mark.each[1])

    # -- the forms of a call -------------------------------------------------------------------------------------------

    def _item(self, mark: Mark) -> Reading:
        """A call, or a list of them, of any form."""
        source = self._source
        first = yield from source.peek()
        if first == "{":
            yield from self._object(mark)
        elif first == "[":
            source.take(1)
            yield from self._list(mark)
        elif first == "<":
            opener = yield from source.one_of("<function=", '<invoke name="', '<｜DSML｜invoke name="')
            if not opener:
                raise NoCall
            yield from self._tagged(mark, opener)
        else:
            yield from self._named(mark)

    def _list(self, mark: Mark) -> Reading:
        """Behind its bracket. Without a sure mark, a list in Python's notation is all or nothing."""
        source, n_items = self._source, 0
        yield from source.spaces()
        self._holding = not mark.sure and (yield from source.peek()) != "{"
        while not (yield from source.one_of("]")):
            if (yield from source.peek()) == "{":
                yield from self._object(mark)
            else:
                yield from self._named(mark)
            n_items += 1
            if self.n_done and not (self._parallel or self._holding):
                return
            yield from source.separated("]")
        if self._holding:
            following = yield from source.peek()
            if following.strip("`;") and not following.isspace():
                raise NoCall
            self._holding = False
        if n_items:
            self._record()

    def _object(self, mark: Mark) -> Reading:
        """``{"name": …, "arguments": {…}}``, in any order, or as OpenAI writes it."""
        call = SimpleNamespace(name=None, arguments=None, begun=False, nested=False)  # as far as it was read
        yield from self._members(mark, call)
        if call.name is None or (mark is _BARE and call.arguments is None):
            raise NoCall
        if call.begun:
            self._done()
            return
        arguments = as_json(call.arguments or "{}", self._type(call.name))
        if arguments is None:
            raise NoCall
        yield from self._called(call.name, mark, arguments)

    def _members(self, mark: Mark, call: SimpleNamespace) -> Reading:
        source = self._source
        source.take(1)
        yield from source.spaces()
        while not (yield from source.one_of("}")):
            key = yield from read_key(source)
            if mark is _BARE and not call.begun and key not in (*_CALLED, *_GIVEN, *_BESIDE):
                raise NoCall
            yield from source.colon()
            is_object = (yield from source.peek()) == "{"
            if key == "function" and is_object and not call.nested:
                call.nested = True
                yield from self._members(mark, call)
            elif key in _CALLED and call.name is None:
                name = written_json((yield from self._value()))
                if not isinstance(name, str) or not name:
                    raise NoCall
                call.name = self._function(name)
                if not mark.sure and call.name not in self._functions:
                    raise NoCall
            elif call.name is None and is_object and key in self._functions and mark is not _BARE:
                call.name = key  # Apertus: {name: {…}}
                yield from self._given(mark, call)
            elif key in _GIVEN and call.arguments is None:
                yield from self._given(mark, call)
            else:
                yield from self._value()
            yield from source.separated("}")

    def _value(self) -> Generator[None, None, str]:
        """A value as JSON, of whatever type it seems to be."""
        found: list[str] = []
        yield from read_value(self._source, found.append, UNTYPED)
        return "".join(found)

    def _given(self, mark: Mark, call: SimpleNamespace) -> Reading:
        """The arguments of an object: they go out as they come, if the name stood before them."""
        if call.name is not None and (yield from self._source.peek()) == "{":
            call.begun, call.arguments = True, ""
            self._start(call.name, mark)
            yield from read_value(self._source, self._give, self._type(call.name))
            return
        value = yield from self._value()
        value = written_json(value) if value.startswith('"') else value
        call.arguments = "{}" if value.strip() in ("", "null") else value.strip()
        if not call.arguments.startswith("{"):
            raise NoCall

    def _named(self, mark: Mark) -> Reading:
        source = self._source
        raw = yield from source.run(_NAME)
        if not raw:
            raise NoCall
        if (yield from source.one_of("(")):
            yield from self._python(mark, self._function(raw))
            return
        if mark is _BARE:
            raise NoCall
        yield from source.spaces()
        sure = raw.startswith("call:") or mark is MARKS["[TOOL_CALLS]"]
        if mark.header:
            sure, found = True, ""
            while found != mark.header:
                yield from source.run(_HEADER)
                found = yield from source.one_of("<|constrain|>", "<|channel|>", mark.header)
                if not found:
                    raise NoCall
        if (yield from source.one_of("[CALL_ID]")):
            yield from source.run(_IDENTIFIER)
        if (yield from source.next_of(*SEPARATORS)):
            sure = True
            yield from source.spaces()
            raw = (yield from source.run(_NAME)) or raw  # DeepSeek R1: function<sep>name
        name = self._function(raw)
        fence = yield from source.next_of("```json", "```")
        yield from source.spaces()
        if sure and (yield from source.peek()) == "{":
            yield from self._called(name, mark)
            if fence:
                yield from self._closed("```")
        elif (yield from source.sees("<arg_key>")):
            yield from self._tagged_arguments(mark, "<arg_key>", name)
        elif name in self._functions and mark.closers and not self._cut and (yield from source.ahead(mark.closers)):
            yield from self._called(name, mark, "{}")
        else:
            raise NoCall

    def _python(self, mark: Mark, name: str) -> Reading:
        """``name(key=value, …)`` behind its parenthesis."""
        source, type_ = self._source, self._type(name)
        if name not in self._functions:
            raise NoCall
        self._start(name, mark, early=mark.sure)
        declared, n = type_.names, 0
        yield from source.spaces()
        while not (yield from source.one_of(")")):
            word = yield from source.run(_IDENTIFIER)
            named = (yield from source.next_of("=")) if word else ""
            if not named and n >= len(declared):
                raise NoCall
            key = word if named else declared[n]
            self._give(f"{', ' if n else '{'}{_quoted(key)}: ")
            yield from source.spaces()
            if word and not named:
                self._give(type_.member(key).literal(word + (yield from source.run(WORD))))
            else:
                yield from read_value(source, self._give, type_.member(key))
            n += 1
            yield from source.separated(")")
        self._give("}" if n else "{}")
        self._done()

    def _tagged(self, mark: Mark, opener: str) -> Reading:
        """``<function=name>`` or ``<invoke name="name">``, behind its beginning."""
        source = self._source
        name = self._function((yield from source.run(_IN_TAG)).strip())
        if not name or not (yield from source.one_of('">', ">")):
            raise NoCall
        if not mark.sure and name not in self._functions:
            raise NoCall
        yield from source.spaces()
        if (yield from source.peek()) == "{":
            yield from self._called(name, mark)
            yield from self._closed(TAGS[opener].ends)
        else:
            yield from self._tagged_arguments(mark, opener, name)

    def _tagged_arguments(self, mark: Mark, opener: str, name: str) -> Reading:
        """Arguments between tags."""
        source, tags, type_ = self._source, TAGS[opener], self._type(name)
        n = 0
        while True:
            yield from source.spaces()
            if not (yield from source.peek()):
                if self._cut or not n:
                    raise NoCall
                break
            if (yield from source.one_of(tags.ends) if tags.ends else source.ahead(mark.closers)):
                break
            yield from source.need(tags.key)
            key = (yield from source.run(_IN_TAG)).strip()
            attributes = yield from source.run(_ATTRIBUTES)
            if not key or not (yield from source.one_of(">", "</arg_key>")):
                raise NoCall
            if tags.key == "<arg_key>":
                yield from source.need("<arg_value>")
            if not n:
                self._start(name, mark)
            self._give(f"{', ' if n else '{'}{_quoted(key)}: ")
            n += 1
            if 'string="true"' in attributes or type_.member(key).is_text:
                self._give('"')
                yield from self._tagged_value(mark, tags, type_.names, lambda text: self._give(escaped(text)))
                self._give('"')
            else:
                found: list[str] = []
                yield from self._tagged_value(mark, tags, type_.names, found.append)
                self._give(type_.member(key).typed("".join(found)))
        if not n:
            self._start(name, mark)
        self._give("}" if n else "{}")
        self._done()

    def _tagged_value(self, mark: Mark, tags: Tags, declared: Sequence[str], put: Put) -> Reading:
        """A value up to what ends it. The value itself may hold such a text: what follows an end has to fit."""
        source = self._source
        after = {tags.value_ends: (tags.key, tags.ends) if tags.ends else (tags.key, *mark.closers)}
        if tags.lines:
            yield from source.one_of("\n")
            # Some models forget to end a value.
            forgotten = {f"\n{tags.key}": tuple(f"{name}>" for name in declared)}
            forgotten[f"\n{tags.ends}"] = (*mark.closers, *_OPENERS)
            after = {f"\n{tags.value_ends}": after[tags.value_ends]} | after | forgotten
        pattern = re.compile("|".join(map(re.escape, after)))
        while True:
            text, match = source.search(pattern, tuple(after))
            if text:
                put(text)
            if match:
                ended = yield from source.ahead(after[match[0]], len(match[0]))
                read = source.take(len(match[0])) if not ended or match[0].endswith(tags.value_ends) else ""
                if ended:
                    return
                put(read)
            elif not (yield from source.more()):
                rest = source.take(source.n_left)
                if self._cut:
                    put(rest)
                    raise NoCall
                put(rest.removesuffix("\n") if tags.lines else rest)
                return

    # -- calls on their way out ----------------------------------------------------------------------------------------

    def _function(self, raw: str) -> str:
        return raw if raw in self._functions else _AROUND_NAME.sub("", raw)

    def _type(self, name: str) -> ArgumentType:
        return self._functions.get(name, UNTYPED)

    def _called(self, name: str, mark: Mark, arguments: str | None = None) -> Reading:
        """A call with these arguments; None: they come, as JSON."""
        self._start(name, mark)
        if arguments is None:
            yield from read_value(self._source, self._give, self._type(name))
        else:
            self._give(arguments)
        self._done()

    def _closed(self, *texts: str) -> Reading:
        """Read one of these texts, if it comes: it belongs to the calls before it."""
        if (yield from self._source.next_of(*texts)):
            self._record()

    def _start(self, name: str, mark: Mark, *, early: bool = True) -> None:
        """A call begins; ``early``: it is one, whatever comes."""
        if not mark.sure and name not in self._functions:
            raise NoCall
        self._muted = not self._parallel and self.n_calls > 0
        if not self._muted:
            self.n_calls += 1
        self._put(CallStart(self.n_calls - 1, f"call_{secrets.token_hex(12)}", name))
        if early and not self._holding:
            self._source.taken = None

    def _give(self, text: str) -> None:
        if text:
            self._put(CallArguments(self.n_calls - 1, text))

    def _put(self, piece: Piece) -> None:
        if not self._muted:
            self._pieces.append(piece)

    def _record(self) -> None:
        """Calls until here stay; what follows may have to be given back."""
        self._source.record()
        self._n_sure, self._settled = len(self._pieces), (self.n_calls, self.n_done)

    def _done(self) -> None:
        self.n_done += not self._muted
        self._muted = False
        if not self._holding:
            self._record()


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Text that follows text, and arguments those of the same call, as one piece."""
    groups = groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", None)))
    found = (list(same) for _, same in groups)
    return [same[0] if len(same) == 1 else replace(same[0], text="".join(each.text for each in same))  # type: ignore
            for same in found]  # fmt: skip
