"""What a tool's schema says about the types of its arguments, for models that write arguments as plain text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

from localspec.commands.serve.call_values import Schema, Untyped, readings

MAX_DEPTH, MAX_STEPS = 32, 256
"""References and combinations followed, within each other and in all; what lies beyond allows everything."""

MAX_VALUES = 5000
"""Longest ``enum`` that is looked at; a longer one allows all values of the types that it begins with."""

Alternative = tuple[tuple[str, ...] | None, frozenset[str] | None]
"""Types, None is all, and values in the form of ``_comparable``, None is any."""


class ArgumentTypes(Untyped):
    """The types of one tool's arguments.

    Args:
        parameters: the function's JSON schema.
    """

    def __init__(self, parameters: Schema) -> None:
        self.root = parameters
        # By the identity of a schema, all of which are parts of the root.
        self._known: dict[int, list[Mapping[str, Any]]] = {}
        self._allowed: dict[int, list[Alternative]] = {}

    def member(self, schema: Schema, key: str) -> Schema:
        """The schema of an object's member; None where none is known."""
        for one in self._combined(schema):
            properties = one.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return properties[key]
            if isinstance(one.get("additionalProperties"), Mapping):
                return one["additionalProperties"]
        return None

    def item(self, schema: Schema) -> Schema:
        """The schema of a list's items; None where none is known."""
        return next((one["items"] for one in self._combined(schema) if isinstance(one.get("items"), Mapping)), None)

    def names(self) -> list[str]:
        """The arguments that are declared, in their order."""
        found: dict[str, None] = {}
        for one in self._combined(self.root):
            if isinstance(one.get("properties"), Mapping):
                found |= dict.fromkeys(one["properties"])
        return list(found)

    def takes_strings(self, schema: Schema) -> bool:
        """Whether a value that is written as a string is one."""
        return any(kinds is None or "string" in kinds for kinds, _ in self._alternatives(schema))

    def is_text(self, schema: Schema) -> bool:
        """Whether any text is a value as it is: nothing but strings is allowed, and any of them."""
        return self._alternatives(schema) == [(("string",), None)]

    def typed(self, text: str, schema: Schema) -> str:
        """A value that was written as plain text, as JSON.

        The schema decides: where it asks for a string, ``007`` and ``true`` are strings. Null, lists and objects are
        taken for what they look like wherever the schema allows them; of a string and a number it takes the one that it
        names first. What fits nothing is a string where there may be one, else what it looks like.
        """
        found = dict(readings(text))
        alternatives = self._alternatives(schema)
        for first in (("null", "array", "object"), None):
            for kinds, values in alternatives:
                for kind in kinds or (*found, "string"):
                    if first is not None and kind not in first:
                        continue
                    value = json.dumps(text, ensure_ascii=False) if kind == "string" else found.get(kind)
                    if value is not None and _among(value, values):
                        return value
        return json.dumps(text, ensure_ascii=False) if self.takes_strings(schema) else super().literal(text, schema)

    def literal(self, word: str, schema: Schema) -> str:
        """A value without quotes, as JSON: what it is, except where the schema asks for a string in its place."""
        found = dict(readings(word))
        if not found:
            return self.typed(word, schema)
        fits = any(
            _among(value, values)
            for kinds, values in self._alternatives(schema)
            for kind, value in found.items()
            if kinds is None or kind in kinds
        )
        asked = not fits and "null" not in found and self.takes_strings(schema)
        return json.dumps(word, ensure_ascii=False) if asked else super().literal(word, schema)

    def _alternatives(self, schema: Schema) -> list[Alternative]:
        """What a value may be, in the schema's order."""
        found = self._allowed.get(id(schema))
        if found is None:
            found = self._allowed[id(schema)] = [_alternative(one) for one in self._combined(schema)]
        return found

    def _combined(self, schema: Schema) -> list[Mapping[str, Any]]:
        """The schemas that may apply to a value: references followed, ``anyOf`` and the like taken apart."""
        known = self._known.get(id(schema))
        if known is None:
            known = self._known[id(schema)] = self._taken_apart(schema, 0, [MAX_STEPS])
        return known

    def _taken_apart(self, schema: Schema, depth: int, left: list[int]) -> list[Mapping[str, Any]]:
        left[0] -= 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or left[0] < 0:
            return [{}]
        parts: list[Schema] = next(
            (schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)), []
        )[: left[0] + 1]
        if isinstance(schema.get("$ref"), str):
            parts = [self._referred(schema["$ref"])]
        says = any(name in schema for name in _SAYING)
        found: list[Mapping[str, Any]] = [schema] if says or not parts else []
        if schema.get("type") in (None, "object"):
            inner = [one for part in parts for one in self._taken_apart(part, depth + 1, left)]
            if says or "allOf" in schema:  # all apply: one that says nothing does not allow everything
                inner = [one for one in inner if any(name in one for name in _SAYING)]
            found += inner
        if schema.get("nullable") is True and found:
            found.append({"type": "null"})
        return found or [{}]

    def _referred(self, reference: str) -> Schema:
        found = self.root
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


_KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")
_SAYING = ("type", "enum", "const", "properties", "items", "additionalProperties")


def _alternative(schema: Mapping[str, Any]) -> Alternative:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    values = values if isinstance(values, list) else None
    kinds = schema.get("type")
    if kinds is None and values is not None:
        kinds = list(dict.fromkeys(kind for value in values[:MAX_VALUES] for kind in _kinds_of(value)))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    known = tuple(kind for kind in kinds if kind in _KINDS) if isinstance(kinds, list) else ()
    is_short = values is not None and len(values) <= MAX_VALUES
    return known or None, frozenset(map(_comparable, values or ())) if is_short else None


def _kinds_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number")
    return {str: ("string",), type(None): ("null",), list: ("array",), dict: ("object",)}.get(type(value), ())


_encoded = json.JSONEncoder(sort_keys=True).encode


def _comparable(value: Any) -> str:
    """A JSON value as a text that all values equal to it have."""
    return _encoded(int(value) if isinstance(value, float) and value.is_integer() else value)


def _among(value: str, values: Collection[str] | None) -> bool:
    return values is None or _comparable(json.loads(value)) in values
