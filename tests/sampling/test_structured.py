"""Answers that follow a schema or a grammar: what may be asked, and that every answer and every guess keeps to it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from localspec import LLM, SamplingParams
from localspec.backends import reference
from localspec.commands.options import RunOptions, answer_form
from localspec.errors import EngineUnavailable, UsageError
from localspec.model_files.vocab import Vocab
from localspec.sampling.constraint import constraint_for
from localspec.sampling.grammar import grammar_of
from localspec.spec_decode.rounds import Round
from tests.conftest import TinyFiles
from tests.support.grammars import byte_matcher, matches, thing
from tests.support.program import localspec

# Every string and number is bounded: a model of random weights would go on for ever inside one.
PERSON = thing(
    {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "catfish", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "maxItems": 3},
        "alive": {"type": "boolean"},
        "parent": {"anyOf": [{"type": "null"}, thing({"é\n": {"const": "😀"}})]},
    }
)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


PARAMS = SamplingParams(response_format=schema_format(PERSON), max_tokens=400)


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles) -> Iterator[LLM]:
    pair = tiny.quick
    with LLM(pair.target, draft=["ngram", str(pair.draft)], backend="reference", n_ctx=512) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def vocab(tiny: TinyFiles) -> Iterator[Vocab]:
    with reference.load(tiny.quick.target) as model:
        yield model.vocab


def answer(llm: LLM, params: SamplingParams, **options: Any) -> tuple[str, list[int], str, list[Round]]:
    with llm.rounds("a cat", params, **options) as stream:
        rounds = list(stream)
        return stream.reply.text, stream.reply.token_ids, stream.reply.finish_reason, rounds


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_valid_and_drafting_changes_nothing(llm: LLM, seed: int) -> None:
    """Random weights say nonsense, so whatever is valid here is valid because of the mask; see ``test_structured_law``
    for drafts."""
    base = replace(PARAMS, seed=seed, temperature=[0.0, 0.7, 3.0][seed % 3], top_k=[0, 40][seed % 2])
    if seed % 4 == 0:
        base = replace(base, repeat_penalty=1.2, logit_bias={40: 2.0})
    plain = answer(llm, base, speculate=False)
    jsonschema.validate(json.loads(plain[0]), PERSON)
    assert plain[2] == "stop"
    for length in (1, 5, "auto"):
        assert answer(llm, base, draft_length=length)[:3] == plain[:3]
    free = replace(PARAMS, temperature=[0.5, 2.0][seed % 2])  # here the draft model's guesses are sampled from a q
    text, _, _, rounds = answer(llm, free, draft_length=4)
    jsonschema.validate(json.loads(text), PERSON)
    assert any(guess.dist is not None for round_ in rounds for guess in round_.draft)


def test_forced_text_is_drafted(llm: LLM) -> None:
    """Field names cost no pass of their own: an answer takes far fewer passes than it has tokens."""
    _, tokens, _, rounds = answer(llm, replace(PARAMS, seed=1, temperature=1.0), draft_length=12)
    guesses = [(g, a) for r in rounds for g, a in zip(r.draft, r.accepted, strict=True) if g.source == "grammar"]
    assert sum(accepted for _, accepted in guesses) > 20
    assert len(rounds) < 0.6 * len(tokens)
    sure = [accepted for guess, accepted in guesses if guess.prob == 1.0]
    assert sure, "nowhere a single token was allowed"


def test_a_bias_against_everything_allowed_is_an_error(llm: LLM, vocab: Vocab) -> None:
    banned = {token: -float("inf") for token in range(vocab.n_tokens) if vocab.token_bytes(token).startswith(b"q")}
    with pytest.raises(UsageError, match="bans every token"):
        answer(llm, SamplingParams(grammar='root ::= "q"', logit_bias=banned))
    assert answer(llm, SamplingParams(grammar='root ::= "q"'))[0] == "q"


def test_the_mask_allows_what_the_bytes_allow(vocab: Vocab) -> None:
    """Token by token, against the same grammar matched on single bytes: an independent way through the library."""
    grammar = grammar_of(PARAMS.response_format, None)
    assert grammar is not None
    bytewise = byte_matcher(grammar)
    rng, n_checked = random.Random(2), 0
    constraint = constraint_for(PARAMS, vocab)
    assert constraint is not None
    while not constraint.complete:
        mask = constraint.allowed(vocab.n_tokens + 3)  # logits can be wider than the vocabulary
        assert not mask[-3:].any()
        for token in range(vocab.n_tokens):
            said = vocab.token_bytes(token)
            n = bytewise.try_consume_tokens(list(said)) if said else 0
            bytewise.rollback(n)
            fits = bool(said) and n == len(said)
            if token in vocab.eog:
                fits = bytewise.is_accepting()
            assert mask[token] == fits == bool(constraint.n_legal([token])), said
            n_checked += fits
        token = int(rng.choice(np.flatnonzero(mask).tolist()))
        constraint.settle(token)
        bytewise.try_consume_tokens(list(vocab.token_bytes(token)))
    assert n_checked > 300


@pytest.mark.parametrize(
    ("response_format", "complaint"),
    [
        ("json", "must be an object with a type"),
        ({}, "type must be text, json_object or json_schema, not None"),
        ({"type": "xml"}, "not 'xml'"),
        ({"type": "json_schema"}, 'an object with a "schema" in it'),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, 'an object with a "schema" in it'),
        (schema_format([1]), "a JSON schema is an object, not [1]"),
        (schema_format({"type": "strin"}), "cannot be followed: Invalid type: strin"),
        (schema_format({"type": "string", "pattern": "("}), "cannot be followed: regex parse error"),
        (schema_format({"$ref": "https://example.com/x"}), "cannot be followed"),
        (schema_format({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (schema_format({"enum": []}), "Unsatisfiable"),
        (schema_format(False), "Unsatisfiable"),
        (schema_format({"minimum": float("nan")}), "is not JSON"),
        (schema_format({"const": {1, 2}}), "is not JSON"),
        (schema_format({"x-guidance": 3}), "x-guidance in a JSON schema must be an object"),
        (schema_format({"description": "x" * (1 << 18)}), "at most 262144"),
        (
            schema_format({"properties": {f"p{i}": {} for i in range(1001)}, "required": ["x", "x", [], "y"]}),
            "1001 properties that may be left out",
        ),
    ],
)
def test_what_cannot_be_followed_gets_one_line_before_anything_runs(response_format: Any, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(response_format=response_format)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_forms_exclude_one_another_and_endless_answers_and_need_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    json_object = {"type": "json_object"}
    with pytest.raises(UsageError, match="exclude each other"):
        SamplingParams(response_format=json_object, grammar='root ::= "a"')
    with pytest.raises(UsageError, match="ignore_eos"):
        SamplingParams(response_format=json_object, ignore_eos=True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineUnavailable, match=r"pip install 'llguidance"):
        SamplingParams(response_format=json_object | {"schema": {"title": "not seen before"}})
    SamplingParams(response_format={"type": "text"}, ignore_eos=True)


def test_schemas_come_in_the_shapes_that_clients_send() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    shapes = [
        schema_format(schema),
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_schema", "schema": schema},
        {"type": "json_object", "schema": schema},
    ]
    assert len({grammar_of(shape, None) for shape in shapes}) == 1
    objects = [{"type": "json_object"}, schema_format({"type": "object"})]
    assert len({grammar_of(shape, None) for shape in objects}) == 1  # on one line, both
    assert grammar_of({"type": "text"}, None) is None
    assert grammar_of(None, None) is None


def says(schema: dict[str, Any], text: str) -> bool:
    return matches(byte_matcher(grammar_of(schema_format(schema), None) or ""), text)


NUMBERS = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize("name", ["path", "binary", "ipv4network", "int32", "uri-reference", "x y", 3, None])
def test_formats_that_are_not_known_are_annotations(name: Any) -> None:
    text = {"type": "string", "format": name, "maxLength": 3}
    for schema, shape in (
        (text, "{}"),
        ({"type": "array", "items": text}, "[{}]"),
        ({"anyOf": [{"type": "null"}, text]}, "{}"),
        ({"$ref": "#/$defs/a", "$defs": {"a": text}}, "{}"),
        ({"type": "object", "properties": {"a": text}, "additionalProperties": False}, '{{"a": {}}}'),
    ):
        assert [says(schema, shape.format(each)) for each in ('"a/b"', '"a/bc"', "3")] == [True, False, False], schema


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "format": "int64"}, "3", '"3"'),
        ({"type": "string", "format": "date"}, '"2026-01-31"', '"31.1.2026"'),
        ({"type": "string", "format": "ipv4"}, '"127.0.0.1"', '"localhost"'),
        # What is called so is no format: a property, a value.
        (thing({"format": {"enum": ["path"]}}), '{"format": "path"}', "{}"),
        ({"const": {"format": "path"}}, '{"format": "path"}', "{}"),
        # Whitespace is the schema's choice.
        (NUMBERS, "[1, 2]", "[ 1,\n  2 ]"),
        (NUMBERS | {"x-guidance": {"whitespace_flexible": True}}, "[ 1,\n  2 ]", "[1 2]"),
        (NUMBERS | {"x-guidance": {"item_separator": ","}}, "[1,2]", "[1, 2]"),
    ],
)
def test_what_a_schema_says(schema: dict[str, Any], right: str, wrong: str) -> None:
    assert [says(schema, text) for text in (right, wrong)] == [True, False]


def test_references_by_the_thousand_overflow_no_stack() -> None:
    """Compiled on a thread with the usual stack, this ends the process."""
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4_000)}
    SamplingParams(response_format=schema_format({"$defs": chain | {"a4000": {"type": "null"}}, "$ref": "#/$defs/a0"}))


def test_generate_answers_by_a_schema_and_by_a_grammar(tiny: TinyFiles, tmp_path: Path) -> None:
    (tmp_path / "person.json").write_text(json.dumps(PERSON), encoding="utf-8")
    (tmp_path / "answer.gbnf").write_text('root ::= "yes" | "no" # é', encoding="utf-8")
    common = ["generate", tiny.quick.target, "--draft", "ngram", "--backend", "reference", "--raw", "-p", "a"]
    common += ["--draft-length", "4"]
    done = localspec(*common, "--json-schema", tmp_path / "person.json", "--format", "events")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    jsonschema.validate(json.loads(events[-1]["text"]), PERSON)
    assert "grammar" in {guess["source"] for event in events[:-1] for guess in event["draft"]}
    done = localspec(*common, "--grammar", tmp_path / "answer.gbnf")
    assert done.stdout in (b"yes\n", b"no\n")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "is not JSON: Expecting property name"),
        (b'{"type": "strin"}', "the JSON schema cannot be followed: Invalid type: strin"),
        (b"\xff\xfb", "is not a UTF-8 text file"),
    ],
)
def test_a_bad_file_gets_one_line_before_a_model_is_loaded(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "form"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        RunOptions("no-such-model", sampling=answer_form(str(path), None))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_are_read_as_windows_programs_write_them(tmp_path: Path, encoding: str) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.gbnf"
    schema.write_bytes('{"const": "ü"}\r\n'.encode(encoding))
    grammar.write_bytes('# ü\r\nroot ::= "seven"\r\n'.encode(encoding))
    assert answer_form(str(schema), None)["response_format"]["json_schema"]["schema"] == {"const": "ü"}
    assert answer_form(None, str(grammar))["grammar"] == '# ü\nroot ::= "seven"\n'
