"""How far a long prompt is read, as events of streamed answers and on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from localspec.engine.answer import LONG_PROMPT
from tests.conftest import TinyFiles
from tests.support.serving import Server, asking, serve
from tests.support.tabs import Tabs
from tests.support.waiting import Brake, wait_until

LONG_TEXT = "la lo li lu " * 120


@pytest.fixture(params=[1, 2])
def llm(request: pytest.FixtureRequest, tiny: TinyFiles, isolated_home: Path) -> Iterator[LLM]:
    with LLM(tiny.quick.target, "ngram", backend="reference", n_ctx=2048, parallel=request.param) as loaded:
        yield loaded


@pytest.fixture
def server(llm: LLM) -> Iterator[Server]:
    with serve(llm) as running:
        yield running


def chunks_of(server: Server, path: str, begin: str, **body: Any) -> list[tuple[str, Any]]:
    """(name, data) of the events of a streamed answer to a prompt that begins otherwise than others."""
    asked = asking(begin + LONG_TEXT, 3, ignore_eos=True, stream=True)[path]
    status, _, answer = server.ask("POST", path, asked | body)
    assert status == 200, answer
    blocks = [dict(line.split(": ", 1) for line in each.split("\n")) for each in answer.decode().split("\n\n") if each]
    return [(b.get("event", ""), json.loads(b["data"])) for b in blocks if b["data"] != "[DONE]"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_have_llama_servers_chunks_and_ours(server: Server, path: str) -> None:
    theirs = [data for _, data in chunks_of(server, path, "la", return_progress=True) if "prompt_progress" in data]
    found = [each["prompt_progress"] for each in theirs]
    assert [set(each) for each in found] == [{"total", "cache", "processed", "time_ms"}] * len(found)
    assert found[0]["processed"] == found[0]["cache"] == 0
    assert found[-1]["processed"] == found[-1]["total"] > LONG_PROMPT
    assert all(type(value) is int for each in found for value in each.values())
    for each in theirs:  # its text is empty, for clients that know nothing of it
        (choice,) = each["choices"]
        assert (choice["finish_reason"], choice.get("text") or choice.get("delta") or None) == (None, None)
    # Ours have a name, and come before the rounds.
    named = chunks_of(server, path, "lo", stream_options={"localspec_rounds": True})
    names = [name for name, _ in named if name]
    assert names == sorted(names)  # prompt, then round
    prompts = [data["localspec"]["prompt"] for name, data in named if name == "localspec.prompt"]
    assert prompts[-1]["processed"] == prompts[-1]["total"]
    fields = "type reader total cached processed seconds tokens_per_second seconds_left"
    assert set(prompts[0]) == set(fields.split())
    assert not any("prompt_progress" in data for _, data in named)
    # Who does not ask is told nothing.
    assert not any(name or "prompt_progress" in data for name, data in chunks_of(server, path, "li"))
    whole = server.ask("POST", path, asking("lu" + LONG_TEXT, 3, return_progress=True)[path])
    assert (whole[0], b"prompt_progress" in whole[2]) == (200, False)


def test_the_page_shows_it_until_the_answer_begins(tab: Tabs, tiny: TinyFiles, isolated_home: Path) -> None:
    with LLM(tiny.quick.target, "ngram", backend="reference", n_ctx=4096) as llm, serve(llm) as running:
        it = tab(running.url)
        with Brake(llm, after=2) as brake:
            it.page.fill("#question", LONG_TEXT)
            it.page.press("#question", "Enter")
            it.until("() => document.querySelector('.turn-figures')?.textContent.includes(' left')")
            line, bar = it.page.inner_text(".turn-figures"), ".turn-figures progress"
            assert re.fullmatch(r"reading \d+ of [\d,]+ tokens · [\d,]+ tok/s · (\d+ min )?\d+ s left", line.strip())
            share = it.run(f"() => document.querySelector('{bar}').position")
            assert 0 < share < 1
            # Stopped, it says so; the question is back where it was typed, as no answer came.
            it.page.click("#stop")
            it.idle()
            running.wait_idle()
            assert brake.n_passes <= 4
        assert it.page.locator(bar).count() == 0
        it.ask("a" + LONG_TEXT[::-1])
        assert it.page.locator(bar).count() == 0
        wait_until(lambda: "tok/s" in it.page.inner_text(".turn:last-of-type .turn-figures"), "the figures")
