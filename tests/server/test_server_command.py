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
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("measured_home")
PROGRAM = [sys.executable, "-m", "localspec", "serve"]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@contextmanager
def serving(*arguments: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program, once it has printed its URL."""
    process = subprocess.Popen(
        [*PROGRAM, *map(str, arguments), "--backend", "reference", "--draft", "ngram"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
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


@pytest.mark.parametrize(
    ("number", "status", "parallel"),
    [
        (signal.SIGTERM, 0, 1),
        pytest.param(
            signal.SIGINT, 130, 2, marks=pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child")
        ),
    ],
)
def test_it_serves_until_it_is_told_to_stop(tiny: TinyFiles, number: int, status: int, parallel: int) -> None:
    with serving(tiny.quick.target, "--port", "0", "--ctx", "1024", "--parallel", str(parallel)) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        port = int(url.rpartition(":")[2])
        body = json.dumps(CHAT | {"stream": True, "max_tokens": 900, "ignore_eos": True, "n": 16}).encode()
        with ExitStack() as clients:
            for _ in range(parallel):  # all of them are being answered when it is told
                sock = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
                sock.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                received = b""
                while b"data: " not in received:
                    received += sock.recv(65536)
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == status
        assert stdout == ""
        assert stderr.splitlines()[-1] == "localspec: stopped"
        assert "Traceback" not in stderr
        assert "POST /v1" not in stderr  # requests are logged if that is asked for
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_in_use_is_one_line_at_once(tiny: TinyFiles, fail: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, lines = fail(tiny.quick.target, "--port", str(port))
    assert status == 1
    assert lines == [
        f"localspec: port {port} of 127.0.0.1 is in use: stop what uses it, or take another with --port (0 finds one)"
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
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
    for names, expected in (((), ["one", "two"]), ((tiny.quick.draft, "hf:acme/tiny/two.gguf"), None)):
        options = ("--port", "0", "--ctx", "256", "--memory", "1GB", "--keep-alive", "10m")
        with serving(*names, *options) as (process, url):
            found = [model["id"] for model in asked(url, "/v1/models")["data"]]
            assert found == (expected or [tiny.quick.draft.stem, "two"])
            answer = asked(url, "/v1/chat/completions", CHAT | {"model": "two"})
            assert (answer["model"], answer["usage"]["completion_tokens"]) == ("two", 4)
            (shown,) = asked(url, "/api/ps")["models"]
            assert (shown["name"], shown["context_length"]) == ("two", 256)
            process.terminate()
            _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        lines = stderr.splitlines()
        assert (
            f"localspec: 2 models, loaded when asked for, kept for 600 s after their use: {', '.join(found)}" in lines
        )
        assert "localspec: memory for models: 1 GB" in lines
        assert lines[-1] == "localspec: stopped"


def test_one_model_with_a_time_to_stay_is_loaded_when_asked_for(tiny: TinyFiles) -> None:
    with serving(tiny.quick.target, "--port", "0", "--keep-alive", "0") as (_, url):
        assert asked(url, "/api/ps") == {"models": []}
        assert asked(url, "/v1/chat/completions", CHAT)["choices"]
        wait_until(lambda: asked(url, "/api/ps") == {"models": []}, "it is unloaded")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child")
def test_ctrl_c_while_a_model_is_loaded(tiny: TinyFiles) -> None:
    """At several moments of the load; whatever it was doing, the program ends with its own status and one line."""
    for seconds in (0.0, 0.1, 0.3):
        with serving(tiny.quick.target, "--port", "0", "--keep-alive", "5m") as (process, url):
            body = json.dumps(CHAT).encode()
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE) as sock:
                sock.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                time.sleep(seconds)
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert stderr.splitlines()[-1] == "localspec: stopped"
        assert "Traceback" not in stderr


def test_a_model_that_is_not_there_leaves_the_port(tmp_path: Path, fail: Callable[..., Any]) -> None:
    status, lines = fail(tmp_path / "none.gguf", "--port", "0")
    assert (status, len(lines)) == (2, 1)
    assert "does not exist" in lines[0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(tiny: TinyFiles) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "-sS", "--max-time", str(PATIENCE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with serving(tiny.quick.target, "--port", "0", "--alias", "tiny", LOCALSPEC_API_KEY="sesame") as (_, url):
        chat = f"{url}/v1/chat/completions"
        key = ("-H", "Authorization: Bearer sesame")
        body = ("-H", "Content-Type: application/json", "-d", json.dumps(CHAT | {"model": "tiny"}))
        found = json.loads(curl(chat, *key, *body))
        assert found["choices"][0]["message"]["role"] == "assistant"
        assert found["usage"]["completion_tokens"] > 0
        streamed = curl("-N", chat, *key, *body[:-1], json.dumps(CHAT | {"stream": True}))
        assert streamed.endswith("data: [DONE]\n\n")
        assert json.loads(curl(chat, *body))["error"]["code"] == "invalid_api_key"
        # What curl sends by itself is called a form. So is what a foreign page could send, which a browser tells.
        assert json.loads(curl(chat, *key, "-d", json.dumps(CHAT)))["object"] == "chat.completion"
        page = curl(chat, *key, "-H", "Referer: http://a.example/", "-d", json.dumps(CHAT))
        assert json.loads(page)["error"]["code"] == "unsupported_media_type"
        assert json.loads(curl(f"{url}/health")) == {"status": "ok"}
        assert "localspec_requests_total" in curl(f"{url}/metrics", *key)


def test_simon_willison_s_llm(tiny: TinyFiles, tmp_path: Path) -> None:
    """Another program that speaks to OpenAI's API, in a process of its own."""
    pytest.importorskip("llm")
    with serving(tiny.quick.target, "--port", "0") as (_, url):
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: here\n  model_name: {tiny.quick.target.stem}\n  api_base: {url}/v1\n  api_key_name: none\n"
        )
        environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
        command = [sys.executable, "-m", "llm", "prompt", "-m", "here", "--key", "x", "-o", "max_tokens", "12", "-n"]

        def ask(*options: str) -> str:
            done = subprocess.run(
                [*command, *options, "the cat"], env=environment, capture_output=True, timeout=PATIENCE, check=False
            )
            assert done.returncode == 0, done.stderr.decode()
            return done.stdout.decode("utf-8", "replace").strip()

        assert ask() == ask("--no-stream")


def test_how_many_requests_at_a_time_is_chosen_and_said(tiny: TinyFiles) -> None:
    with serving(tiny.quick.target, "--port", "0", "--parallel", "auto", "--verbose") as (process, url):
        with urllib.request.urlopen(f"{url}/v1/localspec/stats", timeout=PATIENCE) as answer:
            found = json.load(answer)["parallel"]
        process.terminate()
        _, stderr = process.communicate(timeout=PATIENCE)
    assert (found["parallel"], found["running"]) == (1, 0)
    assert "one conversation of this model at a time" in found["reason"]
    assert f"localspec: requests at a time: 1 ({found['reason']})" in stderr.splitlines()
    assert "GET /v1/localspec/stats" in stderr
