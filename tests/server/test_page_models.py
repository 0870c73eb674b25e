"""The page of a server of several models: the list of them, in a real Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localspec.system.files import models_dir
from tests.support import ggufs
from tests.support.serving import Server, opening, serve_several
from tests.support.standin import Server as Hub
from tests.support.tabs import Tab

SHAPE = ggufs.Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("LOCALSPEC_OFFLINE")
    yield server
    server.close()


@pytest.fixture
def server(measured_home: Path, hub: Hub) -> Iterator[Server]:
    """Two models, of which ``wide`` needs more than all may take."""
    folder = models_dir() / "hf/acme/tiny"
    folder.mkdir(parents=True)
    ggufs.write_llama(folder / "blue.gguf", SHAPE, ggufs.bpe_vocab(300), seed=1)
    ggufs.write_llama(folder / "red.gguf", SHAPE, ggufs.bpe_vocab(300), seed=3)
    ggufs.write_llama(folder / "wide.gguf", SHAPE, ggufs.bpe_vocab(4000), seed=3)
    hub.files["/acme/more/resolve/main/green.gguf"] = (folder / "blue.gguf").read_bytes()
    with serve_several(opening(), memory=3_000_000, prefix_cache=0) as running:
        yield running


def row(it: Tab, name: str) -> str:
    found: str = it.page.inner_text(f"#model-list li:has(button.name:text-is('{name}'))")
    return found


def test_models_are_chosen_loaded_unloaded_and_fetched(tab: Callable[..., Tab], server: Server, hub: Hub) -> None:
    it = tab(server.url)
    assert it.page.inner_text("#models-toggle") == "blue"
    assert it.page.inner_text("#engine") == "loaded with the next question"
    it.page.click("#models-toggle")
    it.until("() => document.querySelectorAll('#model-list li').length === 3")
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
    it.until("() => document.getElementById('models-toggle').textContent === 'red'")
    it.press("Escape")
    assert it.page.is_hidden("#models")
    it.ask("a")
    assert it.asked[-1]["model"] == "red"
    it.until("() => document.getElementById('engine').textContent.startsWith('loaded · reference')")
    assert it.page.title() == "red · localspec"
    it.page.reload()
    it.until("() => document.getElementById('models-toggle').textContent === 'red'")
    # On a narrow page its button stays reachable; a click elsewhere closes the list too.
    usual = it.page.viewport_size
    it.page.set_viewport_size({"width": 420, "height": 800})
    it.page.click("#models-toggle")
    assert it.page.is_visible("#models")
    it.page.click("#models-toggle")
    assert it.page.is_hidden("#models")
    it.page.set_viewport_size(usual)
    it.page.click("#models-toggle")
    it.page.click("#engine")
    assert it.page.is_hidden("#models")
    # Fetched, with a refusal first.
    it.page.click("#models-toggle")
    for name, until in (
        ("hf:acme/more/none.gguf", "() => !document.getElementById('models-alert').hidden"),
        ("hf:acme/more/green.gguf", "() => document.querySelectorAll('#model-list li').length === 4"),
    ):
        it.page.fill("#fetch-name", name)
        it.page.click("#fetch-form button")
        it.until(until)
    assert it.page.is_hidden("#models-alert")
    it.page.click("[data-of='name green']")
    it.until("() => document.getElementById('models-toggle').textContent === 'green'")
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
