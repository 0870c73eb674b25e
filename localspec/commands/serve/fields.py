"""The fields of a JSON object, taken one by one and checked; an error names the field by its path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from localspec.commands.serve.errors import ApiError, invalid
from localspec.commands.serve.known_fields import Known
from localspec.values import nearest

_LONGEST_NAME = 60


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

    def known(self, table: Known) -> Fields:
        """This object, once its fields are checked: all that are not ``null`` are in the table.

        Raises:
            ApiError: a field that is unknown, or that cannot be had: ignoring it would answer another question.
        """
        for name, value in self._value.items():
            if value is None or name in table.honoured or name in table.ignored:
                continue
            if name in table.refused:
                if table.asks_nothing(name, value):
                    continue
                raise invalid(f"{self.path(name)} {table.refused[name]}", self.path(name), "unsupported_parameter")
            near = nearest(name, table.names) if 2 < len(name) <= _LONGEST_NAME else None
            hint = f"; did you mean {self.path(near)}?" if near else ""
            path = self.path(f"{name:.{_LONGEST_NAME}}")
            raise invalid(f"{path} is no field that is known here{hint}", path, "unknown_parameter")
        return self

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

    def those(self, names: Iterable[str]) -> dict[str, Any]:
        """The fields of these names that are there, as they were sent."""
        return {name: self._value[name] for name in names if self.has(name)}

    def _take(self, name: str, rule: str, fits: Callable[[Any], bool]) -> Any:
        value = self._value.get(name)
        if value is not None and not fits(value):
            raise self.wrong(name, rule)
        return value

    def text(self, name: str) -> str | None:
        text: str | None = self._take(name, "a string", lambda value: isinstance(value, str))
        return text

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise invalid(f"{self.path(name)} is missing", self.path(name), "missing_required_parameter")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._take(name, "true or false", lambda value: isinstance(value, bool))
        return default if value is None else bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        def fits(value: Any) -> bool:
            return _is_number(value) and low <= value <= high and float(value).is_integer()

        value = self._take(name, f"an integer in {low}..{high}", fits)
        return None if value is None else int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        def fits(value: Any) -> bool:
            return _is_number(value) and low <= value <= high and math.isfinite(value)

        value = self._take(name, f"a number in {low:g}..{high:g}", fits)
        return None if value is None else float(value)

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """One of several words; the first if absent."""
        return self._take(name, " or ".join(filter(None, allowed)), lambda value: value in allowed) or allowed[0]

    def items(self, name: str, most: int) -> list[Any]:
        """A list of at most so many; empty if absent."""
        return self._take(name, f"a list of at most {most}", lambda v: isinstance(v, list) and len(v) <= most) or []

    def object(self, name: str) -> Fields | None:
        value = self._value.get(name)
        return None if value is None else Fields(value, self.path(name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
