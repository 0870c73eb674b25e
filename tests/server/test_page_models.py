"""The page of a server of several models: the list of them, in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import SHAPE
from tests.support import ggufs
from tests.support.serving import Server, opening, serve_several
from tests.support.standin import Server as Hub
from tests.support.tabs import Tab, expect


@pytest.fixture
def server(disk: Path, hub: Hub) -> Iterator[Server]:
    """Models of which ``wide`` needs more than all may take."""
    ggufs.write_llama(disk / "wide.gguf", SHAPE, ggufs.bpe_vocab(4000), seed=3)
    with serve_several(opening(), memory=3_000_000, prefix_cache=0) as running:
        yield running


def row(it: Tab, name: str) -> str:
    found: str = it.page.inner_text(f"#model-list li:has(button.name:text-is('{name}'))")
    return found


def test_models_are_chosen_loaded_unloaded_and_fetched(it: Tab, hub: Hub) -> None:
    assert it.page.inner_text("#models-toggle") == "blue"
    assert it.page.inner_text("#engine") == "loaded with the next question"
    it.page.click("#models-toggle")
    expect(it.page.locator("#model-list li")).to_have_count(4)
    assert [word in row(it, "blue") for word in ("fits", "loaded", "too big")] == [True, False, False]
    assert "too big" in row(it, "wide")
    assert it.page.is_disabled("[data-of='act wide']")
    # Load and unload.
    it.page.click("[data-of='act red']")
    it.until("() => document.querySelector('li.loaded .name')?.textContent === 'red'")
    assert "loaded" in row(it, "red")
    it.page.click("[data-of='act red']")
    it.until("() => !document.querySelector('li.loaded')")
    # Another one answers, also in the next tab.
    it.page.click("[data-of='name red']")
    expect(it.page.locator("#models-toggle")).to_have_text("red")
    it.press("Escape")
    assert it.page.is_hidden("#models")
    it.ask("a")
    assert it.asked[-1]["model"] == "red"
    it.until("() => document.getElementById('engine').textContent.startsWith('loaded · reference')")
    assert it.page.title() == "red · localspec"
    it.page.reload()
    expect(it.page.locator("#models-toggle")).to_have_text("red")
    # On a narrow page its button stays reachable; a click elsewhere closes the list too.
    usual = it.page.viewport_size
    it.page.set_viewport_size({"width": 420, "height": 800})
    for shown in (True, False, True):
        it.page.click("#models-toggle")
        assert it.page.is_visible("#models") == shown
    it.page.set_viewport_size(usual)
    it.page.click("#engine")
    assert it.page.is_hidden("#models")
    # Fetched, with a refusal first.
    it.page.click("#models-toggle")
    for name, alert, n in (("none", True, 4), ("green", False, 5)):
        it.page.fill("#fetch-name", f"hf:acme/more/{name}.gguf")
        it.page.click("#fetch-form button")
        expect(it.page.locator("#models-alert")).to_be_visible(visible=alert)
        expect(it.page.locator("#model-list li")).to_have_count(n)
    it.page.click("[data-of='name green']")
    expect(it.page.locator("#models-toggle")).to_have_text("green")
    # One that is fetched can be stopped.
    hub.files["/acme/more/resolve/main/slow.gguf"] = bytes(1 << 20)
    hub.hold_after = 1 << 18
    it.page.fill("#fetch-name", "hf:acme/more/slow.gguf")
    it.page.click("#fetch-form button")
    it.until("() => document.getElementById('fetch-words').textContent.includes('of 1 MB')")
    it.page.click("#fetch-stop")
    it.until("() => document.getElementById('models-alert').textContent.startsWith('Stopped')")
    assert it.page.is_hidden("#fetch-progress")
    hub.go_on.set()
