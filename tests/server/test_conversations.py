"""Conversations on the server's disk: what is kept, its bounds, and who may see it."""

from __future__ import annotations

import json
import math
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from localspec.errors import MAX_DEPTH
from localspec.server.conversations import ConversationLimits, ConversationStore
from localspec.server.http import ApiError
from tests.server.test_known_fields import rows
from tests.support.serving import Server, serve

LOAD: dict[str, Any] = {"draft": [], "n_ctx": 128}

PATH = "/v1/localspec/conversations"


def content(title: str = "A title", said: str = "hello") -> dict[str, Any]:
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "*hi*"}]
    return {"title": title, "system": "Be brief.", "settings": {"temperature": 0.5}, "messages": messages}


@pytest.fixture
def server(llm: LLM) -> Iterator[Server]:
    with serve(llm) as running:
        yield running


def ask(server: Server, method: str, path: str = "", body: Any = None, **headers: str) -> tuple[int, Any]:
    status, _, answer = server.ask(method, PATH + path, body, headers)
    return status, json.loads(answer) if answer[:1] in (b"{", b"[") else answer.decode()


def test_one_is_kept_listed_changed_exported_and_deleted(server: Server, isolated_home: Path) -> None:
    status, made = ask(server, "POST", body=content())
    assert (status, made["revision"], made["title"]) == (201, 1, "A title")
    other = {"id": "0123456789abcdef"}  # by the client, which may ask again: that makes no other one
    for expected in (201, 409):
        assert ask(server, "POST", body=content("Another", "Good-bye, ÄPFEL") | other)[0] == expected
    one = "/" + made["id"]
    if sys.platform != "win32":  # nobody else can read it
        folder = isolated_home / "conversations"
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / f"{made['id']}.json")]
        assert modes == [0o700, 0o600]
    status, kept = ask(server, "GET", one)
    assert status == 200
    assert {key: kept[key] for key in content()} == content()
    longer = content("Renamed")
    file = {"name": "a.py", "text": "x = 1\n", "edit": True}
    longer["messages"].append({"role": "user", "content": "go on", "files": [file]})
    status, changed = ask(server, "PUT", one, longer | {"revision": 1})
    assert (status, changed["revision"], changed["created"]) == (200, 2, made["created"])
    assert changed["updated"] >= made["updated"]
    status, refused = ask(server, "PUT", one, content("of the first revision") | {"revision": 1})
    assert (status, refused["error"]["code"]) == (409, "conversation_changed")
    listed = ask(server, "GET")[1]["data"]
    assert [(entry["title"], entry["messages"]) for entry in listed] == [("Renamed", 3), ("Another", 2)]
    for query, expected in (("renamed", 1), ("%C3%A4pfel+BYE", 1), ("a.py", 1), ("hi", 2), ("hello+bye", 0)):
        assert len(ask(server, "GET", f"?q={query}")[1]["data"]) == expected, query
    text = ask(server, "GET", one + "?format=markdown")[1]
    assert text == ("# Renamed\n\n> Be brief.\n\n## You\n\nhello\n\n## Answer\n\n*hi*\n\n## You (with a.py)\n\ngo on\n")
    assert ask(server, "DELETE", one)[0] == 204
    assert ask(server, "GET", one)[0] == 404
    assert [entry["id"] for entry in ask(server, "GET")[1]["data"]] == [other["id"]]


def test_versions_and_how_an_answer_ended_are_kept(server: Server) -> None:
    body = content()
    other = [{"role": "user", "content": "plums?"}, {"role": "assistant", "content": "no", "finish": "length"}]
    body["messages"][0] |= {"versions": [other, [{"role": "assistant", "content": "the same question"}]], "version": 2}
    body["messages"][1]["finish"] = "broken"
    one = "/" + ask(server, "POST", body=body)[1]["id"]
    assert ask(server, "GET", one)[1]["messages"] == body["messages"]
    assert len(ask(server, "GET", "?q=plums")[1]["data"]) == 1
    assert ask(server, "GET")[1]["data"][0]["messages"] == 2  # those that are shown
    text = ask(server, "GET", one + "?format=markdown")[1]
    assert text.endswith("*hi*\n\n*(The answer broke off here.)*\n")
    assert "plums" not in text


def nested(depth: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for _ in range(depth):
        messages = [{"role": "user", "content": "x", "versions": [messages]}]
    return messages


def test_versions_within_versions_have_the_bound_of_json_and_what_is_in_it_works(server: Server) -> None:
    most = (MAX_DEPTH - 3) // 3
    one = "/" + ask(server, "POST", body={"messages": nested(most)})[1]["id"]
    assert len(ask(server, "GET", one)[1]["messages"]) == 1
    assert len(ask(server, "GET", "?q=x")[1]["data"]) == 1
    for depth in (most + 1, 200):
        status, refused = ask(server, "POST", body={"messages": nested(depth)})
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert len(refused["error"]["message"]) <= 600


@pytest.mark.parametrize(("body", "field"), rows("conversation"))
def test_what_is_no_conversation_is_refused(server: Server, body: Any, field: str) -> None:
    status, refused = ask(server, "POST", body=body)
    assert (status, refused["error"]["param"]) == (400, field)
    assert ask(server, "GET")[1]["data"] == []


def test_no_name_leads_out_of_the_folder(server: Server, isolated_home: Path) -> None:
    secret = isolated_home / "0123456789abcdef.json"
    isolated_home.mkdir(exist_ok=True)
    secret.write_text('{"format": 1, "id": "0123456789abcdef"}')
    for name in ("..%2f0123456789abcdef", "../0123456789abcdef", "0123456789ABCDEF", ".lock", "%00", "x" * 5000):
        for method in ("GET", "DELETE"):
            assert ask(server, method, "/" + name)[0] in (400, 404, 405)
    assert secret.exists()


def test_nothing_beyond_the_limits_is_kept_and_nothing_is_lost(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "kept", ConversationLimits(3, 2000, 3000))
    first = store.create(content(said="x" * 1200))
    for n, status in ((2500, 413), (1300, 507)):
        with pytest.raises(ApiError) as refused:
            store.create(content(said="x" * n))
        assert refused.value.status == status
    with pytest.raises(ApiError, match="may take"):
        store.replace(first["id"], 1, content(said="x" * 2500))
    assert store.get(first["id"])["revision"] == 1
    for _ in range(2):
        store.create(content())
    with pytest.raises(ApiError, match="3 conversations are kept"):
        store.create(content())
    store.delete(first["id"])
    store.create(content())
    assert len(store.list()) == 3


DAMAGES: tuple[dict[str, Any] | str, ...] = (
    *({name: None} for name in ("title", "messages", "updated", "system", "settings", "revision", "created", "format")),
    *({"messages": messages} for messages in ({}, ["hello"], [{"role": "user"}])),
    *({"messages": [{"role": "user", "content": "x", "versions": each}]} for each in ([[{"role": "user"}]], [[]])),
    {"messages": [{"role": "user", "content": "x", "files": [{"text": "hello"}]}]},
    *({"updated": each} for each in ("now", "1.5")),
    {"revision": "1"},
    {"settings": {"temperature": math.inf}},
    {"format": 2},
    *("", "{", "[]"),
)
"""What a file holds instead; None is missing."""


def test_a_damaged_file_is_passed_over_and_left_alone(server: Server, isolated_home: Path) -> None:
    good, bad = (ask(server, "POST", body=content())[1]["id"] for _ in range(2))
    path = isolated_home / "conversations" / f"{bad}.json"
    whole = json.loads(path.read_bytes())
    for damage in DAMAGES:
        if not isinstance(damage, str):
            changed = {name: value for name, value in (whole | damage).items() if value is not None}
            damage = json.dumps(changed)
        path.write_text(damage)
        for query in ("", "?q=hello"):
            status, listed = ask(server, "GET", query)
            assert (status, [entry["id"] for entry in listed["data"]]) == (200, [good]), damage
        for path_end in (f"/{bad}", f"/{bad}?format=markdown"):
            status, refused = ask(server, "GET", path_end)
            assert (status, refused["error"]["code"]) == (500, "conversation_damaged"), damage
        assert ask(server, "PUT", f"/{bad}", content() | {"revision": 1})[0] == 500
        assert path.read_text() == damage
    assert ask(server, "DELETE", f"/{bad}")[0] == 204


def test_two_servers_do_not_overwrite_each_other(tmp_path: Path) -> None:
    stores = [ConversationStore(tmp_path) for _ in range(4)]
    name = stores[0].create(content())["id"]
    begin = threading.Barrier(len(stores))

    def change(n: int) -> None:
        begin.wait()
        stores[n].replace(name, 1, content(said=str(n)))

    with ThreadPoolExecutor() as pool:
        changes = [pool.submit(change, n) for n in range(len(stores))]
    refused = [each.exception() for each in changes]
    assert sorted(getattr(each, "status", 0) for each in refused) == [0, 409, 409, 409]
    assert stores[0].get(name)["messages"][0]["content"] == str(refused.index(None))
    assert [entry["id"] for entry in stores[1].list()] == [name]
