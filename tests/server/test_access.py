"""What each kind of client is given: every address, asked by everybody, and no answer has what is not for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.engine.saved import CONVERSATIONS
from localspec.server.access import ALL, Client, Kind, public_names
from localspec.server.app import addresses
from localspec.server.infill import Slots, Windows
from tests.conftest import TinyFiles
from tests.support.serving import Server, asking, serve

KEY, SITE = "sesame", "https://notes.example"
WHO: dict[str, tuple[Kind | None, dict[str, str]]] = {
    "program": (Kind.LOCAL, {}),
    "own page": (Kind.LOCAL, {"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}),
    "proxied": (Kind.REMOTE, {"X-Forwarded-For": "192.0.2.7"}),
    "another name": (Kind.REMOTE, {"Host": "box.lan"}),
    "another computer": (Kind.REMOTE, {"Authorization": f"Bearer {KEY}"}),
    "site": (Kind.SITE, {"Origin": SITE, "Sec-Fetch-Site": "cross-site"}),
    "site with the key": (Kind.SITE, {"Origin": SITE, "Authorization": f"Bearer {KEY}"}),
    "keyless": (Kind.KEYLESS, {}),
    "keyless site": (Kind.KEYLESS, {"Origin": SITE}),
    "foreign page": (None, {"Origin": "https://evil.example"}),
    "rebound": (None, {"Host": "evil.example"}),
}
WITH_KEY = ("another computer", "site with the key", "keyless", "keyless site")
"""Those that ask a server that listens to other computers; the others ask one that listens on this one alone."""

KINDS = {who: kind for who, (kind, _) in WHO.items() if kind is not None}

CHAT = [{"role": "user", "content": "say something"}]
OURS = {"ignore_eos": True, "localspec": {"draft_length": 4}, "seed": 1}
BODIES = {path: body | {"stream": False} for path, body in asking("say something", 4, **OURS).items()} | {
    "/v1/messages/count_tokens": {"messages": CHAT} | OURS,
    "/api/show": {"name": ""},
    "/v1/localspec/conversations": {"messages": [{"role": "user", "content": "kept"}]},
    "/models/load": {"model": ""},
}


class House:
    """Two servers of one model that drafts from private texts: one on this computer alone, one for others.

    Attributes:
        said: what the model answers to ``CHAT``; its end is in the corpora, and is not in the question.
    """

    def __init__(self, llm: LLM, local: Server, remote: Server, said: str, folder: Path) -> None:
        self.llm, self.said, self.folder, self.local, self.remote = llm, said, folder, local, remote

    def ask(self, who: str, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        server = self.remote if who in WITH_KEY else self.local
        headers = {name: value.format(port=server.port) for name, value in WHO[who][1].items()}
        return server.ask(method, path, body, headers)


@pytest.fixture(scope="module")
def house(tiny: TinyFiles, module_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("clients") / "acme-merger"
    folder.mkdir()
    options: Any = {"backend": "reference", "n_ctx": 512, "idle": False, "remember": False}
    with LLM(tiny.quick.target, None, **options) as plain:
        said = plain.chat(CHAT, SamplingParams(max_tokens=24, ignore_eos=True, seed=1)).text
    (folder / "a.txt").write_text("assistant\n" + said, encoding="utf-8", newline="")
    (module_home / CONVERSATIONS).mkdir(mode=0o700, exist_ok=True)
    kept = {"format": 1, "id": "0" * 16, "title": "t", "system": "", "settings": {}, "revision": 1}
    kept |= {"created": 0.0, "updated": 0.0, "messages": [{"role": "assistant", "content": "assistant\n" + said}]}
    (module_home / CONVERSATIONS / f"{'0' * 16}.json").write_text(json.dumps(kept))
    draft = ["ngram", f"corpus:{folder}", "corpus:chats"]
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(tiny.quick.target, draft, **options))
        local = stack.enter_context(serve(llm, origins=(SITE,), hosts=("box.lan",)))
        remote = stack.enter_context(serve(llm, origins=(SITE,), api_key=KEY, host="0.0.0.0"))
        yield House(llm, local, remote, said, folder)


def asked_at(house: House) -> list[tuple[str, str, Collection[Kind]]]:
    """Method and address of all routes that the application has, and the kinds of client that are answered."""
    all_of_them = addresses(house.local.runner.host)
    found = [(method, each.path, each.kinds) for each in all_of_them for method in each.methods]
    return [*found, ("GET", "/page/{path:path}", ALL)]


def filled(path: str) -> str:
    return path.replace("{id}", "0" * 16).replace("{path:path}", "none.js").replace("{model:path}", "none")


def body_for(method: str, path: str) -> Any:
    return BODIES.get(path, {"messages": CHAT, "revision": 99}) if method in ("POST", "PUT") else None


def test_only_this_computer_reads_texts_and_only_the_page_needs_no_key(house: House) -> None:
    kinds = {path: set(kinds) for _, path, kinds in asked_at(house)}
    keyless = {path for path, answered in kinds.items() if Kind.KEYLESS in answered}
    assert keyless == {"/", "/page/{path:path}", "/health"}
    private = {"/v1/localspec/conversations", "/v1/localspec/conversations/{id}", "/api/pull", "/api/delete"}
    assert {path for path, answered in kinds.items() if answered == {Kind.LOCAL}} == private
    assert {path for path, answered in kinds.items() if answered == {Kind.LOCAL, Kind.REMOTE}} == {"/metrics"}


@pytest.mark.parametrize("who", WHO)
def test_who_is_answered(house: House, who: str) -> None:
    for method, path, kinds in asked_at(house):
        status, headers, answer = house.ask(who, method, filled(path), body_for(method, path))
        what = (method, path, status, answer[:200])
        if who not in KINDS:
            assert status == 403, what
            assert "access-control-allow-origin" not in headers
        elif KINDS[who] in kinds:
            assert status not in (401, 403), what
            assert status < 300 or path not in BODIES or path == "/infill", what  # which this model cannot
        else:
            assert status == (401 if KINDS[who] is Kind.KEYLESS else 403), what
        text = answer.decode()
        # No path, nor a part of one, is in any answer to anybody.
        assert "acme-merger" not in text, what
        assert str(house.folder.parent) not in text, what
        # Figures about all clients' requests name what drafted for others, to those who may see them.
        if who not in ("program", "own page") and path not in ("/v1/localspec/stats", "/metrics"):
            assert "corpus" not in text, what


@pytest.mark.parametrize("who", KINDS)
@pytest.mark.parametrize("own", [{"draft_length": 24}, {"draft": "auto", "draft_length": 24}, {}])
def test_whose_texts_are_drafted(house: House, who: str, own: dict[str, Any]) -> None:
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 24, "seed": 1, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"localspec_rounds": True, "include_usage": True}, "localspec": own}
    status, _, answer = house.ask(who, "POST", "/v1/chat/completions", body)
    if KINDS[who] is Kind.KEYLESS:
        assert status == 401
        return
    chunks = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: {")]
    rounds = [chunk["localspec"]["round"] for chunk in chunks if "round" in chunk.get("localspec", {})]
    (last,) = [chunk["localspec"] for chunk in chunks if "stats" in chunk.get("localspec", {})]
    sources = {token["source"] for one in rounds for token in (*one["draft"], *one["emitted"])} - {"target"}
    sources |= set(last["stats"]["by_source"])
    private = {source for source in sources if source.startswith("corpus")}
    if KINDS[who] is Kind.LOCAL:
        assert private or not own, (sources, "nothing was drafted from them: this shows nothing")
        assert last["draft"] == ["ngram", "corpus", "corpus:chats"]
    else:
        assert not private
        assert last["draft"] == ["ngram"]


def test_what_is_drafted_from_only_on_request(house: House) -> None:
    body = {"messages": CHAT, "max_tokens": 24, "seed": 1, "ignore_eos": True}
    corpus = f"corpus:{house.folder}"
    with serve(house.llm, corpora=[corpus]) as server:
        for draft, drafted in (("auto", False), ("corpus", True), (["auto", corpus], True), (f"{corpus}/../x", None)):
            own = {"localspec": {"draft": draft, "draft_length": 24}}
            status, _, answer = server.ask("POST", "/v1/chat/completions", body | own)
            assert status == (400 if drafted is None else 200)  # no other path: no file is opened
            if drafted is not None:
                sources = json.loads(answer)["localspec"]["stats"]["by_source"]
                assert ("corpus" in sources, "ngram" in sources) == (drafted, draft != "corpus")


@pytest.mark.parametrize("who", ["proxied", "another computer", "site", "site with the key"])
@pytest.mark.parametrize("name", ["corpus", "corpus:chats", "corpus:{folder}"])
def test_they_cannot_be_asked_for_by_name(house: House, who: str, name: str) -> None:
    own = {"draft": ["auto", name.format(folder=house.folder)]}
    status, _, answer = house.ask(who, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "localspec": own})
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "localspec.draft")
    assert error["message"].endswith("there is ngram")
    assert house.ask("program", "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "localspec": own})[0] == 200


def test_an_answer_that_is_kept_is_for_who_asked_for_it(house: House) -> None:
    for who, others in (
        ("program", {"own page": 200, "proxied": 404, "site": 404}),
        ("site", {"program": 200, "site": 200, "proxied": 404}),
        ("another computer", {"another computer": 200, "site with the key": 404}),
    ):
        _, _, answer = house.ask(who, "POST", "/v1/responses", {"input": "my PIN is 4711", "max_output_tokens": 1})
        name, item = json.loads(answer)["id"], json.loads(answer)["output"][0]["id"]
        for other, status in others.items():
            assert house.ask(other, "GET", f"/v1/responses/{name}")[0] == status, (who, other)
            by_id = {"input": "go on", "previous_response_id": name}
            for body in (by_id, {"input": [{"type": "item_reference", "id": item}, *CHAT]}):
                found, _, answer = house.ask(other, "POST", "/v1/responses", body | {"max_output_tokens": 1})
                assert found == (200 if status == 200 else 400), (who, other, answer)
            if status != 200:
                assert house.ask(other, "DELETE", f"/v1/responses/{name}")[0] == 404
        assert house.ask(who, "DELETE", f"/v1/responses/{name}")[0] == 200


def test_how_much_of_a_prompt_was_known_is_not_for_a_site(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    about = house.llm.parallel_info() | {"passes": {"rows": {"prompts": 4711}}}  # as where several are answered
    monkeypatch.setattr(LLM, "parallel_info", lambda llm: about)
    prompt = "the vault code is zebra quartz nineteen, " * 3
    house.ask("program", "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    for who, cached in (("program", True), ("site", False)):
        whole = json.loads(house.ask(who, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})[2])
        assert (whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached
        assert (whole["localspec"]["stats"]["cached_tokens"] > 0) == cached
        stats = json.loads(house.ask(who, "GET", "/v1/localspec/stats")[2])
        assert ("totals" in stats, "prefix_cache" in stats, "passes" in stats["parallel"]) == (cached, cached, cached)


def test_a_window_of_an_editor_is_its_own(house: House) -> None:
    service = house.local.service
    mine, theirs = (service.seen_by(client) for client in (Client(), Client(Kind.SITE, SITE)))
    text = "".join(f"line {i}: the PIN is {i * 4711}\n" for i in range(60))
    mine.kept(Windows).joined(0, text)
    assert theirs.kept(Windows).joined(0, text[500:]) == text[500:]
    assert mine.kept(Windows).joined(0, text[500:]) == text
    assert service.seen_by(Client()).kept(Windows) is mine.kept(Windows)
    assert theirs.kept(Slots) is not mine.kept(Slots)


def test_names_have_no_folders() -> None:
    loaded = ["ngram", "a/draft", "b/draft", "corpus:/srv/acme", "corpus:chats", "corpus:C:\\acme\\x", "corpus"]
    shown = "ngram draft draft-2 corpus corpus:chats corpus3 corpus4"
    assert public_names(loaded) == dict(zip(shown.split(), loaded, strict=True))
