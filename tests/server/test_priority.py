"""``localspec.priority`` of a request: who comes first of those that wait, in every API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from tests.conftest import TinyFiles
from tests.support.serving import Server
from tests.support.waiting import PATIENCE, Brake, wait_until

CHAT = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/api/chat": {"messages": CHAT, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/infill": {"input_prefix": "def f(", "input_suffix": ")", "n_predict": 2},
}
FILLS: dict[str, dict[str, Any]] = {
    "/infill": BODIES["/infill"],
    "/v1/completions": {"prompt": "def f(", "suffix": ")", "max_tokens": 2},
    "/api/generate": {"prompt": "def f(", "suffix": ")", "stream": False, "options": {"num_predict": 2}},
}


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    with LLM(tiny.fim.target, draft="ngram", backend="reference", n_ctx=512) as loaded:
        yield loaded


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_it(server: Server, begun: list[int], path: str) -> None:
    for priority in (-7, 0, 3):
        status, _, answer = server.ask("POST", path, BODIES[path] | {"localspec": {"priority": priority}})
        assert status == 200, answer
    assert begun == [-7, 0, 3]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("priority", ["high", 1.5, True, 1 << 32])
def test_what_is_no_priority_is_refused_in_the_form_of_each_api(server: Server, path: str, priority: Any) -> None:
    status, _, answer = server.ask("POST", path, BODIES[path] | {"localspec": {"priority": priority}})
    assert status == 400
    found = json.loads(answer)["error"]
    message = found if path.startswith("/api/") else found["message"]
    assert message.startswith(f"localspec.priority must be an integer in -{1 << 31}..{1 << 31}, not ")
    assert "\n" not in message
    if path == "/v1/messages":
        assert json.loads(answer)["type"] == "error"
    elif not path.startswith("/api/"):
        assert found["param"] == "localspec.priority"


@pytest.mark.parametrize("path", FILLS)
def test_what_fills_in_comes_before_what_says_nothing(server: Server, begun: list[int], path: str) -> None:
    for own in ({}, {"localspec": {"priority": -1}}):
        status, _, answer = server.ask("POST", path, FILLS[path] | own)
        assert status == 200, answer
    assert begun == [1, -1]


def test_the_highest_comes_first_and_one_under_way_keeps_its_place(server: Server, llm: LLM, begun: list[int]) -> None:
    long = BODIES["/v1/chat/completions"] | {"max_tokens": 100, "ignore_eos": True, "localspec": {"priority": -5}}
    asked = [("/v1/chat/completions", long)]
    for priority in (-1, 0, 4):
        asked.append(("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"localspec": {"priority": priority}}))
    asked.append(("/infill", BODIES["/infill"]))
    answers: dict[int, int] = {}

    def ask(i: int) -> None:
        answers[i] = server.ask("POST", *asked[i])[0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    with Brake(llm) as brake:
        threads[0].start()
        brake.wait()
        for n, thread in enumerate(threads[1:]):
            thread.start()
            wait_until(lambda n=n: llm.queue_length == n + 1)
        brake.release()
        for thread in threads:
            thread.join(PATIENCE)
    assert begun == [-5, 4, 1, 0, -1]
    assert set(answers.values()) == {200}
