"""``localspec serve`` as a shell, curl and other people's programs see it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from localspec.__main__ import run
from localspec.system.files import models_dir
from tests.conftest import TinyFiles
from tests.support.serving import post
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("measured_home")
PROGRAM = [sys.executable, "-m", "localspec", "serve"]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@contextmanager
def serving(*arguments: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program, once it has printed its URL."""
    command = [*PROGRAM, *map(str, arguments), "--backend", "reference", "--draft", "ngram", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=os.environ | environment, **pipes)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command in this process, which says nothing on standard output: status, and lines of standard error."""

    def run_it(*arguments: str | Path) -> tuple[int, list[str]]:
        status, said = run(["serve", *map(str, arguments)]), capsys.readouterr()
        assert said.out == ""
        return status, said.err.splitlines()

    return run_it


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE)


def ended(process: subprocess.Popen[str], number: int, status: int) -> list[str]:
    """What the program said until a signal ended it."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (status, "")
    assert stderr.splitlines()[-1] == "localspec: stopped"
    assert "Traceback" not in stderr
    return stderr.splitlines()


no_sigint = pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child")


@pytest.mark.parametrize(
    ("number", "status", "parallel"), [(signal.SIGTERM, 0, 1), pytest.param(signal.SIGINT, 130, 2, marks=no_sigint)]
)
def test_it_serves_until_it_is_told_to_stop(tiny: TinyFiles, number: int, status: int, parallel: int) -> None:
    with (
        serving(tiny.quick.target, "--ctx", "1024", "--parallel", str(parallel)) as (process, url),
        ExitStack() as all_,
    ):
        for _ in range(parallel):  # all of them are being answered when it is told
            sock = all_.enter_context(connected(url))
            sock.sendall(post(CHAT | {"stream": True, "max_tokens": 900, "ignore_eos": True, "n": 16}))
            received = b""
            while b"data: " not in received:
                received += sock.recv(65536)
        lines = ended(process, number, status)
        assert not any("POST /v1" in line for line in lines)  # requests are logged if that is asked for
        with pytest.raises(OSError, match="refused"):
            connected(url)


def test_a_port_in_use_is_one_line_at_once(tiny: TinyFiles, fail: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, lines = fail(tiny.quick.target, "--port", str(port))
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith(f"localspec: port {port} of 127.0.0.1 is in use: ")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--port", "0"], "does not exist"),
        (["--host", "0.0.0.0"], "needs --api-key"),
        (["--host", "::"], "needs --api-key"),
        (["--host", "no.such.host.invalid"], "no such address"),
        (["--port", "70000"], "'--port'"),
        (["--queue", "-1"], "'--queue'"),
        (["--parallel", "0"], "parallel must be auto or a whole number in 1..64, not 0"),
        (["--parallel", "many"], "parallel must be auto or a whole number in 1..64"),
        (["--prefix-cache", "-1"], "'--prefix-cache'"),
        (["--time-limit", "0"], "'--time-limit'"),
        (["--allow-origin", "localhost"], "--allow-origin must be"),
        (["--api-key", " "], "empty"),
        (["--memory", "much"], "--memory must be a size such as 8GB or 512MB, not 'much'"),
        (["--memory", "0"], "--memory must be a size"),
        (["--keep-alive", "soon"], "--keep-alive must be a duration such as 5m"),
    ],
)
def test_bad_usage_is_one_line(fail: Callable[..., Any], arguments: list[str], part: str) -> None:
    status, lines = fail("/no/such.gguf", *arguments)
    assert status == 2
    assert len(lines) == 1
    assert part in lines[0]


def asked(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def test_several_models_and_all_on_the_disk(tiny: TinyFiles) -> None:
    folder = models_dir() / "hf" / "acme" / "tiny"
    folder.mkdir(parents=True)
    shutil.copy(tiny.quick.target, folder / "one.gguf")
    shutil.copy(tiny.quick.target, folder / "two.gguf")
    options = ("--ctx", "256", "--memory", "1GB", "--keep-alive", "10m")
    named = (tiny.quick.draft, "hf:acme/tiny/two.gguf")
    for names, expected in (((), ["one", "two"]), (named, [tiny.quick.draft.stem, "two"])):
        with serving(*names, *options) as (process, url):
            assert [model["id"] for model in asked(url, "/v1/models")["data"]] == expected
            answer = asked(url, "/v1/chat/completions", CHAT | {"model": "two"})
            assert (answer["model"], answer["usage"]["completion_tokens"]) == ("two", 4)
            (shown,) = asked(url, "/api/ps")["models"]
            assert (shown["name"], shown["context_length"]) == ("two", 256)
            said = "\n".join(ended(process, signal.SIGTERM, 0))
        assert f"kept for 600 s after their use: {', '.join(expected)}" in said
        assert "memory for models: 1 GB" in said


def test_one_model_with_a_time_to_stay_is_loaded_when_asked_for(tiny: TinyFiles) -> None:
    with serving(tiny.quick.target, "--keep-alive", "0") as (_, url):
        assert asked(url, "/api/ps") == {"models": []}
        assert asked(url, "/v1/chat/completions", CHAT)["choices"]
        wait_until(lambda: asked(url, "/api/ps") == {"models": []}, "it is unloaded")


@no_sigint
def test_ctrl_c_while_a_model_is_loaded(tiny: TinyFiles) -> None:
    """At several moments of the load; whatever it was doing, the program ends with its own status and one line."""
    for seconds in (0.0, 0.2):
        with serving(tiny.quick.target, "--keep-alive", "5m") as (process, url), connected(url) as sock:
            sock.sendall(post(CHAT))
            time.sleep(seconds)
            ended(process, signal.SIGINT, 130)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_has_answers_and_what_was_chosen(tiny: TinyFiles) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "-sS", "--max-time", str(PATIENCE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    options = ("--alias", "tiny", "--parallel", "auto", "--verbose")
    with serving(tiny.quick.target, *options, LOCALSPEC_API_KEY="sesame") as (process, url):
        chat, key = f"{url}/v1/chat/completions", ("-H", "Authorization: Bearer sesame")
        body = CHAT | {"model": "tiny"}
        found = json.loads(curl(chat, *key, "-d", json.dumps(body)))  # which curl calls a form
        assert found["choices"][0]["message"]["role"] == "assistant"
        assert found["usage"]["completion_tokens"] > 0
        streamed = curl("-N", chat, *key, "-d", json.dumps(body | {"stream": True}))
        assert streamed.endswith("data: [DONE]\n\n")
        assert json.loads(curl(chat, "-d", json.dumps(body)))["error"]["code"] == "invalid_api_key"
        # How many requests are answered at a time is chosen, and said.
        about = json.loads(curl(f"{url}/v1/localspec/stats", *key))["parallel"]
        lines = ended(process, signal.SIGTERM, 0)
    assert (about["parallel"], about["running"]) == (1, 0)
    assert "one conversation of this model at a time" in about["reason"]
    assert f"localspec: requests at a time: 1 ({about['reason']})" in lines
    assert "GET /v1/localspec/stats" in "\n".join(lines)
