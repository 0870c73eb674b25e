"""What a request may ask of its answer's form, checked and translated before anything is decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from localspec.errors import UsageError
from localspec.sampling.structured import compiler
from localspec.sampling.structured.compiler import one_line

N_COMPILED = 32
"""Grammars kept, and kept compiled, the least recently used going first."""

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's ``json.dumps`` writes it: on one line. Free whitespace costs tokens and lets small models run on in
blanks; a schema that wants it says so with llguidance's key ``x-guidance``."""

MAX_SCHEMA = MAX_GRAMMAR = 1 << 18
"""Longest schema and grammar, in characters."""

MAX_OPTIONAL = 1000
"""Most properties of one object that may be left out. Compiling takes time with their square, half a second for these,
and each takes four of the places in a grammar that the library may be at (``compiler.MAX_ITEMS``)."""


def grammar_of(response_format: Mapping[str, Any] | None, grammar: str | None) -> str | None:
    """The grammar of a request in llguidance's notation; None where any text will do.

    Args:
        response_format: OpenAI's ``{"type": "text"}``, ``{"type": "json_object"}`` or ``{"type": "json_schema",
            "json_schema": {"name": …, "schema": {…}}}``; or None.
        grammar: GBNF, llama.cpp's notation, with a rule ``root``; or None.

    Raises:
        UsageError: both are given, or one that cannot be followed; the message is one line.
        EngineUnavailable: the library that matches grammars is not installed.
    """
    if response_format is not None and grammar is not None:
        raise UsageError("response_format and grammar exclude each other: give one of them")
    if grammar is not None:
        if not isinstance(grammar, str) or not grammar.strip():
            raise UsageError("grammar must be the text of a GBNF grammar, with a rule named root")
        return _from_gbnf(grammar)
    schema = _schema_of(response_format)
    if schema is None:
        return None
    try:
        _check_objects(schema)
        text = json.dumps(changed(schema, _drop_unknown_format), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {one_line(str(error))}") from None
    return _from_schema(text)


def is_schema(response_format: Mapping[str, Any] | None) -> bool:
    """Whether a ``response_format`` asks for JSON, rather than for any text."""
    return response_format is not None and response_format.get("type") != "text"


def _schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema that a ``response_format`` stands for; None for free text."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise UsageError(f"response_format must be an object with a type, not {_short(response_format)}")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's server takes a schema here too.
        schema = response_format.get("schema")
        return {"type": "object"} if schema is None else _checked_schema(schema)
    if kind != "json_schema":
        raise UsageError(f"response_format: type must be text, json_object or json_schema, not {_short(kind)}")
    wrapper = response_format.get("json_schema", response_format)
    if not isinstance(wrapper, Mapping) or "schema" not in wrapper:
        raise UsageError('response_format: json_schema must be an object with a "schema" in it')
    return _checked_schema(wrapper["schema"])


_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats of strings that answers are held to."""

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_SCHEMAS = ("const", "enum", "default", "examples", "example", "x-guidance")


def changed(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of a schema, with a change made to it and to every schema in it."""
    if isinstance(schema, list):
        return [changed(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: changed(one, change) for name, one in value.items()}
        else:
            found[key] = value if key in _NO_SCHEMAS else changed(value, change)
    change(found)
    return found


def _drop_unknown_format(schema: dict[str, Any]) -> None:
    """JSON Schema calls a format that is not known an annotation; those who make schemas write many such."""
    if not (isinstance(schema.get("format"), str) and schema["format"] in _FORMATS):
        schema.pop("format", None)


def _checked_schema(schema: Any) -> Any:
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"a JSON schema is an object, not {_short(schema)}")
    if isinstance(schema, bool):
        return schema
    chosen = schema.get("x-guidance", {})
    if not isinstance(chosen, Mapping):
        raise UsageError(f"x-guidance in a JSON schema must be an object, not {_short(chosen)}")
    unset = {} if chosen.get("whitespace_flexible") or chosen.get("whitespace_pattern") else ONE_LINE
    return {**schema, "x-guidance": {**unset, **chosen}}


def _check_objects(schema: Any) -> None:
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            properties, required = each.get("properties"), each.get("required")
            if isinstance(properties, Mapping):
                names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
                n = len(properties.keys() - names)
                if n > MAX_OPTIONAL:
                    message = f"an object of the JSON schema has {n} properties that may be left out"
                    raise UsageError(f"{message}, and at most {MAX_OPTIONAL} can be used")
            left += each.values()
        elif isinstance(each, list):
            left += each


@lru_cache(maxsize=N_COMPILED)
def _from_schema(schema: str) -> str:
    if len(schema) > MAX_SCHEMA:
        raise UsageError(f"the JSON schema has {len(schema)} characters, and at most {MAX_SCHEMA} can be used")
    text = f'%llguidance {{"no_forcing": true}}\nstart: %json {schema}\n'
    _check(text, "the JSON schema cannot be followed")
    return text


@lru_cache(maxsize=N_COMPILED)
def _from_gbnf(grammar: str) -> str:
    if len(grammar) > MAX_GRAMMAR:
        raise UsageError(f"the grammar has {len(grammar)} characters, and at most {MAX_GRAMMAR} can be used")
    from localspec.sampling.structured.gbnf import parse
    from localspec.sampling.structured.gbnf_lark import lark

    try:
        text = '%llguidance {"no_forcing": true}\n' + lark(parse(grammar))
    except RecursionError:
        raise UsageError("the grammar's rules are nested too deeply") from None
    _check(text, "the grammar cannot be followed")
    return text


def _check(text: str, complaint: str) -> None:
    """Refuse a grammar that does not compile; needs no vocabulary."""
    problem = compiler.problem_of(text)
    if problem:
        raise UsageError(f"{complaint}: {problem}")


def _short(value: Any) -> str:
    return one_line(repr(value))[:60]
