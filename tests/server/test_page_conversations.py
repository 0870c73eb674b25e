"""Leading conversations on the page of ``localspec serve``, in a real Chromium: kept, found, edited, with files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from tests.server.test_page_reading import ANSWER
from tests.support.browsing import WIDE
from tests.support.documents import write_docx, write_pdf
from tests.support.serving import Server, serve
from tests.support.tabs import Tab, Tabs, expect, said, streamed
from tests.support.thinkers import write_thinker

QUESTIONS = ".question > p"

LOAD: dict[str, Any] = {"draft": ["ngram", "model"]}

AXE = os.environ.get("LOCALSPEC_TEST_AXE", "")
"""axe.min.js of npm's axe-core; .ci/run fetches it where there is an npm."""


@pytest.fixture
def server(llm: LLM, port: int) -> Iterator[Server]:
    with serve(llm, port=port) as running:
        yield running


def test_find_rename_export_delete_and_undo(tab: Tabs, server: Server) -> None:
    it = tab(server.url, accept_downloads=True)
    said = it.ask("about apples")
    it.saved("about apples")
    it.press("Alt+n")
    it.turns(0)
    it.ask("about pears")
    for search, titles in (("", ("about pears", "about apples")), ("APPLES", ("about apples",)), ("plums", ())):
        it.page.fill("#search", search)
        it.saved(*titles)
    expect(it.page.locator("#list-note")).to_have_text("None has all of these words.")
    it.page.fill("#search", "")
    it.saved("about pears", "about apples")
    it.page.focus("#list button")
    it.press("ArrowDown", "Enter")
    it.until("() => document.getElementById('title').value === 'about apples'")
    it.page.fill("#title", "Fruit <b>")
    it.press("Enter")
    it.saved("Fruit <b>", "about pears")
    with it.page.expect_download() as download:
        it.click("Export as Markdown")
    assert download.value.suggested_filename == "Fruit-b.md"
    text = Path(download.value.path()).read_text("utf-8")
    assert text == f"# Fruit <b>\n\n## You\n\nabout apples\n\n## Answer\n\n{said}".rstrip() + "\n"
    it.click("Delete")
    it.saved("about pears")
    it.turns(0)
    # It can be undone until that has worked.
    full = {"error": {"message": "the disk is full"}}
    it.page.route("**/v1/localspec/conversations", lambda route: route.fulfill(status=507, json=full))
    it.click("Undo")
    it.page.get_by_text("the disk is full").first.wait_for()
    expect(it.page.locator("#deleted")).to_be_visible()
    it.page.unroute("**/v1/localspec/conversations")
    it.click("Undo")
    it.saved("Fruit <b>", "about pears")
    expect(it.page.locator("#deleted")).to_be_hidden()
    expect(it.page.locator(".question p")).to_have_text("about apples")
    it.click("Delete")
    it.saved("about pears")
    it.click("Close this note")
    expect(it.page.locator("#deleted")).to_be_hidden()


def test_thoughts_are_kept_where_the_answer_then_fails(it: Tab) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Let me see."}, "finish_reason": None}]}
    it.page.route("**/v1/chat/completions", streamed(thought, {"error": {"message": "the engine broke"}}))
    it.ask("why?")
    expect(it.page.locator("#chat-alert")).to_have_text("the engine broke")
    expect(it.page.locator("#question")).to_have_value("")
    expect(it.page.locator(".turn-figures")).to_contain_text("no answer came after the thoughts")
    it.reload(1)
    expect(it.page.locator(".thoughts")).to_have_text("Let me see.")


DROP = """([where, name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    const event = (kind) => new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
    return ["dragover", "drop"].map((kind) => !document.querySelector(where).dispatchEvent(event(kind)));
}"""
"""Drops a file; whether what the browser would do with it is prevented."""


def test_a_dropped_file_becomes_part_of_the_message_and_a_prediction(it: Tab, tmp_path: Path) -> None:
    code = "def f():\n    return '''```'''\n"
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    it.run(DROP, ["#talk", "a.py", code])
    it.page.locator("#attached li").wait_for()
    it.page.set_input_files("#file", [tmp_path / "picture.png"])
    expect(it.page.locator("#chat-alert")).to_have_text("picture.png is not a text in UTF-8.")
    it.page.set_input_files("#file", [tmp_path / "a.py"])
    expect(it.page.locator("#attached li")).to_have_count(2)
    it.page.get_by_role("button", name="Take a.py out").last.click()
    expect(it.page.locator("#attached li")).to_have_count(1)
    it.ask("rename f to g")
    sent = it.asked[0]
    assert sent["messages"][0]["content"] == f"a.py:\n````\n{code}````\n\nrename f to g"
    assert sent["prediction"] == {"type": "content", "content": code}
    assert it.page.locator(".question .files").text_content().startswith("a.py")
    expect(it.page.locator("#attached li")).to_have_count(0)
    it.page.reload()
    it.until("() => document.querySelectorAll('.question .files li').length === 1")
    it.page.set_input_files("#file", [tmp_path / "a.py"])
    it.page.get_by_label("to be changed").uncheck()
    it.ask("what does it do?")
    assert "prediction" not in it.asked[-1]
    assert it.asked[-1]["messages"][0] == sent["messages"][0]


def test_no_file_that_is_dropped_anywhere_takes_the_page_s_place(it: Tab) -> None:
    for n, where in enumerate(("header", "#conversations", "#settings", "#talk"), 1):
        assert it.run(DROP, [where, f"{n}.py", "x = 1"]) == [True, True]
        expect(it.page.locator("#attached li")).to_have_count(n)
    it.page.click("#race-tab")
    assert it.run(DROP, ["#race", "5.py", "x = 1"]) == [True, True]
    it.page.click("#chat-tab")
    expect(it.page.locator("#attached li")).to_have_count(4)
    expect(it.page.locator(".dropping")).to_have_count(0)


def test_two_tabs_lose_nothing(tab: Tabs, server: Server) -> None:
    one = tab(server.url)
    one.ask("begin")
    one.saved("begin")
    two = tab(one.page.url)
    two.turns(1)
    second = two.ask("from two")
    two.saved("begin")
    one.ask("from one")
    one.saved("begin")  # one conversation, in which both have gone on
    expect(one.page.locator(".versions:not([hidden])")).to_have_count(1)
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from one"])
    one.click("Later version")
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from two"])
    expect(one.page.locator(".turn").last.locator(".answer")).to_contain_text(second)
    one.saved("begin")
    one.reload(2)
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from two"])
    one.click("Earlier version")
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from one"])


def test_thinking_is_folded_and_not_sent_back(tab: Tabs, shared_home: Path, tmp_path: Path) -> None:
    def budgeted(route: Any) -> None:  # this model would think until its context is full
        route.continue_(post_data=json.dumps(json.loads(route.request.post_data) | {"thinking_budget": 12}))

    path = write_thinker(tmp_path, "deepseek")
    with LLM(path, draft="ngram", backend="reference", n_ctx=512, idle=False) as llm, serve(llm) as server:
        it = tab(server.url)
        it.page.route("**/v1/chat/completions", budgeted)
        it.page.get_by_text("More sampling").click()
        for name, value in {"max-tokens": "40", "temperature": "1", "seed": "1"}.items():
            it.page.fill(f"#{name}", value)
        it.ask("in the and")
        thoughts = it.page.get_by_label("Thinking", exact=True)
        assert not thoughts.is_visible()
        it.page.get_by_text("Thoughts, ").click()
        thought = thoughts.text_content()
        assert thought
        assert thought not in it.page.locator(".reading").text_content()
        assert it.page.locator(".answer .thought").count() > 0
        it.ask("go on")
        assert [set(message) for message in it.asked[-1]["messages"]] == [{"role", "content"}] * 3
        it.reload(2)
        expect(it.page.locator(".thinking:not([hidden])")).to_have_count(2)
        expect(it.page.locator(".thoughts").first).to_have_text(thought)
        it.page.get_by_label("Thinking").last.select_option("off")
        it.ask("and off")
        assert it.asked[-1]["think"] == "off"
        expect(it.page.locator(".turn").last.locator(".thinking:not([hidden])")).to_have_count(0)
        assert "no answer came after the thoughts" not in it.page.text_content("#talk")


APPEARING = """() => {
    document.getElementById("token-view").click();
    for (const it of document.querySelectorAll("#key-form, #think-field, #deleted, .thinking")) it.hidden = false;
    for (const it of document.querySelectorAll("details")) it.open = true;
    document.querySelector(".thoughts").append("Let me see.");
    const alert = document.getElementById("chat-alert");
    alert.hidden = false;
    alert.append("Something is wrong.");
}"""


@pytest.mark.skipif(not Path(AXE).is_file() or not AXE, reason="axe-core is not here: LOCALSPEC_TEST_AXE=axe.min.js")
def test_axe_finds_nothing(tab: Tabs, llm: LLM) -> None:
    with serve(llm, params=SamplingParams(grammar=f"root ::= {json.dumps(ANSWER)}")) as server:
        it = tab(server.url)
        it.page.set_input_files("#file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1\n"})
        it.ask("say it")
        it.saved("say it")
        it.page.set_input_files("#file", {"name": "b.py", "mimeType": "text/plain", "buffer": b"x = 1\n"})
        it.page.get_by_text("More sampling").click()
        it.run(Path(AXE).read_text("utf-8") + ";0")
        views = {
            "reading": lambda: None,
            "editing": lambda: it.click("Edit the question"),
            "tokens": lambda: it.page.get_by_label("Tokens", exact=True).check(),
            "all that may appear": lambda: it.run(APPEARING),
            "race": lambda: it.page.click("#race-tab"),
        }
        for view, show in views.items():
            show()
            for scheme in ("light", "dark"):
                it.page.select_option("#theme", scheme)
                for size in (WIDE, {"width": 360, "height": 640}):
                    it.page.set_viewport_size(size)
                    found = it.run("async () => (await axe.run()).violations")
                    shown = [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found]
                    assert shown == [], (view, scheme, size)
                it.page.set_viewport_size(WIDE)


def test_exported_conversations_are_imported(tab: Tabs, server: Server, tmp_path: Path) -> None:
    def export() -> dict[str, Any]:
        with it.page.expect_download() as download:
            it.click("Export as JSON")
        return json.loads(Path(download.value.path()).read_text("utf-8"))

    it = tab(server.url, accept_downloads=True)
    it.page.route("**/v1/chat/completions", streamed(said("well", "stop")))
    it.ask("about apples")
    it.saved("about apples")
    it.click("Edit the question")
    it.page.get_by_label("The question, to be edited").fill("about pears")
    it.press("Enter")
    question = it.page.locator(".question p")
    expect(question).to_have_text("about pears")
    it.idle()
    before = export()
    it.click("Delete")
    it.saved()
    exported, bad = tmp_path / "Fruit.json", tmp_path / "bad.json"
    exported.write_text(json.dumps(before))
    bad.write_text("[1")
    it.page.set_input_files("#import-file", [bad, exported])
    it.saved("about apples")
    expect(question).to_have_text("about pears")
    expect(it.page.locator("#chat-alert")).to_contain_text("bad.json is no conversation")
    it.click("Earlier version")
    expect(question).to_have_text("about apples")
    it.page.set_input_files("#import-file", exported)  # once more: another one, which takes no other's place
    it.saved("about apples", "about apples")
    expect(question).to_have_text("about pears")
    again = export()
    assert again["id"] != before["id"]
    kept = ("title", "system", "settings", "messages")
    assert [again[name] for name in kept] == [before[name] for name in kept]
    exported.write_text(json.dumps(before | {"messages": [{"role": "robot", "content": "x"}]}))
    it.page.set_input_files("#import-file", exported)
    expect(it.page.locator("#chat-alert")).to_contain_text("Fruit.json is not imported: ")


def test_pdf_and_word_files_are_read_by_the_server(it: Tab, tmp_path: Path) -> None:
    write_pdf(tmp_path / "paper.pdf", ["The first page.", "The second."])
    write_docx(tmp_path / "letter.DOCX")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    it.page.set_input_files("#file", [tmp_path / name for name in ("paper.pdf", "broken.pdf", "letter.DOCX")])
    expect(it.page.locator("#attached li")).to_have_count(2)
    expect(it.page.locator("#chat-alert")).to_have_text("broken.pdf cannot be read: it is damaged, or no PDF file")
    it.ask("what is it?")
    sent = it.asked[0]["messages"][0]["content"]
    assert sent.startswith("paper.pdf:\n```\nThe first page.\n\nThe second.\n```\n\nletter.DOCX:\n```\n# Dear reader\n")
    assert "prediction" not in it.asked[0]
    assert it.page.locator(".question .files").text_content().startswith("paper.pdf")
