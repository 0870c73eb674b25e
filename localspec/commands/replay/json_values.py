"""JSON from a file that is not trusted: values read one by one, fields read with their type checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 10**12
"""No honest figure is larger, and sums of these stay finite."""

_REQUIRED: Any = object()
_SPACE = re.compile(r"\s*")
_KIND_NAMES = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a whole number"}


class Values(Iterator[Any]):
    """The JSON values of a text, one after the other, up to the first that cannot be read.

    Attributes:
        line: the line that the last value began on.
        damage: what ended it early; empty at a clean end.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._decode = json.JSONDecoder(parse_constant=_no_constant).raw_decode
        self._at = 0
        self._counted = 0
        self.line = 1
        self.damage = ""

    def __next__(self) -> Any:
        self._at = _space(self._text, self._at)
        self.line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        if self._at == len(self._text):
            raise StopIteration
        try:
            value, self._at = self._decode(self._text, self._at)
        except (ValueError, RecursionError):
            whole = "\n" in self._text[self._at :]
            self.damage = f"line {self.line} is damaged" if whole else f"it ends in the middle of line {self.line}"
            raise StopIteration from None
        return value


def _space(text: str, at: int) -> int:
    """Where the white space from ``at`` on ends."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Each of the following raises ValueError; the message names the field.


def check(value: Any, kind: type, name: str) -> None:
    """Whether a value is of a JSON type."""
    # To Python, true is an int.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name} is not {_KIND_NAMES[kind]}")


def get(value: Mapping[str, Any], name: str, kind: type[T], default: Any = _REQUIRED) -> T:
    """A field of an object; ``default`` stands for one that is missing or null."""
    found = value.get(name)
    if found is None:
        if default is _REQUIRED:
            raise ValueError(f"{name} is missing")
        return default  # type: ignore[no-any-return]
    check(found, kind, name)
    return found  # type: ignore[no-any-return]


def entries(value: Mapping[str, Any], name: str, kind: type[T], default: Any = _REQUIRED) -> list[T]:
    """A field that is a list of values of one type."""
    found: list[T] = get(value, name, list, default)
    for each in found:
        check(each, kind, f"an entry of {name}")
    return found


def one_of(known: Sequence[str], value: Mapping[str, Any], name: str) -> str:
    """A field that is one of a few words."""
    found = get(value, name, str)
    if found not in known:
        raise ValueError(f"{name} is not one of {', '.join(known)}")
    return found


def number(value: Mapping[str, Any], name: str, largest: float = LARGEST) -> float | None:
    """A count, a share or a time; None where it is missing or null."""
    found = value.get(name)
    if found is None:
        return None
    # The comparison is false for NaN as well.
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= largest:
        raise ValueError(f"{name} is not a number from 0 to {largest:g}")
    return found
