"""``localspec.priority`` of a request: who comes first of those that wait, in every API."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from localspec import LLM
from tests.support.serving import Server, asking
from tests.support.waiting import Brake, wait_until

LOAD: dict[str, Any] = {"files": "fim", "n_ctx": 512}

BODIES = asking("hi", 2)
FILLS = {path: BODIES[path] | {"suffix": ")"} for path in ("/v1/completions", "/api/generate")}
FILLS["/infill"] = BODIES["/infill"]


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
    path, short = "/v1/chat/completions", BODIES["/v1/chat/completions"]
    long = short | {"max_tokens": 100, "ignore_eos": True, "localspec": {"priority": -5}}
    waiting = [(path, short | {"localspec": {"priority": priority}}) for priority in (-1, 0, 4)]
    waiting.append(("/infill", BODIES["/infill"]))
    with ThreadPoolExecutor(8) as pool, Brake(llm) as brake:
        asked = [pool.submit(server.ask, "POST", path, long)]
        brake.wait()
        for n, each in enumerate(waiting, 1):
            asked.append(pool.submit(server.ask, "POST", *each))
            wait_until(lambda n=n: llm.queue_length == n)
        brake.release()
        assert [each.result()[0] for each in asked] == [200] * 5
    assert begun == [-5, 4, 1, 0, -1]
