"""Grammars for the matching library, which reads a text in two steps: characters to lexemes, lexemes to rules.

Its lexemes are as long as they can be, which GBNF does not know: with ``"a"+ "b" | "ab" "c"`` it would read the lexeme
``ab`` in the text ``ab`` and find no rule for it. Two ways of writing a grammar keep its meaning:

* What refers to no rule that contains itself is a regular expression, and a whole grammar like that is one lexeme.
* In other grammars a lexeme is a single character, or a part that nothing else can be mistaken for: no text of it
  begins another text of it, and no other lexeme begins with the same character. Strings in quotation marks and
  keywords are like that. (Long lexemes are what makes masks fast.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from localspec.sampling.structured.gbnf import Chars, Choice, Node, Ranges, Repeat, Rule, Sequence, names_in, united


def lark(rules: Mapping[str, Node]) -> str:
    """The rules in the library's notation, beginning with ``start``."""
    return _Writer(rules).write()


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self.numbers = {name: i for i, name in enumerate(rules)}
        self.start = f"r{self.numbers['root']}"
        self.regular: set[str] = set()
        self._nullable: set[str] = set()
        for name in _regular(rules):
            self.regular.add(name)
            if self.nullable(rules[name]):
                self._nullable.add(name)
        self._first: dict[Node, Ranges] = {}
        self._prefix_free: dict[Node, bool] = {}
        self.refused: set[Node] = set()
        self.lexemes: dict[Node, None] = {}
        self.named: dict[str, str] = {}  # rules and parts of lexemes that are referred to: name here -> GBNF's

    def write(self) -> str:
        while True:
            self.lexemes, self.named = {}, {"start": "root"}
            if "root" in self.regular:
                self.lexemes[Rule("root")] = None
                lines = [f"start: {self.lexeme(Rule('root'))}"]
            else:
                lines = self.definitions(0, in_lexeme=False)
            mistakable = self.mistakable()
            if not mistakable:
                break
            self.refused |= mistakable
        n_rules = len(self.named)
        lexemes = [(i, node) for i, node in enumerate(self.lexemes) if not isinstance(node, Chars)]
        lines += [f"L{i}: {self.expression(node, in_lexeme=True)}" for i, node in lexemes]
        return "\n".join([*lines, *self.definitions(n_rules, in_lexeme=True)]) + "\n"

    def definitions(self, start: int, *, in_lexeme: bool) -> list[str]:
        """Of all that is referred to from the ``start``-th on; grows with what those refer to."""
        lines: list[str] = []
        while start + len(lines) < len(self.named):
            for name, rule in list(self.named.items())[start + len(lines) :]:
                lines.append(f"{name}: {self.expression(self.rules[rule], in_lexeme=in_lexeme)}")
        return lines

    def expression(self, node: Node, *, in_lexeme: bool) -> str:
        """A part as rules of lexemes, or as a regular expression within one."""
        if not in_lexeme and self.is_lexeme(node):
            self.lexemes[node] = None
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
            case Repeat(body, least, most):
                return f"({self.expression(body, in_lexeme=in_lexeme)}){_times(least, most)}"

    def grouped(self, sequence: Sequence) -> tuple[Node, ...]:
        """The parts, with the longest runs that can be one lexeme made one part."""
        parts, result, at = sequence.parts, list[Node](), 0
        while at < len(parts):
            for end in range(len(parts), at, -1):
                run: Node = Sequence(parts[at:end]) if end - at > 1 else parts[at]
                if end == at + 1 or self.is_lexeme(run):
                    result.append(run)
                    at = end
                    break
        return tuple(result)

    # -- lexemes -------------------------------------------------------------------------------------------------

    def is_lexeme(self, node: Node) -> bool:
        return isinstance(node, Chars) or (node not in self.refused and self.prefix_free(node))

    def mistakable(self) -> set[Node]:
        """Long lexemes that begin like another one."""
        found: set[Node] = set()
        lexemes = [(node, self.first(node)) for node in self.lexemes]
        for i, (node, first) in enumerate(lexemes):
            for other, its_first in lexemes[:i]:
                if _meet(first, its_first):
                    found |= {each for each in (node, other) if not isinstance(each, Chars)}
        return found

    def lexeme(self, node: Node) -> str:
        if isinstance(node, Chars):
            return _regex(node)
        return f"L{list(self.lexemes).index(node)}"

    # -- what texts of a regular node look like --------------------------------------------------------------------

    def first(self, node: Node) -> Ranges:
        """The characters that its texts begin with."""
        if node not in self._first:
            self._first[node] = united([pair for each in self._begins(node) for pair in each])
        return self._first[node]

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

    def nullable(self, node: Node) -> bool:
        """Whether the empty text is one of its texts."""
        match node:
            case Chars():
                return False
            case Rule(name):
                return name in self._nullable
            case Sequence(parts):
                return all(map(self.nullable, parts))
            case Choice(options):
                return any(map(self.nullable, options))
            case Repeat(body, least):
                return least == 0 or self.nullable(body)

    def prefix_free(self, node: Node) -> bool:
        """Whether it is regular, and surely no text of it begins another one; the empty text begins every text."""
        if node not in self._prefix_free:
            self._prefix_free[node] = self._is_prefix_free(node)
        return self._prefix_free[node]

    def _is_prefix_free(self, node: Node) -> bool:
        match node:
            case Chars():
                return True
            case Rule(name):
                return name in self.regular and self.prefix_free(self.rules[name])
            case Choice(options):
                if not all(map(self.prefix_free, options)):
                    return False
                if all(isinstance(option, Chars) for option in options):
                    return True
                return not any(_meet(self.first(a), self.first(b)) for i, a in enumerate(options) for b in options[:i])
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


def _regular(rules: Mapping[str, Node]) -> list[str]:
    """The rules that are regular expressions, each after those it uses: what they use never comes back to them."""
    sorter = TopologicalSorter({name: set(names_in(node)) for name, node in rules.items()})
    with suppress(CycleError):  # it still sorts what no cycle blocks
        sorter.prepare()
    regular: list[str] = []
    while ready := sorter.get_ready():
        regular += ready
        sorter.done(*ready)
    return regular


def _meet(a: Ranges, b: Ranges) -> bool:
    """Whether two sets of characters share one."""
    return any(low <= its_high and its_low <= high for low, high in a for its_low, its_high in b)


def _times(least: int, most: int | None) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?", (least, least): f"{{{least}}}"}
    return known.get((least, most)) or f"{{{least},{'' if most is None else most}}}"


def _regex(chars: Chars) -> str:
    ranges = chars.ranges
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return json.dumps(chr(ranges[0][0]))
    parts = (
        f"\\u{{{low:x}}}" + (f"-\\u{{{high:x}}}" if high > low else "") for low, high in _without_surrogates(ranges)
    )
    return "/[" + "".join(parts) + "]/"


def _without_surrogates(ranges: Ranges) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        if low < 0xD800:
            yield low, min(high, 0xD7FF)
        if high > 0xDFFF:
            yield max(low, 0xE000), high
