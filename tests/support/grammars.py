"""What a GBNF grammar means, by definition, for the tests to compare with; and schemas of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llguidance

from localspec.sampling.grammar import Chars, Choice, Node, Repeat, Rule, Sequence, compiled


def thing(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these properties alone, all of them required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def byte_matcher(grammar: str) -> Any:
    """A matcher of a grammar in llguidance's notation whose tokens are single bytes."""
    made = compiled(llguidance.LLTokenizer("byte"), grammar)
    assert not made.is_error(), made.get_error() + grammar
    return made


def matches(made: Any, text: str) -> bool:
    """Whether a text is in the grammar of such a matcher, which it begins anew."""
    made.reset()
    data = list(text.encode())
    return bool(made.try_consume_tokens(data) == len(data) and made.is_accepting())


class Meaning:
    """Which texts a grammar says, and which begin one."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules

    def says(self, text: str) -> bool:
        return len(text) in self._ends(text)["root", 0]

    def _ends(self, text: str) -> dict[tuple[str, int], set[int]]:
        """For every rule and place, where a text of the rule that starts there can end: grown until nothing is new."""
        known: dict[tuple[str, int], set[int]] = {(n, i): set() for n in self.rules for i in range(len(text) + 1)}
        while True:
            size = sum(map(len, known.values()))
            for name, start in known:
                known[name, start] |= self._match(self.rules[name], text, start, known)
            if size == sum(map(len, known.values())):
                return known

    def _match(self, node: Node, text: str, at: int, known: dict[tuple[str, int], set[int]]) -> set[int]:
        match node:
            case Chars(ranges):
                fits = at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
                return {at + 1} if fits else set()
            case Rule(name):
                return known[name, at]
            case Choice(options):
                return set().union(*(self._match(option, text, at, known) for option in options))
            case Sequence(parts):
                ends = {at}
                for part in parts:
                    ends = set().union(*(self._match(part, text, end, known) for end in ends))
                return ends
            case Repeat(body, least, most):
                ends, found = {at}, set() if least else {at}
                for n in range(1, (most if most is not None else least + len(text) + 1) + 1):
                    ends = set().union(*(self._match(body, text, end, known) for end in ends))
                    found |= ends if n >= least else set()
                return found
        raise AssertionError(node)
