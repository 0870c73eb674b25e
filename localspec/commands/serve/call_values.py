"""Values that models write in calls, read as they come: JSON, and what is nearly JSON, written again as JSON.

Valid JSON is passed on as it is. Besides it there are Python's way (``'…'``, ``True``, ``None``, tuples), bare keys,
Gemma's quotes, line breaks and single backslashes within strings, and a comma too many.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from localspec.values import written_json

Schema = Any
"""A JSON schema, or what a client sent in place of one; what cannot be read allows everything."""

Reading = Generator[None, None, Any]
"""A reader: it yields where it needs more text."""

MAX_TAKEN = 100_000
"""Characters that wait for the end of what may be a call, at most."""

MAX_DEPTH = 100
"""Lists and objects within each other."""

SPACE = re.compile(r"\s+")
WORD = re.compile(r"""[^\s,:;{}\[\]()<>"'`=]+""")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "True": "true", "TRUE": "true", "false": "false", "False": "false", "FALSE": "false",
          "null": "null", "None": "null"}  # fmt: skip
_QUOTES = ('<|"|>', "<escape>")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"""[^'"\\\x00-\x1f]+""")}


class NoCall(Exception):
    """What was read so far is no call."""


class EndOfText(NoCall):
    """The answer is over in the midst of it."""


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
        """What is read from here on may have to be given back."""
        self.taken, self._n_taken = [], 0

    @property
    def n_left(self) -> int:
        """Characters that have come and were not read."""
        return len(self._text) - self._at

    def some(self, pattern: re.Pattern[str]) -> str:
        """Read what is there by now of a kind of characters."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def search(self, pattern: re.Pattern[str], partial: tuple[str, ...]) -> tuple[str, re.Match[str] | None]:
        """Read up to where a pattern is found, or to where it may yet be; the match itself is not read.

        Args:
            pattern: what is looked for.
            partial: texts that its matches begin with.
        """
        match = pattern.search(self._text, self._at)
        if match:
            return self.take(match.start() - self._at), match
        return self.take(self.n_left - _overlap(self._text[max(self._at, len(self._text) - 64) :], partial)), None

    def take(self, n: int) -> str:
        """Read n characters that are there."""
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
        """Wait for text; whether there can be any."""
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

    def one_of(self, *texts: str) -> Generator[None, None, str]:
        """Read the first of these texts that comes next, "" where none does. A longer one goes before its beginning."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            for text in texts:
                if rest.startswith(text):
                    return self.take(len(text))
                if text.startswith(rest) and not self.final:
                    break
            else:
                return ""
            yield


class Untyped:
    """Types where no schema says any."""

    root: Schema = None

    def member(self, schema: Schema, key: str) -> Schema:
        return None

    def item(self, schema: Schema) -> Schema:
        return None

    def takes_strings(self, schema: Schema) -> bool:
        return True

    def typed(self, text: str, schema: Schema) -> str:
        """A value that was written as plain text, as JSON."""
        return self.literal(text, schema)

    def literal(self, word: str, schema: Schema) -> str:
        """A value without quotes, as JSON."""
        return next((value for _, value in readings(word)), None) or json.dumps(word, ensure_ascii=False)


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


def as_json(text: str, types: Untyped | None = None) -> str | None:
    """A whole value as JSON; None if it is none."""
    source, found = IncomingText(), list[str]()
    source.feed(text, final=True)
    types = types or Untyped()

    def reading() -> Reading:
        yield from read_value(source, found.append, types, types.root)
        yield from source.spaces()

    try:
        for _ in reading():
            raise AssertionError("the text is all there")
    except NoCall:
        return None
    return None if source.n_left else "".join(found)


Put = Callable[[str], None]


def read_value(source: IncomingText, put: Put, types: Untyped, schema: Schema, depth: int = 0) -> Reading:
    """Read a value; its JSON goes out as it comes, of the types that a schema asks for.

    Raises:
        NoCall: it is none.
        EndOfText: the text ends within it.
    """
    first = yield from source.peek()
    if depth > MAX_DEPTH:
        raise NoCall
    if first == "{":
        yield from _read_members(source, put, types, schema, depth)
    elif first in ("[", "("):
        yield from _read_items(source, put, types, schema, depth)
    elif quote := (yield from read_quote(source)):
        if types.takes_strings(schema):
            put('"')
            yield from read_string(source, put, quote)
            put('"')
        else:
            put(types.typed((yield from _whole_string(source, quote)), schema))
    elif word := (yield from source.run(WORD)):
        put(types.literal(word, schema))
    else:
        raise NoCall if (yield from source.peek()) else EndOfText


def _read_members(source: IncomingText, put: Put, types: Untyped, schema: Schema, depth: int) -> Reading:
    put(source.take(1))
    while not (yield from _closed(source, put, "}")):
        key = yield from read_key(source)
        put(json.dumps(key, ensure_ascii=False))
        put((yield from source.spaces()))
        if not (yield from source.one_of(":")):
            raise NoCall
        put(":")
        put((yield from source.spaces()))
        yield from read_value(source, put, types, types.member(schema, key), depth + 1)
        if (yield from _closed(source, put, "}", ",")):
            return


def _read_items(source: IncomingText, put: Put, types: Untyped, schema: Schema, depth: int) -> Reading:
    closer = "]" if source.take(1) == "[" else ")"
    put("[")
    while not (yield from _closed(source, put, closer)):
        yield from read_value(source, put, types, types.item(schema), depth + 1)
        if (yield from _closed(source, put, closer, ",")):
            return


def _closed(source: IncomingText, put: Put, closer: str, comma: str = "") -> Reading:
    """Whether a list or object ends here; else a comma has to be read, where one is given. One too many is dropped."""
    space = yield from source.spaces()
    if comma and (yield from source.one_of(comma)):
        after = yield from source.spaces()
        if (yield from source.peek()) != closer:
            put(space + comma + after)
            return False
        space += after
    elif comma and (yield from source.peek()) not in (closer, ""):
        raise NoCall
    put(space)
    found = yield from source.one_of(closer)
    if found:
        put("}" if closer == "}" else "]")
    elif not (yield from source.peek()):
        raise EndOfText
    return bool(found)


def read_key(source: IncomingText) -> Generator[None, None, str]:
    """A member's name, in quotes or bare."""
    if quote := (yield from read_quote(source)):
        return (yield from _whole_string(source, quote))
    word = yield from source.run(WORD)
    if not word:
        raise NoCall if (yield from source.peek()) else EndOfText
    return word


def read_quote(source: IncomingText) -> Generator[None, None, str]:
    """The quote that a string begins with; "" if none does."""
    first = yield from source.peek()
    if first == "<":
        return (yield from source.one_of(*_QUOTES))
    return source.take(1) if first in ('"', "'") else ""


def _whole_string(source: IncomingText, quote: str) -> Generator[None, None, str]:
    found: list[str] = []
    yield from read_string(source, found.append, quote)
    text: str = written_json('"' + "".join(found) + '"')
    return text


def read_string(source: IncomingText, put: Put, quote: str) -> Reading:
    """A string behind its quote, up to and without the other, written as JSON writes it within quotes."""
    if quote not in _PLAIN:
        yield from read_until(source, lambda text: put(escaped(text)), quote)
        return
    while True:
        first = yield from source.peek()
        if not first:
            raise EndOfText
        if plain := source.some(_PLAIN[quote]):
            put(plain)
        elif first == "\\":
            put((yield from _escape(source)))
        elif source.take(1) == quote:
            return
        else:
            put(escaped(first))


def _escape(source: IncomingText) -> Generator[None, None, str]:
    """What a backslash begins."""
    pair = yield from source.peek(2)
    if len(pair) < 2:
        raise EndOfText
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
        return f"\\u{digits}" if n == 4 else escaped(chr(code))
    other = yield from source.peek(6)  # half of a character is none
    if n == 4 and code < 0xDC00 and re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", other):
        return "\\u" + digits + source.take(6)
    return "\\ufffd"


def escaped(text: str) -> str:
    """A text as JSON writes it within quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_until(source: IncomingText, put: Put, closer: str) -> Reading:
    """Pass on what comes before a text, and read that too."""
    pattern, found = re.compile(re.escape(closer)), None
    while found is None:
        before, found = source.search(pattern, (closer,))
        if before:
            put(before)
        if found is None and not (yield from source.more()):
            put(source.take(source.n_left))
            raise EndOfText
    source.take(len(closer))


def _overlap(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of the text that is a beginning of one of the marks."""
    firsts = {mark[0] for mark in marks}
    ends = (text[at:] for at, character in enumerate(text) if character in firsts)
    return next((len(end) for end in ends if any(mark.startswith(end) and mark != end for mark in marks)), 0)
