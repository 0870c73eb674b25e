"""``/infill`` and ``suffix``: what llama.vim, llama.vscode and OpenAI's package send, to a real server."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from localspec import LLM, SamplingParams
from localspec.server.http import ApiError
from localspec.server.infill import MAX_CHARACTERS, MAX_HELD, MAX_WINDOWS, LineRules, Slots, Windows, join
from tests.conftest import TinyFiles
from tests.server.apis.packages import says
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE, Brake, wait_until

LOAD: dict[str, Any] = {"files": "fim", "draft": ["ngram", "model"]}
SERVE: dict[str, Any] = {"params": SamplingParams(temperature=1.5)}

BEFORE, TYPED, BEHIND = "def area(r):\n" * 12, "    return the ", "\n\nprint(area(2))\n"
EXTRA = [{"text": "he re in an\n", "time": [1, 2], "filename": "b.py"}]
VIM: dict[str, Any] = {"input_prefix": BEFORE, "input_suffix": BEHIND, "input_extra": EXTRA, "prompt": TYPED}
VIM |= {"samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.90, "n_predict": 24, "stop": []}
VIM |= {"id_slot": 0, "n_indent": 0, "stream": False, "cache_prompt": True, "model": ""}
VIM |= {"t_max_prompt_ms": 500, "t_max_predict_ms": 0}
"""What llama.vim sends after a key stroke."""

ENDLESS = {"n_predict": 900, "ignore_eos": True, "localspec": {"off": True}}


def infill(server: Server, **changes: Any) -> dict[str, Any]:
    status, _, body = server.ask("POST", "/infill", VIM | changes)
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def saying(server: Server, text: str, **changes: Any) -> dict[str, Any]:
    """Where the model says this."""
    return infill(server, **{"n_predict": 900} | says(text) | changes)


def test_a_suggestion_is_the_library_s(llm: LLM, server: Server) -> None:
    """Greedy, though the server's chats are not: samplers with ``infill`` leave no choice by chance."""
    params = SamplingParams(max_tokens=24, top_k=40, top_p=0.9)
    expected = llm.fill(BEFORE + TYPED, BEHIND, params, context_files=[("b.py", "he re in an\n")])
    found = infill(server)
    assert found["content"] == expected.text
    assert found["stop"] is True
    assert found["stop_type"] == ("eos" if expected.finish_reason == "stop" else "limit")
    assert found["tokens_evaluated"] == expected.stats["prompt_tokens"]
    assert found["tokens_predicted"] == len(expected.token_ids)
    assert found["tokens_cached"] == expected.stats["prompt_tokens"] + len(expected.token_ids)
    assert found["generation_settings"]["n_ctx"] == 2048
    assert (found["truncated"], found["id_slot"], found["has_new_line"]) == (False, 0, "\n" in expected.text)


def test_timings_count_what_was_read_and_drafted(server: Server) -> None:
    infill(server)
    found = infill(server, prompt=TYPED + "a", localspec={"draft_length": 4})
    timings, stats = found["timings"], found["localspec"]["stats"]
    assert timings["cache_n"] > timings["prompt_n"] > 0
    assert timings["cache_n"] + timings["prompt_n"] == found["tokens_evaluated"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] == stats["num_accepted_tokens"] > 0
    speed = 1e3 * timings["predicted_n"] / timings["predicted_ms"]
    assert timings["predicted_per_second"] == pytest.approx(speed, rel=1e-6)
    # llama.vim has those fields that it wants, and no others.
    wanted = ["content", "timings/prompt_ms", "timings/predicted_per_token_ms", "truncated", "tokens_cached"]
    found = infill(server, response_fields=[*wanted, "timings/none"])
    assert list(found) == wanted
    assert min(found["timings/prompt_ms"], found["timings/predicted_per_token_ms"]) > 0


def test_it_comes_in_pieces(server: Server) -> None:
    status, headers, body = server.ask("POST", "/infill", VIM | {"stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]
    assert "".join(each["content"] for each in events) == infill(server)["content"]
    assert events[-1]["timings"]["predicted_n"] > 0
    assert b"[DONE]" not in body  # llama-server's own addresses have none


def test_extra_context_is_read_while_nobody_asks(llm: LLM, server: Server) -> None:
    """llama.vim's and llama.vscode's way to have new chunks read."""
    llm.generate("on in the an " * 20, SamplingParams(max_tokens=2))
    nothing = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
    extra = [{"text": "an on in he re\n" * 20, "filename": "c.py"}]
    assert infill(server, **nothing, input_extra=extra, response_fields=[""]) == {}
    assert infill(server, **nothing, input_extra=extra)["content"] == ""
    assert llm.wait_idle(PATIENCE)
    read = len(llm.fill_prompt("", "", [("c.py", extra[0]["text"])]).tokens) - 2
    assert infill(server, input_extra=extra)["timings"]["cache_n"] == read


def test_a_line_further_left_and_a_stop_string_end_it(server: Server) -> None:
    text = "the\n\n    in\n  an\non"
    assert saying(server, text)["content"] == text
    assert saying(server, text, n_indent=2)["content"] == "the\n\n    in\n  an"
    assert saying(server, "the\n  in  \n", n_indent=2)["content"] == "the\n  in  \n"  # what is held back comes too
    for change, end in (({"n_indent": 4}, ("the\n\n    in", "limit")), ({"stop": ["\n"]}, ("the", "word"))):
        found = saying(server, text, **change)
        assert (found["content"], found["stop_type"]) == end


def test_time_ends_an_answer_of_several_lines(server: Server) -> None:
    text = "an\n" * 150
    found = saying(server, text, t_max_predict_ms=1)
    assert 3 <= len(found["content"]) < len(text)
    line = "an " * 150
    assert saying(server, line, t_max_predict_ms=1)["content"] == line


def test_white_space_without_end_is_not_held_back() -> None:
    rules = LineRules(2, None)
    assert sum(len(rules.push("\n")) for _ in range(3 * MAX_HELD)) >= 2 * MAX_HELD


def test_what_slides_out_of_the_editor_s_window_stays(server: Server) -> None:
    lines = [f"line {i * i} of the area in an on\n" for i in range(40)]

    def read(slot: int, last: int) -> int:
        """Tokens read anew, where the editor shows 20 lines before the cursor."""
        found = infill(server, id_slot=slot, input_prefix="".join(lines[last - 20 : last]), prompt="", input_extra=[])
        return int(found["timings"]["prompt_n"])

    window = read(9, 20)
    assert window > 200
    assert all(read(9, last) < window / 3 for last in range(21, 40))
    # llama.vscode names no slot: a window goes on from the one that it overlaps with.
    read(-1, 20)
    assert all(read(-1, last) < window / 3 for last in range(21, 40))
    assert read(7, 30) > window / 2  # another editor's slot, which has shown nothing yet


def test_only_windows_of_one_text_are_joined() -> None:
    text = "".join(f"line {i}\n" for i in range(300))
    old, new = text[:2000], text[16:2010]
    assert join(old, new) == join(old + "something that was suggested", new) == text[:2010]
    assert join("", new) == join("another text", new) == new
    assert join(old, new[:300] + "x" * 1500) == new[:300] + "x" * 1500
    assert join(text[:3000], text[1700:2800]) == text[1700:2800]  # more than two windows


def test_windows_without_a_slot_are_told_apart_by_their_text_and_few_are_remembered() -> None:
    one, two = ("".join(f"{word} {i}\n" for i in range(100)) for word in ("line", "row"))
    windows = Windows()
    for text in (one, two):
        assert windows.joined(None, text) == text
    assert windows.joined(None, one[7:] + "and") == one + "and"
    assert windows.joined(None, two[6:]) == two
    assert windows.joined(None, one[14:] + "and more") == one + "and more"  # both are there still
    assert windows.joined(None, one[7:60]) == one[7:60]  # too little to be told apart
    assert windows.joined(3, one[7:]) == one[7:]  # what has a slot is another editor's
    for slot in range(MAX_WINDOWS):
        windows.joined(slot, one)
    assert windows.joined(None, one[21:]) == one[21:]
    assert windows.joined(MAX_WINDOWS - 1, one[7:]) == one
    long = one * (MAX_CHARACTERS // len(one) + 1)
    windows.joined(1, long)
    assert windows.joined(1, long[7:]) == long[7:]


def meanwhile(server: Server, older: dict[str, Any], *newer: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Answers to a request of slot 0, and to others that come while it runs."""

    def ask(changes: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, _, body = server.ask("POST", "/infill", VIM | changes)
        return status, json.loads(body)

    llm = server.service.llm
    with ThreadPoolExecutor() as pool, Brake(llm) as brake:
        first = pool.submit(ask, ENDLESS | older)
        brake.wait()
        found = [pool.submit(ask, changes) for changes in newer]
        wait_until(lambda: llm.queue_length == len(newer) or first.done() or all(each.done() for each in found))
        brake.release()
        return [each.result() for each in (first, *found)]


def test_a_newer_request_takes_the_slot(server: Server) -> None:
    (status, refusal), (_, newer) = meanwhile(server, {}, {"prompt": TYPED + "a"})
    assert (status, refusal["error"]["code"]) == (409, "superseded")
    assert newer["timings"]["predicted_n"] > 0
    server.wait_idle()


def test_a_request_that_is_refused_leaves_the_older_one_alone(llm: LLM) -> None:
    with serve(llm, queue=0) as server:
        (status, older), (refused, refusal) = meanwhile(server, {"n_predict": 100}, {})
    assert (refused, refusal["error"]["code"]) == (429, "queue_full")
    assert (status, older["tokens_predicted"]) == (200, 100)


def test_other_slots_and_what_is_read_ahead_wait_for_their_turn(server: Server) -> None:
    found = meanwhile(server, {"n_predict": 100}, {"id_slot": 1}, {"id_slot": -1})
    assert [(status, answer["stop"]) for status, answer in found] == [(200, True)] * 3
    (status, _), (_, nothing) = meanwhile(server, {"n_predict": 100}, {"n_predict": 0})
    assert (status, nothing["content"]) == (200, "")


def test_a_newer_request_may_be_gone_before_the_older_one_has_cleaned_up() -> None:
    async def both() -> None:
        slots, begun, cleaned_up = Slots(), asyncio.Event(), asyncio.Event()

        async def older() -> None:
            with slots.newest(0):
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await cleaned_up.wait()

        task = asyncio.create_task(older())
        await begun.wait()
        with slots.newest(0):
            pass
        cleaned_up.set()
        await task

    with pytest.raises(ApiError) as refused:
        asyncio.run(both())
    assert (refused.value.status, refused.value.code) == (409, "superseded")


def test_a_prediction_is_heeded_as_in_the_other_apis(llm: LLM, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, job = list[Any](), LLM.job
    monkeypatch.setattr(LLM, "job", lambda llm, *given, **options: asked.append(options) or job(llm, *given, **options))
    infill(server, prediction={"type": "content", "content": "area of r"}, n_predict=2)
    infill(server, n_predict=2)
    assert [options.get("prediction") for options in asked] == [llm.tokenize("area of r"), None]


def test_a_model_that_cannot_says_so(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny.quick.target, draft=None, backend="reference", n_ctx=256) as llm, serve(llm) as server:
        for path, body in (("/infill", VIM), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
            status, _, said = server.ask("POST", path, body)
            assert (status, b"no fill-in-the-middle tokens" in said) == (400, True)
        status, _, said = server.ask("POST", "/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 2})
        assert status == 200  # nothing to fill in: as OpenAI's own


def test_a_suffix_by_openai_s_package(llm: LLM, client: openai.OpenAI) -> None:
    expected = llm.fill(BEFORE, BEHIND, SamplingParams(max_tokens=16))
    ask: Any = {"model": llm.model_name, "prompt": BEFORE, "suffix": BEHIND, "max_tokens": 16, "temperature": 0}
    found = client.completions.create(**ask, extra_body={"localspec": {"draft_length": 4}})
    assert found.choices[0].text == expected.text
    assert found.usage.prompt_tokens == expected.stats["prompt_tokens"]
    assert found.usage.completion_tokens_details.accepted_prediction_tokens
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
    assert "".join(pieces) == expected.text
    with pytest.raises(openai.BadRequestError, match="prompt must be a text where there is a suffix"):
        client.completions.create(model=llm.model_name, prompt=[1, 2], suffix="x")


def test_marks_that_an_editor_wrote_itself(llm: LLM, server: Server) -> None:
    """Zed and Continue have the forms of prompts built in, and send a text."""

    def ask(before: str) -> dict[str, Any]:
        prompt = f"<|fim_prefix|>{before}<|fim_suffix|>{BEHIND}<|fim_middle|>"
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "stop": ["<|endoftext|>"]}
        return json.loads(server.ask("POST", "/v1/completions", body)[2])

    assert ask(BEFORE)["choices"][0]["text"] == llm.fill(BEFORE, BEHIND, SamplingParams(max_tokens=16)).text
    next_one = ask(BEFORE + "x")["usage"]
    assert next_one["prompt_tokens_details"]["cached_tokens"] > next_one["prompt_tokens"] // 2
    assert llm.marked_fill_prompt("<|fim_prefix|>a<|fim_suffix|>") is None
