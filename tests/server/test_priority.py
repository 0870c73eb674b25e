"""``localspec.priority`` of a request: who comes first of those that wait, in every API."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from localspec import LLM
from tests.support.serving import Server
from tests.support.waiting import PATIENCE, Brake, wait_until

LOAD: dict[str, Any] = {"files": "fim", "n_ctx": 512}

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


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_it(server: Server, begun: list[int], path: str) -> None:
    for priority in (-7, 0, 3):
        status, _, answer = server.ask("POST", path, BODIES[path] | {"localspec": {"priority": priority}})
        assert status == 200, answer
    assert begun == [-7, 0, 3]


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
