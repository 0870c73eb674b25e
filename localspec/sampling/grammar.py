"""GBNF, llama.cpp's notation for grammars: text -> rules.

::

    root  ::= "{" ws pair ("," ws pair)* "}"   # literals, groups, * + ? {m} {m,} {m,n}
    pair  ::= [a-z]+ ":" ws ( value | [^}] )   # character classes, alternatives
    ws    ::= [ \\t\\n]*                         # escapes: \\n \\r \\t \\\\ \\" \\[ \\] \\xHH \\uHHHH \\UHHHHHHHH
    any   ::= .                                # any character

A rule ends with its line, but inside of parentheses and after ``|`` it goes on. What llama.cpp has beyond that,
references to tokens (``<think>``), is refused: here a grammar is about text alone.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any, NoReturn, TypeVar

from localspec.errors import EngineUnavailable, UsageError, shown

LAST_CHARACTER = 0x10FFFF
MAX_REPEAT = 10_000

Ranges = tuple[tuple[int, int], ...]  # Sets of characters: increasing, disjoint code point ranges, both ends included


@dataclass(frozen=True, slots=True)
class Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts in order; none: the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The body ``least`` to ``most`` times; None is any number."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to another rule."""

    name: str


Node = Chars | Sequence | Choice | Repeat | Rule


def parse(text: str) -> dict[str, Node]:
    """Read a grammar: its rules by name, ``root`` among them. Raises ``UsageError``: it is not one; the message
    names the line."""
    rules = dict(_Reader(text).rules())
    if "root" not in rules:
        raise UsageError("the grammar has no rule named root")
    for name, rule in rules.items():
        for used in names_in(rule):
            if used not in rules:
                raise UsageError(f"the grammar's rule {name} uses {used}, which is not defined")
    endless = rules.keys() - _ending(rules)
    if endless:
        raise UsageError(f"the grammar's rule {min(endless)} has no end: every text of it would contain another")
    return rules


def _ending(rules: Mapping[str, Node]) -> set[str]:
    """The rules with at least one finite text."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, rule in rules.items():
        for used in names_in(rule):
            users[used].add(name)
    ending: set[str] = set()
    queue = list(rules)
    while queue:
        name = queue.pop()
        if name not in ending and _has_text(rules[name], ending.__contains__, empty=False):
            ending.add(name)
            queue += users[name]
    return ending


def _has_text(node: Node, has_one: Callable[[str], bool], *, empty: bool) -> bool:
    """Whether a node has a finite text, of the rules that have one; or, if asked, an empty one."""
    match node:
        case Chars():
            return not empty
        case Rule(name):
            return has_one(name)
        case Sequence(parts):
            return all(_has_text(part, has_one, empty=empty) for part in parts)
        case Choice(options):
            return any(_has_text(option, has_one, empty=empty) for option in options)
        case Repeat(body, least):
            return least == 0 or _has_text(body, has_one, empty=empty)


def names_in(node: Node) -> Iterator[str]:
    match node:
        case Rule(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from names_in(part)
        case Repeat(body):
            yield from names_in(body)


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(high, result[-1][1])
        else:
            result.append((low, high))
    return tuple(result)


def others(ranges: Ranges) -> Ranges:
    result, start = [], 0
    for low, high in ranges:
        if low > start:
            result.append((start, low - 1))
        start = high + 1
    if start <= LAST_CHARACTER:
        result.append((start, LAST_CHARACTER))
    return tuple(result)


_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(,?)\s*(\d{0,9})\s*\}")
_DASH = re.compile(r"-(?=[^\]])")  # between the ends of a range
_CHARACTER = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})|\\([\s\S]?)|([^\r\n])")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def rules(self) -> Iterator[tuple[str, Node]]:
        seen = set()
        self.skip(_SPACE)
        while self.at < len(self.text):
            name = self.name()
            self.skip(_BLANK)
            if not self.take("::="):
                self.fail(f"::= is missing after {name}")
            if name in seen:
                self.fail(f"the rule {name} is defined twice")
            seen.add(name)
            self.skip(_SPACE)
            yield name, self.choice()
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                self.fail(f"{self.text[self.at]!r} is not expected here")
            self.skip(_SPACE)

    def choice(self) -> Node:
        options = [self.sequence()]
        while self.take("|"):
            self.skip(_SPACE)
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        between = _SPACE if self.depth else _BLANK
        self.skip(between)
        while (part := self.part()) is not None:
            self.skip(between)
            parts.append(self.repeated(part))
            self.skip(between)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def part(self) -> Node | None:
        if self.take('"'):
            return self.literal()
        if self.take("["):
            return self.chars()
        if self.take("."):
            return Chars(((0, LAST_CHARACTER),))
        if self.take("("):
            return self.group()
        if self.text.startswith(("<", "!"), self.at):
            self.fail("references to tokens are not supported, only text")
        name = self.skip(_NAME)
        return Rule(name) if name else None

    def group(self) -> Node:
        self.depth += 1
        self.skip(_SPACE)
        node = self.choice()
        if not self.take(")"):
            self.fail("a closing parenthesis is missing")
        self.depth -= 1
        return node

    def repeated(self, body: Node) -> Node:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.take(sign):
                return Repeat(body, least, most)
        if not self.text.startswith("{", self.at):
            return body
        match = _TIMES.match(self.text, self.at)
        if match is None or (match[3] and not match[2]):
            self.fail("a repetition is {m}, {m,} or {m,n}")
        least = int(match[1])
        most = int(match[3]) if match[3] else None if match[2] else least
        if (most is not None and most < least) or max(least, most or 0) > MAX_REPEAT:
            self.fail(f"a repetition needs 0 <= m <= n <= {MAX_REPEAT}")
        self.at = match.end()
        return Repeat(body, least, most)

    def literal(self) -> Node:
        characters: list[Node] = []
        while not self.take('"'):
            code = self.character("the text")
            characters.append(Chars(((code, code),)))
        return characters[0] if len(characters) == 1 else Sequence(tuple(characters))

    def chars(self) -> Node:
        negated = self.take("^")
        found: list[tuple[int, int]] = []
        while not self.take("]"):
            low = high = self.character("the character class")
            if self.skip(_DASH):
                high = self.character("the character class")
            if high < low:
                self.fail("a range of characters runs backwards")
            found.append((low, high))
        ranges = united(found)
        ranges = others(ranges) if negated else ranges
        if not ranges:
            self.fail("a character class has no character")
        return Chars(ranges)

    def character(self, where: str) -> int:
        """The code point of one character, perhaps escaped."""
        match = _CHARACTER.match(self.text, self.at)
        if match is None:
            self.fail(f"{where} has no end")
        self.at = match.end()
        digits, escaped, plain = match.groups()
        if plain:
            return ord(plain)
        if digits is None:
            return ord(_ESCAPES[escaped]) if escaped in _ESCAPES else self.fail(f"\\{escaped} is no escape")
        code = int(digits[1:], 16)
        if code > LAST_CHARACTER or 0xD800 <= code <= 0xDFFF:
            self.fail(f"\\{digits} is no character")
        return code

    def name(self) -> str:
        return self.skip(_NAME) or self.fail("the name of a rule is expected")

    def skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match[0] if match else ""

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def fail(self, what: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        raise UsageError(f"the grammar, line {line}: {what}")


# Grammars for llguidance, which reads a text in two steps: characters to lexemes, lexemes to rules. Its lexemes are as
# long as they can be, which GBNF does not know: with ``"a"+ "b" | "ab" "c"`` it would read the lexeme ``ab`` in the
# text ``ab`` and find no rule for it. Two ways of writing a grammar keep its meaning:
# * A whole grammar that is a regular expression (no rule contains itself) is one lexeme.
# * Elsewhere a lexeme is a single character, or a part that cannot be mistaken for another: no text of it begins
# another text of it, and no other lexeme begins with the same character. (Long lexemes, as of strings and keywords,
# make masks fast.)


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self.numbers = {name: i for i, name in enumerate(rules)}
        self.start = f"r{self.numbers['root']}"
        self.regular = _regular(rules)
        self.first: Callable[[Node], Ranges] = cache(self._first)
        self.nullable: Callable[[Node], bool] = cache(self._nullable)
        self.prefix_free: Callable[[Node], bool] = cache(self._prefix_free)
        self.refused: set[Node] = set()
        self.lexemes: dict[Node, int] = {}
        self.named: dict[str, str] = {}  # rules and parts of lexemes that are referred to: name here -> GBNF's

    def write(self) -> str:
        while True:
            self.lexemes, self.named = {}, {"start": "root"}
            if "root" in self.regular:
                lines = [f"start: {self.lexeme(Rule('root'))}"]
            else:
                lines = self.definitions(0, in_lexeme=False)
            mistakable = self.mistakable()
            if not mistakable:
                break
            self.refused |= mistakable
        n_rules = len(self.named)
        for node, number in self.lexemes.items():
            if not isinstance(node, Chars):
                lines.append(f"L{number}: {self.expression(node, in_lexeme=True)}")
        return "\n".join([*lines, *self.definitions(n_rules, in_lexeme=True)]) + "\n"

    def definitions(self, start: int, *, in_lexeme: bool) -> list[str]:
        """Definitions from the ``start``-th name on; grows with what those refer to."""
        lines: list[str] = []
        while start + len(lines) < len(self.named):
            for name, rule in list(self.named.items())[start + len(lines) :]:
                lines.append(f"{name}: {self.expression(self.rules[rule], in_lexeme=in_lexeme)}")
        return lines

    def expression(self, node: Node, *, in_lexeme: bool) -> str:
        """A part as rules of lexemes, or as a regular expression within one."""
        if not in_lexeme and self.is_lexeme(node):
            return self.lexeme(node)
        match node:
            case Chars():
                return _regex(node)
            case Rule(name):
                own = f"{'T' if in_lexeme else 'r'}{self.numbers[name]}"
                own = "start" if own == self.start else own
                self.named[own] = name
                return own
            case Sequence(parts):
                parts = parts if in_lexeme else self.grouped(node)
                return " ".join(self.expression(part, in_lexeme=in_lexeme) for part in parts) or '""'
            case Choice(options):
                return "(" + " | ".join(self.expression(each, in_lexeme=in_lexeme) for each in options) + ")"
            case Repeat(most=0):
                return '""'
            case Repeat(body, least, most):
                times = f"{{{least},{'' if most is None else most}}}"
                return f"({self.expression(body, in_lexeme=in_lexeme)}){times}"

    def grouped(self, sequence: Sequence) -> tuple[Node, ...]:
        """The parts, with the longest runs that can be one lexeme made one part."""
        parts, result = sequence.parts, list[Node]()
        while parts:
            runs = (n for n in range(len(parts), 1, -1) if self.is_lexeme(Sequence(parts[:n])))
            n = next(runs, 1)
            result.append(Sequence(parts[:n]) if n > 1 else parts[0])
            parts = parts[n:]
        return tuple(result)

    # -- lexemes -------------------------------------------------------------------------------------------------

    def is_lexeme(self, node: Node) -> bool:
        return isinstance(node, Chars) or (node not in self.refused and self.prefix_free(node))

    def mistakable(self) -> set[Node]:
        """Long lexemes that begin like another one."""
        pairs = [pair for pair in combinations(self.lexemes, 2) if _meet(*map(self.first, pair))]
        return {node for pair in pairs for node in pair if not isinstance(node, Chars)}

    def lexeme(self, node: Node) -> str:
        number = self.lexemes.setdefault(node, len(self.lexemes))
        return _regex(node) if isinstance(node, Chars) else f"L{number}"

    # -- what texts of a regular node look like --------------------------------------------------------------------

    def _first(self, node: Node) -> Ranges:
        return united([pair for each in self._begins(node) for pair in each])

    def _begins(self, node: Node) -> Iterator[Ranges]:
        match node:
            case Chars(ranges):
                yield ranges
            case Rule(name):
                yield self.first(self.rules[name])
            case Sequence(parts):
                for part in parts:
                    yield self.first(part)
                    if not self.nullable(part):
                        return
            case Choice(options):
                yield from map(self.first, options)
            case Repeat(body):
                yield self.first(body)

    def _nullable(self, node: Node) -> bool:
        """Whether the empty text is one of its texts."""
        return _has_text(node, lambda name: self.nullable(self.rules[name]), empty=True)

    def _prefix_free(self, node: Node) -> bool:
        """Whether it is regular, and surely no text of it begins another one; the empty text begins every text."""
        match node:
            case Chars():
                return True
            case Rule(name):
                return name in self.regular and self.prefix_free(self.rules[name])
            case Choice(options):
                firsts = map(self.first, options)
                return all(map(self.prefix_free, options)) and not any(_meet(a, b) for a, b in combinations(firsts, 2))
            case Repeat(body, least, most):
                return least == most and least > 0 and self.prefix_free(body)
            case Sequence(parts):
                for i in reversed(range(len(parts))):
                    part, rest = parts[i], Sequence(parts[i + 1 :])
                    if not self.prefix_free(part) and not (rest.parts and self.ends_clearly(part, rest)):
                        return False
                return bool(parts)
        raise AssertionError(node)

    def ends_clearly(self, part: Node, rest: Sequence) -> bool:
        """Whether it is a repetition that is over where, and only where, the rest (prefix-free) begins."""
        return (
            isinstance(part, Repeat)
            and self.prefix_free(part.body)
            and not _meet(self.first(part.body), self.first(rest))
        )


def lark(rules: Mapping[str, Node]) -> str:
    return _Writer(rules).write()


def _regular(rules: Mapping[str, Node]) -> set[str]:
    """The rules that are regular expressions: what they use never comes back to them."""
    sorter = TopologicalSorter({name: set(names_in(node)) for name, node in rules.items()})
    with suppress(CycleError):  # it still sorts what no cycle blocks
        sorter.prepare()
    regular: set[str] = set()
    while ready := sorter.get_ready():
        regular.update(ready)
        sorter.done(*ready)
    return regular


def _meet(a: Ranges, b: Ranges) -> bool:
    return any(low <= its_high and its_low <= high for low, high in a for its_low, its_high in b)


def _regex(chars: Chars) -> str:
    ranges = chars.ranges
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return json.dumps(chr(ranges[0][0]))
    halves = [pair for low, high in ranges for pair in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high))]
    parts = (f"\\u{{{low:x}}}" + (f"-\\u{{{high:x}}}" if high > low else "") for low, high in halves if low <= high)
    return "/[" + "".join(parts) + "]/"


T = TypeVar("T")

# Compiling recurses over references: a thousand in a row overflow the usual stack of a thread, which ends the process.
# Only what is used becomes memory.
STACK_BYTES = 512 << 20

MAX_ITEMS = 5000  # Places in the grammar at which an answer may be at once; the library's own limit is 2,000

_starting = threading.Lock()


def library() -> Any:
    """The module ``llguidance``. Raises ``EngineUnavailable``: it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise EngineUnavailable(
            "JSON schemas, grammars and forced tool calls need the package llguidance: pip install 'llguidance>=1.9,<2'"
        ) from error
    return llguidance


def compiled(tokenizer: Any, grammar: str) -> Any:
    llguidance = library()
    return _deep(lambda: llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_limits(llguidance)))


def _limits(llguidance: Any) -> Any:
    # Errors come with a dump of the parser otherwise.
    return llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ITEMS)


def _deep(function: Callable[[], T]) -> T:
    """Run on a thread with a large stack."""
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(function()), name="localspec-grammar", daemon=True)
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result[0]


_WHERE = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n +\d+ \| .*|\n?<non-verbose/>.*", re.DOTALL)


def reason(message: str) -> str:
    """What is wrong, from the library's message: one line without its excerpts and internal positions."""
    return one_line(_WHERE.sub("", _EXCERPT.sub("", message))) or "the library does not say why"


def one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 240 else line[:237] + "..."


N_COMPILED = 32  # Grammars kept compiled, the least recently used going first

# JSON on one line, as ``json.dumps`` writes it. Free whitespace costs tokens, and small models never end it; a schema
# that wants it says so with llguidance's key ``x-guidance``.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_SCHEMA = MAX_GRAMMAR = 1 << 18  # Longest schema and grammar, in characters

# Most optional properties of one object: compiling takes time with their square, and each takes four of ``MAX_ITEMS``.
MAX_OPTIONAL = 1000


def grammar_of(response_format: Mapping[str, Any] | None, grammar: str | None) -> str | None:
    """The grammar of a request in llguidance's notation; None where any text will do.

    ``response_format`` is OpenAI's ``{"type": "text"}``, ``{"type": "json_object"}`` or ``{"type": "json_schema",
    "json_schema": {"name": …, "schema": {…}}}``; ``grammar`` is GBNF with a rule ``root``. Raises ``UsageError``: both
    are given, or one that cannot be followed; ``EngineUnavailable``: llguidance is not installed.
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
        text = json.dumps(changed(schema, _prepare), allow_nan=False)
    except UsageError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {one_line(str(error))}") from None
    return _from_schema(text)


def _schema_of(response_format: Mapping[str, Any] | None) -> Any:
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise UsageError(f"response_format must be an object with a type, not {shown(response_format)}")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's server takes a schema here too.
        schema = response_format.get("schema")
        return _checked_schema({"type": "object"} if schema is None else schema)
    if kind != "json_schema":
        raise UsageError(f"response_format: type must be text, json_object or json_schema, not {shown(kind)}")
    wrapper = response_format.get("json_schema", response_format)
    if not isinstance(wrapper, Mapping) or "schema" not in wrapper:
        raise UsageError('response_format: json_schema must be an object with a "schema" in it')
    return _checked_schema(wrapper["schema"])


# Formats of strings that answers are held to.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

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


def _prepare(schema: dict[str, Any]) -> None:
    """Drop an unknown format, which JSON Schema calls an annotation; refuse an object with too much to leave out."""
    if not (isinstance(schema.get("format"), str) and schema["format"] in _FORMATS):
        schema.pop("format", None)
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, Mapping):
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        n = len(properties.keys() - names)
        if n > MAX_OPTIONAL:
            raise UsageError(
                f"an object of the JSON schema has {n} properties that may be left out, and at most {MAX_OPTIONAL} "
                "can be used"
            )


def _checked_schema(schema: Any) -> Any:
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"a JSON schema is an object, not {shown(schema)}")
    if isinstance(schema, bool):
        return schema
    chosen = schema.get("x-guidance", {})
    if not isinstance(chosen, Mapping):
        raise UsageError(f"x-guidance in a JSON schema must be an object, not {shown(chosen)}")
    unset = {} if chosen.get("whitespace_flexible") or chosen.get("whitespace_pattern") else ONE_LINE
    return {**schema, "x-guidance": {**unset, **chosen}}


@lru_cache(maxsize=N_COMPILED)
def _from_schema(schema: str) -> str:
    _check_length("JSON schema", schema, MAX_SCHEMA)
    return _checked(f"start: %json {schema}\n", "the JSON schema cannot be followed")


@lru_cache(maxsize=N_COMPILED)
def _from_gbnf(grammar: str) -> str:
    _check_length("grammar", grammar, MAX_GRAMMAR)
    try:
        text = lark(parse(grammar))
    except RecursionError:
        raise UsageError("the grammar's rules are nested too deeply") from None
    return _checked(text, "the grammar cannot be followed")


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise UsageError(f"the {what} has {len(text)} characters, and at most {most} can be used")


def _checked(rules: str, complaint: str) -> str:
    """A whole grammar, which compiles; needs no vocabulary."""
    text, llguidance = '%llguidance {"no_forcing": true}\n' + rules, library()
    failed, messages = _deep(
        lambda: llguidance.LLMatcher.validate_grammar_with_warnings(text, None, limits=_limits(llguidance))
    )
    if failed:
        raise UsageError(f"{complaint}: {reason(messages[0])}")
    return text
