"""The page of ``localspec serve`` loses nothing: what was sent, typed, set and half answered, in a real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from tests.support.serving import Server, serve
from tests.support.tabs import Tab, Tabs, expect, said, streamed
from tests.support.waiting import wait_until

CONVERSATIONS = "/v1/localspec/conversations"
ANSWERS = "**/v1/chat/completions"
KEPT = "**/v1/localspec/conversations**"
QUESTIONS = ".question > p"


@pytest.fixture
def server(llm: LLM, port: int) -> Iterator[Server]:
    with serve(llm, port=port) as running:
        yield running


def on_disk(server: Server) -> list[list[dict[str, Any]]]:
    """The messages of all conversations that the server keeps."""
    listed = json.loads(server.ask("GET", CONVERSATIONS)[2])["data"]
    found = [server.ask("GET", f"{CONVERSATIONS}/{each['id']}") for each in listed]
    return [json.loads(body)["messages"] for status, _, body in found if status != 404]  # deleted since the list


def texts(conversations: list[list[dict[str, Any]]]) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in conversations]


def answers(it: Tab) -> list[str]:
    return it.run("() => [...document.querySelectorAll('.turn')].map((it) => it.turn.text)")


def shows(it: Tab, *texts: str, version: str = "") -> None:
    """Wait until these answers are there, the last one in this version."""
    status = it.page.locator(".turn").last.locator(".versions [role=status]")
    wait_until(lambda: answers(it) == [*texts] and (not version or status.text_content() == version), "as they were")


def begin(it: Tab, question: str, n: int = 8) -> None:
    """Ask what is answered for ever, until so many characters have come."""
    it.say(question)
    it.until("(n) => (document.querySelector('.turn:last-of-type')?.turn.text || '').length > n", n)


def test_a_question_is_kept_before_it_is_answered(it: Tab, server: Server) -> None:
    waiting: list[Any] = []
    it.page.route(ANSWERS, lambda route: waiting.append(route))  # which is never answered
    it.say("what is this?")
    wait_until(lambda: len(on_disk(server)) == 1, "the question is kept")
    question, answer = on_disk(server)[0]
    assert (question["content"], answer["content"], answer["finish"]) == ("what is this?", "", "broken")
    it.reload(1)
    expect(it.page.locator(QUESTIONS)).to_have_text(["what is this?"])
    expect(it.page.locator(".turn-figures")).to_contain_text("broken off")


def test_a_question_is_answered_where_it_was_asked_before_the_list_is_there(it: Tab) -> None:
    held: list[Any] = []

    def release() -> None:
        it.page.route(KEPT, lambda route: route.continue_())
        for route in held:
            route.continue_()
        held.clear()

    it.page.route(KEPT, lambda route: held.append(route) if route.request.method == "GET" else route.continue_())
    it.page.reload()
    it.ask("one")
    it.until("() => location.hash")

    release()
    expect(it.page.locator("#list button[aria-current]")).to_have_count(1)
    it.page.wait_for_load_state("networkidle")
    expect(it.page.locator(QUESTIONS)).to_have_text(["one"])
    assert it.page.locator(".answer .token").count() > 0  # it was not put there again from what is kept

    answer = answers(it)[0]
    it.page.route(KEPT, lambda route: held.append(route))
    it.page.reload()
    it.say("two")
    it.page.wait_for_timeout(100)
    assert len(it.asked) == 1  # it goes with what the address names, which is not there yet
    release()
    it.turns(2)
    it.idle()
    assert [message["content"] for message in it.asked[-1]["messages"]] == ["one", answer, "two"]


def test_what_is_typed_is_there_where_the_address_names_what_is_gone(it: Tab, server: Server) -> None:
    it.page.fill("#question", "half a question")
    it.page.goto(f"{server.url}#0123456789abcdef")
    it.page.reload()
    expect(it.page.locator("#chat-alert")).to_be_visible()
    expect(it.page.locator("#question")).to_have_value("half a question")
    it.until("() => !location.hash")


def test_a_reload_in_the_middle_keeps_the_question_and_the_part(tab: Tabs, endless: Server) -> None:
    it = tab(endless.url)
    with it.page.expect_response(lambda response: response.request.method == "PUT"):
        begin(it, "go on")
    assert on_disk(endless)[0][1]["content"]  # while the answer comes
    expect(it.page.locator("#stop")).to_be_enabled()
    part = answers(it)[0]
    it.reload(1)
    endless.wait_idle()
    expect(it.page.locator(QUESTIONS)).to_have_text(["go on"])
    kept = answers(it)[0]
    assert kept.startswith(part)
    expect(it.page.locator(".turn-figures")).to_have_text("broken off")
    wait_until(lambda: on_disk(endless)[0][1] == {"role": "assistant", "content": kept, "finish": "broken"}, "as shown")
    it.click("Continue the answer")
    it.until("(n) => document.querySelector('.turn').turn.text.length > n + 8", len(kept))
    it.press("Escape")
    it.idle()
    assert answers(it)[0].startswith(kept)
    sent = it.asked[-1]
    assert sent["messages"] == [{"role": "user", "content": "go on"}, {"role": "assistant", "content": kept}]
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    assert len(on_disk(endless)) == 1


def test_a_page_that_goes_keeps_the_part_before_it_is_gone(tab: Tabs, endless: Server) -> None:
    """At once, in the browser: a request of a page that goes may never be sent."""
    it = tab(endless.url)
    begin(it, "go on until you go")
    part, *held = it.run(
        """() => {
            const part = document.querySelector(".turn").turn.text;
            for (const name of Object.keys(localStorage)) if (name.includes("unsaved")) localStorage.removeItem(name);
            dispatchEvent(new PageTransitionEvent("pagehide"));
            const states = Object.keys(localStorage).filter((name) => name.includes("unsaved"));
            return [part, ...states.map((name) => JSON.parse(localStorage[name]).messages[1].content)];
        }"""
    )
    assert held == [part]
    it.press("Escape")
    it.idle()


def test_a_server_that_dies_in_an_answer_gets_it_when_it_is_back(tab: Tabs, endless: Server, module_home: Path) -> None:
    llm = endless.service.llm
    with serve(llm) as first:
        it = tab(first.url)
        begin(it, "before the death")
        first.runner.stop()
        it.idle()
        expect(it.page.locator("#chat-alert")).to_be_visible()
    part = answers(it)[0]
    assert it.page.text_content(".turn-figures").endswith("broken off")
    expect(it.page.locator("#list-note")).to_contain_text("kept in this browser")
    it.say("typed meanwhile")
    expect(it.page.locator("#chat-alert")).to_contain_text("does not answer")
    it.idle()
    expect(it.page.locator("#question")).to_have_value("typed meanwhile")
    assert answers(it) == [part]
    with serve(llm, port=first.port) as second:
        # It is not asked for: the page tries again by itself.
        wait_until(lambda: ["before the death", part] in texts(on_disk(second)), "it is saved")
        it.reload(1)
        wait_until(lambda: answers(it) == [part], "as they were")
        expect(it.page.locator("#question")).to_have_value("typed meanwhile")
        expect(it.page.get_by_role("button", name="Continue the answer")).to_be_visible()


def test_what_a_server_never_took_survives_its_death_and_the_page_s(tab: Tabs, llm: LLM) -> None:
    held = "() => Object.keys(localStorage).filter((name) => name.includes('unsaved'))"
    full = {"error": {"message": "1000 conversations are kept, which is the most; delete some", "code": "x"}}

    def refuse(route: Any) -> None:
        route.fulfill(status=507, json=full) if route.request.method == "POST" else route.continue_()

    with serve(llm) as first:
        it = tab(first.url)
        it.page.route(KEPT, refuse)
        words = ["nobody saved this", it.ask("nobody saved this")]
        expect(it.page.locator("#list-note")).to_contain_text("kept in this browser until it is")
        it.reload(1)
        words += ["nor this", it.ask("nor this")]
        expect(it.page.locator(QUESTIONS)).to_have_text(words[::2])
        assert on_disk(first) == []
    with serve(llm, port=first.port) as second:
        other = it.page.context.new_page()
        other.goto(second.url)  # not its address: any tab saves it
        other.wait_for_function("() => document.querySelectorAll('#list li').length === 1")
        assert texts(on_disk(second)) == [words]
        # A browser may let a page go after another has come: that one has nothing new to keep.
        it.run("() => dispatchEvent(new PageTransitionEvent('pagehide'))")
        assert other.evaluate(held) == []
        other.locator("#list button").click()
        other.wait_for_selector(".turn")
        assert other.evaluate(held) == []


def test_an_answer_whose_reply_was_lost_is_not_kept_twice(it: Tab, server: Server) -> None:
    """The server has saved it, and the page never heard of that."""
    lost = []

    def lose(route: Any) -> None:
        if route.request.method == "POST" and not lost:
            lost.append(route.fetch())
            route.abort()
        else:
            route.continue_()

    it.page.route(KEPT, lose)
    it.ask("only once")
    expect(it.page.locator("#list li")).to_have_count(1)
    assert [messages[0]["content"] for messages in on_disk(server)] == ["only once"]
    assert on_disk(server)[0][0].get("versions") is None


def test_a_server_that_keeps_none_leaves_it_to_the_tab(tab: Tabs, llm: LLM) -> None:
    with serve(llm, host="0.0.0.0", api_key="key") as server:
        it = tab(server.url)
        assert it.run("() => document.activeElement.id") == "key"
        it.page.keyboard.type("wrong")
        it.press("Enter")
        expect(it.page.locator("#chat-alert")).to_contain_text("does not take that key")
        it.page.fill("#key", "key")
        it.press("Enter")
        expect(it.page.locator("#key-form")).to_be_hidden()
        expect(it.page.locator("#chat-alert")).to_be_hidden()
        expect(it.page.locator("#list-note")).to_contain_text("stays in this tab")
        it.ask("hello")
        it.page.fill("#question", "half a ques")
        it.page.reload()
        expect(it.page.locator("#question")).to_have_value("half a ques")  # before the key is there
        it.page.fill("#key", "key")
        it.press("Enter")
        it.turns(1)
        expect(it.page.locator(QUESTIONS)).to_have_text(["hello"])
        it.press("Alt+n")
        it.turns(0)
        it.click("hello")  # until the tab is closed it can be gone back to
        it.turns(1)
        expect(it.page.locator("#question")).to_have_value("half a ques")
        assert it.run("() => Object.keys(localStorage).filter((name) => name.includes('unsaved'))") == []


def test_what_is_typed_attached_and_set_survives_for_each_conversation(it: Tab) -> None:
    def check() -> None:
        expect(it.page.locator("#question")).to_have_value("half a ques")
        assert it.page.locator("#attached li").text_content().startswith("a.py")
        expect(it.page.get_by_label("to be changed")).not_to_be_checked()
        for name, value in (fields | {"draft-length": "3", "title": "Fruit"}).items():
            assert it.page.input_value(f"#{name}") == value, name
        expect(it.page.locator("#rejects")).not_to_be_checked()

    fields = {"temperature": "0.75", "max-tokens": "77", "system": "Be brief.", "seed": "7"}
    it.ask("first")
    it.page.get_by_text("More sampling").click()
    it.page.select_option("#draft-length", "3")
    for name, value in fields.items():
        it.page.fill(f"#{name}", value)
    it.page.uncheck("#rejects")
    it.page.set_input_files("#file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1\n"})
    it.page.get_by_label("to be changed").uncheck()
    it.page.fill("#question", "half a ques")
    it.page.fill("#title", "Fruit")  # and not Enter
    it.reload(1)
    check()
    it.saved("Fruit")
    it.press("Alt+n")
    it.turns(0)
    expect(it.page.locator("#question")).to_have_value("")
    expect(it.page.locator("#attached li")).to_have_count(0)
    it.page.fill("#question", "another half")
    it.page.fill("#temperature", "0.1")
    it.page.locator("#list button").click()
    it.turns(1)
    check()
    two = it.page.context.new_page()  # another tab, in which something else is typed
    two.goto(it.page.url)
    two.wait_for_selector(".turn")
    two.fill("#question", "in the other tab")
    it.reload(1)
    check()
    two.reload()
    two.wait_for_selector(".turn")
    assert two.input_value("#question") == "in the other tab"
    it.press("Alt+n")
    it.turns(0)
    expect(it.page.locator("#question")).to_have_value("another half")
    it.page.reload()
    it.until("() => document.getElementById('engine').textContent")
    expect(it.page.locator("#question")).to_have_value("another half")
    it.page.click("#race-tab")
    it.page.fill("#race-prompt", "my own")
    it.page.reload()
    it.until("() => document.getElementById('engine').textContent")
    expect(it.page.locator("#race-prompt")).to_have_value("my own")


def test_a_question_that_is_being_edited_survives(it: Tab) -> None:
    it.ask("first")
    it.ask("second")
    it.page.get_by_role("button", name="Edit the question").first.click()
    box = it.page.get_by_label("The question, to be edited")
    box.fill("first, bett")
    it.reload(2)
    assert box.input_value() == "first, bett"
    box.fill("word " * 3000)  # refused: it does not fit
    it.press("Enter")
    it.page.wait_for_selector("#chat-alert:not([hidden])")
    it.idle()
    assert box.input_value() == ("word " * 3000).strip()
    expect(it.page.locator(".turn")).to_have_count(2)
    it.press("Escape")
    it.reload(2)
    assert box.count() == 0


def test_an_answer_made_anew_leaves_the_one_before(it: Tab, server: Server) -> None:
    again = it.page.get_by_role("button", name="Regenerate the answer")
    for words in ("one", "two", "three"):
        it.page.route(ANSWERS, streamed(said(words), said("", "stop")))
        if words == "one":
            it.ask("say")
        else:
            again.click()
            it.until("(words) => document.querySelector('.turn').turn.text === words", words)
            it.idle()
            assert it.asked[-1]["messages"] == it.asked[0]["messages"]
    shows(it, "three", version="3/3")
    it.click("Undo")
    shows(it, "two", version="2/3")
    it.click("Earlier version")
    it.page.route(ANSWERS, streamed(said("four"), said("", "stop")))
    it.ask("and then?")  # follows the first answer
    it.reload(2)
    shows(it, "one", "four")
    first = it.page.locator(".turn").first
    assert first.locator("[role=status]").text_content() == "1/3"
    for _ in range(2):
        first.get_by_role("button", name="Later version").click()
    shows(it, "three")
    it.reload(1)
    shows(it, "three", version="3/3")
    for _ in range(2):
        it.click("Earlier version")
    shows(it, "one", "four")
    found = json.loads(server.ask("GET", f"{CONVERSATIONS}?q=three")[2])["data"]
    assert len(found) == 1  # a search finds what stands in another version


def test_a_stopped_answer_takes_nothing_away(tab: Tabs, endless: Server) -> None:
    it = tab(endless.url)
    begin(it, "go on")
    it.press("Escape")
    it.idle()
    first = answers(it)[0]
    again = it.page.get_by_role("button", name="Regenerate the answer")
    waiting: list[Any] = []
    it.page.route(ANSWERS, lambda route: waiting.append(route))
    again.click()
    it.page.wait_for_selector("#stop:enabled")
    it.press("Escape")  # before a word has come: the old answer is back
    it.idle()
    shows(it, first)
    expect(it.page.locator(".versions:not([hidden])")).to_have_count(0)
    it.page.unroute(ANSWERS)
    for breaks_off, n in ((False, 2), (True, 3)):
        again.click()
        it.until("() => document.querySelector('.turn').turn.text.length > 8")
        if not breaks_off:
            it.press("Escape")
            it.idle()
        it.reload(1)
        expect(it.page.locator(".versions [role=status]")).to_have_text(f"{n}/{n}")
        for _ in range(n - 1):
            it.click("Earlier version")
        shows(it, first)


def test_an_edited_question_leaves_all_that_followed(it: Tab) -> None:
    for question in ("one", "two", "three"):
        it.page.route(ANSWERS, streamed(said(f"said to {question}", "stop")))
        it.ask(question)
    before = answers(it)
    it.page.get_by_role("button", name="Edit the question").nth(1).click()
    box = it.page.get_by_label("The question, to be edited")
    assert box.input_value() == "two"
    it.press("Escape")
    assert box.count() == 0
    it.turns(3)
    it.press("Enter")  # the focus is back on the button
    box.fill("zwei")
    it.press("Enter")
    it.turns(2)
    it.idle()
    assert [message["content"] for message in it.asked[-1]["messages"]] == ["one", "said to one", "zwei"]
    expect(it.page.locator(QUESTIONS)).to_have_text(["one", "zwei"])
    it.press("ArrowUp")  # in the empty box for questions: edits the last
    assert box.input_value() == "zwei"
    it.press("Escape")
    it.click("Undo")
    expect(it.page.locator(QUESTIONS)).to_have_text(["one", "two", "three"])
    shows(it, *before)
    it.reload(3)
    it.page.locator(".turn").nth(1).get_by_role("button", name="Later version").click()
    expect(it.page.locator(QUESTIONS)).to_have_text(["one", "zwei"])


MERGED = """async ([mine, theirs]) => {
    const {merged, messagesOf, turnsOf} = await import("/page/versions.js");
    const all = (turns) => turns.flatMap(({question, answer, others}) =>
        [question.content + answer.content, ...others.flatMap(all)]);
    const [a, b] = [turnsOf(mine), turnsOf(theirs)];
    const both = merged(a, b);
    const again = merged(merged(both, b), a);
    const kept = turnsOf(messagesOf(both));
    return [both.map((turn) => turn.question.content), all(a), all(b), all(both), all(kept), all(again)];
}"""


def test_two_states_of_a_conversation_become_one_with_all_of_both(it: Tab) -> None:
    def of(*turns_: Any) -> list[dict[str, Any]]:
        messages = []
        for question, answer, *versions in turns_:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            if versions:
                messages[-2] |= {"versions": [of(*each) for each in versions], "version": 0}
        return messages

    cases = [
        (of(("a", "1")), of(("a", "1"), ("b", "2"))),
        (of(("a", "1"), ("c", "3")), of(("a", "1"), ("b", "2"))),
        (of(("a", "1")), of(("a", "one"))),
        (of(("x", "0")), of(("y", "0"))),
        (of(("a", "1", [("b", "2"), ("c", "3")])), of(("b", "2", [("a", "1"), ("d", "4")]), ("c", "3"), ("e", "5"))),
        (of(("a", "1", [("a", "2")], [("a", "3")])), of(("a", "3", [("a", "1"), ("z", "9")], [("a", "4")]))),
    ]
    for mine, theirs in cases:
        shown, ours, others, both, kept, again = it.run(MERGED, [mine, theirs])
        assert shown[: len(mine) // 2] == [message["content"] for message in mine[::2]]  # nothing of mine moves
        assert set(both) == set(ours) | set(others)
        assert len(both) == len(set(both))
        assert sorted(kept) == sorted(both) == sorted(again)


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_buttons_of_an_answer_are_in_sight_when_it_ends(tab: Tabs, server: Server, size: tuple[int, int]) -> None:
    it = tab(server.url, viewport={"width": size[0], "height": size[1]})
    words = "\n\n".join(f"Paragraph {n}." for n in range(40))
    it.page.route(ANSWERS, streamed(said(words), said("", "stop")))
    for finish in ("stop", "length", None):
        it.page.route(ANSWERS, streamed(said(words), *([said("", finish)] if finish else [])))
        it.ask("say it")
        inside = """() => {
            const talk = document.getElementById("talk").getBoundingClientRect();
            const row = document.querySelector(".turn:last-of-type .actions").getBoundingClientRect();
            return row.height > 0 && row.bottom <= talk.bottom && row.top >= talk.top;
        }"""
        it.until(inside)
    expect(it.page.locator("#chat-alert")).to_be_visible()  # that the connection broke off: it takes room of the talk


def test_a_number_out_of_range_is_not_sent(it: Tab) -> None:
    for name, value, rule in (
        ("temperature", "9", "Temperature must be a number from 0 to 2."),
        ("max-tokens", "1.5", "Longest answer must be a whole number from 1 to 100,000."),
        ("top-p", "-1", "Top p must be a number from 0 to 1."),
    ):
        it.run("([name, value]) => { const it = document.getElementById(name); it.value = value; }", [name, value])
        it.say("hello")
        expect(it.page.locator("#chat-alert")).to_have_text(rule)
        assert it.run("() => document.activeElement.id") == name
        expect(it.page.locator(f"#{name}")).to_be_visible()
        expect(it.page.locator("#question")).to_have_value("hello")
        it.page.click("#race-tab")
        it.page.click("#start")
        expect(it.page.locator("#race-alert")).to_have_text(rule)
        it.page.click("#chat-tab")
        it.page.fill("#question", "")
        it.page.fill(f"#{name}", "")
    it.page.fill("#temperature", "0.55")
    it.ask("hello")
    assert [body["temperature"] for body in it.asked] == [0.55]


def test_what_to_do_is_said_where_a_question_does_not_fit(it: Tab, server: Server) -> None:
    it.page.set_input_files("#file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1\n" * 1500})
    it.say("what is it?")
    expect(it.page.locator("#chat-alert")).to_contain_text("remove the file, or start the server with --ctx")
    n_tokens, n_ctx, wanted = map(int, re.findall(r"\d+", it.page.text_content("#chat-alert")))
    assert n_ctx == 2048 < n_tokens < wanted
    expect(it.page.locator("#question")).to_have_value("what is it?")
    expect(it.page.locator("#attached li")).to_have_count(1)
    wait_until(lambda: on_disk(server) == [], "nothing is kept of what was refused")
    it.saved()  # and the page knows it
    it.page.reload()
    expect(it.page.locator("#question")).to_have_value("what is it?")
    expect(it.page.locator("#attached li")).to_have_count(1)


def test_a_phone_has_buttons_for_fingers(tab: Tabs, server: Server) -> None:
    it = tab(server.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    welcome = it.page.inner_text("#welcome")
    assert ("drop a text" in welcome, "add a text, PDF or Word file" in welcome) == (False, True)
    toggle = it.page.get_by_role("button", name="Settings")
    for is_open in (False, True, False):  # they fold away
        assert it.page.is_visible("#draft-length") == is_open
        assert toggle.get_attribute("aria-expanded") == str(is_open).lower()
        toggle.click()
    toggle.click()
    it.page.set_input_files("#file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1\n"})
    it.page.route(ANSWERS, streamed(said("```python\nx = 1\n```"), said("", "length")))
    it.ask("hello")
    it.click("Regenerate the answer")
    it.until("() => document.querySelector('.versions:not([hidden])')")
    it.idle()
    small = """() => [...document.querySelectorAll("button")].filter((it) => it.offsetParent)
        .map((it) => [it.textContent, it.getBoundingClientRect()])
        .filter(([, {height, width}]) => height < 40 || width < 40)
        .map(([text, {height, width}]) => `${text}: ${width} x ${height}`)"""
    assert it.run(small) == []
    assert it.run("() => document.documentElement.scrollWidth - innerWidth") <= 0


# -- Markdown ----------------------------------------------------------------------------------------------------------

WORK = """async (units) => {
    // A unit of work: a character that a search may have had to look at, or that was copied.
    let work = 0;
    const counted = (prototype, name, cost) => {
        const real = prototype[name];
        prototype[name] = function (...args) {
            const result = real.apply(this, args);
            work += cost(this, args, result);
            return result;
        };
    };
    const {blocks} = await import("/page/markdown.js"), {ReadingText} = await import("/page/reading.js");
    counted(String.prototype, "indexOf", (it, [what, from = 0], at) => (at < 0 ? it.length : at) - from + 1);
    counted(String.prototype, "slice", (it, args, made) => made.length + 1);
    counted(RegExp.prototype, "exec", (it, [text]) => text.length + 1);
    const found = [];
    for (const unit of units) {
        const costs = [2000, 4000, 8000].map((n) => {
            const text = unit.repeat(n / unit.length) + "\\nx";
            work = 0;
            blocks(text, false);
            new ReadingText(document.createElement("div")).set(text, false);
            return work / text.length;
        });
        found.push([unit, costs]);
    }
    return found;
}"""


def test_markdown_takes_work_that_grows_with_its_length(it: Tab) -> None:
    """Work is counted, not timed: twice the text is about twice the work, whatever the text repeats."""
    units = ["\\(", "\\( ", "\n", "\\[\n", "$$\n", "a\n\\[\n", "- \\[\n", "> \\[\n", "\n\\[\nx", "[\\("]
    units += ["[", "](", "![", "\n\n|", "\n ", "| ", "$", "`", "*", "$a\n", "x\n\n"]
    for unit, costs in it.run(WORK, units):
        assert costs[2] < 1.5 * costs[0] + 20, (unit, costs)
