"""``localspec launch``: programs that stand for coding agents ask a real server as the settings tell them to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import LLM
from localspec.commands.config import settings_file
from localspec.commands.launch import AGENTS
from tests.conftest import TinyFiles
from tests.support.program import PROGRAM, assert_one_line, localspec
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.usefixtures("measured_home"),
    pytest.mark.skipif(sys.platform == "win32", reason="the programs that stand for agents are scripts"),
]

AGENT = """\
#!{python}
import json, os, signal, sys, urllib.request
name = os.path.basename(sys.argv[0])
if name == "claude":
    url, model = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", os.environ["ANTHROPIC_MODEL"]
    key = os.environ["ANTHROPIC_AUTH_TOKEN"]
elif name == "codex":
    import tomllib
    given = tomllib.loads("\\n".join(sys.argv[n + 1] for n, word in enumerate(sys.argv) if word == "-c"))
    provider = given["model_providers"][given["model_provider"]]
    url, model = provider["base_url"] + "/responses", given["model"]
    key = os.environ[provider["env_key"]]
elif name == "opencode":
    given = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = given["model"].partition("/")
    options = given["provider"][provider]["options"]
    assert model in given["provider"][provider]["models"]
    url, key = options["baseURL"] + "/chat/completions", options["apiKey"]
elif name == "goose":
    url = os.environ["OPENAI_HOST"] + "/" + os.environ["OPENAI_BASE_PATH"]
    model, key = os.environ["GOOSE_MODEL"], os.environ["OPENAI_API_KEY"]
elif name == "aider":
    url, key = os.environ["OPENAI_API_BASE"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    model = sys.argv[sys.argv.index("--model") + 1].removeprefix("openai/")
else:
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    model = os.environ["OPENAI_MODEL"]
body = {{"model": model, "max_tokens": 4, "messages": [{{"role": "user", "content": "la"}}]}}
if name == "codex":
    body = {{"model": model, "max_output_tokens": 4, "input": "la"}}
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + key}}
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request, timeout=200))
with open(os.environ["RECORD"], "w") as file:
    json.dump({{"url": url, "arguments": sys.argv[1:], "answer": answer}}, file)
if "wait" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
    print("waiting", flush=True)
    while True:
        signal.pause()
sys.exit(7)
"""


KEY = "secret"


@pytest.fixture(scope="module")
def server(tiny: TinyFiles, module_home: Path) -> Iterator[Server]:
    with LLM(tiny.pair.target, None, backend="reference", n_ctx=512) as llm, serve(llm, api_key=KEY) as running:
        yield running


@pytest.fixture
def record(tmp_path: Path, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs in the place of the agents, which record what they were told; the tiny model is the file's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in AGENTS:
        (folder / name).write_text(AGENT.format(python=sys.executable))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record.json"))
    settings_file().write_text(
        f"model = {str(tiny.pair.target)!r}\nbackend = 'reference'\ndraft = 'none'\nctx = 512\n[serve]\nport = 0\n"
    )
    return tmp_path / "record.json"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_asks_a_server_that_runs_and_what_is_printed_can_be_pasted(
    name: str, record: Path, server: Server
) -> None:
    command = ["launch", name, "--port", str(server.port), "--api-key", KEY]
    script = localspec(*command, "--print", "--", "c d").stdout.decode().replace("\n", "; ")
    for typed, run in (
        ("a b", lambda: localspec(*command, "--", "a b")),
        ("c d", lambda: subprocess.run(["sh", "-c", script], check=False)),
    ):
        assert run().returncode == 7  # the agent's own
        found = json.loads(record.read_text())
        assert found["url"].startswith(f"{server.url}/")
        assert (found["arguments"][-1], found["answer"]["model"]) == (typed, server.service.llm.model_name)


def test_an_agent_without_arguments_has_its_usual_ones_and_a_server_is_told_its_key(
    record: Path, server: Server
) -> None:
    command = ["launch", "goose", "--port", str(server.port)]
    assert_one_line(localspec(*command), 2, "asks for its key")
    assert localspec(*command, "--api-key", KEY).returncode == 7
    assert json.loads(record.read_text())["arguments"] == ["session"]


def is_there(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=10).close()
    except urllib.error.URLError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_is_started_for_an_agent_and_ends_with_it(
    number: signal.Signals, record: Path, tiny: TinyFiles
) -> None:
    """Ctrl-C is the agent's, which ends by itself then; told to end, the program takes both along."""
    command, pipe = [*PROGRAM, "launch", "aider", "--", "wait"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True) as it:
        assert it.stdout.readline() == b"waiting\n"
        if number == signal.SIGINT:
            os.killpg(it.pid, number)  # as a terminal does
        else:
            it.send_signal(number)
        assert it.wait(PATIENCE) == (9 if number == signal.SIGINT else 128 + number)
        assert b"the context holds 512 tokens" in it.stderr.read()
    found = json.loads(record.read_text())
    assert (found["arguments"][-1], found["answer"]["model"]) == ("wait", tiny.pair.target.stem)
    url = found["url"].partition("/v1")[0]
    wait_until(lambda: not is_there(url), "the server has ended")


def test_what_cannot_be_launched_is_one_line(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_line(localspec("launch", "ader"), 2, "did you mean aider?")
    result = localspec("launch", "claude", "--model", "nosuch")
    said = [part in result.stderr for part in (b"there is no model 'nosuch'", b"the server could not be started")]
    assert (result.returncode, said) == (1, [True, True])
    monkeypatch.setenv("PATH", "/nowhere")
    assert_one_line(localspec("launch", "codex"), 2, "codex is not installed", "npm install -g @openai/codex")
    assert not record.exists()


def test_what_is_printed_without_a_server_names_the_model_as_one_would(tiny: TinyFiles) -> None:
    printed = localspec("launch", "claude", "--model", tiny.pair.target, "--port", "1", "--print").stdout.decode()
    assert f"localspec serve {tiny.pair.target} --port 1" in printed
    assert f"export ANTHROPIC_MODEL={tiny.pair.target.stem}\n" in printed
