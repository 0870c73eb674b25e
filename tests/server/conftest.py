"""Fixtures of the server's tests."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from localspec import LLM
from localspec.engine.worker import Job
from localspec.system.files import models_dir
from tests.conftest import TinyFiles
from tests.support import ggufs, waiting
from tests.support.browsing import PATIENCE, WIDE
from tests.support.endless import N_CTX, write_endless
from tests.support.gguf_vocabs import fim_vocab
from tests.support.serving import Server, serve
from tests.support.standin import Server as Hub
from tests.support.tabs import Tab, Tabs

SHAPE = ggufs.Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    """A tiny pair, loaded as the module's ``LOAD`` says; its draft is called ``model``."""
    options = {"files": "quick", "draft": ["ngram"], "n_ctx": 2048} | getattr(request.module, "LOAD", {})
    files = getattr(tiny, options.pop("files"))
    draft = [files.draft if name == "model" else name for name in options.pop("draft")]
    with LLM(files.target, draft=draft or None, backend="reference", **options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, llm: LLM) -> Iterator[Server]:
    """A server with the settings of the module's ``SERVE``."""
    with serve(llm, **getattr(request.module, "SERVE", {})) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=waiting.PATIENCE) as made:
        yield made


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory, module_home: Path) -> Iterator[Server]:
    """A server whose model does not stop by itself, and takes its time."""
    path = write_endless(tmp_path_factory.mktemp("endless") / "endless.gguf")
    with LLM(path, draft=None, backend="reference", n_ctx=N_CTX) as loaded, serve(loaded) as running:
        decode = loaded.inspect().context.decode

        def slowly(*args: Any, **options: Any) -> Any:
            time.sleep(0.01)
            return decode(*args, **options)

        loaded.inspect().context.decode = slowly
        yield running


@pytest.fixture
def it(tab: Tabs, server: Server) -> Tab:
    """A tab with the page of the module's server."""
    return tab(server.url)


@pytest.fixture
def disk(measured_home: Path) -> Path:
    """Three models that continue text, of which ``code`` fills in."""
    folder = models_dir() / "hf/acme/tiny"
    folder.mkdir(parents=True)
    ggufs.write_llama(folder / "blue.gguf", SHAPE, ggufs.bpe_vocab(300), seed=1)
    ggufs.write_llama(folder / "code.gguf", SHAPE, fim_vocab(), seed=2)
    ggufs.write_llama(folder / "red.gguf", SHAPE, ggufs.bpe_vocab(300), seed=3)
    return folder


@pytest.fixture
def hub(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Where ``green`` can be had, which is the same as ``blue``."""
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("LOCALSPEC_OFFLINE")
    server.files["/acme/more/resolve/main/green.gguf"] = (disk / "blue.gguf").read_bytes()
    yield server
    server.close()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The priorities of requests in the order in which their turn comes."""
    found: list[int] = []
    start = Job.start

    def recorded(job: Job) -> bool:
        if job.request is not None:
            found.append(job.priority)
        return start(job)

    monkeypatch.setattr(Job, "start", recorded)
    return found


def slow_down(tab: Tab, times: float, latency: float) -> None:
    """Lets a tab's scripts take so many times as long, and each of its requests so many milliseconds more.

    What a test takes for granted of their order shows then.
    """
    session = tab.page.context.new_cdp_session(tab.page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": times})
    session.send("Network.enable")
    throughput = {"downloadThroughput": -1, "uploadThroughput": -1}
    session.send("Network.emulateNetworkConditions", {"offline": False, "latency": latency, **throughput})


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    """Where the first tab of a test is: it has the page's forty files in its cache, and nothing else of other tests."""
    context = browser.new_context(viewport=WIDE)
    yield context
    context.close()


@pytest.fixture(scope="module")
def port() -> int:
    """For one server after the other, so that a browser has their page already."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        found: int = sock.getsockname()[1]
        return found


@pytest.fixture
def tab(browser: Any, window: Any) -> Iterator[Tabs]:
    """Opens tabs, each as in a browser of its own; at the end, none has reached for another server or complained."""
    with ExitStack() as stack:
        tabs: list[tuple[Tab, str]] = []

        def new(url: str, **options: Any) -> Tab:
            context = window if not (tabs or options) else browser.new_context(**({"viewport": WIDE} | options))
            context.set_default_timeout(PATIENCE)
            made = Tab(context.new_page())
            if context is window:
                stack.callback(context.clear_permissions)
                stack.callback(lambda: [page.close() for page in context.pages])
                kept = {"origin": url.partition("#")[0], "storageTypes": "local_storage"}
                context.new_cdp_session(made.page).send("Storage.clearDataForOrigin", kept)
            else:
                stack.callback(context.close)
            if os.environ.get("LOCALSPEC_TEST_SLOW_TAB"):
                slow_down(made, *map(float, os.environ["LOCALSPEC_TEST_SLOW_TAB"].split(",")))
            tabs.append((made, url.partition("#")[0]))
            made.page.goto(url)
            made.until(
                "() => document.getElementById('engine').textContent || !document.getElementById('key-form').hidden"
                " || !document.getElementById('chat-alert').hidden"
            )
            return made

        yield new
        for each, url in tabs:
            assert [address for address in each.addresses if not address.startswith((url, "data:"))] == []
            assert each.complaints == []
            assert each.run("() => window.hacked") is None
