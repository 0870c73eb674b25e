"""Who is let in: programs that know where they are, not web pages that make a browser ask."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest

from localspec import LLM
from tests.support.serving import Server, serve

LOAD: dict[str, Any] = {"draft": [], "n_ctx": 256}

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ASK = ("POST", "/v1/chat/completions", BODY)


def code_of(answer: bytes) -> Any:
    return json.loads(answer)["error"]["code"]


OURS = ("127.0.0.1", "127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:{port}", "127.8.9.1")
FOREIGN = ("evil.example", "evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.5")
MALFORMED = ("localhost@evil.example", "127.0.0.1:{port}/x")


def test_only_our_own_names_are_answered_to(server: Server) -> None:
    for hosts, status in ((OURS, 200), ((*FOREIGN, "0.0.0.0"), 403), (MALFORMED, 400)):
        for host in hosts:
            named = {"Host": host.format(port=server.port)}
            found, _, answer = server.ask(*ASK, named)
            assert found == status, host
            assert status != 403 or code_of(answer) == "host_not_allowed"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:{port}", "Host": "localhost:{port}"}, 200),
        ({"Origin": "http://localhost:{port}"}, 403),
        *(({"Origin": f"http://127.0.0.1:{port}"}, status) for port, status in (("{port}", 200), ("1", 403))),
        *(({"Origin": origin}, 403) for origin in ("https://evil.example", "null", "file://")),
        ({"Origin": ""}, 200),
        *(({"Sec-Fetch-Site": site}, 403) for site in ("cross-site", "same-site")),
        *(({"Sec-Fetch-Site": site}, 200) for site in ("same-origin", "none")),
        ({"Content-Type": "", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "", "Origin": "https://evil.example"}, 403),
        ({"Content-Type": "", "Referer": "https://evil.example/"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "Mozilla/5.0 (X11)"}, 415),
        *(({"Content-Type": kind}, 415) for kind in ("text/plain", "text/plain; application/json")),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": ""}, 200),  # what Ollama's clients send
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),  # what curl -d sends
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_pages_of_other_sites_stay_out(server: Server, headers: dict[str, str], status: int) -> None:
    headers = {name: value.format(port=server.port) for name, value in headers.items()}
    found, sent, _ = server.ask(*ASK, headers)
    assert found == status
    assert "access-control-allow-origin" not in sent


def test_an_origin_can_be_let_in_with_what_its_client_adds(llm: LLM) -> None:
    friend = {"Origin": "app://obsidian.md"}
    asked = "Authorization, x-stainless-os,dangerously-allow-browser, http-referer,x-title, traceparent"
    question = friend | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    question["Access-Control-Request-Private-Network"] = "true"
    with serve(llm, origins=("app://obsidian.md/",), api_key="k") as server:
        status, headers, _ = server.ask("OPTIONS", "/v1/chat/completions", None, question)
        assert (status, headers["access-control-allow-origin"]) == (200, friend["Origin"])
        assert headers["access-control-allow-headers"] == asked
        assert headers["access-control-allow-methods"] == "GET, POST, DELETE"
        assert headers["access-control-allow-private-network"] == "true"
        status, headers, _ = server.ask("OPTIONS", "/v1/chat/completions", None, question | {"Origin": "http://evil"})
        assert (status, [name for name in headers if name.startswith("access-control")]) == (403, [])
        assert server.ask(*ASK, friend)[0] == 401
        status, headers, _ = server.ask(*ASK, friend | {"Authorization": "Bearer k"})
        assert (status, headers["access-control-allow-origin"]) == (200, friend["Origin"])
        assert server.ask(*ASK, {"Origin": "app://obsidian.com", "Authorization": "Bearer k"})[0] == 403


def test_a_link_may_lead_to_the_page_but_nothing_may_embed_it(server: Server) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert server.ask("GET", "/", None, link)[0] == 200
    assert server.ask("GET", "/", None, link | {"Sec-Fetch-Mode": "no-cors"})[0] == 403
    assert server.ask("GET", "/v1/localspec/stats", None, link)[0] == 403


def test_the_key(llm: LLM) -> None:
    with serve(llm, api_key="sésame", hosts=("box.lan",), host="0.0.0.0") as server:
        for given in ("", "Bearer", "Bearer wrong", "Basic sésame", "sésame"):
            status, headers, answer = server.ask(*ASK, {"Authorization": given.encode().decode("latin-1")})
            assert (status, code_of(answer)) == (401, "invalid_api_key"), given
            assert headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer sésame".encode().decode("latin-1")}
        assert server.ask(*ASK, right)[0] == 200
        for path in ("/nothing", "/pages"):  # all that there is: test_access
            assert server.ask("GET", path)[0] == 401, path
        # Names are still checked, but any address will do: the key is what counts.
        assert server.ask(*ASK, right | {"Host": "192.168.1.5:80"})[0] == 200
        assert server.ask(*ASK, right | {"Host": "box.lan"})[0] == 200
        assert server.ask(*ASK, right | {"Host": "evil.example"})[0] == 403


def test_answers_tell_browsers_to_be_careful(server: Server) -> None:
    _, api, _ = server.ask("GET", "/v1/models")
    _, page, _ = server.ask("GET", "/")
    assert api["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert page["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    for headers in (api, page):
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers
    assert api["cache-control"] == "no-store"


def test_no_path_leads_out_of_the_page_s_folder(server: Server) -> None:
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd", "/page/"):
        status, _, answer = server.ask("GET", path)
        assert status in (404, 405), path
        assert b"import" not in answer


def test_no_insides_in_an_answer_to_a_failure(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "/srv/somebody/secret.gguf"
    errors = (RuntimeError(secret), OSError(2, "No such file", secret), KeyError(secret))
    for error in (*errors, MemoryError()):
        monkeypatch.setattr(server.service.llm, "job", Mock(side_effect=error))
        for body in (BODY, BODY | {"stream": True}):
            status, _, answer = server.ask("POST", "/v1/chat/completions", body)
            assert (status, code_of(answer)) == (500, "internal_error")
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
            assert b"secret" not in answer
            assert b"Traceback" not in answer
    said = capfd.readouterr().err
    assert said.count(secret) == 2 * len(errors)  # the owner of the server is told, in one line each
    assert "Traceback" not in said
