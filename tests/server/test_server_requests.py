"""What a client may ask, and how it is told that it may not: status, field and code, one by one."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from localspec import LLM
from localspec.prompts.templates import ChatTemplate
from localspec.server.answers import AnswerBlock
from localspec.server.http import ApiError, parse
from localspec.server.tools import messages_for
from tests.support.serving import Server, asking
from tests.support.waiting import Brake, wait_until

LOAD: dict[str, Any] = {"files": "fim", "n_ctx": 256}

CHAT = [{"role": "user", "content": "hi"}]


NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e400", b"9" * 10_000, b"1" + b"0" * 400, b'[{"b":1E309}]')
NO_JSON = [
    *(b"", b"{", b"nonsense", b"\xff\xfe", b'{"\\ud83d": 1}', b'{"a": 1, "b": {"c": 1, "c": 1}}'),
    *(b'{"a": ' + value + b"}" for value in (*NUMBERS, b'"\\ud800"', b'"\\udc00\\ud800"')),
    *(b"[" * 100_000, b"[" * 201 + b"]" * 201, b'{"a":' * 201 + b"1" + b"}" * 201, b"[" + b"[]," * 500_001 + b"0]"),
]


@pytest.mark.parametrize("body", NO_JSON, ids=range(len(NO_JSON)))
def test_what_is_no_json_is_400(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parse(body)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": 1e308, "b": -0, "c": -0.0, "d": 1e-999}', {"a": 1e308, "b": 0, "c": -0.0, "d": 0.0}),
        (b'{"a": ' + b"9" * 308 + b"}", {"a": 10**308 - 1}),
        (b'{"a": "\\ud83d\\ude00 NaN 1e999 [[["}', {"a": "\U0001f600 NaN 1e999 [[["}),
        (b'{"a": "\\\\", "b": "\\"[{"}', {"a": "\\", "b": '"[{'}),
        (b"\xef\xbb\xbf{}", {}),
        (b"[" * 200 + b"]" * 200, json.loads("[" * 200 + "]" * 200)),
    ],
)
def test_what_means_the_same_to_everybody_is_read(body: bytes, value: Any) -> None:
    assert parse(body) == value


def test_what_a_model_wrote_can_be_sent_and_rendered() -> None:
    text = '{"a": 1e999, "b": NaN, "c": -Infinity, "d": "\\ud83d", "e": 1.5, "f": 1, "f": 2}'
    arguments = AnswerBlock(0, "call", text).arguments
    assert arguments == {"a": "1e999", "b": "NaN", "c": "-Infinity", "d": "?", "e": 1.5, "f": 2}
    json.dumps(arguments, allow_nan=False).encode()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (_, sent) = messages_for(messages)
    assert sent["tool_calls"][0]["function"]["arguments"] == arguments
    assert AnswerBlock(0, "call", '{"a":' * 100_000).arguments == {}


def test_statuses(server: Server) -> None:
    cookie = {"Content-Type": "", "Cookie": "a=b"}
    for status, code, method, path, *rest in (
        (404, "not_found", "GET", "/nothing"),
        (404, "model_not_found", "GET", "/v1/models/nobody"),
        (404, "model_not_found", "POST", "/v1/chat/completions", {"messages": CHAT, "model": "nobody"}),
        (405, "method_not_allowed", "GET", "/v1/chat/completions"),
        (405, "method_not_allowed", "DELETE", "/v1/models"),
        (405, "method_not_allowed", "POST", "/health", b"{}"),
        (400, None, "POST", "/v1/chat/completions", b"{"),
        (400, None, "POST", "/v1/chat/completions", b"[]"),
        (400, None, "POST", "/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"mood": "calm"}}),
        (400, None, "POST", "/v1/chat/completions", {"messages": [{"role": "no such role!", "content": ""}]}),
        (400, None, "POST", "/v1/completions", {"prompt": ""}),
        (400, "context_length_exceeded", "POST", "/v1/completions", {"prompt": "x" * 5000}),
        (415, "unsupported_media_type", "POST", "/v1/completions", b"a=b", {"Content-Type": "text/plain"}),
        (415, "unsupported_media_type", "POST", "/v1/completions", b"{}", cookie),
    ):
        found, _, answer = server.ask(method, path, *rest)
        error = json.loads(answer)["error"]
        assert (found, error["code"]) == (status, code), (method, path)
        assert error["message"]
        assert "Traceback" not in answer.decode()
    assert server.ask("GET", "/v1/models/")[2] == server.ask("GET", "/v1/models")[2]


def test_a_template_that_refuses_is_422(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    picky = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    monkeypatch.setattr(server.service.llm.inspect().encoder, "template", picky)
    status, _, answer = server.ask("POST", "/v1/chat/completions", {"messages": CHAT})
    assert status == 422
    assert b"roles must alternate" in answer


def test_stats_metrics_and_health(server: Server) -> None:
    before = json.loads(server.ask("GET", "/v1/localspec/stats")[2])["totals"]
    body = {"messages": CHAT, "max_tokens": 9, "ignore_eos": True, "localspec": {"draft_length": 3}}
    stats = json.loads(server.ask("POST", "/v1/chat/completions", body)[2])["localspec"]["stats"]
    assert server.ask("POST", "/v1/chat/completions", body | {"n": 0})[0] == 400
    found = json.loads(server.ask("GET", "/v1/localspec/stats")[2])
    totals = found["totals"]
    for name in ("completion_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens", "prompt_tokens"):
        assert totals[name] - before[name] == stats[name], name
    assert totals["requests"]["answered"] == before["requests"]["answered"] + 1
    assert totals["requests"]["invalid"] == before["requests"]["invalid"] + 1
    assert found["drafters"] == ["ngram"]
    assert found["queue"] == {"running": False, "waiting": 0, "limit": 32}
    status, headers, text = server.ask("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    written = [one for family in text_string_to_metric_families(text.decode()) for one in family.samples]
    samples = {(one.name.removeprefix("localspec_"), *one.labels.values()): one.value for one in written}
    assert len(samples) == len(written)
    assert samples["completion_tokens_total",] == totals["completion_tokens"]
    assert samples["draft_tokens_total", "ngram"] == totals["num_draft_tokens"]
    assert samples["requests_total", "chat", "answered"] > 0
    buckets = [value for (name, *_), value in samples.items() if name == "request_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == samples["request_seconds_count",]
    assert json.loads(server.ask("GET", "/health")[2]) == {"status": "ok"}


def test_the_server_s_system_prompt_is_for_chats_without_one() -> None:
    assert messages_for(CHAT, "S")[0] == {"role": "system", "content": "S"}
    own = [{"role": "system", "content": "mine"}, *CHAT]
    assert messages_for(own, "S") == own


# -- ``localspec.priority``: who comes first of those that wait --------------------------------------------------------

BODIES = asking("hi", 2)
ASKED = [(path, body, 1 if path == "/infill" else 0) for path, body in BODIES.items()]
ASKED += [(path, BODIES[path] | {"suffix": ")"}, 1) for path in ("/v1/completions", "/api/generate")]


@pytest.mark.parametrize(("path", "body", "usual"), ASKED)
def test_every_api_takes_it_and_what_fills_in_comes_before_what_says_nothing(
    server: Server, begun: list[int], path: str, body: dict[str, Any], usual: int
) -> None:
    for own in ({}, *({"localspec": {"priority": priority}} for priority in (-7, 0, 3))):
        status, _, answer = server.ask("POST", path, body | own)
        assert status == 200, answer
    assert begun == [usual, -7, 0, 3]


def test_the_highest_comes_first_and_one_under_way_keeps_its_place(server: Server, llm: LLM, begun: list[int]) -> None:
    path, short = "/v1/chat/completions", BODIES["/v1/chat/completions"]
    long = short | {"max_tokens": 100, "ignore_eos": True, "localspec": {"priority": -5}}
    waiting = [(path, short | {"localspec": {"priority": priority}}) for priority in (-1, 0, 4)]
    waiting.append(("/infill", BODIES["/infill"]))
    with ThreadPoolExecutor(8) as pool, Brake(llm) as brake:
        asked = [pool.submit(server.ask, "POST", path, long)]
        brake.wait()
        for n, each in enumerate(waiting, 1):
            asked.append(pool.submit(server.ask, "POST", *each))
            wait_until(lambda n=n: llm.queue_length == n)
        brake.release()
        assert [each.result()[0] for each in asked] == [200] * 5
    assert begun == [-5, 4, 1, 0, -1]
