"""Where drafters go on while the target verifies, and what of it a user sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from localspec import LLM, SamplingParams
from localspec.engine import drafts as drafts_module
from localspec.spec_decode.ahead import DraftAhead
from tests.conftest import Backend, TinyFiles
from tests.support.waiting_engine import Timing, waiting

pytestmark = pytest.mark.usefixtures("measured_home")

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture
def files(tiny: TinyFiles) -> tuple[Path, Path]:
    return tiny.quick.target, tiny.quick.draft


def loaded(files: tuple[Path, Path], target: str, draft: str) -> Iterator[LLM]:
    timings = {files[0]: Timing(6.0, device=target), files[1]: Timing(0.5, device=draft, right=0.8)}
    with waiting(timings), LLM(*files, backend="reference", n_ctx=256, idle=False, remember=False) as llm:
        yield llm


@pytest.fixture
def apart(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr("localspec.engine.state.sys", SimpleNamespace(platform="linux"))
    yield from loaded(files, "gpu", "cpu")


@pytest.mark.parametrize(
    ("system", "target", "draft"),
    [
        ("linux", "cpu", "cpu"),
        ("linux", "gpu", "gpu"),
        ("linux", "mixed", "cpu"),
        ("linux", "gpu", "mixed"),
        ("darwin", "gpu", "cpu"),  # a Mac's devices share their memory
    ],
)
def test_devices_that_are_shared_are_left_alone(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, system: str, target: str, draft: str
) -> None:
    monkeypatch.setattr("localspec.engine.state.sys", SimpleNamespace(platform=system))
    for llm in loaded(files, target, draft):
        assert llm.run(lambda pair: pair.state.drafting_ahead) is None
        reply = llm.generate("one two", PARAMS, draft_length=3)
        assert reply.stats["num_ahead_tokens"] == reply.stats["num_ahead_hits"] == 0
        assert all("ahead" not in round_.as_event() for round_ in llm.rounds("one two", PARAMS, draft_length=3))


def test_a_target_on_a_gpu_and_a_draft_on_the_cpu_work_at_once(apart: LLM) -> None:
    ordinary = apart.generate("one two", PARAMS, speculate=False)
    stream = apart.rounds("one two", PARAMS, draft_length=3)
    events = [round_.as_event()["ahead"] for round_ in stream]
    stats = stream.reply.stats
    assert stream.reply.token_ids == ordinary.token_ids
    assert stats["num_ahead_hits"] == sum(event["hit"] for event in events) > 0
    assert stats["num_ahead_tokens"] == sum(event["prepared"] for event in events)
    assert stats["num_ahead_tokens_used"] == sum(event["taken"] for event in events) > 0
    assert stats["num_ahead_tokens_used"] < stats["num_ahead_tokens"]


def test_auto_lengths_take_what_was_prepared(apart: LLM) -> None:
    plain = apart.generate("one two", PARAMS, speculate=False)
    used = 0
    for _ in range(8):  # it begins with a look at how the draft does
        reply = apart.generate("one two", PARAMS)
        assert reply.token_ids == plain.token_ids
        used += reply.stats["num_ahead_tokens_used"]
    assert used > 0


def test_another_draft_is_another_choice(files: tuple[Path, Path], apart: LLM) -> None:
    apart.set_draft("ngram")
    assert apart.run(lambda pair: pair.state.drafting_ahead) is None
    apart.set_draft(files[1])
    assert apart.generate("one two", PARAMS, draft_length=3).stats["num_ahead_tokens"] > 0


def test_two_contexts_of_a_real_engine_work_at_once(
    tiny: TinyFiles, fast_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one thread's at a time, and both are as they were before when the answer is over."""
    monkeypatch.setattr(drafts_module, "ahead_of", lambda target, drafts: DraftAhead(cautious=False, n_steps=8))
    options = {"n_ctx": 256, "n_threads": 1, "idle": False, "remember": False, "light_draft": False}
    with LLM(tiny.pair.target, tiny.pair.draft, backend=fast_backend.name, **options) as llm:  # type: ignore[arg-type]
        plain = llm.generate("one two", PARAMS, speculate=False)
        for seed in (None, 1, 2):
            params = PARAMS if seed is None else replace(PARAMS, temperature=0.7, seed=seed)
            reply = llm.generate("one two", params, draft_length=3)
            assert len(reply.token_ids) == 40
            assert reply.stats["num_ahead_tokens_used"] > 0
        assert llm.generate("one two", PARAMS, speculate=False).token_ids == plain.token_ids
