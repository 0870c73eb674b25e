"""The fields of a JSON object, taken one by one and checked; what is wrong is told by its path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.commands.serve.errors import ApiError, invalid


class Fields:
    """One object of a request.

    A field that is ``null`` counts as absent: OpenAI's clients send both.

    Args:
        value: what was sent.
        path: where it stands in the request; empty is the request itself.

    Raises:
        ApiError: it is not an object.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, Mapping):
            raise invalid(f"{path or 'the request'} must be an object, not {kind_of(value)}", path or None)
        self._value = value
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, rule: str) -> ApiError:
        """400: the field breaks a rule."""
        value = self._value.get(name)
        shown = f"{value!r:.60}" if isinstance(value, str | int | float | bool) else kind_of(value)
        return invalid(f"{self.path(name)} must be {rule}, not {shown}", self.path(name))

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def get(self, name: str) -> Any:
        """The field as it was sent; None if absent."""
        return self._value.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._value.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise invalid(f"{self.path(name)} is missing", self.path(name), "missing_required_parameter")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"an integer in {low}..{high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"a number in {low:g}..{high:g}")
        if not (low <= value <= high and math.isfinite(value)):
            raise self.wrong(name, f"a number in {low:g}..{high:g}")
        return float(value)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self.text(name) or default
        if value not in allowed:
            raise self.wrong(name, " or ".join(allowed))
        return value

    def items(self, name: str, most: int) -> list[Any]:
        """A list of at most so many; empty if absent."""
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, f"a list of at most {most}")
        return value

    def object(self, name: str) -> Fields | None:
        value = self._value.get(name)
        return None if value is None else Fields(value, self.path(name))

    def refuse(self, **reasons: str) -> None:
        """400 where a field is there that we cannot honour: ignoring it would answer another question."""
        for name, reason in reasons.items():
            if self.has(name):
                raise invalid(f"{self.path(name)} {reason}", self.path(name), "unsupported_parameter")


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
