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
        self._part: list[str] = []
        self._reading = "key"
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
        elif self._reading == "key":
            self._read_key(c, quoted)
        elif self._reading == "colon":
            self._reading = "value" if c == ":" else "colon"
            self.failed = c != ":" and not c.isspace()
        elif depth == 1 and not quoted and c in ",}":
            self._end_value()
            self._reading, self._part = "key", []
            self._end(c)
        else:
            self._part.append(c)
            # An object goes out as it comes; what is not one is decoded when it is whole.
            if self._key in _ARGUMENTS and (len(self._open) > 1 or depth > 1):
                self.arguments += c

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

    def _read_key(self, c: str, quoted: bool) -> None:
        if quoted or c == '"':
            self._part.append(c)
            if quoted and not self._in_string:
                try:
                    self._key = json.loads("".join(self._part))
                except ValueError:
                    self.failed = True
                self._reading, self._part = "colon", []
        elif c == "}":
            self._end(c)
        else:
            self.failed = c != "," and not c.isspace()

    def _end_value(self) -> None:
        raw = "".join(self._part).strip()
        if self._key in _ARGUMENTS and raw.startswith(("{", "[")):
            return
        if self._key not in (*_ARGUMENTS, *_NAMES):
            return
        try:
            value = json.loads(raw)
        except ValueError:
            self.failed = True
            return
        if self._key in _ARGUMENTS:
            self.arguments += value if isinstance(value, str) else "" if value is None else raw
        elif isinstance(value, str) and value:
            self.name = value
        elif isinstance(value, dict) and isinstance(value.get("name"), str):  # as OpenAI writes it
            self.name = value["name"]
            inner: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
            self.arguments = inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
        else:
            self.failed = True

    def _end(self, c: str) -> None:
        if c == "}" and not self.failed:
            self.failed = self.name is None
            self.done = not self.failed
