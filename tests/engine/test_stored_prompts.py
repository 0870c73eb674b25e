"""The prompt cache on the disk: what is read again after a restart, and what is never taken for something else."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.engine import stored_prompts
from localspec.engine.stored_prompts import GROWTH, MIN_STORED
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support.contexts import some_tokens
from tests.support.program import localspec
from tests.support.serving import serve
from tests.support.waiting import Brake

pytestmark = pytest.mark.usefixtures("measured_home")

GB = 10**9
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


def some(n: int, seed: int = 0) -> list[int]:
    return some_tokens(n, seed, 280)


PROMPT = some(900)


def opened(path: Path, draft: Any = None, **options: Any) -> LLM:
    given = {
        "backend": "reference",
        "n_ctx": 2048,
        "n_threads": 1,
        "prompt_cache_bytes": GB,
        "remember": False,
    } | options
    return LLM(path, draft, **given)


def cached(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, list[int]]:
    """How many tokens of a prompt were known, and the answer's tokens."""
    reply = llm.generate(prompt, params)
    return reply.stats["cached_tokens"], reply.token_ids


def store(path: Path, prompt: list[int] = PROMPT, **options: Any) -> None:
    with opened(path, **options) as llm:
        assert cached(llm, prompt)[0] == 0


@pytest.mark.parametrize("parallel", [1, 2])
def test_after_a_restart_only_what_is_new_is_read_and_the_answer_is_the_same(
    tiny: TinyFiles, backend: Backend, parallel: int
) -> None:
    """In target and draft, on every engine; the next turn of a conversation too."""
    files, options = tiny.quick, {"backend": backend.name, "parallel": parallel, "draft_length": 3}
    with opened(files.target, files.draft, **options) as llm:
        first = llm.generate(PROMPT, SAMPLED)
        more = [*PROMPT, *first.token_ids, *some(40, 1)]
        # The same memory without a restart: what the second answer is compared with.
        assert llm.wait_idle(60)
        then = cached(llm, more, SAMPLED)
    assert then[0] >= len(PROMPT)
    shutil.rmtree(stored_prompts.folder())
    with opened(files.target, files.draft, **options) as llm:
        assert llm.generate(PROMPT, SAMPLED).token_ids == first.token_ids
    with opened(files.target, files.draft, **options) as llm:
        assert cached(llm, PROMPT, SAMPLED) == (len(PROMPT) - 1, first.token_ids)
        assert llm.cache_info()["restored"] == 2  # target and draft
        draft = llm.inspect().state.models[0].context
        assert draft.tokens[: len(PROMPT)] == PROMPT
        with opened(files.target, files.draft, **options, prompt_cache_bytes=0) as other:
            assert other.generate(PROMPT, SAMPLED).stats["cached_tokens"] == 0
    with opened(files.target, files.draft, **options) as llm:
        assert cached(llm, more, SAMPLED) == then


def test_it_is_written_while_nothing_is_asked_and_at_the_end_and_by_this_user_alone(tiny: TinyFiles) -> None:
    with opened(tiny.quick.target) as llm:
        llm.generate(some(MIN_STORED - 100), GREEDY)
        assert llm.wait_idle(60)
        assert stored_prompts.stored_prompts() == []  # too short
        llm.generate(PROMPT, GREEDY)
        assert llm.wait_idle(60)
        (kept,) = stored_prompts.stored_prompts()
        assert list(kept.tokens[: len(PROMPT)]) == PROMPT
        assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700
        grown = [*kept.tokens, *some(200, 2)]
        llm.generate(grown, GREEDY)
        assert llm.wait_idle(60)
        assert stored_prompts.stored_prompts() == [kept]  # a disk wears
        llm.generate([*grown, *some(GROWTH, 3)], GREEDY)
        assert llm.wait_idle(60)
        (kept,) = stored_prompts.stored_prompts()  # it has all that the other had
        assert len(kept.tokens) >= len(grown) + GROWTH
        llm.generate([*kept.tokens, *some(150, 4)], GREEDY)
    assert len(stored_prompts.stored_prompts()[0].tokens) >= len(kept.tokens) + 150


def test_a_request_does_not_wait_for_the_writing(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for one step at most; what was begun is written later."""
    monkeypatch.setattr("localspec.engine.saved._PIECE", 1 << 12)
    with opened(tiny.quick.target) as llm:
        with Brake(llm, after=0):  # nothing is idle until both wait
            one, other = llm.rounds(PROMPT, GREEDY), llm.rounds(some(800, 5), GREEDY)
        assert one.reply.token_ids
        assert other.reply.stats["cached_tokens"] == 0
        assert llm.wait_idle(60)
        # The first was put aside in memory for the second; both are there.
        assert sorted(len(each.tokens) // 100 for each in stored_prompts.stored_prompts()) == [8, 9]


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("file", {}),
        ("engine", {}),
        ("machine", {}),
        ("memory", {"parallel": 2}),
        ("ropes", {"n_ctx": 1500}),
        ("kv type", {"kv_cache_type": "f32"}),
        ("gpu layers", {"n_gpu_layers": 0}),
    ],
)
def test_it_is_used_by_what_made_it_and_by_nothing_else(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, changed: dict[str, Any]
) -> None:
    path, options = tmp_path / "model.gguf", dict[str, Any]()
    if what in ("kv type", "gpu layers"):
        options = {"backend": open_backend("llama-cpp").name}
    shutil.copy(tiny.quick.target, path)
    if what == "ropes":
        monkeypatch.setattr("localspec.engine.stored_prompts.LONG_ROPE", "token_embd.weight")
    store(path, **options)
    with opened(path, **options) as llm:
        assert cached(llm, PROMPT)[0] == len(PROMPT) - 1  # it can be used
    if what == "file":
        shutil.copy(tiny.quick.draft, path)
    elif what == "engine":
        monkeypatch.setattr("numpy.__version__", "a newer one")
    elif what == "machine":
        monkeypatch.setattr("localspec.engine.stored_prompts.cpu_name", lambda: "another")
    with opened(path, **options, **changed) as llm:
        found = cached(llm, PROMPT)
        assert found[0] == 0
        with opened(path, **options, **(changed | {"prompt_cache_bytes": 0})) as other:
            assert found[1] == cached(other, PROMPT)[1]


def test_a_file_that_goes_by_another_name_is_not_used(tiny: TinyFiles) -> None:
    store(tiny.quick.target)
    (kept,) = stored_prompts.stored_prompts()
    with opened(tiny.pair.target) as llm:
        llm.generate(PROMPT, GREEDY)
    (other,) = [each for each in stored_prompts.stored_prompts() if each.path != kept.path]
    shutil.copy(kept.path, other.path)
    with opened(tiny.pair.target) as llm:
        assert cached(llm, PROMPT)[0] == 0


@pytest.mark.parametrize("damage", ["header", "state", "cut", "empty"])
def test_a_damaged_one_is_read_anew(tiny: TinyFiles, damage: str) -> None:
    store(tiny.quick.target)
    (kept,) = stored_prompts.stored_prompts()
    data = bytearray(kept.path.read_bytes())
    if damage in ("header", "state"):
        data[80 if damage == "header" else -20] ^= 1
    kept.path.write_bytes({"cut": data[: len(data) // 2], "empty": b""}.get(damage, data))
    with opened(tiny.quick.target) as llm:
        found = cached(llm, PROMPT)
        assert found[0] == 0
        assert not kept.path.exists() or kept.path.read_bytes() != data
    with opened(tiny.quick.target) as llm:
        assert cached(llm, PROMPT) == (len(PROMPT) - 1, found[1])


def test_the_least_recently_used_goes_first_and_the_bound_holds(tiny: TinyFiles) -> None:
    prompts = [some(600, seed) for seed in range(3)]
    store(tiny.quick.target, prompts[0])
    (first,) = stored_prompts.stored_prompts()
    bound = int(2.5 * first.n_bytes)
    os.utime(first.path, (1, 1))
    store(tiny.quick.target, prompts[1], prompt_cache_bytes=bound)
    os.utime(next(each.path for each in stored_prompts.stored_prompts() if each != first), (2, 2))
    with opened(tiny.quick.target, prompt_cache_bytes=bound) as llm:
        assert cached(llm, prompts[0])[0] == len(prompts[0]) - 1  # now it was used last
        llm.generate(prompts[2], GREEDY)
    found = stored_prompts.stored_prompts()
    assert sum(each.n_bytes for each in found) <= bound
    assert sorted(prompts.index(list(each.tokens[:600])) for each in found) == [0, 2]
    with opened(tiny.quick.target, prompt_cache_bytes=first.n_bytes // 2) as llm:  # too small for any
        llm.generate(some(600, 9), GREEDY)
    assert len(stored_prompts.stored_prompts()) == 2


def test_a_disk_that_takes_nothing_costs_one_line(tiny: TinyFiles) -> None:
    stored_prompts.folder().write_text("in the way")
    with opened(tiny.quick.target) as llm:
        assert llm.generate(PROMPT, GREEDY).token_ids
        assert llm.wait_idle(60)
        (line,) = [line for line in llm.warnings if "prompts are not kept on the disk any more" in line]
        assert "\n" not in line
        assert llm.generate(PROMPT, GREEDY).token_ids


def _ask(path: Path, seeds: list[int], answers: Any) -> None:
    with opened(path, prompt_cache_bytes=1 << 21, idle=True) as llm:
        for seed in seeds:
            answers.put((seed, llm.generate(some(700, seed), GREEDY).token_ids))
            llm.wait_idle(60)


def test_two_processes_may_use_it_at_once(tiny: TinyFiles) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    both = [
        spawn.Process(target=_ask, args=(tiny.quick.target, seeds, answers)) for seeds in ([0, 1, 2] * 2, [2, 1, 0] * 2)
    ]
    for each in both:
        each.start()
    found = [answers.get(timeout=240) for _ in range(12)]
    for each in both:
        each.join()
        assert each.exitcode == 0
    assert len({(seed, tuple(tokens)) for seed, tokens in found}) == 3
    assert not [path for path in stored_prompts.folder().iterdir() if path.suffix != ".prompt"]


def test_a_server_restarted_and_the_command(tiny: TinyFiles) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "return_progress": True, "stream": True}
    for times in range(2):
        with opened(tiny.quick.target) as llm, serve(llm) as server:
            said = server.ask("POST", "/v1/completions", body)[2].decode()
            assert ("prompt_progress" in said) is (times == 0)
    listed = localspec("cache")
    assert listed.returncode == 0
    assert tiny.quick.target.name in listed.stdout.decode()
    (row,) = json.loads(localspec("cache", "--json").stdout)["prompts"]
    assert row["tokens"] >= len(PROMPT)
    assert localspec("cache", "--clear").stdout.startswith(b"deleted 1 prompt (")
    assert stored_prompts.stored_prompts() == []
    assert localspec("cache").stdout.startswith(b"0 prompts")


def test_the_option(tiny: TinyFiles) -> None:
    options = [tiny.quick.target, "--draft", "none", "--backend", "reference", "--max-tokens", "3", "--ctx", "2048"]
    question = ("la lo li lu " * 90).encode()
    assert localspec("chat", *options, "--prompt-cache", "0", stdin=question).returncode == 0
    assert stored_prompts.stored_prompts() == []
    assert localspec("chat", *options, stdin=question).returncode == 0
    assert len(stored_prompts.stored_prompts()) == 1
    wrong = localspec("chat", *options, "--prompt-cache", "plenty")
    assert (wrong.returncode, wrong.stderr.count(b"\n")) == (2, 1)
    with LLM(tiny.quick.target, None, backend="reference") as llm:  # programs say that they want it
        assert llm.inspect().options.prompt_cache_bytes == 0
