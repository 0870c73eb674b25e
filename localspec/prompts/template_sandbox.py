"""Untrusted templates, rendered in Jinja's sandbox with a budget.

The sandbox keeps a template from reaching the program, not from running for ever. Here every operation that can take
time or memory out of proportion is paid for from the budget of a ``Meter``: iterations, calls, filters, operators, and
the values they make. A container costs as much as written out in full, so that ``[a, a]`` nested sixty deep is refused
when it is built, not when something compares or prints it.
"""

from __future__ import annotations

import functools
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from localspec.errors import TemplateError

# Sound templates have room for ten times what Qwen2.5's spends on 200 messages of 2,000 characters, and 10,000 messages
# for a filter over all earlier text in each. The units bound the work; the clock is for what they miss, so both grow
# with the conversation.
MAX_SOURCE = 80_000
SECONDS, SECONDS_PER_INPUT_UNIT = 1.0, 5e-5
UNITS, UNITS_PER_INPUT_UNIT = 32_000_000, 1024
# No chat template computes with anything but short counts.
MAX_NUMBER_BITS = 4096
MAX_NUMBER_ARGUMENT = 1_000_000
MAX_PRODUCT = 100_000_000
_ELEMENT = 16

# Filters that run regular expressions or pretty-printers over what they are given; no chat template uses them.
_DROPPED_FILTERS = ("urlize", "striptags", "wordwrap", "xmlattr", "pprint", "forceescape", "random")
# Methods of str whose cost is not bounded by the sizes that are checked.
_DROPPED_METHODS = frozenset(("expandtabs", "translate", "maketrans", "encode", "format_map"))


class LimitReached(BaseException):
    """The budget is spent. Not an ``Exception``, lest anything between here and the renderer swallows it."""


class Meter:
    """What one rendering may still do; a long conversation (``inputs``) may cost more."""

    def __init__(self, inputs: Any = None) -> None:
        given = weight(inputs, UNITS)
        self.left = UNITS + UNITS_PER_INPUT_UNIT * given
        # Its own: a busy machine must not refuse a sound template.
        self.deadline = time.thread_time() + SECONDS + SECONDS_PER_INPUT_UNIT * given

    def spend(self, units: int) -> None:
        """Pay for an operation, or raise ``LimitReached``."""
        self.left -= units
        if self.left < 0:
            raise LimitReached("it asks for too much work or memory")
        if time.thread_time() > self.deadline:
            raise LimitReached("it does not come to an end")

    def spend_text(self, size: int) -> None:
        """Pay for a text that is made. Copying is cheap: a template may go on adding to what it has written."""
        if size > UNITS:
            raise LimitReached("it asks for too much work or memory")
        self.spend(1 + size // 8)


def weight(value: Any, limit: int) -> int:
    """The size of a value written out in full, shared parts counted as often as they occur; stops at ``limit``."""
    total, stack = 0, [iter((value,))]
    while stack:
        for item in stack[-1]:
            if isinstance(item, str | bytes):
                total += _ELEMENT + len(item) // 8
            else:
                total += _ELEMENT
                if isinstance(item, Mapping):
                    stack.append(iter([*item.keys(), *item.values()]))
                    break
                if isinstance(item, Sequence | Set) and not isinstance(item, range):
                    stack.append(iter(item))
                    break
            if total > limit:
                return total
        else:
            stack.pop()
    return total


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.meter = Meter()


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up for chat templates, with a budget: ``meter``, of the rendering in this
    thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols], cache_size=0
        )
        self.of_thread = _OfThread()
        self.globals.pop("lipsum")
        self.globals |= {"namespace": _Namespace, "raise_exception": _refuse, "strftime_now": _now}
        for name in _DROPPED_FILTERS:
            self.filters.pop(name)
        self.filters["tojson"] = _to_json
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}

    @property
    def meter(self) -> Meter:
        return self.of_thread.meter

    # Jinja's hooks

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        return cast(nodes.Template, _Instrument().visit(tree))

    def concat(self, parts: Iterable[str]) -> str:
        texts = parts if isinstance(parts, list) else list(self.metered(parts))
        self.meter.spend_text(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, Sized) and isinstance(times, int):
                    self.meter.spend(max(0, len(text) * times))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_NUMBER_BITS:
                raise LimitReached("it computes with too large a number")
        return self.checked(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _DROPPED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # an instruction of ours, see _Instrument
            return __obj(*args)
        __self.meter.spend(_ELEMENT)
        if isinstance(owner, str | int | float):
            args = tuple(__self._settled(arg) for arg in args)
            __self._check_arguments(owner, args)
            if isinstance(owner, str) and __obj.__name__ == "join" and args:
                __self._check_join(owner, args[0])
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.checked(result)

    # Instructions that are compiled into every template

    def metered(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.meter.spend(_ELEMENT)
            yield value

    def checked(self, value: Any) -> Any:
        """The value itself, paid for by its size."""
        if isinstance(value, str):
            self.meter.spend_text(len(value))
        elif isinstance(value, Iterator):
            return self.metered(value)
        else:
            self.meter.spend(weight(value, self.meter.left))
        return value

    def sliced(self, value: Any) -> Any:
        """A part of a value, paid for by its length: its elements were paid for when the value was made."""
        if isinstance(value, list | tuple):
            self.meter.spend(_ELEMENT + len(value) // 2)
            return value
        return self.checked(value)

    def written(self, *values: Any) -> str:
        return self.concat([str(value) for value in values])

    # Filters

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend(_ELEMENT)
            given = [self._settled(arg) for arg in args[skipped:]]
            options = [*given[1:], *kwargs.values()]
            numbers = [abs(option) for option in options if isinstance(option, int)]
            size = len(given[0]) if given and isinstance(given[0], Sized) else 1
            if name == "round" and max(numbers, default=0) > 100:
                raise LimitReached("it computes with too large a number")
            if name == "sum" and any(isinstance(option, list | tuple) for option in options):
                raise LimitReached("it adds up lists")  # copies all of them again and again
            if name == "format" and given:
                _check_format(str(given[0]))
            if name == "join" and given:
                separator = next((option for option in options if isinstance(option, str)), "")
                self._check_join(separator, given[0])
            if name == "replace":
                self._check_arguments(str(given[0]), [option for option in options if isinstance(option, str)])
            if name == "indent" and options and isinstance(options[0], str):
                self._check_arguments(str(given[0]), [options[0]])
            if name != "truncate" and max(numbers, default=0) * max(1, size) > self.meter.left:
                raise LimitReached("it asks for too much work or memory")
            return self.checked(function(*args[:skipped], *given, **kwargs))

        return guarded

    def _settled(self, value: Any) -> Any:
        return self.checked(list(self.metered(value))) if isinstance(value, Iterator) else value

    def _check_arguments(self, owner: Any, args: Sequence[Any]) -> None:
        size = len(owner) if isinstance(owner, str) else 1
        for arg in args:
            if isinstance(arg, int) and abs(arg) > MAX_NUMBER_ARGUMENT:
                raise LimitReached("it computes with too large a number")
            if isinstance(arg, str) and size * len(arg) > MAX_PRODUCT:
                raise LimitReached("it asks for too much work or memory")

    def _check_join(self, separator: str, parts: Any) -> None:
        if isinstance(parts, Sized) and isinstance(parts, Iterable):
            self.meter.spend(len(separator) * len(parts))
            for part in parts:
                self.meter.spend(len(part) if isinstance(part, str) else _ELEMENT)


class SandboxedTemplate:
    """A template that runs within the budget of a ``Meter``, in several threads at a time if need be. Raises
    ``TemplateError``: it is too long, or not Jinja."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"the model's chat template has {len(source)} characters; at most {MAX_SOURCE} are read"
            )
        self._environment = MeteredEnvironment()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's own about odd expressions, meant for the template's author
                self._template = self._environment.from_string(source)
        except (Exception, LimitReached) as error:
            raise _failure("cannot be read", error) from None

    def run(self, variables: dict[str, Any]) -> str:
        """Render; raises ``TemplateError`` where the template fails or spends its budget."""
        self._environment.of_thread.meter = Meter(list(variables.values()))
        pieces = []
        try:
            for piece in self._template.generate(variables):
                self._environment.meter.spend(1 + len(piece))
                pieces.append(piece)
        except (Exception, LimitReached) as error:
            raise _failure("was stopped" if isinstance(error, LimitReached) else "failed", error) from None
        return "".join(pieces)


def _failure(what: str, error: BaseException) -> TemplateError:
    if isinstance(error, RecursionError):
        reason = "it calls itself without end"
    elif isinstance(error, MemoryError):
        reason = "it asks for too much memory"
    else:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    line = getattr(error, "lineno", None)
    where = f" at line {line}" if line else ""
    return TemplateError(f"the model's chat template {what}{where}: {reason} (raw text completion works without it)")


class _Instrument(NodeTransformer):
    """Puts the instructions above where Jinja has no hook of its own."""

    def generic_visit(self, node: nodes.Node) -> nodes.Node:
        super().generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _instruction("metered", node.iter)
            case nodes.Concat():
                return _instruction("written", *node.nodes)
            case nodes.Getitem(arg=nodes.Slice()):
                return _instruction("sliced", node)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return _instruction("checked", node)
        return node


def _instruction(name: str, *args: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), cast(list[nodes.Expr], list(args)), [], None, None)
    return cast(nodes.Call, call.set_lineno(args[0].lineno if args else 1))


class _Generation(Extension):
    """``{% generation %}`` marks an answer for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Can be changed after it was weighed, so it is never written out."""

    def __repr__(self) -> str:
        return "<namespace>"


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(pattern: str) -> str:
    if len(pattern) > 200:
        raise LimitReached("it asks for too long a date")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face has it: Jinja's own escapes HTML, which models were not trained on."""
    if isinstance(indent, str) or (indent or 0) > 16:
        raise LimitReached("it indents too deeply")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_format(pattern: str) -> None:
    """Refuse fields wider than 999 characters, and widths that come from an argument."""
    digits, braces = 0, 0
    for before, character in zip(" " + pattern, pattern, strict=False):
        digits = digits + 1 if character.isdigit() else 0
        braces += (character == "{") - (character == "}")
        if digits > 3 or (character == "*" and before in "%.-+ #0") or (braces > 1 and before != "{"):
            raise LimitReached("it formats with too wide a field")
