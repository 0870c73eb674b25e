"""Request bodies as pydantic models: each field is read, ignored for a stated reason, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, StrictBool, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from localspec.errors import nearest
from localspec.server.http import ApiError, KeepAlive, invalid

MAX_COUNT = 1 << 31
_LONGEST_NAME = 60

UNREAD: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("unread_fields.json").read_bytes())
"""Class of a body -> ``ignored`` and ``refused``, each reason -> names of fields, and ``off``, as ``Known`` has it."""


@dataclass(frozen=True, slots=True)
class Known:
    """The fields of one kind of object; docs/server.md lists those that are ignored."""

    honoured: frozenset[str] = frozenset()  # those that are read
    ignored: Mapping[str, str] = field(default_factory=dict)  # those that change nothing here -> why
    refused: Mapping[str, str] = field(default_factory=dict)  # those that cannot be had -> why
    off: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # values of refused ones that ask for nothing

    @property
    def names(self) -> list[str]:
        return sorted({*self.honoured, *self.ignored, *self.refused})

    def asks_nothing(self, name: str, value: Any) -> bool:
        """Whether a refused field has a value that asks for nothing."""
        off = self.off.get(name, ())
        if isinstance(value, bool):
            return value in off if True in off else not value
        return value is None or value in ("", []) or any(value == each and each is not True for each in off)


class Body(BaseModel):
    """One object of a request. What is annotated is read; the other fields that are known are in ``UNREAD``.

    A field that is ``null`` counts as absent: OpenAI's clients send both. Subclasses inherit all of it; what is read
    goes before what is ignored, and that before what is refused.
    """

    KNOWN: ClassVar[Known] = Known()

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def sent(self) -> dict[str, Any]:
        """The object as it was sent."""
        return self._sent

    def those(self, *names: str) -> dict[str, Any]:
        """The fields of these names that are there, as they were sent."""
        return {name: self._sent[name] for name in names if self._sent.get(name) is not None}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        tables = [UNREAD.get(each.__name__, {}) for each in reversed(cls.__mro__)]
        honoured = frozenset(field.alias or name for name, field in cls.model_fields.items())
        ignored, refused = (
            {name: why for each in tables for why, names in each.get(kind, {}).items() for name in names.split()}
            for kind in ("ignored", "refused")
        )
        ignored = {name: why for name, why in ignored.items() if name not in honoured}
        refused = {name: why for name, why in refused.items() if name not in honoured and name not in ignored}
        off = {name: values for each in tables for name, values in each.get("off", {}).items()}
        cls.KNOWN = Known(honoured, ignored, refused, off)

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, value: Any, read: Callable[[Any], Any]) -> Any:
        if not isinstance(value, dict):
            return read(value)
        known, kept = cls.KNOWN, dict[str, Any]()
        for name, item in value.items():
            if item is None or name in known.ignored:
                continue
            if name in known.honoured:
                kept[name] = item
            elif name not in known.refused:
                near = nearest(name, known.names) if 2 < len(name) <= _LONGEST_NAME else None
                raise PydanticCustomError("unknown_parameter", "unknown", {"name": name[:_LONGEST_NAME], "near": near})
            elif not known.asks_nothing(name, item):
                raise PydanticCustomError(
                    "unsupported_parameter", "refused", {"name": name, "why": known.refused[name]}
                )
        body = read(kept)
        body._sent = value
        return body


class ModelBody(Body):
    """The body of an endpoint that a model answers."""

    model: str | None = None

    @property
    def keep(self) -> KeepAlive | Literal["usual"]:
        """How long the model stays loaded after the answer."""
        return "usual"

    @property
    def unloads(self) -> bool:
        """Whether it asks for nothing but that the model is unloaded."""
        return False

    @property
    def tells_loading(self) -> bool:
        """Whether the events say how far the model is loaded."""
        return False


Kind = TypeVar("Kind", bound=Body)


def read(kind: type[Kind], value: Any, path: str = "") -> Kind:
    """A JSON value as an object of this kind; ``path``: where it stands in the request. An ``ApiError`` if it is none:
    one line that names the first field that is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], path) from None


_RULES = {
    "string_type": "a string",
    "string_too_short": "a string of at least {min_length} character",
    "string_too_long": "a string of at most {max_length} characters",
    "bool_type": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "model_type": "an object",
    "literal_error": "{expected}",
    "rule": "{rule}",
}
"""Kind of a wrong value, as pydantic or ``must_be`` calls it -> what the field must be."""


def _refusal(error: ErrorDetails, path: str) -> ApiError:
    kind, context = error["type"], error.get("ctx", {})
    for step in error["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    path = path.removeprefix(".")
    inner = f"{path}." if path else ""
    if kind == "unknown_parameter":
        near = f"; did you mean {inner}{context['near']}?" if context["near"] else ""
        path = inner + context["name"]
        return invalid(f"{path} is no field that is known here{near}", path, kind)
    if kind == "unsupported_parameter":
        path = inner + context["name"]
        return invalid(f"{path} {context['why']}", path, kind)
    if kind == "missing":
        return invalid(f"{path} is missing", path, "missing_required_parameter")
    if kind in ("too_short", "too_long"):
        what = "a list" if context["field_type"] == "List" else "an object"
        bound = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return invalid(f"{path} must be {what} of {bound}", path)
    return wrong(path, _RULES[kind].format(**context), error["input"])


def wrong(path: str, rule: str, value: Any) -> ApiError:
    """400: a field breaks a rule."""
    shown = f"{value!r:.60}" if isinstance(value, str | int | float | bool) else kind_of(value)
    return invalid(f"{path or 'the request'} must be {rule}, not {shown}", path or None)


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    names = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


# What fields may be; to stand in ``Annotated``. ``list`` takes ``items``, a flag is a ``Flag``.

Flag = StrictBool


def must_be(rule: str, fits: Callable[[Any], bool], as_: Callable[[Any], Any] = lambda value: value) -> BeforeValidator:
    """A value that fits, changed by ``as_``; the rule is what the message says."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise PydanticCustomError("rule", "rule", {"rule": rule})
        return as_(value)

    return BeforeValidator(check)


def is_integer(value: Any, low: int, high: int) -> bool:
    """Whether a value is a whole number within bounds, also written as 5.0."""
    return _is_number(value) and low <= value <= high and float(value).is_integer()


def whole(low: int, high: int) -> BeforeValidator:
    return must_be(f"an integer in {low}..{high}", lambda value: is_integer(value, low, high), int)


def between(low: float, high: float) -> BeforeValidator:
    return must_be(f"a number in {low:g}..{high:g}", lambda value: _is_number(value) and low <= value <= high, float)


def text_or_items(most: int) -> BeforeValidator:
    rule = f"a text or a list of at most {most}"
    return must_be(rule, lambda value: isinstance(value, str) or (isinstance(value, list) and len(value) <= most))


LISTED = must_be(
    "a string or a list of strings",
    lambda value: isinstance(value, str | list),
    lambda value: [value] if isinstance(value, str) else value,
)


def items(most: int) -> Any:
    """A list of at most so many; the first item that is wrong is reported."""
    return Field(max_length=most, fail_fast=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def are_tokens(value: Any, n_vocab: int | None = None) -> bool:
    """Whether a value is a list of token ids; with the size of a vocabulary, of that."""

    def is_token(each: Any) -> bool:
        return isinstance(each, int) and not isinstance(each, bool) and (n_vocab is None or 0 <= each < n_vocab)

    return isinstance(value, list) and all(map(is_token, value))
