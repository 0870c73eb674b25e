"""What a client sends: JSON with anything anywhere, bodies that are none, odd methods and addresses.

Refused is refused in the API's own form, with a 4xx status; what is answered is well-formed. Afterwards a good request
is answered as before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from localspec import LLM
from localspec.server import anthropic, models, ollama, openai, requests, responses
from localspec.server.bodies import Body
from tests.fuzz.target import Check, Target, strict_json, table, timed
from tests.support import ggufs
from tests.support.serving import serve

PATHS = ["/v1/chat/completions", "/v1/completions"]
TRANSLATED = ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/show"]
OTHERS: list[str] = table("bodies", "OTHERS")

GOOD_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 7}
GOOD_TEXT = {"prompt": "the cat", "max_tokens": 4, "seed": 7}

FIELDS: list[str] = table("bodies", "FIELDS")
WORDS: list[str] = table("bodies", "WORDS")
TEXTS = st.one_of(
    st.sampled_from(["", " ", "x", "auto", "none", "ngram", "required", "function", "text", "json_schema", "the"]),
    st.sampled_from(["\x00", "é", "😀", "<|im_end|>", "<tool_call>", "a" * 3000, "\x1b[2J"]),
    st.sampled_from(WORDS),
    st.text(max_size=6),
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 5, 16, 17, 0.5, 1.0, -1, -0.0, 1e308, -1e308, 5e-324]),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**400, -(10**30)]),
    st.integers(-3, 40),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)

# Nearly right values: what is refused at once tries little.


def fitting(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Values of the kind that a field is annotated with, or that its name asks for."""
    kinds = get_args(kind)
    if name in NAMED:
        return NAMED[name]
    if get_origin(kind) is Annotated:
        return fitting(kinds[0])
    if get_origin(kind) is Literal:
        return st.sampled_from(kinds)
    if get_origin(kind) in (Union, UnionType):
        return st.one_of([fitting(each) for each in kinds])
    if get_origin(kind) is list:
        return st.lists(fitting(kinds[0]), max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(TEXTS, VALUES, max_size=3)
    if isinstance(kind, type) and issubclass(kind, Body):
        return fields_of(kind)
    simple = {str: TEXTS, bool: st.booleans(), int: st.integers(-1, 40), float: NUMBERS, type(None): st.none()}
    return simple.get(kind, VALUES)


def fields_of(kind: type[Body]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the fields that have to be there, and some of the others."""
    needed, others = dict[str, Any](), dict[str, Any]()
    for name, values in named_fields(kind).items():
        (needed if kind.model_fields.get(name, OPTIONAL).is_required() else others)[name] = values
    return st.fixed_dictionaries(needed, optional=others)


def named_fields(kind: type[Body]) -> dict[str, st.SearchStrategy[Any]]:
    """The fields that are read -> their values."""
    named = {field.alias or name: field for name, field in kind.model_fields.items()}
    return {name: fitting(field.annotation, name) for name, field in named.items()}


OPTIONAL = FieldInfo(default=None)
KINDS = "text image_url tool_use tool_result thinking image message function_call function_call_output reasoning x"
NAMED: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from([*KINDS.split(), "function", "json_object", "json_schema"]),
    "arguments": TEXTS | VALUES,
    "schema": VALUES
    | st.sampled_from(table("bodies", "schemas"))
    | st.fixed_dictionaries({"type": TEXTS, "properties": st.dictionaries(TEXTS, VALUES, max_size=2)}),
    "grammar": st.sampled_from(
        ['root ::= "a" | "b"', "root ::= [a-z]+", 'root ::= ""', "root ::= x", "root ::= root", "x ::= 1", "("]
    ),
    "n": st.integers(1, 3),
    "logit_bias": st.dictionaries(st.integers(-1, 301).map(str) | TEXTS, NUMBERS, max_size=3),
    "max_output_tokens": st.integers(1, 12),
    "num_predict": st.integers(1, 12),
    "tool_choice": st.sampled_from(["auto", "none", "required"])
    | st.just({"type": "function", "function": {"name": "f"}}),
}
NAMED |= {"parameters": NAMED["schema"], "input_schema": NAMED["schema"], "format": st.just("json") | NAMED["schema"]}
ITEMS = st.lists(
    st.one_of(
        fields_of(kind)
        for kind in (
            requests.TextPart,
            anthropic.ToolUseBlock,
            anthropic.ToolResultBlock,
            anthropic.ThinkingBlock,
            responses.MessageItem,
            responses.FunctionCallItem,
            responses.FunctionCallOutputItem,
        )
    ),
    max_size=3,
)
NAMED |= dict.fromkeys(("content", "input", "system", "output"), TEXTS | ITEMS | VALUES)
NAMED["prompt"] = TEXTS | st.lists(TEXTS, max_size=3) | st.lists(st.integers(-1, 301), max_size=5)


BODIES = {
    "/v1/chat/completions": openai.ChatBody,
    "/v1/completions": openai.CompletionBody,
    "/v1/responses": responses.ResponsesBody,
    "/v1/messages": anthropic.MessagesBody,
    "/v1/messages/count_tokens": anthropic.CountBody,
    "/api/chat": ollama.OllamaChatBody,
    "/api/generate": ollama.OllamaGenerateBody,
    "/api/show": models.OllamaShowBody,
}
SHAPED = {path: named_fields(kind) for path, kind in BODIES.items()}


@st.composite
def objects(draw: Any, path: str) -> dict[str, Any]:
    """A request with a few fields that are nearly right or quite wrong; mostly fields that the address knows."""
    shaped = SHAPED[path]
    are_known = draw(st.integers(0, 9)) > 0
    names = draw(st.lists(st.sampled_from(sorted(shaped) if are_known else FIELDS), max_size=5, unique=True))
    body = {name: draw(shaped.get(name, VALUES) if draw(st.integers(0, 3)) else VALUES) for name in names}
    if draw(st.integers(0, 9)):
        body = {"messages": GOOD_CHAT["messages"], "prompt": "the", "input": "the", "model": "served-target"} | body
    if not isinstance(body.get("max_tokens"), float):
        body.setdefault("max_tokens", draw(st.integers(1, 12)))
    body.setdefault("max_output_tokens", 12)
    body.setdefault("options", {"num_predict": 12})
    return {name: value for name, value in body.items() if name in shaped} if are_known else body


def cases(paths: list[str]) -> st.SearchStrategy[tuple[str, str, dict[str, Any]]]:
    return st.sampled_from(paths).flatmap(lambda path: st.tuples(st.just("json"), st.just(path), objects(path)))


JSON = b'null [] 7 "x" { {} {}{} \xff\xfe{} \xef\xbb\xbf{} {"prompt":"a","prompt":"b"}'.split()
ODD = rb'{"prompt":"\ud800"} {"prompt":NaN} {"temperature":1e999,"prompt":"a"} {"\u0000":1}'.split()
LONG = [b'{"seed":' + b"9" * 5000 + b',"prompt":"a"}', b'{"prompt":"' + b"a" * 200_000 + b'"}']
DEEP = [b"[" * 100_000, b'{"a":' * 50_000, b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", b"[" * 900 + b"]" * 900]
BYTES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", *JSON]),
    st.sampled_from(DEEP),
    st.sampled_from([*ODD, b'{"prompt":"\xed\xa0\x80"}', *LONG]),
)

METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW"]


def to(kind: str, paths: list[str], what: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, str, Any]]:
    return st.tuples(st.just(kind), st.sampled_from(paths), what)


CASES = st.one_of(
    *[cases(PATHS)] * 3,
    *[cases(TRANSLATED)] * 2,
    to("bytes", PATHS + TRANSLATED, BYTES),
    to("other", PATHS + TRANSLATED + OTHERS, st.tuples(st.sampled_from(METHODS), BYTES)),
)


def check_answer(path: str, status: int, headers: dict[str, str], body: bytes, *, method: str = "POST") -> None:
    """Either a well-formed answer or a refusal in the API's form."""
    assert status < 500, f"{status}: {body[:300]!r}"
    if method == "HEAD":
        return
    kind = headers.get("content-type", "")
    if status >= 400:
        if kind.startswith("application/json"):
            error = json.loads(body)["error"]
            if path.startswith("/api/"):
                error = {"message": error}
            elif path.startswith("/v1/messages"):
                assert set(error) == {"message", "type"}, error
            else:
                assert set(error) == {"message", "type", "param", "code"}, error
            assert error["message"].strip(), error
            assert error["message"].isprintable(), error
        return
    if kind.startswith("application/json"):
        strict_json(body)
    elif kind == "application/x-ndjson":
        *lines, last = map(strict_json, body.splitlines())
        assert [line["done"] for line in lines] == [False] * len(lines)
        assert last["done"], last
    elif kind.startswith("text/event-stream"):
        lines = [line for line in body.decode().split("\n") if line.startswith("data: ")]
        if path in PATHS:
            assert lines.pop() == "data: [DONE]", lines[-1:]
        for line in lines:
            event = strict_json(line.removeprefix("data: "))
            assert event.get("type") != "error", event
            if event.get("error"):
                assert event["error"]["type"] != "server_error", event


@contextmanager
def _opened(folder: Path) -> Iterator[Check]:
    shape = ggufs.Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)
    pair = ggufs.correlated_pair(folder, ggufs.bpe_vocab(300), shape=shape, name="served")
    with (
        LLM(pair.target, draft=["ngram", str(pair.draft)], backend="reference", n_ctx=256) as llm,
        serve(llm, body_seconds=5.0) as server,
    ):

        def good() -> list[Any]:
            texts = []
            for path, body in zip(PATHS, (GOOD_CHAT, GOOD_TEXT), strict=True):
                status, _, answer = server.ask("POST", path, body)
                assert status == 200, answer
                choice = json.loads(answer)["choices"][0]
                texts.append(choice.get("message", choice.get("text")))
            return texts

        expected = good()

        def check(case: tuple[str, str, Any]) -> None:
            kind, path, what = case
            with timed("the request", 60.0):
                if kind == "json":
                    check_answer(path, *server.ask("POST", path, json.dumps(what).encode("utf-8", "surrogatepass")))
                elif kind == "bytes":
                    check_answer(path, *server.ask("POST", path, what))
                else:
                    check_answer(path, *server.ask(what[0], path, what[1]), method=what[0])
                server.wait_idle()
                assert good() == expected, "a good request is answered otherwise than before"

        yield check


TARGET = Target("server bodies", CASES, _opened, in_suite=120)
