"""GBNF grammars: read as llama.cpp has them, and followed to the letter by the library that knows another notation."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localspec.errors import UsageError
from localspec.sampling import grammar as grammar_module
from localspec.sampling.grammar import Chars, Choice, Node, Repeat, Rule, Sequence, grammar_of, lark, parse
from tests.support.grammars import Meaning, byte_matcher, matches


def compare(rules: dict[str, Node], texts: list[str]) -> int:
    """Returns how many of the texts the grammar says."""
    meaning, made = Meaning(rules), byte_matcher('%llguidance {"no_forcing": true}\n' + lark(rules))
    right = [meaning.says(text) for text in texts]
    assert [matches(made, text) for text in texts] == right, (lark(rules), texts)
    return sum(right)


JSON = r"""
# llama.cpp's own example
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_llama_cpps_json_grammar() -> None:
    rules = parse(JSON)
    good = ['{"a": [1, -2.5e3, "é\\n\\u00e9"], "b": {}, "c": true} ', "{}", '{\n\t"x":null}']
    bad = ["[]", '{"a": 01}', '{"a" 1}', '{"a": "\t"}', "{,}", '{"a": tru}']
    assert compare(rules, good + bad) == len(good)
    # Strings and keywords are read whole, which is what makes masks fast; blanks and numbers cannot be.
    words = [line for line in lark(rules).splitlines() if line.startswith("L")]
    assert any('"t" "r" "u" "e"' in line for line in words)
    assert any(line.endswith('"\\""') for line in words)
    assert len(words) == 3


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "(" root ")" | [a-z]+ "x" | "if"', "(ax) ((if)) (xx)", "(a) () i"),
        ('root ::= item ("," item)*\nitem ::= [a-z,]+ ";"', "a,b; a;,b;,;", "; a,b"),
        ('root ::= root "+" [0-9]+ | [0-9]+', "1 12+3 1+2+3", "+ 1+ 1++2"),
        ('root ::= "\\u00e9" [^"\\\\] . [\\]a\\-]', 'éx\n- é"', "é\\xa e"),
        ('root ::= "say \\"hi\\"" | "\\x41\\U0001F600/" | [/\\n]', 'say"hi" A😀/ /', "A"),
        ('root ::= ("ab"){2,3} "c"{0,1} [xy]{1,}', "abab*x ababcyx abababx", "abx ababc"),
        ('root ::= a-B | A_b\na-B ::= "q" # a comment\nA_b ::=\n  "r" |\n  "s"', "q r s", "qr"),
        ('root ::= (\n  "a"\n  "b" # in here lines go on\n)+', "ab abab", "a ba"),
        ('root ::= "true" | [a-z]+ "!" | "{" root "}"', "true {true} {truex!} t!", "tru {t}"),
        ('root ::= [^a-c] [é-ü]* | "ab" root "ab"', "d déü abdab", "a ab"),
        ("root ::= .+", "a\n😀", ""),
        ('root ::= "a"{0} x{0,0} ("b" "c"{0}){2}\nx ::= "x"', "bb", "abb xbb b bbc"),
    ],
)
def test_grammars_mean_what_they_say(grammar: str, good: str, bad: str) -> None:
    rules = parse(grammar)
    texts = [text.replace("*", "") for text in good.split(" ") + bad.split(" ")]
    meaning = Meaning(rules)
    assert compare(rules, texts) == sum(map(meaning.says, texts))
    assert sum(map(meaning.says, texts)) >= 1
    assert not any(meaning.says(text) for text in bad.split(" ") if text)


NAMES = ("root", "p", "q", "r")


def nodes() -> st.SearchStrategy[Node]:
    letters = st.sampled_from(["a", "b", "c", "ab", "abc", "ba", ""])
    literal = letters.map(lambda text: Sequence(tuple(Chars(((ord(c), ord(c)),)) for c in text)))
    chars = st.sampled_from([((97, 98),), ((98, 99),), ((97, 99),), ((99, 99),)]).map(Chars)
    leaves = st.one_of(literal, chars, st.sampled_from(NAMES).map(Rule))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=4).map(lambda parts: Sequence(tuple(parts))),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: Choice(tuple(options))),
            st.builds(Repeat, inner, st.just(0), st.sampled_from([None, 1, 2])),
            st.builds(Repeat, inner, st.just(1), st.sampled_from([None, 1, 2])),
        ),
        max_leaves=8,
    )


WORDS = ["".join(letters) for n in range(5) for letters in product("abc", repeat=n)]


@settings(max_examples=60, deadline=None)
@given(st.tuples(*(nodes() for _ in NAMES)))
def test_random_grammars_mean_what_they_say(bodies: tuple[Node, ...]) -> None:
    """On all texts of up to four letters; recursive, ambiguous, with empty parts and overlapping words."""
    rules = dict(zip(NAMES, bodies, strict=True))
    assume(not rules.keys() - grammar_module._ending(rules))
    compare(rules, WORDS[::2])


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("", "GBNF"),
        ('start ::= "a"', "no rule named root"),
        ("root ::= x", "root uses x, which is not defined"),
        ('root ::= "a', "line 1: the text has no end"),
        ("root ::= [a", "line 1: the character class has no end"),
        ('root ::= ("a"', "line 1: a closing parenthesis is missing"),
        ('root = "a"', "line 1: ::= is missing after root"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is defined twice"),
        ('root ::= "a"{3,1}', "line 1: a repetition needs"),
        ('root ::= "a"{x}', "line 1: a repetition is"),
        ('root ::= "\\q"', "line 1: \\q is no escape"),
        ('root ::= "\\ud800"', "line 1: \\ud800 is no character"),
        ("root ::= [z-a]", "runs backwards"),
        ("root ::= []", "has no character"),
        ("root ::= <think> .*", "references to tokens are not supported"),
        ('root ::= "a" ) "b"', "')' is not expected here"),
        ("root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "nested too deeply"),
        ("root ::= root", "rule root has no end"),
        ('root ::= "a" | "b" x\nx ::= "c" x', "rule x has no end"),
    ],
)
def test_what_is_no_grammar_gets_one_clear_line(grammar: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        grammar_of(None, grammar)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
