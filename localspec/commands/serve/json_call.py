"""One call in JSON, read as it is written: the name as soon as it is there, the arguments piece by piece."""

from __future__ import annotations

import json
from typing import Any

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_CLOSES = {"}": "{", "]": "["}


class CallObject:
    """``{"name": …, "arguments": {…}}``, character by character.

    Args:
        name: the function, where it stood outside; the object is then the arguments.

    Attributes:
        name: the function; None until it was read.
        text: all that was read.
        arguments: all arguments that were read, as JSON.
        done: the object is complete.
        failed: it is no call.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.text = ""
        self.arguments = ""
        self.done = False
        self.failed = False
        self._bare = name is not None
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._part: list[str] = []  # of a key or a value, so far
        self._n_given = 0

    def push(self, text: str) -> int:
        """Read on, to the end of the object at most; returns how many characters were read."""
        n = 0
        while n < len(text) and not (self.done or self.failed):
            self._read(text[n])
            n += 1
        self.text += text[:n]
        return n

    def take(self) -> str:
        """Arguments not taken yet; none before the name is known."""
        if self.name is None:
            return ""
        new = self.arguments[self._n_given :]
        self._n_given = len(self.arguments)
        return new

    def _read(self, c: str) -> None:
        depth, quoted = len(self._open), self._in_string
        self._follow(c)
        if self.failed:
            return
        if self._bare:
            self.arguments += c
            self.done = not self._open
        elif depth == 0:
            self.failed = c != "{"
        elif depth > 1 or quoted or c not in ":,}":
            self._part.append(c)
            if self._key is None:
                self.failed = not (quoted or c == '"' or c.isspace())
            elif self._key in _ARGUMENTS and (len(self._open) > 1 or depth > 1):
                # An object goes out as it comes; what is not one is decoded when it is whole.
                self.arguments += c
        elif c == ":":
            self.failed = self._key is not None
            self._key = self._decoded(self._part_read())
        else:
            self._end_member(self._part_read())
            self._key = None
            if c == "}" and not self.failed:
                self.failed = self.name is None
                self.done = not self.failed

    def _part_read(self) -> str:
        part, self._part = "".join(self._part).strip(), []
        return part

    def _decoded(self, raw: str) -> Any:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            self.failed = True
            return None

    def _follow(self, c: str) -> None:
        """Strings and brackets."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self._in_string = False
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._open.append(c)
        elif c in "}]":
            self.failed = not self._open or self._open.pop() != _CLOSES[c]

    def _end_member(self, raw: str) -> None:
        if self._key is None:
            self.failed = raw != ""  # a key without a value
        elif self._key in _ARGUMENTS and not raw.startswith(("{", "[")):
            value = self._decoded(raw)
            self.arguments += value if isinstance(value, str) else "" if value is None else raw
        elif self._key in _NAMES:
            value = self._decoded(raw)
            if isinstance(value, str) and value:
                self.name = value
            elif isinstance(value, dict) and isinstance(value.get("name"), str):  # as OpenAI writes it
                self.name = value["name"]
                inner: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
                self.arguments = inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
            else:
                self.failed = True
