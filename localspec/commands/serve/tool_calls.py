"""A model's tool calls, read out of its text as it comes.

Without a mark, an answer is a call where it begins with one, bare or in a code block, to a tool that was offered.
Arguments have the types that the tool's schema asks for. Text that turns out to be no call is given back as it was, and
what may still become a call waits.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from localspec.commands.serve.argument_types import ArgumentTypes
from localspec.commands.serve.call_marks import MARKS, SEPARATORS, TAGS, Mark, Tags
from localspec.commands.serve.call_values import (
    WORD,
    EndOfText,
    IncomingText,
    NoCall,
    Put,
    Reading,
    Untyped,
    as_json,
    escaped,
    read_key,
    read_value,
)
from localspec.values import written_json


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is no call."""

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


_BARE = Mark(sure=False)
"""No mark."""

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
        n_calls: calls begun so far.
        n_done: calls complete so far.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> None:
        functions = [tool["function"] for tool in tools]
        self._functions = {each["name"]: ArgumentTypes(each.get("parameters")) for each in functions}
        self._parallel = parallel
        self._source = IncomingText()
        self._reading = self._read()
        self._over = False
        self._cut = False
        self._pieces: list[Piece] = []
        self._space: list[str] = []  # may turn out to stand around a call
        self._said = False
        # A call whose text may have to be given back: its pieces wait, and those of a list that is all or nothing.
        self._waiting: list[Piece] = []
        self._holding = False
        self._n_before = 0, 0
        self._muted = False  # a call that is left out is being read
        self.n_calls = 0
        self.n_done = 0

    def push(self, text: str) -> list[Piece]:
        """Read on; returns what is certain now."""
        if not self._functions:
            return [TextPiece(text)] if text else []
        return self._advance(text, final=False)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """The answer is over; returns the rest.

        Args:
            cut: it was ended before its end: a call that is not whole stays so.
        """
        self._cut = cut
        return self._advance("", final=True) if self._functions else []

    def _advance(self, text: str, *, final: bool) -> list[Piece]:
        if not self._over:
            self._source.feed(text, final=final)
            self._over = next(self._reading, self) is self
        pieces, self._pieces = self._pieces, []
        return _joined(pieces)

    # -- text and calls in turns ---------------------------------------------------------------------------------------

    def _read(self) -> Reading:
        self._source.record()
        yield from self._try(self._answer_begins())
        while self._parallel or not self.n_done:
            opener = yield from self._next_mark()
            if not opener:
                break
            yield from self._try(self._marked(opener))
        if not self.n_calls:
            self._pieces += map(TextPiece, self._space)

    def _try(self, reading: Reading) -> Reading:
        """Read calls; what was read since the last whole one is text."""
        try:
            yield from reading
        except NoCall:
            if self._holding:
                self.n_calls, self.n_done = self._n_before
            elif self._waiting:
                self.n_calls -= 1
        self._waiting, self._holding, self._muted = [], False, False
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

    def _next_mark(self) -> Generator[None, None, str]:
        """Text up to a mark, which is read; "" at the end."""
        while True:
            text, match = self._source.search(_OPENER, _OPENERS)
            self._say(text)
            if match:
                self._source.record()
                return self._source.take(len(match[0]))
            if not (yield from self._source.more()):
                self._say(self._source.take(self._source.n_left))
                return ""

    def _answer_begins(self) -> Reading:
        """Calls without a mark, or a code block of nothing but calls."""
        source = self._source
        yield from source.spaces()
        opener, fence = (yield from source.one_of(*_FIRST)), ""
        if not opener and (fence := (yield from source.one_of("```"))):
            if (yield from source.run(_LANGUAGE)) not in _LANGUAGES:
                raise NoCall
            yield from source.spaces()
            opener = yield from source.one_of(*_OPENERS)
        if opener:
            yield from self._marked(opener)
        else:
            while (self._parallel or not self.n_done) and (yield from source.peek()) in ("{", "["):
                yield from self._item(_BARE)
                yield from source.spaces()
                yield from source.one_of(";", ",")
                yield from source.spaces()
        if fence and self.n_calls:
            yield from source.spaces()
            if (yield from source.one_of("```")):
                source.record()

    def _marked(self, opener: str) -> Reading:
        """Calls behind a mark, and behind those that follow them at once."""
        while opener:
            opener = yield from self._behind(opener)

    def _behind(self, opener: str) -> Generator[None, None, str]:
        """Calls behind a mark, up to what ends them; the next mark, if that is what does."""
        source, mark, n_before = self._source, MARKS[opener], self.n_calls
        begun = opener == "<function=" or opener in mark.each[0]
        while self._parallel or not self.n_done:
            if opener == "<function=" and begun:
                yield from self._tagged(mark, opener)
            else:
                yield from source.spaces()
                if not begun:
                    begun = bool(mark.each[0] and (yield from source.one_of(*mark.each[0])))
                if not begun and self.n_calls > n_before:
                    if mark.closers and (yield from source.one_of(*mark.closers)):
                        source.record()
                        return ""
                    if (yield from source.one_of(",", ";")):
                        continue
                    if another := (yield from source.one_of(*_OTHERS)):
                        return another
                    if not (yield from source.peek()):
                        return ""
                if mark.each[0] and not begun:
                    raise NoCall
                yield from self._item(mark)
            if mark.each[1]:
                yield from source.spaces()
                if (yield from source.one_of(*mark.each[1])):
                    source.record()
            begun = False
        return ""

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
        self._n_before = self.n_calls, self.n_done
        while not (yield from source.one_of("]")):
            if (yield from source.peek()) == "{":
                yield from self._object(mark)
            else:
                yield from self._named(mark)
            n_items += 1
            if self.n_done and not (self._parallel or self._holding):
                return
            yield from source.spaces()
            if not (yield from source.one_of(",")) and (yield from source.peek()) != "]":
                raise NoCall if (yield from source.peek()) else EndOfText
            yield from source.spaces()
        if self._holding:
            following = yield from source.peek()
            if following.strip("`;") and not following.isspace():
                raise NoCall
            self._holding = False
            self._commit()
        if n_items:
            source.record()

    def _object(self, mark: Mark) -> Reading:
        """``{"name": …, "arguments": {…}}``, in any order, or as OpenAI writes it."""
        call = _Call()
        yield from self._members(mark, call)
        if call.name is None or (mark is _BARE and not call.begun):
            raise NoCall
        if not call.begun:
            self._start(call.name, mark)
            self._give("{}")
        self._done()

    def _members(self, mark: Mark, call: _Call) -> Reading:
        source = self._source
        source.take(1)
        yield from source.spaces()
        while not (yield from source.one_of("}")):
            if mark is _BARE and not call.begun:
                key = yield from self._bare_key()
            else:
                key = yield from read_key(source)
            yield from source.spaces()
            if not (yield from source.one_of(":")):
                raise NoCall
            yield from source.spaces()
            first = yield from source.peek()
            if key == "function" and first == "{" and not call.nested:
                call.nested = True
                yield from self._members(mark, call)
            elif key in _CALLED and call.name is None:
                yield from self._object_name(mark, call)
            elif call.name is None and first == "{" and key in self._functions and mark is not _BARE:
                call.name = key  # Apertus: {name: {…}}
                yield from self._given(mark, call)
            elif key in _GIVEN and not call.begun:
                yield from self._given(mark, call)
            else:
                yield from read_value(source, lambda text: None, Untyped(), None)
            yield from source.spaces()
            if not (yield from source.one_of(",")) and (yield from source.peek()) != "}":
                raise NoCall if (yield from source.peek()) else EndOfText
            yield from source.spaces()

    def _bare_key(self) -> Generator[None, None, str]:
        """A member's name, in what is no call as soon as there is another than calls have."""
        quote = yield from self._source.one_of('"', "'")
        key = yield from self._source.one_of(*_CALLED, *_GIVEN, *_BESIDE)
        if not quote or not key or not (yield from self._source.one_of(quote)):
            raise NoCall
        return key

    def _object_name(self, mark: Mark, call: _Call) -> Reading:
        found: list[str] = []
        yield from read_value(self._source, found.append, Untyped(), None)
        name = written_json("".join(found))
        if not isinstance(name, str) or not name:
            raise NoCall
        call.name = self._function(name)
        if not mark.sure and call.name not in self._functions:
            raise NoCall
        if call.arguments is not None:
            self._begin(mark, call)

    def _given(self, mark: Mark, call: _Call) -> Reading:
        """The arguments of an object: they go out as they come, if the name stood before them."""
        if (yield from self._source.peek()) == "{" and call.name is not None:
            call.begun = True
            self._start(call.name, mark)
            yield from self._arguments(call.name)
            return
        found: list[str] = []
        yield from read_value(self._source, found.append, Untyped(), None)
        value = "".join(found)
        if value.startswith('"'):
            value = written_json(value)
        call.arguments = "{}" if value.strip() in ("", "null") else value
        if not call.arguments.lstrip().startswith("{"):
            raise NoCall
        if call.name is not None:
            self._begin(mark, call)

    def _begin(self, mark: Mark, call: _Call) -> None:
        """A call whose arguments were read before."""
        assert call.name is not None
        assert call.arguments is not None
        arguments = as_json(call.arguments.strip(), self._types(call.name))
        if arguments is None:
            raise NoCall
        call.begun = True
        self._start(call.name, mark)
        self._give(arguments)

    def _named(self, mark: Mark) -> Reading:
        """A name, and what it is called with."""
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
            sure = True
            while (mark_in_header := (yield from self._in_header())) != mark.header:
                if not mark_in_header:
                    raise NoCall
        if (yield from source.one_of("[CALL_ID]")):
            yield from source.run(_IDENTIFIER)
            yield from source.spaces()
        if (yield from source.one_of(*SEPARATORS)):
            sure = True
            yield from source.spaces()
            raw = (yield from source.run(_NAME)) or raw  # DeepSeek R1: function<sep>name
        yield from source.spaces()
        name = self._function(raw)
        fence = yield from source.one_of("```json", "```")
        yield from source.spaces()
        if sure and (yield from source.peek()) == "{":
            self._start(name, mark)
            yield from self._arguments(name)
            self._done()
            if fence:
                yield from source.spaces()
                if (yield from source.one_of("```")):
                    source.record()
        elif (yield from source.one_of("<arg_key>")):
            yield from self._tagged_arguments(mark, "<arg_key>", name, begun=True)
        elif name in self._functions and mark.closers and not self._cut and (yield from source.ahead(mark.closers)):
            self._start(name, mark)
            self._give("{}")
            self._done()
        else:
            raise NoCall

    def _in_header(self) -> Generator[None, None, str]:
        yield from self._source.run(_HEADER)
        return (yield from self._source.one_of("<|constrain|>", "<|channel|>", "<|message|>"))

    def _python(self, mark: Mark, name: str) -> Reading:
        """``name(key=value, …)`` behind its parenthesis."""
        source, types = self._source, self._types(name)
        if name not in self._functions:
            raise NoCall
        self._start(name, mark, early=mark.sure)
        declared, n = types.names(), 0
        yield from source.spaces()
        while not (yield from source.one_of(")")):
            word = yield from source.run(_IDENTIFIER)
            yield from source.spaces()
            named = word and (yield from source.one_of("="))
            if not named and n >= len(declared):
                raise NoCall if (yield from source.peek()) else EndOfText
            key = word if named else declared[n]
            self._give(f"{', ' if n else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            schema = types.member(types.root, key)
            yield from source.spaces()
            if word and not named:
                self._give(types.literal(word + (yield from source.run(WORD)), schema))
            else:
                yield from read_value(source, self._give, types, schema)
            n += 1
            yield from source.spaces()
            if not (yield from source.one_of(",")) and (yield from source.peek()) != ")":
                raise NoCall if (yield from source.peek()) else EndOfText
            yield from source.spaces()
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
            self._start(name, mark)
            yield from self._arguments(name)
            self._done()
            yield from source.spaces()
            if (yield from source.one_of(TAGS[opener].ends)):
                source.record()
        else:
            yield from self._tagged_arguments(mark, opener, name)

    def _tagged_arguments(self, mark: Mark, opener: str, name: str, *, begun: bool = False) -> Reading:
        """Arguments between tags; ``begun``: what begins the first has been read."""
        source, tags, types = self._source, TAGS[opener], self._types(name)
        n = 0
        while True:
            if not begun:
                yield from source.spaces()
                if not (yield from source.peek()):
                    if self._cut or not n:
                        raise EndOfText
                    break
                if (yield from source.one_of(tags.ends) if tags.ends else source.ahead(mark.closers)):
                    break
                if not (yield from source.one_of(tags.key)):
                    raise NoCall
            begun = False
            key = (yield from source.run(_IN_TAG)).strip()
            attributes = yield from source.run(_ATTRIBUTES)
            if not key or not (yield from source.one_of(">", "</arg_key>")):
                raise NoCall if (yield from source.peek()) else EndOfText
            if tags.key == "<arg_key>":
                yield from source.spaces()
                if not (yield from source.one_of("<arg_value>")):
                    raise NoCall if (yield from source.peek()) else EndOfText
            if not n:
                self._start(name, mark)
            self._give(f"{', ' if n else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            n += 1
            schema = types.member(types.root, key)
            if 'string="true"' in attributes or types.is_text(schema):
                self._give('"')
                yield from self._tagged_value(mark, tags, types, lambda text: self._give(escaped(text)))
                self._give('"')
            else:
                found: list[str] = []
                yield from self._tagged_value(mark, tags, types, found.append)
                self._give(types.typed("".join(found), schema))
        if not n:
            self._start(name, mark)
        self._give("}" if n else "{}")
        self._done()

    def _tagged_value(self, mark: Mark, tags: Tags, types: ArgumentTypes, put: Put) -> Reading:
        """A value up to what ends it. The value itself may hold such a text: what follows an end has to fit."""
        source = self._source
        following = (tags.key, tags.ends) if tags.ends else (tags.key, *mark.closers)
        ends: tuple[str, ...] = (tags.value_ends,)
        if tags.lines:
            yield from source.one_of("\n")
            # Some models forget to end a value.
            ends = (f"\n{tags.value_ends}", tags.value_ends, f"\n{tags.key}", f"\n{tags.ends}")
        pattern = re.compile("|".join(map(re.escape, ends)))
        while True:
            text, match = source.search(pattern, ends)
            if text:
                put(text)
            if match is None:
                if not (yield from source.more()):
                    rest = source.take(source.n_left)
                    if self._cut:
                        put(rest)
                        raise EndOfText
                    put(rest.removesuffix("\n") if tags.lines else rest)
                    return
            elif match[0].endswith(tags.value_ends):
                if (yield from source.ahead(following, len(match[0]))):
                    source.take(len(match[0]))
                    return
                put(source.take(len(match[0])))
            else:
                names = [f"{name}>" for name in types.names()]
                fits = (*mark.closers, *_OPENERS) if match[0].endswith(tags.ends) else names
                if (yield from source.ahead(fits, len(match[0]))):
                    return
                put(source.take(len(match[0])))

    # -- calls on their way out ----------------------------------------------------------------------------------------

    def _function(self, raw: str) -> str:
        """A function's name without what models write around it."""
        return raw if raw in self._functions else _AROUND_NAME.sub("", raw)

    def _types(self, name: str) -> ArgumentTypes:
        return self._functions.get(name) or ArgumentTypes(None)

    def _arguments(self, name: str) -> Reading:
        types = self._types(name)
        yield from read_value(self._source, self._give, types, types.root)

    def _start(self, name: str, mark: Mark, *, early: bool = True) -> None:
        """A call begins; ``early``: it is one, whatever comes."""
        if not mark.sure and name not in self._functions:
            raise NoCall
        self._muted = not self._parallel and self.n_calls > 0
        if not self._muted:
            self.n_calls += 1
        self._put(CallStart(self.n_calls - 1, f"call_{secrets.token_hex(12)}", name))
        if early:
            self._commit()

    def _give(self, text: str) -> None:
        if text:
            self._put(CallArguments(self.n_calls - 1, text))

    def _put(self, piece: Piece) -> None:
        if not self._muted:
            (self._pieces if self._source.taken is None else self._waiting).append(piece)

    def _commit(self) -> None:
        if not self._holding:
            self._pieces += self._waiting
            self._waiting, self._source.taken = [], None

    def _done(self) -> None:
        self.n_done += not self._muted
        self._muted = False
        self._commit()
        if not self._holding:
            self._source.record()


@dataclass(slots=True)
class _Call:
    """An object that may be a call, as far as it was read."""

    name: str | None = None
    arguments: str | None = None
    begun: bool = False
    nested: bool = False


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of a kind as one."""
    joined: list[Piece] = []
    for kind, same in groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", None))):
        found = list(same)
        if kind[0] is CallStart:
            joined += found
        elif kind[0] is TextPiece:
            joined.append(TextPiece("".join(piece.text for piece in found)))  # type: ignore[union-attr]
        else:
            joined.append(CallArguments(kind[1], "".join(piece.text for piece in found)))  # type: ignore
    return joined
