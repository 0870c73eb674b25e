"""The page of ``localspec replay`` in a real Chromium: what it shows, how it is driven, and what it refuses to do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.commands.chat.chat import AnswerRecord
from localspec.commands.replay.command import read, replay_page
from tests.commands.replay.test_replay import EVENTS, a_round, emitted, events, guess
from tests.support import tabs
from tests.support.browsing import CONTRAST, PATIENCE, WIDE
from tests.support.saved_chats import write_chat
from tests.support.tabs import expect

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<!--<script>",
    "]]>--></textarea></style>",
    "$scripts ${style} $policy",
    "javascript:window.hacked=3",
    '" onmouseover="window.hacked=4',
    "&lt;b&gt; & \\u003c \u2028",
)


class Tab(tabs.Tab):
    """The page of a recording in a tab; ``addresses`` are those asked for, the page's own file apart."""

    def open(self, path: Path) -> Tab:
        self.page.goto(path.as_uri())
        self.addresses = [url for url in self.addresses if url != path.as_uri()]
        return self

    @property
    def position(self) -> tuple[int, str]:
        """The round shown, from 0, and its phase."""
        title = self.page.text_content("#round-title")
        return int(title.split()[1]) - 1, self.page.get_attribute("#round", "data-phase")

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def settled(self) -> str:
        """The answer as far as it has got."""
        return self.run(
            "() => [...document.querySelectorAll('#answer .round:not(.future) [data-token]:not(.unborn, .cut)')]"
            ".map((token) => token.textContent).join('')"
        )


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(PATIENCE)
    yield context
    context.close()


@pytest.fixture
def tab(window: Any) -> Iterator[Callable[[Path], Tab]]:
    """Opens tabs; at the end, none of them has asked for anything or complained."""
    tabs: list[Tab] = []

    def new(path: Path) -> Tab:
        tabs.append(Tab(window.new_page()))
        return tabs[-1].open(path)

    yield new
    for each in tabs:
        each.page.close()
        assert [url for url in each.addresses if not url.startswith("data:")] == []
        assert each.complaints == []


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "real.html", EVENTS.read_bytes())


@pytest.fixture
def it(tab: Callable[[Path], Tab], real: Path) -> Tab:
    """The page of the real recording."""
    return tab(real)


def write(path: Path, data: bytes) -> Path:
    path.write_text(replay_page(read(data), "run.jsonl"), encoding="utf-8")
    return path


*REAL, REPLY = map(json.loads, EVENTS.read_bytes().splitlines())


def one_line(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "⇥")


def is_current(tab: Tab, index: int) -> bool:
    return tab.position == (index, "other")


def test_tokens_their_fates_and_copied_text_are_the_files(it: Tab) -> None:
    shown = it.run(
        """() => [...document.querySelectorAll("#answer .line > [data-round] > *")].map((it) => ({
            round: Number(it.parentElement.dataset.round), token: it.dataset.token, guess: it.dataset.guess,
            text: it.textContent, style: it.className, tag: it.tagName}))"""
    )
    for index, round_ in enumerate(REAL):
        mine = [each for each in shown if each["round"] == index]
        for i, token in enumerate(round_["emitted"]):
            pieces = [each for each in mine if each["token"] == str(i)]
            assert "".join(each["text"] for each in pieces) == token["text"], (index, i)
            slot = {"model": " s0", "ngram": " s1", "target": ""}[token["source"]]
            assert {each["style"] for each in pieces} == {f"token {token['kind']}{slot}"}
        rejected = [(each["guess"], each["text"], each["tag"]) for each in mine if each["guess"] is not None]
        guesses = enumerate(round_["draft"])
        assert rejected == [(str(i), one_line(g["text"]), "DEL") for i, g in guesses if not g["accepted"]]
        # In the order in which it happened: accepted, rejected, the target's own.
        styles = [each["style"] for each in mine if each["style"] != "ending"]
        rank = ["accepted" in style or 1 + ("rejected" not in style) for style in styles]
        assert rank == sorted(rank)
    kinds = {each["style"] for each in shown}
    assert kinds >= {"token accepted s0", "token accepted s1", "token recovered", "token bonus", "token rejected"}
    copied = it.run("() => { getSelection().selectAllChildren($('answer')); return getSelection().toString(); }")
    assert copied.rstrip() == REPLY["text"].rstrip()


def test_branches_are_marked_and_say_what_they_come_after(tab: Callable[[Path], Tab], tmp_path: Path) -> None:
    tree = (("a", True, -1), ("b", False, 0), ("x", False, 1), ("c", True, 0), ("d", False, -1))
    draft = [guess(text, accepted) | {"parent": parent} for text, accepted, parent in tree]
    said = [emitted("a", "accepted", "model"), emitted("c", "accepted", "model"), emitted("e", "bonus")]
    it = tab(write(tmp_path / "tree.html", events(a_round(*said, draft=draft))))
    it.press("Home", "ArrowRight")
    assert it.texts("#answer .rejected") == ["b", "x", "⑂ d"]
    assert it.texts(".card .word") == ["a", "b", "x", "⑂ c", "⑂ d"]
    assert it.texts(".card .fate") == ["✓ accepted", "✗ rejected", "✗ dropped", "✓ accepted", "✗ rejected"]
    labels = [card.get_attribute("aria-label") for card in it.page.locator(".card").all()]
    assert labels[3].endswith(", a branch after guess 1")
    assert labels[4].endswith(", a branch after the last token")


def test_a_round_shows_all_the_file_says_of_it(it: Tab) -> None:
    it.press("Home")
    for index, round_ in enumerate(REAL):
        it.press("ArrowRight")
        assert is_current(it, index)
        words, fates = it.texts(".card .word"), []
        assert [word.replace("␣", " ") for word in words] == [one_line(drafted["text"]) for drafted in round_["draft"]]
        for drafted in round_["draft"]:
            behind = any(not fate.startswith("✓") for fate in fates)
            fates.append("✓ accepted" if drafted["accepted"] else "✗ dropped" if behind else "✗ rejected")
        assert it.texts(".card .fate") == fates
        drawn = it.run(
            """() => [...document.querySelectorAll(".card")].map((card) => [card.getAttribute("aria-label"), ...[
                card.querySelector(".share").textContent, card.querySelector(".fill").style.width,
                card.querySelector(".tick").style.left].map(parseFloat)])"""
        )
        for drafted, fate, (label, share, bar, tick) in zip(round_["draft"], fates, drawn, strict=True):
            assert share == pytest.approx(100 * drafted["prob"], abs=0.5)
            assert [bar, tick] == pytest.approx([100 * drafted["prob"], 100 * drafted["expected"]], abs=0.01)
            assert fate[2:] in label
            assert {"model": "draft model", "ngram": "n-gram"}[drafted["source"]] in label
        assert it.texts(".chip .kind") == [token["kind"] for token in round_["emitted"]]
        words = [one_line(token["text"]) or "end of text" for token in round_["emitted"]]
        assert [word.replace("␣", " ") for word in it.texts(".chip .word")] == words
        (pass_,), (times,), reasons = it.texts(".pass"), it.texts(".times"), it.texts(".reason")
        assert f"over {len(round_['draft']) + 1} token" in pass_
        assert f"; {round_['ms_verify_expected']:.0f} ms expected" in pass_
        assert f"(expected {round_['tokens_expected']:.1f})" in times
        for name, ms in zip(("ms_draft", "ms_verify", "ms_other"), it.texts(".step .ms"), strict=True):
            assert float(ms.split()[0]) == pytest.approx(round_[name], abs=0.5 if round_[name] >= 10 else 0.051)
        assert reasons == [f"Why {round_['reason']}"]


def test_the_header_has_the_figures(it: Tab) -> None:
    stats = REPLY["stats"]
    for part in (REPLY["model"], " + ".join(REPLY["draft"]), REPLY["backend"]):
        expect(it.page.locator("#engine")).to_contain_text(part)
    figures = it.page.text_content("#figures")
    assert f"{stats['tokens_per_second']:.1f} tok/s" in figures
    assert f"{stats['mean_acceptance_length']:.2f}" in figures
    assert f"{stats['acceptance_rate']:.0%}".replace("%", " %") in figures
    for part in ("prompt", "draft", "verify", "other"):
        assert f"{part} {stats[f'seconds_{part}']:.2f} s" in figures
    legend = it.texts("#legend li")
    tokens = [token for round_ in REAL for token in round_["emitted"]]
    n_ngram = sum(token["kind"] == "accepted" and token["source"] == "ngram" for token in tokens)
    n_bonus = sum(token["kind"] == "bonus" for token in tokens)
    n_rejected = sum(not g["accepted"] for round_ in REAL for g in round_["draft"])
    assert {f"+ bonus {n_bonus}", f"✓ accepted from n-gram {n_ngram}", f"✗ rejected {n_rejected}"} <= set(legend)


def test_every_turn_of_a_chat_can_be_picked(tab: Callable[[Path], Tab], tmp_path: Path) -> None:
    def turn(name: str) -> tuple[str, str, AnswerRecord]:
        rounds = [a_round(emitted(f"answer {name}"), type="round")]
        return f"question {name}", f"answer {name}", AnswerRecord("stop", rounds, {"seconds_prompt": 7.0})

    turns = [("early", "said", AnswerRecord("cancelled")), turn("one"), turn("two")]
    path = write_chat(tmp_path / "a.chat", *turns, system="be brief", draft=["ngram"], backend="engine")
    it = tab(write(tmp_path / "chat.html", path.read_bytes()))
    assert it.settled() == "answer one"  # the first with rounds
    expect(it.page.locator("#turn")).to_have_value("1")
    expect(it.page.locator("#prompt")).to_contain_text("question one")
    expect(it.page.locator("#prompt")).to_contain_text("be brief")
    assert it.texts("#engine dd") == ["m", "ngram", "engine"]
    expect(it.page.locator("#figures")).to_contain_text("prompt 7.00 s")
    it.page.get_by_label("Turn").select_option("2")
    assert it.settled() == "answer two"
    it.page.get_by_label("Turn").select_option("0")
    expect(it.page.locator("#answer")).to_have_text("saidstopped")
    expect(it.page.locator("footer")).to_be_hidden()
    it.page.get_by_label("Turn").select_option("1")
    assert it.settled() == "answer one"
    expect(it.page.locator("footer")).to_be_visible()


def test_the_end_says_whether_it_is_one_and_what_lies_behind_it_is_marked(
    tab: Callable[[Path], Tab], tmp_path: Path, it: Tab
) -> None:
    data = EVENTS.read_bytes()[:3000]
    part, n_whole = tab(write(tmp_path / "part.html", data)).page, data.count(b"\n")
    expect(part.locator("#damage")).to_be_visible()
    expect(part.locator("#damage")).to_contain_text(f"in the middle of line {n_whole + 1}")
    expect(part.locator("#round-title")).to_have_text(f"Round {n_whole} of {n_whole}")
    expect(part.locator(".ending")).to_have_text("cut short")
    expect(it.page.locator("#damage")).to_be_hidden()
    expect(it.page.locator(".ending")).to_have_text("end")
    rounds = [
        a_round(emitted("one S", "accepted", "model"), draft=[guess("one S", True), guess("more", True)]),
        a_round(emitted("TOP"), emitted("")),
    ]
    cut = tab(write(tmp_path / "cut.html", events(*rounds, text="one ")))
    assert (cut.settled(), cut.texts("#answer .cut")) == ("one ", ["S", "TOP"])
    assert cut.run("() => getComputedStyle(document.querySelector('.cut')).textDecorationLine") == "line-through"
    cut.press("Home", "ArrowRight")
    assert cut.texts(".fate") == ["✓ accepted", "✓ accepted, behind the end"]


def test_keys_walk_through_the_rounds(it: Tab) -> None:
    texts = ["".join(token["text"] for token in round_["emitted"]) for round_ in REAL]
    until = list(itertools.accumulate(texts))
    assert is_current(it, len(REAL) - 1)
    assert it.settled() == REPLY["text"]
    it.press("Home")
    assert it.settled() == ""
    it.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert is_current(it, 2)
    assert it.settled() == until[2]
    it.press("ArrowLeft")
    assert it.settled() == until[1]
    expect(it.page.locator("#said")).to_contain_text(f"Round 2 of {len(REAL)}")
    it.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert it.settled() == ""
    it.press("End", "ArrowRight")
    assert is_current(it, len(REAL) - 1)
    for name, index in (("To the start", None), ("One round on", 0), ("One round on", 1), ("One round back", 0)):
        it.page.get_by_role("button", name=name).click()  # buttons do what the keys do
        assert it.settled() == "" if index is None else is_current(it, index)
    it.page.get_by_role("button", name="To the end").click()
    it.page.focus(".chip >> nth=0")
    it.press("ArrowLeft", "ArrowLeft")
    assert it.run("() => document.activeElement.matches('.chip, .card')")  # the keyboard's place outlives its round
    it.press("End")
    it.page.focus("#scrubber")
    it.press("PageUp", "PageDown", "ArrowUp")
    assert is_current(it, len(REAL) - 10)
    it.page.focus("[name=speed]:checked")
    it.press("ArrowRight")  # here it chooses
    assert is_current(it, len(REAL) - 10)
    expect(it.page.get_by_label("2×")).to_be_checked()


def test_the_scrubber_reaches_every_moment(it: Tab) -> None:
    scrub = "(ms) => { $('scrubber').value = ms; $('scrubber').dispatchEvent(new Event('input')); }"
    at = 0.0
    for index, round_ in enumerate(REAL):
        for phase in ("draft", "verify", "other"):
            if index % 4 == 0:
                it.run(scrub, at + round_[f"ms_{phase}"] / 2)
                assert it.position == (index, phase)
            at += round_[f"ms_{phase}"]
    before = REAL[4]["ms_draft"] + REAL[4]["ms_verify"] / 2
    it.run(scrub, sum(r[f"ms_{phase}"] for r in REAL[:4] for phase in ("draft", "verify", "other")) + before)
    # The guesses stand there unmarked: nothing of the verdict is given away.
    assert it.settled() == "".join(
        token["text"] for r in REAL[:5] for token in r["emitted"] if r is not REAL[4] or token["kind"] == "accepted"
    )
    assert it.page.locator("#answer .pending").count() >= len(REAL[4]["draft"])
    expect(it.page.locator(".step-other .chip >> nth=0")).to_be_hidden()
    assert it.page.get_attribute("#scrubber", "aria-valuetext").startswith(f"Round 5 of {len(REAL)}, ")


def test_clicks_on_the_strip_and_on_the_answer_jump(it: Tab) -> None:
    ends = list(itertools.accumulate(r["ms_draft"] + r["ms_verify"] + r["ms_other"] for r in REAL))
    box = it.page.locator("#strip").bounding_box()
    for index in (3, 0, len(REAL) - 1):
        middle = ends[index] - (ends[index] - (ends[index - 1] if index else 0)) / 2
        it.page.mouse.click(box["x"] + box["width"] * middle / ends[-1], box["y"] + box["height"] / 2)
        assert is_current(it, index)
    it.page.locator("#answer [data-round='2'] .token").first.click()
    assert is_current(it, 2)


def test_playing_goes_from_draft_to_verify_to_accept_and_stops_at_the_end(it: Tab) -> None:
    it.run(
        """() => { window.seen = []; new MutationObserver(() => {
            const now = `${roundView.index} ${$("round").dataset.phase}`;
            if (seen[seen.length - 1] !== now) seen.push(now);
        }).observe($("round"), {attributes: true, subtree: true, childList: true}); }"""
    )
    drafted = next(i for i, round_ in enumerate(REAL) if round_["draft"])
    it.page.locator("label", has_text="slow").click()
    it.run("(index) => player.go(player.timeline.done(index - 1))", drafted)
    it.run("() => { seen.length = 0; document.activeElement.blur(); }")
    it.press("Space")
    expect(it.page.get_by_role("button", name="Pause")).to_be_visible()
    it.page.wait_for_function("(index) => roundView.index > index", arg=drafted)
    seen = [entry for entry in it.run("() => seen") if entry.startswith(f"{drafted} ")]
    assert seen == [f"{drafted} {phase}" for phase in ("draft", "verify", "other")]
    it.press("Space")
    expect(it.page.get_by_role("button", name="Play")).to_be_visible()
    assert it.run(
        """() => new Promise((then) => { const at = player.position;
            requestAnimationFrame(() => requestAnimationFrame(() => then(at === player.position))); })"""
    )
    it.page.locator("label", has_text="5×").click()
    it.run("(index) => player.go(player.timeline.done(index))", len(REAL) - 5)
    it.press("Space")
    it.page.wait_for_function("() => !player.playing")
    assert is_current(it, len(REAL) - 1)
    assert it.settled() == REPLY["text"]


def test_time_passes_in_proportion(it: Tab) -> None:
    # The clock's arithmetic, apart from the clock: where watching for some milliseconds leads.
    total = sum(r["ms_draft"] + r["ms_verify"] + r["ms_other"] for r in REAL)
    for speed in (1, 2, 5):
        there = it.run(
            """([ms, speed]) => {
                const line = player.timeline;
                let at = line.start;
                return Array.from({length: 99}, () => { at = line.later(at, ms, speed); return line.time(at); }); }""",
            [total / 77, speed],
        )
        assert there == pytest.approx([min(total, total / 77 * speed * (i + 1)) for i in range(99)])


def test_details_by_pointer_and_by_keyboard(it: Tab) -> None:
    tip = it.page.locator("#tip")
    index, round_ = next((i, r) for i, r in enumerate(REAL) if r["emitted"][0]["kind"] == "accepted")
    token = it.page.locator(f"#answer [data-round='{index}'] [data-token='0']").first
    token.hover()
    said, times = tip.text_content(), f"verify {round_['ms_verify']:.0f} ms"
    for part in ("a guess that the target accepted", f"token id{round_['draft'][0]['id']}", f"of {len(REAL)}", times):
        assert part in said
    it.page.mouse.move(2, 2)
    assert not tip.is_visible()
    token.click()
    it.page.mouse.move(2, 2)
    it.page.focus(".card >> nth=0")
    assert "calibrated" in tip.text_content()
    assert it.page.get_attribute(".card >> nth=0", "aria-describedby") == "tip"
    box = tip.bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= WIDE["width"]
    assert 0 <= box["y"] <= box["y"] + box["height"] <= WIDE["height"]
    it.press("Escape")
    assert not tip.is_visible()
    strip = it.page.locator("#strip").bounding_box()
    it.page.mouse.move(strip["x"] + 1, strip["y"] + 10)
    assert tip.text_content().startswith(f"Round 1 of {len(REAL)}")


def test_the_keyboard_reaches_all_and_shows_where_it_is(it: Tab) -> None:
    it.run("(index) => player.go(player.timeline.done(index))", next(i for i, r in enumerate(REAL) if r["draft"]))
    seen = set()
    for _ in range(60):
        it.press("Tab")
        where = it.run(
            """() => { const on = document.activeElement; if (on === document.body) return null;
                const shown = on.matches("[name=speed]") ? on.nextElementSibling : on, style = getComputedStyle(shown);
                return [on.id || on.className.split(" ")[0] || on.name,
                        style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2]; }"""
        )
        if where is None:
            break
        assert where[1], f"no outline on {where[0]}"
        seen.add(where[0])
    expect(it.page.get_by_role("slider", name="Time")).to_have_count(1)
    expect(it.page.get_by_role("checkbox", name="rejected guesses")).to_have_count(1)
    unnamed = it.page.get_by_role("button", name="")
    assert all(unnamed.nth(i).get_attribute("aria-label") for i in range(unnamed.count()))
    everything = {"rejects", "answer", "card", "chip", "first", "back", "play", "forward", "last", "scrubber", "speed"}
    assert seen >= everything


def test_every_style_can_be_read_and_colour_is_never_the_only_sign(tab: Callable[[Path], Tab], tmp_path: Path) -> None:
    # Every style there is, in every state, over what is really behind it; WCAG 2.1 asks for 4.5 (AA).
    drafters = ("model", "ngram", "third", "fourth")
    rounds = [a_round(emitted("x", "accepted", name), draft=[guess("x", True, name)]) for name in drafters]
    rounds += [
        a_round(emitted("own", "recovered"), draft=[guess("no", False), guess("nor this", False)], reason="why"),
        a_round(emitted("b", "bonus")),
        a_round(emitted("p STOP")),
    ]
    path = write(tmp_path / "styles.html", events(*rounds, text="xxxxownbp ") + EVENTS.read_bytes()[:900])
    it, pictures = tab(path), []
    looks = it.run(
        """() => [...document.querySelectorAll("#answer .token:not(.cut)")].map((token) => {
            const s = getComputedStyle(token);
            return [s.textDecorationLine, s.textDecorationStyle, s.boxShadow === "none"].join(" "); })"""
    )
    assert (len(looks), len(set(looks))) == (9, 8)  # two guesses were rejected
    marks = [entry.split()[0] for entry in it.texts("#legend li")]
    assert set(marks) == {"✓", "→", "+", "·", "✗"}
    for scheme in ("light", "dark"):
        it.page.emulate_media(color_scheme=scheme)
        for state in (
            "player.go(player.timeline.end)",
            "player.go({round: 4, phase: VERIFY, fraction: 0.5})",
            "player.go(player.timeline.done(4)); document.querySelector('.card').focus()",
        ):
            it.run(state)
            for text, ratio in it.run(CONTRAST):
                assert ratio >= 4.5, (scheme, state, text, ratio)
        pictures.append(it.page.screenshot())
    assert pictures[0] != pictures[1]


def test_nothing_is_cut_off_and_reduced_motion_is_respected(it: Tab) -> None:
    it.run("() => player.go({round: 0, phase: VERIFY, fraction: 0.5})")
    for motion, expected in (("no-preference", "checking"), ("reduce", "none")):
        it.page.emulate_media(reduced_motion=motion)
        assert it.run("() => getComputedStyle(document.querySelector('#answer .pending')).animationName") == expected
    for width, height in ((400, 800), (900, 640), (1900, 1000)):
        it.page.set_viewport_size({"width": width, "height": height})
        assert it.run("() => document.documentElement.scrollWidth") <= width
        for name in ("first", "play", "last", "scrubber", "strip"):
            box = it.page.locator(f"#{name}").bounding_box()
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width
            assert box["y"] + box["height"] <= height


def test_hostile_text_stays_text(tab: Callable[[Path], Tab], tmp_path: Path) -> None:
    rounds = [
        a_round(emitted(text, "recovered", text), draft=[guess(text, False, text)], reason=text, type="round")
        for text in HOSTILE
    ]
    turn = "".join(HOSTILE), "".join(HOSTILE), AnswerRecord("stop", rounds)
    engine: dict[str, Any] = {"draft": list(HOSTILE), "backend": HOSTILE[1]}
    chat = write_chat(tmp_path / "a.chat", turn, turn, system=HOSTILE[1], model=HOSTILE[0], **engine)
    path = tmp_path / "hostile.html"
    path.write_text(replay_page(read(chat.read_bytes()), HOSTILE[0]), encoding="utf-8")
    it = tab(path)
    shown = [text.replace("\u2028", "\n") for text in HOSTILE]
    assert it.settled() == "".join(shown)
    for index, text in enumerate(shown):
        it.run("(index) => player.go(player.timeline.done(index))", index)
        expect(it.page.locator(".card .word")).to_have_text(one_line(text))
        expect(it.page.locator(".reason")).to_have_text(f"Why {text}")
        it.page.hover(".card")
        expect(it.page.locator("#tip")).to_contain_text(one_line(text))
    expect(it.page.locator("#file")).to_have_text(HOSTILE[0])
    assert it.run("() => window.hacked") is None
    parts = it.run("() => ['img', 'script', 'style', 'iframe', 'link'].map((t) => document.querySelectorAll(t).length)")
    assert parts == [0, 10, 1, 0, 1]  # the page's own
    assert it.run("() => [...document.querySelectorAll('*')].filter((e) => e.onmouseover || e.onerror).length") == 0


def test_the_policy_stops_what_the_code_would_let_through(browser: Any, real: Path) -> None:
    # Not under the `tab` fixture: the browser reports each refusal on the console.
    page = browser.new_page()
    page.goto(real.as_uri())
    tried = page.evaluate(
        """async () => {
            const refusals = [], told = (then) => document.addEventListener("securitypolicyviolation", (event) =>
                refusals.push(event.effectiveDirective) === 3 && then(refusals.sort()));
            const network = new Promise(told), at = "127.0.0.1:9/x";
            fetch(`http://${at}`).catch(() => {});
            new Image().src = `http://${at}`;
            document.body.append(Object.assign(document.createElement("iframe"), {src: `http://${at}`}));
            const blocked = await network;
            try { document.body.innerHTML = "<b>x</b>" } catch (error) { return [...blocked, error.name] } }"""
    )
    assert tried == ["connect-src", "frame-src", "img-src", "TypeError"]
    page.close()


def test_the_round_that_is_shown_is_in_view_among_thousands(tab: Callable[[Path], Tab], tmp_path: Path) -> None:
    rounds = [a_round(emitted("one\n", "accepted", "model"), draft=[guess("one\n", True), guess("no", False)])] * 4_000
    it = tab(write(tmp_path / "long.html", events(*rounds, text="one\n" * 4_000)))
    it.run("() => player.seek(player.timeline.total / 2)")
    assert it.position[0] == pytest.approx(2_000, abs=1)
    assert it.run(
        """() => { const [round, answer] = [document.querySelector(".now"), $("answer")]
            .map((each) => each.getBoundingClientRect());
            return round.top >= answer.top && round.bottom <= answer.bottom; }"""
    )
