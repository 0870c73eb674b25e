"""A model's tool calls, read out of its text as it comes.

Models were trained to write calls in a few ways; all are understood, whichever model it is:

====================================================  ============================================================
``<tool_call>{"name": …, "arguments": {…}}</…>``      Hermes, Qwen 2.5 and 3, SmolLM2 (a list), and our fallback
``<tool_call><function=…><parameter=…>…</…>``         Qwen3-Coder: arguments as text, typed by the tool's schema
``[TOOL_CALLS][{…}]``, ``[TOOL_CALLS]name[ARGS]{…}``  Mistral
``<|python_tag|>{…}``, ``{"name", "parameters"}``     Llama 3: the whole answer is the call
``<|tool_call|>[{…}]<|/tool_call|>``                  Phi-4-mini, Granite
``{…}`` bare or fenced, ``<tools>{…}</tools>``        what Qwen2.5-Coder says instead of the above
====================================================  ============================================================

Text that turns out to be no call is given back as text. What may still become a call waits.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.commands.serve.json_call import CallObject

MAX_HELD = 100_000
"""Characters that wait for the end of what may be a call, at most."""


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

_CLOSERS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<tools>": "</tools>",
    "<function=": "</tool_call>",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
}
"""How calls begin and end; the last two end as the answer does, or where something else begins."""

MARKERS = ("<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
"""Tokens that have no text of their own in some vocabularies, but are read here."""

_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?(?=\{)")
_FENCE_BEGINNING = re.compile(r"\s*(?:`{0,3}|```(?:j|js|jso|json)?\s*)")
_BARE_KEYS = ("name", "arguments", "parameters", "type")
_BARE_KEY = re.compile(rf'\{{\s*"({"|".join(_BARE_KEYS)})"')
_BARE_KEY_BEGINNING = re.compile(r'\{\s*"?(\w*)')
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_BEGINNING = re.compile(r"[\s\w.\[\]-]{0,200}")
_XML_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


class ToolCallReader:
    """Text in pieces -> text, and calls, in pieces.

    Args:
        tools: the functions that may be called, as the request has them; without any, all is text.

    Attributes:
        n_calls: calls begun so far.
        n_done: calls complete so far.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._held = ""
        self._opener = ""
        self._call: CallObject | None = None
        self._announced = False
        self._step = self._answer_begins
        self.n_calls = 0
        self.n_done = 0

    def push(self, text: str) -> list[Piece]:
        """Read on; returns what is certain now."""
        if not self._functions:
            return [TextPiece(text)] if text else []
        self._held += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """The answer is over; returns the rest."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before = self._step, len(self._held)
            pieces += self._step(final)
            if (self._step, len(self._held)) == before:
                return pieces

    # -- steps: each reads from what is held, and says what the next step is -------------------------------------------

    def _answer_begins(self, final: bool) -> list[Piece]:
        """A bare or fenced object at the very beginning may be a call."""
        fence = _FENCE.match(self._held)
        if fence is None:
            if final or not _FENCE_BEGINNING.fullmatch(self._held):
                self._step = self._between
            return []
        body = self._held[fence.end() :]
        if not _BARE_KEY.match(body):
            beginning = _BARE_KEY_BEGINNING.fullmatch(body)
            if final or beginning is None or not any(key.startswith(beginning[1]) for key in _BARE_KEYS):
                self._step = self._between
            return []
        call = CallObject()
        n_read = call.push(body)
        if not call.done and not call.failed and not final and len(body) < MAX_HELD:
            return []
        if call.done and call.name is not None and call.name in self._functions:
            self._held, self._step = body[n_read:], self._bare_call_ended
            return self._whole([(call.name, call.arguments or "{}")])
        self._step = self._between
        return []

    def _bare_call_ended(self, final: bool) -> list[Piece]:
        """Behind a call without marks: the end of its fence, and perhaps another one."""
        self._held = self._held.lstrip().removeprefix(";").removeprefix("```").lstrip()
        if self._held and (final or not "```".startswith(self._held)):
            self._step = self._answer_begins if self._held.startswith("{") else self._between
        return []

    def _between(self, final: bool) -> list[Piece]:
        """Text, up to where calls begin."""
        found = [(i, opener) for opener in _CLOSERS if (i := self._held.find(opener)) >= 0]
        if found:
            end, self._opener = min(found)
            text, self._held = self._held[:end].rstrip(), self._held[end + len(self._opener) :]
            self._step = self._call_begins
        else:
            end = len(self._held)
            if not final:
                # White space waits too: before a call it is no part of the text.
                end -= max(_overlap(self._held, opener) for opener in _CLOSERS)
                end = len(self._held[:end].rstrip())
            text, self._held = self._held[:end], self._held[end:]
        if self.n_calls and not text.strip():
            text = ""
        return [TextPiece(text)] if text else []

    def _call_begins(self, final: bool) -> list[Piece]:
        """Behind an opener."""
        body = self._held.lstrip()
        if self._opener == "<function=" or body.startswith("<function="):
            return self._xml(final)
        if body.startswith("["):
            self._held = body[1:]
        elif body.startswith("{"):
            self._held, self._call, self._step = body, CallObject(), self._in_object
        elif self._opener == "[TOOL_CALLS]" and (named := _NAMED.match(body)):
            self._held, self._call, self._step = body[named.end() :], CallObject(named[1]), self._in_object
        elif final or not self._may_become_call(body):
            self._held = self._opener + self._held
            return self._as_text()
        return []

    def _may_become_call(self, body: str) -> bool:
        if self._opener == "[TOOL_CALLS]":
            return _NAMED_BEGINNING.fullmatch(body) is not None
        return "<function=".startswith(body)

    def _xml(self, final: bool) -> list[Piece]:
        """Qwen3-Coder's way; read once it is whole, as its values have to be given types."""
        text = "<function=" + self._held if self._opener == "<function=" else self._held
        end = text.find("</function>")
        if end < 0 and not final and len(text) < MAX_HELD:
            return []
        end = len(text) if end < 0 else end + len("</function>")
        found = _XML_FUNCTION.search(text[:end])
        if found is None:
            self._held = text if self._opener == "<function=" else self._opener + text
            return self._as_text()
        name = found[1].strip()
        self._held, self._step = text[end:], self._call_ended
        return self._whole([(name, self._typed(name, found[2]))])

    def _in_object(self, final: bool) -> list[Piece]:
        call = self._call
        assert call is not None
        self._held = self._held[call.push(self._held) :]
        pieces: list[Piece] = []
        if call.name is not None and not self._announced:
            pieces.append(self._start(call.name))
            self._announced = True
        if new := call.take():
            pieces.append(CallArguments(self.n_calls - 1, new))
        if not (call.done or call.failed or final):
            return pieces
        self._call = None
        if not self._announced:
            self._held = self._opener + call.text + self._held
            return self._as_text()
        if call.done:
            self.n_done += 1
            if not call.arguments:
                pieces.append(CallArguments(self.n_calls - 1, "{}"))
        self._announced = False
        self._step = self._call_ended
        return pieces

    def _call_ended(self, final: bool) -> list[Piece]:
        """Behind a call: its closer, or another call of the same list."""
        closer = _CLOSERS[self._opener]
        self._held = self._held.lstrip()
        if self._held.startswith((",", "]", ";")):
            self._held = self._held[1:]
        elif self._held.startswith("{"):
            self._call, self._step = CallObject(), self._in_object
        elif closer and self._held.startswith(closer):
            self._held = self._held[len(closer) :]
            self._step = self._between
        elif final or (self._held and not closer.startswith(self._held)):
            self._step = self._between
        return []

    def _as_text(self) -> list[Piece]:
        """What looked like a call is none: give it back, and look for calls behind it."""
        text, self._held = self._held, ""
        self._step = self._between
        return [TextPiece(text)]

    # -- whole calls ---------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> CallStart:
        self.n_calls += 1
        return CallStart(self.n_calls - 1, f"call_{secrets.token_hex(12)}", name)

    def _whole(self, calls: Sequence[tuple[str, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for name, arguments in calls:
            start = self._start(name)
            pieces += [start, CallArguments(start.index, arguments)]
            self.n_done += 1
        return pieces

    def _typed(self, name: str, body: str) -> str:
        """Parameters written as text, as the JSON that the function's schema asks for."""
        schema = self._functions.get(name, {}).get("parameters") or {}
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        values: dict[str, Any] = {}
        for match in _XML_PARAMETER.finditer(body):
            key, text = match[1].strip(), match[2]
            kind = properties.get(key, {}) if isinstance(properties, Mapping) else {}
            values[key] = text
            if not (isinstance(kind, Mapping) and kind.get("type") == "string"):
                try:
                    values[key] = json.loads(text)
                except ValueError:
                    values[key] = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        return json.dumps(values, ensure_ascii=False)


def _overlap(text: str, opener: str) -> int:
    """Length of the longest end of the text that is a beginning of the opener."""
    return next((n for n in range(min(len(opener) - 1, len(text)), 0, -1) if text.endswith(opener[:n])), 0)
