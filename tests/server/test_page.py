"""The page of ``localspec serve`` in a real Chromium, clicked and typed at, with a real (tiny) model behind it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from localspec import LLM, SamplingParams
from localspec.heads import FROM_STATES
from tests.conftest import TinyFiles
from tests.support.browsing import CONTRAST
from tests.support.serving import Server, serve
from tests.support.tabs import Tab, Tabs, expect

LOAD: dict[str, Any] = {"draft": ["ngram", "model"], "n_ctx": 1024}

QUESTION = "a"
"""The tiny model's answer to it has tokens of every kind."""


def test_what_shared_passes_were_for_is_said_after_an_answer(tab: Tabs, tiny: TinyFiles, module_home: Path) -> None:
    with LLM(tiny.quick.target, "ngram", backend="reference", n_ctx=1024, parallel=2) as llm, serve(llm) as running:
        it = tab(running.url)
        it.ask(QUESTION)
        it.until("() => document.getElementById('shared').textContent")
        passes = llm.parallel_info()["passes"]
        expect(it.page.locator("#shared")).to_contain_text("on average 1.0 answers at once")
        expect(it.page.locator("#shared-details")).to_be_hidden()
        it.page.get_by_text("Details").click()
        n, *shares = map(int, re.findall(r"(\d+)(?= passes| %)", it.page.inner_text("#shared-details")))
        assert n == passes["passes"]
        n_rows = sum(passes["rows"].values())
        # The page rounds a half upwards; Python's format would round it to the even number.
        assert shares == [int(100 * (n / n_rows) + 0.5) for n in passes["rows"].values()]


def test_an_answer_shows_every_token_in_the_style_of_its_origin(it: Tab, llm: LLM) -> None:
    expect(it.page.locator("#engine")).to_contain_text(llm.model_name)
    it.page.select_option("#draft-length", "4")
    said = it.ask(QUESTION)
    stream = llm.rounds([{"role": "user", "content": QUESTION}], SamplingParams(), draft_length=4)
    expected: list[tuple[str, str, str]] = []
    rounds = [round_.as_event() for round_ in stream]
    slots = {"model": "s0", "ngram": "s1"}
    for round_ in rounds:
        good = [token for token in round_["emitted"] if token["kind"] == "accepted"]
        wrong = [guess["text"] for guess in round_["draft"] if not guess["accepted"]]
        entries = [("SPAN", f"token accepted {slots[token['source']]}", token["text"]) for token in good]
        entries += [("DEL", "token rejected", text.replace("\n", "↵").replace("\t", "⇥")) for text in wrong]
        own = round_["emitted"][len(good) :]
        entries += [("SPAN", f"token {token['kind']}", token["text"]) for token in own]
        expected += [entry for entry in entries if entry[2]]
    rest = stream.reply.text[len("".join(t["text"] for round_ in rounds for t in round_["emitted"])) :]
    expected += [("SPAN", "token plain", rest)] if rest else []  # the answer may end in half of a character
    looks = {look for _, look, _ in expected}
    assert looks >= {"token accepted s0", "token rejected", "token recovered", "token bonus"}
    shown = it.run(
        "() => [...document.querySelector('.answer').children].map((t) => [t.tagName, t.className, t.textContent])"
    )
    assert [tuple(entry) for entry in shown] == expected
    assert said == stream.reply.text
    # The figures are the answer's.
    stats = stream.reply.stats
    right = f"{stats['num_accepted_tokens']} of {stats['num_draft_tokens']}"
    expect(it.page.locator("#acceptance")).to_have_text(right)
    expect(it.page.locator("#length")).to_have_text(f"{stats['mean_acceptance_length']:.2f}")
    assert float(it.page.text_content("#speed")) > 0
    faster = it.page.text_content("#faster")  # of its own times, not of those of the reply above
    figures = it.page.text_content(".turn-figures")
    assert f"{right} guesses right" in figures
    assert faster == "unknown" or (faster.startswith("×") and faster in figures)
    expect(it.page.locator("#strip > i")).to_have_count(min(72, len(rounds)))
    assert it.page.locator("#strip .wrong").count() > 0


def test_every_drafter_has_a_name_and_a_style_of_the_legend(it: Tab) -> None:
    kinds = ["model", "grammar", "corpus", "ngram", *FROM_STATES]
    script = """async (sources) => {
        const {slot, sourceName} = await import("/page/words.js");
        return sources.map((source) => [slot(source), sourceName(source)]);
    }"""
    looks = dict(zip(kinds, it.run(script, kinds), strict=True))
    assert it.run(script, [f"{kind}2" for kind in kinds]) == list(looks.values())  # the second of its kind
    assert len({name for _, name in looks.values()}) == len(kinds)
    assert [kind for kind, (_, name) in looks.items() if name == kind] == ["grammar", "head"]  # those are its names
    # Those that read the target's states look alike, and no others.
    assert len({slot for slot, _ in looks.values()}) == len(kinds) - len(FROM_STATES) + 1
    assert len({looks[kind][0] for kind in FROM_STATES}) == 1
    for slot, _ in looks.values():
        expect(it.page.locator(f"#legend .accepted.s{slot}")).to_have_count(1)


def test_a_conversation_and_its_settings_reach_the_server(it: Tab) -> None:
    first = it.ask("hello")
    it.page.locator("#speculation").click()
    expect(it.page.locator("#draft-length")).to_be_disabled()
    it.page.fill("#temperature", "0.5")
    it.page.fill("#max-tokens", "7")
    it.page.fill("#system", "Be brief.")
    it.page.get_by_text("More sampling").click()
    more = {"top-p": "0.9", "top-k": "20", "min-p": "0.05", "repeat-penalty": "1.1", "seed": "7"}
    for name, value in more.items():
        it.page.fill(f"#{name}", value)
    it.ask("go on")
    expect(it.page.locator("#acceptance")).to_have_text("none made")
    expect(it.page.locator("#faster")).to_have_text("plain")  # nothing is estimated where nothing was guessed
    assert it.page.text_content(".turn:last-of-type .turn-figures").startswith("plain, ")
    expect(it.page.locator(".turn:last-of-type .answer .token:not(.plain)")).to_have_count(0)
    it.page.locator("#speculation").click()
    it.page.select_option("#draft-length", "3")
    it.page.fill("#max-tokens", "")
    it.click("New chat")
    expect(it.page.locator(".turn")).to_have_count(0)
    it.page.fill("#question", "tell me")
    it.click("Send")
    it.until("() => document.querySelectorAll('.turn').length")
    it.idle()
    one, two, three = it.asked
    hello = {"role": "user", "content": "hello"}
    assert (one["messages"], one["localspec"], one["max_tokens"]) == ([hello], {"draft_length": "auto"}, 1024)
    assert "temperature" not in one
    system = {"role": "system", "content": "Be brief."}
    assert two["messages"] == [system, hello, {"role": "assistant", "content": first}, hello | {"content": "go on"}]
    assert (two["localspec"], two["temperature"], two["max_tokens"]) == ({"off": True}, 0.5, 7)
    assert {name: two[name.replace("-", "_")] for name in more} == {name: float(value) for name, value in more.items()}
    assert (three["messages"], three["localspec"]) == ([system, hello | {"content": "tell me"}], {"draft_length": 3})
    assert "max_tokens" not in three


def test_rejected_guesses_can_be_hidden_and_are_never_copied(it: Tab) -> None:
    it.page.select_option("#draft-length", "4")
    said = it.ask(QUESTION)
    rejected = it.page.locator(".answer .rejected")
    assert rejected.count() > 0
    assert not rejected.first.is_visible()  # the view to read in shows what was said, and nothing else
    it.page.get_by_label("Tokens", exact=True).check()
    assert rejected.first.is_visible()
    copied = (
        "() => { getSelection().selectAllChildren(document.querySelector('.answer')); return String(getSelection()); }"
    )
    assert it.run(copied).rstrip() == said.rstrip()
    it.page.get_by_label("Show rejected guesses").uncheck()
    assert not rejected.first.is_visible()
    expect(it.page.locator("#legend .rejected")).to_be_visible()
    it.page.get_by_label("Show rejected guesses").check()
    assert rejected.first.is_visible()
    # Which view is shown is kept.
    it.press("Alt+t")
    expect(it.page.locator(".reading")).to_be_visible()
    expect(it.page.locator(".answer")).to_be_hidden()
    it.press("Alt+t")
    it.reload(1)
    expect(it.page.locator("#token-view")).to_be_checked()


def test_stop_by_click_and_key(tab: Tabs, endless: Server) -> None:
    it = tab(endless.url)
    for stop in (lambda: it.click("Stop"), lambda: it.press("Escape")):
        it.say("go on")
        it.until("() => document.querySelectorAll('.turn:last-of-type .answer .token').length > 5")
        expect(it.page.locator("#send")).to_be_disabled()
        expect(it.page.locator("#talk")).to_have_attribute("aria-busy", "true")
        it.say("meanwhile")  # not sent, and not lost
        expect(it.page.locator("#question")).to_have_value("meanwhile")
        it.page.fill("#question", "")
        block = it.page.locator(".turn:last-of-type .reading > *").first.element_handle()
        shown = "(n) => document.querySelector('.turn:last-of-type .reading').textContent.length > n"
        it.until(shown, len(block.text_content()))
        assert block.evaluate("(it) => it.isConnected")  # what stands stays while more comes
        stop()
        it.idle()
        endless.wait_idle()
        assert it.page.text_content(".turn:last-of-type .turn-figures").endswith("stopped")
        expect(it.page.locator("#talk")).to_have_attribute("aria-busy", "false")
    # What was said until then is part of the conversation.
    assert [message["role"] for message in it.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert it.asked[1]["messages"][1]["content"]


def test_everything_works_from_the_keyboard(it: Tab) -> None:
    focused = "() => document.activeElement.id"
    assert it.run(focused) == "question"
    it.page.keyboard.type("one")
    it.press("Shift+Enter")
    it.page.keyboard.type("two")
    it.press("Enter")
    it.until("() => document.querySelectorAll('.turn').length")
    it.idle()
    assert it.asked[0]["messages"][0]["content"] == "one\ntwo"
    it.press("Enter")  # nothing was typed: nothing is asked
    assert len(it.asked) == 1
    seen = []
    order = ["question", "add-file", "send", "speculate", "draft-length", "temperature", "max-tokens"]
    for _ in order:
        seen.append(it.run(focused))
        it.press("Tab")
    assert seen == order
    for key, name in (("Alt+k", "search"), ("Alt+t", "search"), ("Alt+n", "question")):
        it.press(key)
        it.until("(name) => document.activeElement.id === name", name)
    expect(it.page.locator("#token-view")).to_be_checked()
    expect(it.page.locator(".turn")).to_have_count(0)
    it.page.focus("#speculate")
    it.press("Space")
    expect(it.page.locator("#speculate")).not_to_be_checked()
    it.page.focus("#chat-tab")
    it.press("ArrowRight")
    assert it.run(focused) == "race-tab"
    expect(it.page.locator("#race")).to_be_visible()
    expect(it.page.locator("#chat")).to_be_hidden()
    it.press("ArrowRight")
    expect(it.page.locator("#chat")).to_be_visible()
    outline = "() => getComputedStyle(document.activeElement).outlineStyle"
    assert it.run(outline) == "solid"


def race(it: Tab, runs: int = 4) -> None:
    n_before = len(it.asked)
    it.page.click("#start")
    while len(it.asked) < n_before + runs:  # a race may be over before anybody sees the button disabled
        it.page.wait_for_timeout(20)
    it.page.wait_for_selector("#start:enabled")


def test_the_race_is_one_after_the_other_and_ends_with_a_verdict(it: Tab, llm: LLM) -> None:
    it.page.select_option("#draft-length", "4")
    it.page.click("#race-tab")
    it.page.fill("#race-prompt", QUESTION)
    it.run(
        """() => { window.order = []; const real = window.fetch; window.fetch = async (...call) => {
            const response = await real(...call); if (!call[0].endsWith("/completions")) return response;
            order.push("asked"); response.clone().text().then(() => order.push("done")); return response; }; }"""
    )
    race(it)
    race(it)
    assert it.run("() => order") == ["asked", "done"] * 8
    whose = [body["localspec"] for body in it.asked]
    turn = [{"off": True}, {"draft_length": 4}]
    # Each race is run twice, in both orders, and the next one begins with the other side.
    assert whose == [*turn, *reversed(turn), *reversed(turn), *turn]
    assert len({body["seed"] for body in it.asked}) == 2  # the same dice for both sides of a race
    reply = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams())
    racers = {name: it.page.locator(f"#{name}-racer") for name in ("plain", "speculative")}
    shown = "(box) => [...box.querySelectorAll('.token:not(.rejected)')].map((t) => t.textContent).join('')"
    places = {"plain": "ran first, second turn", "speculative": "ran second, second turn"}
    for name, racer in racers.items():
        assert racer.locator(".text").evaluate(shown) == reply.text
        assert racer.locator(".clock").text_content().endswith(" ✓")
        assert f"{len(reply.token_ids)} tokens" in racer.locator(".racer-figures").text_content()
        assert racer.locator(".runner").evaluate("(runner) => runner.style.width") == "100%"
        assert racer.locator(".place").text_content() == places[name]
    assert racers["plain"].locator(".rejected").count() == 0
    assert racers["speculative"].locator(".rejected").count() > 0
    verdict = it.page.text_content("#verdict")
    assert f"The answers are the same: all {len(reply.token_ids)} tokens are equal." in verdict
    assert verdict.count("×") in (2, 3)  # both turns are shown, and where they agree what they come to
    assert re.search(r"by turn,? .*×\d+\.\d\d and ×\d+\.\d\d", verdict)
    # Watching again asks for nothing, and ends as it ended.
    it.click("Watch again")
    it.page.wait_for_selector("#start:enabled")
    assert len(it.asked) == 8
    assert racers["speculative"].locator(".text").evaluate(shown) == reply.text


def test_a_race_without_guesses_is_no_comparison(tab: Tabs, tiny: TinyFiles, module_home: Path) -> None:
    with LLM(tiny.quick.target, None, backend="reference", n_ctx=1024) as llm, serve(llm) as server:
        it = tab(server.url)
        expect(it.page.locator("#engine")).to_contain_text("no guesses")
        it.page.click("#race-tab")
        race(it, runs=2)
        verdict = it.page.text_content("#verdict")
        assert verdict.startswith("Nothing was guessed, so both did the same work; the difference is noise. ")
        assert "×" not in verdict
        assert len(it.asked) == 2
        expect(it.page.locator(".racer-figures", has_text="plain, ")).to_have_count(2)


def test_a_race_says_that_others_used_the_cpu(it: Tab, server: Server) -> None:
    """The server counts; here its counters are replaced, so that no machine's load decides."""
    used = iter(((10.0, 0.0, 0.0), (20.0, 9.0, 1.0)))  # of two CPUs for 10 s, 1 s by the server and 8 by others

    def counters(route: Any) -> None:
        stats = json.loads(server.ask("GET", "/v1/localspec/stats")[2])
        assert set(stats["cpu"]) == {"at", "busy", "own", "n_cpus"}
        stats["cpu"] = dict(zip(("at", "busy", "own"), next(used), strict=True)) | {"n_cpus": 2}
        route.fulfill(json=stats)

    it.page.route("**/v1/localspec/stats", counters)
    it.page.click("#race-tab")
    it.page.fill("#race-prompt", QUESTION)
    race(it, runs=2)
    expect(it.page.locator("#verdict")).to_contain_text("used 40 % of the CPU meanwhile")


def test_a_race_can_be_stopped(tab: Tabs, endless: Server) -> None:
    it = tab(endless.url)
    it.page.click("#race-tab")
    it.page.click("#start")
    it.until("() => document.querySelectorAll('#plain-racer .token').length > 5")
    it.press("Escape")
    it.page.wait_for_selector("#start:enabled")
    endless.wait_idle()
    expect(it.page.locator("#verdict")).to_have_text("The race was stopped.")
    expect(it.page.locator("#again")).to_be_disabled()
    assert len(it.asked) == 1


def test_it_can_be_read_in_both_schemes_and_at_every_width(it: Tab) -> None:
    it.page.select_option("#draft-length", "4")
    it.ask(QUESTION)
    it.page.fill("#question", "x" * 1500)  # makes an alert appear
    it.run("() => document.querySelectorAll('.alert').forEach((alert) => { alert.hidden = false; alert.append('!'); })")
    it.run("() => { document.getElementById('key-form').hidden = false; }")
    pictures = []
    for scheme in ("light", "dark"):
        it.page.emulate_media(color_scheme=scheme)
        for view in ("chat", "race"):
            it.page.click(f"#{view}-tab")
            for width, height in ((1440, 900), (1000, 700), (700, 800), (360, 640)):
                it.page.set_viewport_size({"width": width, "height": height})
                case = (scheme, view, width)
                assert it.run(SPILLING) == [], case
                assert it.run("() => document.documentElement.scrollWidth - innerWidth") <= 0, case
                for text, ratio in it.run(CONTRAST):
                    if "disabled" not in text:
                        assert ratio >= 4.5, (case, text, ratio)
        pictures.append(it.page.screenshot())
    assert pictures[0] != pictures[1]


SPILLING = """() => [...document.querySelectorAll(".racer > *, main > section > *")].filter((it) => {
    const inner = it.getBoundingClientRect(), outer = it.parentElement.getBoundingClientRect();
    return inner.height && getComputedStyle(it.parentElement).overflowY === "visible"
        && (inner.bottom > outer.bottom + 1 || inner.right > outer.right + 1);
}).map((it) => it.className || it.id)"""
"""What lies outside of what it is in, where that does not scroll."""
