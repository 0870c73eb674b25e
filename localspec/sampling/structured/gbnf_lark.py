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

    def write(self) -> str:
        if "root" in self.regular:
            self.lexemes[Rule("root")] = None
            lines = [f"start: {self.lexeme(Rule('root'))}"]
            return "\n".join([*lines, *self.lexeme_lines()]) + "\n"
        while True:
            self.lexemes = {}
            lines = self.rule_lines()
            mistakable = self.mistakable()
            if not mistakable:
                return "\n".join([*lines, *self.lexeme_lines()]) + "\n"
            self.refused |= mistakable

    # -- rules ---------------------------------------------------------------------------------------------------

    def rule_lines(self) -> list[str]:
        lines, done, queue = [], {"root"}, ["root"]
        while queue:
            name = queue.pop()
            lines.append(f"{self.rule(name)}: {self.as_rule(self.rules[name])}")
            for used in self.rules_used(self.rules[name]):
                if used not in done:
                    done.add(used)
                    queue.append(used)
        return lines

    def rule(self, name: str) -> str:
        return "start" if name == "root" else f"r{self.numbers[name]}"

    def rules_used(self, node: Node) -> Iterator[str]:
        match node:
            case _ if self.is_lexeme(node):
                return
            case Rule(name):
                yield name
            case Sequence():
                for part in self.grouped(node):
                    yield from self.rules_used(part)
            case Choice(options):
                for option in options:
                    yield from self.rules_used(option)
            case Repeat(body):
                yield from self.rules_used(body)

    def as_rule(self, node: Node) -> str:
        if self.is_lexeme(node):
            self.lexemes[node] = None
            return self.lexeme(node)
        match node:
            case Rule(name):
                return self.rule(name)
            case Sequence():
                return " ".join(self.as_rule(part) for part in self.grouped(node)) or '""'
            case Choice(options):
                return "(" + " | ".join(self.as_rule(option) for option in options) + ")"
            case Repeat(body, least, most):
                return f"({self.as_rule(body)}){_times(least, most)}"
        raise AssertionError(node)

    def grouped(self, sequence: Sequence) -> list[Node]:
        """The parts, with the longest runs that can be one lexeme made one part."""
        parts, result, at = sequence.parts, list[Node](), 0
        while at < len(parts):
            for end in range(len(parts), at, -1):
                run: Node = Sequence(parts[at:end]) if end - at > 1 else parts[at]
                if end == at + 1 or self.is_lexeme(run):
                    result.append(run)
                    at = end
                    break
        return result

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

    def lexeme_lines(self) -> list[str]:
        lines = [f"L{i}: {self.as_regex(node)}" for i, node in enumerate(self.lexemes) if not isinstance(node, Chars)]
        used, queue = set[str](), [name for node in self.lexemes for name in names_in(node)]
        while queue:
            name = queue.pop()
            if name not in used:
                used.add(name)
                lines.append(f"T{self.numbers[name]}: {self.as_regex(self.rules[name])}")
                queue += names_in(self.rules[name])
        return lines

    def as_regex(self, node: Node) -> str:
        match node:
            case Chars():
                return _regex(node)
            case Rule(name):
                return f"T{self.numbers[name]}"
            case Sequence(parts):
                return " ".join(map(self.as_regex, parts)) or '""'
            case Choice(options):
                return "(" + " | ".join(self.as_regex(option) for option in options) + ")"
            case Repeat(body, least, most):
                return f"({self.as_regex(body)}){_times(least, most)}"

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
