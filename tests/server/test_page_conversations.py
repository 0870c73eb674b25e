"""Leading conversations on the page of ``localspec serve``, in a real Chromium: kept, found, edited, with files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from tests.support.browsing import WIDE
from tests.support.documents import write_docx, write_pdf
from tests.support.serving import Server, serve
from tests.support.tabs import Tab, expect
from tests.support.thinkers import write_thinker

QUESTIONS = ".question > p"

LOAD: dict[str, Any] = {"draft": ["ngram", "model"]}

AXE = os.environ.get("LOCALSPEC_TEST_AXE", "")
"""axe.min.js of npm's axe-core; .ci/run fetches it where there is an npm."""

TABLE = """\
## Two ways

1. `sum`, see [the manual](https://docs.example/sum)
2. a loop

```python
def total(numbers):  # slow
    return sum(numbers)
```

| way | steps |
|-----|------:|
| sum | 1 |

> The sum is $n(n+1)/2$.
"""


@pytest.fixture
def server(llm: LLM) -> Iterator[Server]:
    with serve(llm) as running:
        yield running


def titles(it: Tab) -> list[str]:
    return it.page.locator("#list button").all_text_contents()


def saved(it: Tab, *expected: str) -> None:
    """Wait until the list shows these."""
    script = "() => [...document.querySelectorAll('#list button')].map((it) => it.textContent).join()"
    it.until(f"(expected) => ({script})() === expected", ",".join(expected))


def test_conversations_survive_a_restart_of_the_server(tab: Callable[..., Tab], llm: LLM) -> None:
    with serve(llm) as first:
        it = tab(first.url)
        it.page.fill("#system", "Be brief.")
        it.page.fill("#temperature", "0.5")
        it.page.fill("#question", "one question\n")
        said = it.ask("of two lines")
        saved(it, "one question")
        it.press("Alt+n")
        it.until("() => !document.querySelectorAll('.turn').length")
        it.ask("another")
        saved(it, "another", "one question")
    with serve(llm) as second:
        it = tab(second.url)
        saved(it, "another", "one question")
        it.page.fill("#temperature", "")
        it.page.get_by_role("button", name="one question").click()
        it.until("() => document.querySelectorAll('.turn').length")
        assert it.said() == ""  # its tokens are not kept
        expect(it.page.locator(".answer")).to_have_text(said)
        assert it.page.locator(".question p").inner_text() == "one question\nof two lines"
        expect(it.page.locator("#system")).to_have_value("Be brief.")
        expect(it.page.locator("#temperature")).to_have_value("0.5")
        it.page.reload()  # the address names it
        it.until("() => document.querySelectorAll('.turn').length")
        it.ask("and more")
        sent = it.asked[-1]["messages"]
        assert sent[0] == {"role": "system", "content": "Be brief."}
        assert [message["content"] for message in sent[1:]] == ["one question\nof two lines", said, "and more"]
        saved(it, "one question", "another")


def test_find_rename_export_delete_and_undo(tab: Callable[..., Tab], server: Server) -> None:
    it = tab(server.url, accept_downloads=True)
    said = it.ask("about apples")
    saved(it, "about apples")
    it.press("Alt+n")
    it.until("() => !document.querySelectorAll('.turn').length")
    it.ask("about pears")
    saved(it, "about pears", "about apples")
    it.page.fill("#search", "APPLES")
    saved(it, "about apples")
    it.page.fill("#search", "plums")
    saved(it)
    expect(it.page.locator("#list-note")).to_have_text("None has all of these words.")
    it.page.fill("#search", "")
    saved(it, "about pears", "about apples")
    it.page.focus("#list button")
    it.press("ArrowDown", "Enter")
    it.until("() => document.getElementById('title').value === 'about apples'")
    it.page.fill("#title", "Fruit <b>")
    it.press("Enter")
    saved(it, "Fruit <b>", "about pears")
    with it.page.expect_download() as download:
        it.page.get_by_role("button", name="Export as Markdown").click()
    assert download.value.suggested_filename == "Fruit-b.md"
    text = Path(download.value.path()).read_text("utf-8")
    assert text == f"# Fruit <b>\n\n## You\n\nabout apples\n\n## Answer\n\n{said}".rstrip() + "\n"
    it.page.get_by_role("button", name="Delete").click()
    saved(it, "about pears")
    expect(it.page.locator(".turn")).to_have_count(0)
    it.page.get_by_role("button", name="Undo").click()
    saved(it, "Fruit <b>", "about pears")
    expect(it.page.locator(".question p")).to_have_text("about apples")


def test_a_deletion_can_be_undone_until_that_has_worked(tab: Callable[..., Tab], server: Server) -> None:
    def refuse(route: Any) -> None:
        route.fulfill(status=507, json={"error": {"message": "the disk is full"}})

    it = tab(server.url)
    it.ask("about apples")
    saved(it, "about apples")
    it.page.get_by_role("button", name="Delete").click()
    saved(it)
    it.page.route("**/v1/localspec/conversations", refuse)
    it.page.get_by_role("button", name="Undo").click()
    it.page.get_by_text("the disk is full").first.wait_for()
    expect(it.page.locator("#deleted")).to_be_visible()
    it.page.unroute("**/v1/localspec/conversations")
    it.page.get_by_role("button", name="Undo").click()
    saved(it, "about apples")
    it.until("() => document.getElementById('deleted').hidden")
    it.page.get_by_role("button", name="Delete").click()
    saved(it)
    it.page.get_by_role("button", name="Close this note").click()
    expect(it.page.locator("#deleted")).to_be_hidden()


def test_thoughts_are_kept_where_the_answer_then_fails(tab: Callable[..., Tab], server: Server) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Let me see."}}]}
    events = [thought, {"error": {"message": "the engine broke"}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)

    it = tab(server.url)
    it.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    it.ask("why?")
    expect(it.page.locator("#chat-alert")).to_have_text("the engine broke")
    expect(it.page.locator(".thoughts")).to_have_text("Let me see.")
    expect(it.page.locator("#question")).to_have_value("")
    expect(it.page.locator(".turn-figures")).to_contain_text("no answer came after the thoughts")
    it.page.reload()
    it.until("() => document.querySelectorAll('.turn').length === 1")
    expect(it.page.locator(".thoughts")).to_have_text("Let me see.")


def test_a_message_is_edited_and_an_answer_made_anew(tab: Callable[..., Tab], server: Server) -> None:
    """The answers are fixed: what is asked matters, not what a random model says."""
    reply = {"choices": [{"index": 0, "delta": {"content": "well"}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n"
    it = tab(server.url)
    it.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    for question in ("first", "second", "third"):
        it.ask(question)
    it.page.locator(".turn").nth(1).get_by_role("button", name="Edit the question").click()
    box = it.page.get_by_label("The question, to be edited")
    assert box.input_value() == "second"
    it.press("Escape")
    assert box.count() == 0
    expect(it.page.locator(".turn")).to_have_count(3)
    it.press("Enter")  # the focus is back on the button
    box.fill("second, better")
    it.press("Enter")
    it.until("() => document.querySelectorAll('.turn').length === 2")
    it.idle()
    assert [message["content"] for message in it.asked[-1]["messages"]] == ["first", "well", "second, better"]
    it.page.get_by_role("button", name="Regenerate").click()
    it.until("() => document.querySelector('.turn:last-child [role=status]').textContent === '3/3'")
    it.idle()
    assert it.asked[-1]["messages"] == it.asked[-2]["messages"]
    it.press("ArrowUp")  # in the empty box for questions: edits the last
    assert box.input_value() == "second, better"


def test_a_dropped_file_becomes_part_of_the_message_and_a_prediction(
    tab: Callable[..., Tab], server: Server, tmp_path: Path
) -> None:
    it = tab(server.url)
    code = "def f():\n    return '''```'''\n"
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    drop = """([name, text]) => {
        const data = new DataTransfer();
        data.items.add(new File([text], name));
        const event = (kind) => new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
        for (const kind of ["dragover", "drop"]) document.getElementById("talk").dispatchEvent(event(kind));
    }"""
    it.run(drop, ["a.py", code])
    it.page.locator("#attached li").wait_for()
    it.page.set_input_files("#file", [tmp_path / "picture.png"])
    it.page.wait_for_selector("#chat-alert:not([hidden])")
    expect(it.page.locator("#chat-alert")).to_have_text("picture.png is not a text in UTF-8.")
    it.page.set_input_files("#file", [tmp_path / "a.py"])
    it.until("() => document.querySelectorAll('#attached li').length === 2")
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


DROP = """([where, name]) => {
    const data = new DataTransfer();
    data.items.add(new File(["x = 1"], name));
    const event = (kind) => new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
    return ["dragover", "drop"].map((kind) => !document.querySelector(where).dispatchEvent(event(kind)));
}"""


def test_no_file_that_is_dropped_anywhere_takes_the_page_s_place(tab: Callable[..., Tab], server: Server) -> None:
    it = tab(server.url)
    for n, where in enumerate(("header", "#conversations", "#settings", "#talk"), 1):
        assert it.run(DROP, [where, f"{n}.py"]) == [True, True]  # what the browser would do with it is prevented
        it.until("(n) => document.querySelectorAll('#attached li').length === n", n)
    it.page.click("#race-tab")
    assert it.run(DROP, ["#race", "5.py"]) == [True, True]
    it.page.click("#chat-tab")
    expect(it.page.locator("#attached li")).to_have_count(4)
    expect(it.page.locator(".dropping")).to_have_count(0)


def test_two_tabs_lose_nothing(tab: Callable[..., Tab], server: Server) -> None:
    one = tab(server.url)
    one.ask("begin")
    saved(one, "begin")
    two = tab(one.page.url)
    two.until("() => document.querySelectorAll('.turn').length")
    second = two.ask("from two")
    saved(two, "begin")
    one.ask("from one")
    saved(one, "begin")  # one conversation, in which both have gone on
    one.until("() => document.querySelectorAll('.versions:not([hidden])').length === 1")
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from one"])
    one.page.get_by_role("button", name="Later version").click()
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from two"])
    expect(one.page.locator(".turn").last.locator(".answer")).to_contain_text(second)
    saved(one, "begin")
    one.page.reload()
    one.until("() => document.querySelectorAll('.turn').length === 2")
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from two"])
    one.page.get_by_role("button", name="Earlier version").click()
    expect(one.page.locator(QUESTIONS)).to_have_text(["begin", "from one"])


def test_thinking_is_folded_and_not_sent_back(tab: Callable[..., Tab], shared_home: Path, tmp_path: Path) -> None:
    budget = 12

    def budgeted(route: Any) -> None:  # this model would think until its context is full
        route.continue_(post_data=json.dumps(json.loads(route.request.post_data) | {"thinking_budget": budget}))

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
        it.page.reload()
        it.until("() => document.querySelectorAll('.turn').length === 2")
        expect(it.page.locator(".thinking:not([hidden])")).to_have_count(2)
        expect(it.page.locator(".thoughts").first).to_have_text(thought)
        it.page.get_by_label("Thinking").last.select_option("off")
        it.ask("and off")
        assert it.asked[-1]["think"] == "off"
        expect(it.page.locator(".turn").last.locator(".thinking:not([hidden])")).to_have_count(0)
        note = "no answer came after the thoughts"
        assert note not in it.page.text_content("#talk")
        it.page.get_by_label("Thinking").last.select_option("on")
        budget = 100  # more than the answer may have
        it.ask("and only think")
        expect(it.page.locator(".turn").last).to_contain_text(note)


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
def test_axe_finds_nothing(tab: Callable[..., Tab], llm: LLM) -> None:
    with serve(llm, params=SamplingParams(grammar=f"root ::= {json.dumps(TABLE)}")) as server:
        it = tab(server.url)
        it.page.set_input_files("#file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1\n"})
        it.ask("say it")
        saved(it, "say it")
        it.page.set_input_files("#file", {"name": "b.py", "mimeType": "text/plain", "buffer": b"x = 1\n"})
        it.page.get_by_text("More sampling").click()
        it.run(Path(AXE).read_text("utf-8") + ";0")
        views = {
            "reading": lambda: None,
            "editing": lambda: it.page.get_by_role("button", name="Edit the question").click(),
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


def test_exported_conversations_are_imported(tab: Callable[..., Tab], server: Server, tmp_path: Path) -> None:
    it = tab(server.url, accept_downloads=True)
    said = it.ask("about apples")
    it.page.get_by_role("button", name="Edit the question").click()
    it.page.locator(".turn textarea").fill("about pears")
    it.press("Enter")
    it.until("() => document.querySelector('.question p')?.textContent === 'about pears'")
    it.until("() => !document.body.classList.contains('answering')")
    it.page.fill("#title", "Fruit")
    it.press("Enter")
    saved(it, "Fruit")
    with it.page.expect_download() as download:
        it.page.get_by_role("button", name="Export as JSON").click()
    exported = tmp_path / "Fruit.json"
    download.value.save_as(exported)
    before = json.loads(exported.read_text("utf-8"))
    it.page.get_by_role("button", name="Delete").click()
    saved(it)
    bad = tmp_path / "bad.json"
    bad.write_text("[1")
    it.page.set_input_files("#import-file", [bad, exported])
    saved(it, "Fruit")
    it.until("() => document.querySelector('.question p')?.textContent === 'about pears'")
    assert it.page.text_content("#chat-alert") == "bad.json is no conversation that was exported here as .json."
    it.page.get_by_role("button", name="Earlier version").click()
    it.until("() => document.querySelector('.question p')?.textContent === 'about apples'")
    assert said.strip() in it.page.locator(".answer").first.text_content()
    it.page.set_input_files("#import-file", exported)  # once more: another one, which takes no other's place
    saved(it, "Fruit", "Fruit")
    with it.page.expect_download() as download:
        it.page.get_by_role("button", name="Export as JSON").click()
    again = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert again["id"] != before["id"]
    assert [again[name] for name in ("title", "system", "settings", "messages")] == [
        before[name] for name in ("title", "system", "settings", "messages")
    ]
    exported.write_text(json.dumps(before | {"messages": [{"role": "robot", "content": "x"}]}))
    it.page.set_input_files("#import-file", exported)
    it.until("() => document.getElementById('chat-alert').textContent.startsWith('Fruit.json is not imported: ')")


def test_pdf_and_word_files_are_read_by_the_server(tab: Callable[..., Tab], server: Server, tmp_path: Path) -> None:
    write_pdf(tmp_path / "paper.pdf", ["The first page.", "The second."])
    write_docx(tmp_path / "letter.DOCX")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    it = tab(server.url)
    it.page.set_input_files("#file", [tmp_path / name for name in ("paper.pdf", "broken.pdf", "letter.DOCX")])
    it.until("() => document.querySelectorAll('#attached li').length === 2")
    alert = it.page.text_content("#chat-alert")
    assert alert == "broken.pdf cannot be read: it is damaged, or no PDF file"
    it.ask("what is it?")
    sent = it.asked[0]["messages"][0]["content"]
    assert sent.startswith("paper.pdf:\n```\nThe first page.\n\nThe second.\n```\n\nletter.DOCX:\n```\n# Dear reader\n")
    assert "prediction" not in it.asked[0]
    assert it.page.locator(".question .files").text_content().startswith("paper.pdf")
    assert it.complaints == []
