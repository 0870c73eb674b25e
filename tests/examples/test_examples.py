"""The examples that need no window: run as they stand, on tiny models and a real server."""

from __future__ import annotations

import asyncio
import importlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from localspec.backends.reference import ReferenceContext
from tests.conftest import TinyFiles
from tests.support.endless import write_endless
from tests.support.serving import serve
from tests.support.waiting import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_embed_async(
    example: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ReferenceContext._decode

    def slowly(context: ReferenceContext, *args: Any) -> Any:
        if context.n_past > 200:  # the long answer: no machine says 4096 tokens in the second that the example waits
            time.sleep(0.005)
        return decode(context, *args)

    monkeypatch.setattr(ReferenceContext, "_decode", slowly)
    model = write_endless(tmp_path / "target.gguf", tmp_path / "draft.gguf")
    main = example("embed_async").main
    assert asyncio.run(main(str(model), str(tmp_path / "draft.gguf"), backend="reference")) == 0
    out = capsys.readouterr().out
    told = re.findall(r"^([AB]):   [\d.]+ tok/s, (\d+) of (\d+) prompt tokens from memory, (\d+) of (\d+)", out, re.M)
    assert sorted(name for name, *_ in told) == ["A", "A", "B", "B"]
    assert all(int(cached) > 0 for _, cached, *_ in told[1:])  # the system prompt at least is read once
    stopped = re.search(r"after a second: cancelled by the deadline, (\d+) tokens", out)
    assert stopped
    assert int(stopped[1]) < 4096
    assert "left after 5 rounds: " in out
    beats = re.search(r"meanwhile the loop went round (\d+) times", out)
    assert beats
    assert int(beats[1]) >= 1


@pytest.mark.parametrize("name", ["embed_async", "openai_client"])
def test_what_is_not_there_is_one_line(name: str) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        missing = {"embed_async": "nosuch.gguf", "openai_client": f"http://127.0.0.1:{taken.getsockname()[1]}"}[name]
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), missing]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert missing in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_openai_client(example: Callable[[str], Any], tiny: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        LLM(tiny.quick.target, draft=["ngram", tiny.quick.draft], backend="reference", n_ctx=1024) as llm,
        serve(llm) as server,
    ):
        assert example("openai_client").main(server.url) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{llm.model_name}, streamed:\n")
    counts = re.findall(r"^(.*)(\d+) tokens; guesses: (\d+) accepted, (\d+) rejected$", out, re.M)
    edits = [(before.split(":")[0], int(accepted) + int(rejected)) for before, _, accepted, rejected in counts]
    assert [name for name, _ in edits[1:]] == ["edit, plain", "edit, speculative", "edit, with a prediction"]
    assert edits[1][1] == 0  # off is off
