"""Several requests at a time: each answer is what it is alone, whoever comes and goes, and nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, LocalspecError, SamplingParams
from localspec.backends.base import Forward, Piece, SequenceBatch
from localspec.controllers import batching as batching_module
from localspec.controllers.batching import LEAST_ROWS, STALL, SharedPasses
from localspec.errors import EngineError
from tests.conftest import TinyFiles
from tests.support.memory import check_only_conversations_are_held, passes_of
from tests.support.waiting import PATIENCE, Brake

N_CTX = 192
N_PARALLEL = 4
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    drafts = ["ngram", str(tiny.quick.draft)]
    with LLM(tiny.quick.target, draft=drafts, backend="reference", n_ctx=N_CTX, parallel=N_PARALLEL) as loaded:
        yield loaded


def batch_of(llm: LLM) -> SequenceBatch:
    return llm.inspect().state.batch


def check_nothing_is_left(llm: LLM) -> None:
    """No request runs, and every token in the memory is one of a conversation that is kept."""
    info = llm.parallel_info()
    assert (info["parallel"], info["running"], info["reason"]) == (N_PARALLEL, 0, "as asked for")

    llm.run(check_only_conversations_are_held)


def test_a_long_prompt_is_read_beside_a_stream_in_pieces(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def ms(width: int) -> float:
        return 1 + 0.2 * width

    monkeypatch.setattr(batching_module, "LONG_MS", 0.0)
    monkeypatch.setattr(batching_module, "LEARNED", 0.0)
    monkeypatch.setattr(SharedPasses, "__call__", lambda _, width: ms(width))  # whatever this machine's passes take
    prompts = llm.inspect().worker.batch.__self__._memory.passes.prompts  # type: ignore[union-attr] # the scheduler's
    monkeypatch.setattr(prompts, "_dearer", {False: 1.0, True: 1.0})  # whatever was learned before
    fed = passes_of(batch_of(llm), monkeypatch)
    with Brake(llm, after=3) as brake:
        stream = llm.rounds("la", SamplingParams(max_tokens=150, ignore_eos=True), speculate=False)
        brake.wait()
        long = llm.rounds("lo " * 55, SamplingParams(max_tokens=2, ignore_eos=True), speculate=False)
        brake.release()
        assert len(long.reply.token_ids) == 2
        stream.close()
    beside = [
        (n_prompt, n_rows)
        for pieces in fed
        if (n_prompt := sum(len(piece.tokens) for piece in pieces if piece.logits != "all"))
        and (n_rows := sum(len(piece.tokens) for piece in pieces if piece.logits == "all"))
    ]
    assert len(beside) > 1
    widest = max(n_prompt + n_rows for n_prompt, n_rows in beside)
    assert widest > LEAST_ROWS + 1
    assert ms(widest) <= STALL * ms(1)


def test_plain_decoding_is_estimated_for_answers_that_had_no_company(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.inspect().times.noisy = llm.inspect().times.quick = False
    repeated = llm.generate("la la", params).token_ids[3:]
    alone = llm.generate("la la", params, prediction=repeated, draft_length=3).stats
    assert alone["num_draft_tokens"]
    assert alone["estimated_speedup"] > 0
    with Brake(llm, after=0):
        other, one = llm.rounds("lo", params), llm.rounds("la la", params)
    assert one.reply.stats["estimated_speedup"] is None
    assert other.reply.stats["estimated_speedup"] is None
    check_nothing_is_left(llm)


def test_a_failing_pass_ends_only_the_answer_that_caused_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text, params = "la la lo " * 4, SamplingParams(max_tokens=27, seed=3, ignore_eos=True)
    alone = llm.generate(text, params).token_ids
    batch = batch_of(llm)
    decode = batch._decode
    bad = 1 + max(llm.tokenize(text))

    def failing(pieces: Sequence[Piece]) -> list[Forward]:
        if any(bad in piece.tokens for piece in pieces):
            raise EngineError("it broke")
        return decode(pieces)

    monkeypatch.setattr(batch, "_decode", failing)
    good, broken = llm.rounds(text, params), llm.rounds([bad] * 9, params)
    with pytest.raises(EngineError, match="it broke"):
        _ = broken.reply
    assert good.reply.token_ids == alone
    monkeypatch.undo()
    check_nothing_is_left(llm)


def test_exclusive_work_waits_and_is_not_starved(llm: LLM) -> None:
    endless = threading.Event()

    def client() -> None:
        while not endless.is_set():
            llm.generate("la", SamplingParams(max_tokens=5, ignore_eos=True))

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert llm.run(lambda pair: llm.parallel_info()["running"]) == 1
    assert len(llm.logprobs("la la")) > 1
    endless.set()
    for thread in threads:
        thread.join(PATIENCE)


@pytest.mark.parametrize("priority", [1.5, "high", None, True])
def test_priorities_that_make_no_sense_are_refused(llm: LLM, priority: Any) -> None:
    with pytest.raises(LocalspecError, match="priority must be a whole number"):
        llm.rounds("la", priority=priority)


def test_what_belongs_to_one_answer_stays_its_own(llm: LLM) -> None:
    """Its explanation; and the conversation last worked on is that of the answer that ended last."""
    short, long = llm.tokenize("la la lo la la lo"), llm.tokenize("lo la lo")
    with Brake(llm, after=0) as brake:
        first = llm.rounds(long, LONG, drafters=[])
        second = llm.rounds(short, SHORT, keep_tokens=3)  # begins last
        brake.release()
        assert second.reply.finish_reason == first.reply.finish_reason == "length"
    assert "Guessing is off." in first.reply.explanation
    assert "Guessing is off." not in second.reply.explanation
    assert llm.run(lambda pair: list(pair.conversation)) == [*long, *first.reply.token_ids]
