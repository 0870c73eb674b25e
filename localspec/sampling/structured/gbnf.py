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

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from localspec.errors import UsageError

LAST_CHARACTER = 0x10FFFF
MAX_DEPTH = 64
MAX_REPEAT = 10_000

Ranges = tuple[tuple[int, int], ...]
"""Sets of characters: increasing, disjoint code point ranges, both ends included."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other; no parts are the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The body ``least`` to ``most`` times; None is any number."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What another rule says."""

    name: str


Node = Chars | Sequence | Choice | Repeat | Rule


def parse(text: str) -> dict[str, Node]:
    """Read a grammar.

    Returns:
        Its rules by name, ``root`` among them.

    Raises:
        UsageError: it is not one; the message names the line.
    """
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
    """The rules that say at least one text."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, rule in rules.items():
        for used in names_in(rule):
            users[used].add(name)
    ending: set[str] = set()
    queue = list(rules)
    while queue:
        name = queue.pop()
        if name not in ending and _ends(rules[name], ending):
            ending.add(name)
            queue += users[name]
    return ending


def _ends(node: Node, ending: set[str]) -> bool:
    match node:
        case Chars():
            return True
        case Rule(name):
            return name in ending
        case Sequence(parts):
            return all(_ends(part, ending) for part in parts)
        case Choice(options):
            return any(_ends(option, ending) for option in options)
        case Repeat(body, least):
            return least == 0 or _ends(body, ending)


def names_in(node: Node) -> Iterator[str]:
    """The rules that a part refers to."""
    match node:
        case Rule(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from names_in(part)
        case Repeat(body):
            yield from names_in(body)


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Code point ranges in any order, overlapping or not -> increasing and disjoint."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(high, result[-1][1])
        else:
            result.append((low, high))
    return tuple(result)


def others(ranges: Ranges) -> Ranges:
    """All characters that are not in ``ranges``."""
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
_HEX = {"x": 2, "u": 4, "U": 8}
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
        return Rule(self.name()) if _NAME.match(self.text, self.at) else None

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"parentheses are nested more than {MAX_DEPTH} deep")
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
            if self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
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
        here = self.text[self.at : self.at + 1]
        if here == "" or here in "\r\n":
            self.fail(f"{where} has no end")
        self.at += 1
        if here != "\\":
            return ord(here)
        kind = self.text[self.at : self.at + 1]
        self.at += 1
        if kind in _ESCAPES and kind:
            return ord(_ESCAPES[kind])
        digits = self.text[self.at : self.at + _HEX.get(kind, 0)]
        if kind not in _HEX or len(digits) < _HEX[kind] or not re.fullmatch(r"[0-9A-Fa-f]+", digits):
            self.fail(f"\\{kind} is no escape")
        self.at += len(digits)
        code = int(digits, 16)
        if code > LAST_CHARACTER or 0xD800 <= code <= 0xDFFF:
            self.fail(f"\\{kind}{digits} is no character")
        return code

    def name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            self.fail("the name of a rule is expected")
        self.at = match.end()
        return match[0]

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def fail(self, what: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        raise UsageError(f"the grammar, line {line}: {what}")
