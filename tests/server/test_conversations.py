"""Conversations on the server's disk: what is kept, its bounds, and who may see it."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Callable, Iterator
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
    with serve(llm, origins=("http://friend.example",)) as running:
        yield running


def ask(server: Server, method: str, path: str = "", body: Any = None, **headers: str) -> tuple[int, Any]:
    status, _, answer = server.ask(method, PATH + path, body, headers)
    return status, json.loads(answer) if answer[:1] in (b"{", b"[") else answer.decode()


def test_one_is_kept_listed_changed_exported_and_deleted(server: Server) -> None:
    status, made = ask(server, "POST", body=content())
    assert (status, made["revision"], made["title"]) == (201, 1, "A title")
    other = ask(server, "POST", body=content("Another", "Good-bye, ÄPFEL"))[1]["id"]
    one = "/" + made["id"]
    status, kept = ask(server, "GET", one)
    assert status == 200
    assert {key: kept[key] for key in content()} == content()
    longer = content("Renamed")
    file = {"name": "a.py", "text": "x = 1\n", "edit": True}
    longer["messages"].append({"role": "user", "content": "go on", "files": [file]})
    status, changed = ask(server, "PUT", one, longer | {"revision": 1})
    assert (status, changed["revision"], changed["created"]) == (200, 2, made["created"])
    assert changed["updated"] >= made["updated"]
    listed = ask(server, "GET")[1]["data"]
    assert [(entry["title"], entry["messages"]) for entry in listed] == [("Renamed", 3), ("Another", 2)]
    for query, expected in (("renamed", 1), ("%C3%A4pfel+BYE", 1), ("a.py", 1), ("hi", 2), ("hello+bye", 0)):
        assert len(ask(server, "GET", f"?q={query}")[1]["data"]) == expected, query
    text = ask(server, "GET", one + "?format=markdown")[1]
    assert text == ("# Renamed\n\n> Be brief.\n\n## You\n\nhello\n\n## Answer\n\n*hi*\n\n## You (with a.py)\n\ngo on\n")
    assert ask(server, "DELETE", one)[0] == 204
    assert ask(server, "GET", one)[0] == 404
    assert [entry["id"] for entry in ask(server, "GET")[1]["data"]] == [other]


def test_a_change_to_what_has_been_changed_is_refused(server: Server) -> None:
    one = "/" + ask(server, "POST", body=content())[1]["id"]
    assert ask(server, "PUT", one, content("first") | {"revision": 1})[0] == 200
    status, refused = ask(server, "PUT", one, content("second") | {"revision": 1})
    assert (status, refused["error"]["code"]) == (409, "conversation_changed")
    assert ask(server, "GET", one)[1]["title"] == "first"


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


def test_an_id_of_the_client_makes_one_conversation_however_often_it_asks(server: Server) -> None:
    body = content() | {"id": "0123456789abcdef"}
    status, made = ask(server, "POST", body=body)
    assert (status, made["id"], made["revision"]) == (201, "0123456789abcdef", 1)
    status, refused = ask(server, "POST", body=body | {"title": "again"})
    assert (status, refused["error"]["code"]) == (409, "conversation_changed")
    assert [entry["title"] for entry in ask(server, "GET")[1]["data"]] == ["A title"]


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


def test_a_number_that_is_not_finite_spoils_nothing(server: Server, isolated_home: Path) -> None:
    """Such a one is refused; one that is on the disk already is left out, and the rest is there."""
    body = json.dumps(content()).replace("0.5", "1e999").encode()
    status, refused = ask(server, "POST", body=body)
    assert (status, "too large" in refused["error"]["message"]) == (400, True)
    made = ask(server, "POST", body=content())[1]["id"]
    (path,) = isolated_home.glob(f"conversations/{made}.json")
    for number in ("1e999", "NaN", "-Infinity"):
        text = path.read_text()
        path.write_text(text.replace("0.5", number))
        status, kept = ask(server, "GET", "/" + made)
        path.write_text(text)
        assert (status, kept["settings"], len(kept["messages"])) == (200, {}, 2)


def test_no_name_leads_out_of_the_folder(server: Server, isolated_home: Path) -> None:
    secret = isolated_home / "0123456789abcdef.json"
    isolated_home.mkdir(exist_ok=True)
    secret.write_text('{"format": 1, "id": "0123456789abcdef"}')
    for name in ("..%2f0123456789abcdef", "../0123456789abcdef", "0123456789ABCDEF", ".lock", "%00", "x" * 5000):
        for method in ("GET", "DELETE"):
            assert ask(server, method, "/" + name)[0] in (400, 404, 405)
    assert secret.exists()


def test_other_sites_and_other_computers_may_not_read_them(server: Server, llm: LLM) -> None:
    one = "/" + ask(server, "POST", body=content())[1]["id"]
    here = f"127.0.0.1:{server.port}"
    for origin, expected in ((f"http://{here}", 200), ("http://friend.example", 403), ("http://evil.example", 403)):
        assert ask(server, "GET", one, None, Origin=origin)[0] == expected
    # Such a site may ask the model, if --allow-origin lets it.
    assert server.ask("GET", "/v1/models", None, {"Origin": "http://friend.example"})[0] == 200
    assert ask(server, "GET", one, None, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(server, "POST", "", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    with serve(llm, api_key="key") as guarded:
        assert ask(guarded, "GET")[0] == 401
        assert ask(guarded, "GET", Authorization="Bearer key")[0] == 200
    with serve(llm, api_key="key", host="0.0.0.0") as open_to_others:
        status, refused = ask(open_to_others, "GET", Authorization="Bearer key")
        assert (status, refused["error"]["code"]) == (403, "not_loopback")


def kept(said: str = "hello") -> dict[str, Any]:
    return content(said=said)


def test_nothing_beyond_the_limits_is_kept_and_nothing_is_lost(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "kept", ConversationLimits(3, 2000, 3000))
    first = store.create(kept("x" * 1200))
    with pytest.raises(ApiError) as refused:
        store.create(kept("x" * 2500))
    assert refused.value.status == 413
    with pytest.raises(ApiError) as refused:
        store.create(kept("x" * 1300))
    assert refused.value.status == 507
    with pytest.raises(ApiError, match="may take"):
        store.replace(first["id"], 1, kept("x" * 2500))
    assert store.get(first["id"])["revision"] == 1
    store.create(kept())
    store.create(kept())
    with pytest.raises(ApiError, match="3 conversations are kept"):
        store.create(kept())
    store.delete(first["id"])
    store.create(kept())
    assert len(store.list()) == 3


def test_damaged_files_are_passed_over_and_left_alone(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path)
    good = store.create(kept())["id"]
    names = [f"{n:016x}" for n in range(4)]
    for name, text in zip(names, ("", "{", "[]", '{"format": 2, "id": "0000000000000003"}'), strict=True):
        (tmp_path / f"{name}.json").write_text(text)
    assert [entry["id"] for entry in store.list()] == [good]
    assert [entry["id"] for entry in store.list("hello")] == [good]
    for name in names:
        with pytest.raises(ApiError) as refused:
            store.get(name)
        assert refused.value.status == 500
        assert (tmp_path / f"{name}.json").exists()


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda conversation: conversation.pop(name)


@pytest.mark.parametrize(
    "damage",
    [
        *map(without, ("title", "messages", "updated", "system", "settings", "revision", "created")),
        lambda conversation: conversation.update(messages={}),
        lambda conversation: conversation.update(updated="now"),
        lambda conversation: conversation["messages"].append("hello"),
        lambda conversation: conversation["messages"][0].pop("content"),
        lambda conversation: conversation["messages"][0].update(files=[{"text": "hello"}]),
        lambda conversation: conversation["messages"][0].update(versions=[[{"role": "user"}]]),
        lambda conversation: conversation["messages"][0].update(versions=[[]]),
    ],
)
def test_a_file_with_parts_missing_is_passed_over(
    server: Server, isolated_home: Path, damage: Callable[[dict[str, Any]], object]
) -> None:
    good, bad = (ask(server, "POST", body=content())[1]["id"] for _ in range(2))
    path = isolated_home / "conversations" / f"{bad}.json"
    conversation = json.loads(path.read_bytes())
    damage(conversation)
    path.write_text(json.dumps(conversation))
    for query in ("", "?q=hello"):
        status, listed = ask(server, "GET", query)
        assert (status, [entry["id"] for entry in listed["data"]]) == (200, [good])
    for path_end in (f"/{bad}", f"/{bad}?format=markdown"):
        status, refused = ask(server, "GET", path_end)
        assert (status, refused["error"]["code"]) == (500, "conversation_damaged")
    assert ask(server, "PUT", f"/{bad}", content() | {"revision": 1})[0] == 500
    assert ask(server, "DELETE", f"/{bad}")[0] == 204


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are of POSIX")
def test_only_their_owner_can_read_them(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "kept")
    name = store.create(kept())["id"]
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "kept" / f"{name}.json").stat().st_mode) == 0o600


def test_two_servers_do_not_overwrite_each_other(tmp_path: Path) -> None:
    stores = [ConversationStore(tmp_path) for _ in range(4)]
    name = stores[0].create(kept())["id"]
    won: list[int] = []
    refused: list[int] = []
    begin = threading.Barrier(len(stores))

    def change(n: int) -> None:
        begin.wait()
        try:
            stores[n].replace(name, 1, kept(str(n)))
            won.append(n)
        except ApiError as error:
            refused.append(error.status)

    threads = [threading.Thread(target=change, args=(n,)) for n in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), refused) == (1, [409, 409, 409])
    assert stores[0].get(name)["messages"][0]["content"] == str(won[0])
    assert [entry["id"] for entry in stores[1].list()] == [name]
