"""Draft models and heads of several answers at a time: each drafts as it does alone, in a memory of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, Reply, SamplingParams
from localspec.backends.base import Context, Forward, Piece, SequenceBatch, SequencesInTurn
from localspec.controllers import batching as batching_module
from localspec.controllers.cost_model import PassTimes
from localspec.engine import state
from localspec.engine.pair import Pair
from localspec.errors import EngineError, EngineMismatch
from localspec.sampling.sampling import Noise
from localspec.spec_decode.drafters.base import Plan, Proposer
from tests.conftest import TinyFiles
from tests.support.contexts import watch_passes
from tests.support.enumeration import law_of_two
from tests.support.heads import write_random_head
from tests.support.memory import passes_of, share_every_pass, shared_memories
from tests.support.waiting import Brake

N_CTX = 192
N_PARALLEL = 4


class Known(PassTimes):
    """A curve that passes do not correct."""

    def observe(self, width: int, ms: float) -> None:
        pass


@pytest.fixture(autouse=True)
def whatever_passes_take_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass is shared, and nothing is learned of what a row pays for cells."""
    share_every_pass(monkeypatch)
    monkeypatch.setattr(batching_module.SharedPasses, "observe", lambda *observed: None)


def asked(i: int) -> tuple[str, SamplingParams, dict[str, Any]]:
    """Every prompt begins otherwise, so that nothing depends on who was here before."""
    params = SamplingParams(max_tokens=12 + i * 7 % 30, temperature=[0.0, 1.0][i % 2], seed=i, ignore_eos=True)
    return f"{i} " + "la la lo " * (1 + i % 5), params, {"draft_length": 1 + i % 4}


def memory_of(llm: LLM) -> SequenceBatch:
    return llm.inspect().state.models[0].memory.batch


def target_passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[Piece]]:
    return passes_of(shared_memories(llm.inspect())[0], monkeypatch)


def counts(reply: Reply) -> Any:
    return reply.token_ids, {
        source: (each["num_draft_tokens"], each["num_accepted_tokens"])
        for source, each in reply.stats["by_source"].items()
    }


@pytest.mark.parametrize("kind", ["model", "chained", "early-exit"])
def test_each_drafts_and_says_what_it_does_alone(
    kind: Any, tiny: TinyFiles, measured_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft: Any = {"model": tiny.quick.draft, "early-exit": "early-exit:1"}.get(kind)
    draft = draft or f"head:{write_random_head(tiny.quick.target, tmp_path / 'head.gguf', kind)}"
    options: Any = {"draft": draft, "backend": "reference", "n_ctx": N_CTX, "prefix_cache_bytes": 0}
    questions = [asked(i) for i in range(16)]
    with LLM(tiny.quick.target, **options) as llm:
        alone = [llm.generate(text, params, **given) for text, params, given in questions]
    with LLM(tiny.quick.target, parallel=N_PARALLEL, **options) as llm:
        fed = target_passes(llm, monkeypatch)
        with Brake(llm, after=0):  # they begin together
            streams = [llm.rounds(text, params, **given) for text, params, given in questions]
        assert [counts(stream.reply) for stream in streams] == list(map(counts, alone))
        assert llm.warnings == []
    drafted = [sum(len(piece.tokens) > 1 for piece in pieces if piece.logits == "all") for pieces in fed]
    assert max(drafted) == N_PARALLEL
    assert sum(reply.stats["num_accepted_tokens"] for reply in alone) > 0


# What only draft models have.


@pytest.fixture
def drafted(tiny: TinyFiles, measured_home: Path) -> Iterator[LLM]:
    options: Any = {"backend": "reference", "n_ctx": N_CTX, "parallel": N_PARALLEL, "idle": False, "remember": False}
    with LLM(tiny.quick.target, tiny.quick.draft, **options) as llm:
        yield llm


def test_the_law_of_free_draws_with_neighbours(drafted: LLM) -> None:
    """Chi-squared over two tokens of three likely ones each, n = 400; false alarms under 1e-4 (8 degrees: 31.8)."""
    prompt = drafted.tokenize("la la lo la la lo la")
    free = SamplingParams(max_tokens=2, temperature=1.5, top_k=3, ignore_eos=True)
    expected = drafted.run(lambda pair: law_of_two(pair.context, prompt, free))
    replies = [stream.reply for stream in [drafted.rounds(prompt, free, draft_length=2) for _ in range(400)]]
    drawn = Counter(tuple(reply.token_ids) for reply in replies)
    assert sum(reply.stats["num_draft_tokens"] for reply in replies) > 100
    assert set(drawn) <= set(expected)
    assert sum((drawn[pair] - 400 * p) ** 2 / (400 * p) for pair, p in expected.items()) < 31.8


def expect(llm: LLM, target: PassTimes, draft: PassTimes) -> None:
    """Have passes cost so much."""

    def put(pair: Pair) -> None:
        fork = pair.state.fork()
        fork.times, fork.models[0].times = target, draft
        fork.models[0].memory = pair.state.models[0].memory
        pair.use(fork)

    llm.run(put)


def test_rows_go_to_the_draft_tokens_that_are_worth_most(drafted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows beside those of four answers cost nothing, and all further ones more than they can bring."""
    n_free = 3
    expect(drafted, Known({1: 10.0, N_PARALLEL + n_free: 10.0, N_PARALLEL + n_free + 1: 500.0}), Known({1: 0.1}))
    fed = target_passes(drafted, monkeypatch)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with Brake(drafted, after=0):  # they begin together
        streams = [drafted.rounds(f"{i} la la lo", params) for i in range(N_PARALLEL)]
    assert all(stream.reply.stats["num_accepted_tokens"] for stream in streams)
    widths = [
        (len(pieces), sum(len(piece.tokens) for piece in pieces))
        for pieces in fed
        if all(piece.logits == "all" for piece in pieces)
    ]
    assert max(width for _, width in widths) <= N_PARALLEL + n_free
    assert any(n == N_PARALLEL and width > n for n, width in widths)


def test_a_draft_model_reads_a_long_prompt_in_pieces(drafted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_module, "STALL", 0.5)
    expect(drafted, Known({1: 10.0, 64: 10.5}), Known({1: 0.2, 200: 30.0}))
    read = watch_passes(drafted.inspect().state.models[0].context, monkeypatch)
    reply = drafted.generate("lo " * 55, SamplingParams(max_tokens=24, ignore_eos=True))
    assert reply.stats["num_draft_tokens"] > 0
    assert sum(read) > 110
    assert max(read) < 40  # half a pass of the target is 33 of these


def test_a_draft_memory_without_room_drafts_nothing_and_goes_on_later(drafted: LLM) -> None:
    params = [SamplingParams(max_tokens=60, seed=i, temperature=1.0, ignore_eos=True) for i in range(3)]
    before = [drafted.generate("la la", each, speculate=False).token_ids for each in params]
    memory = memory_of(drafted)

    def fill(pair: Pair) -> None:
        for i in range(N_PARALLEL):
            memory[i].truncate(0)
        memory[3].decode([1] * N_CTX, "none")
        memory[2].decode([1] * (N_CTX - 10), "none")
        memory.cells.take(0, 10)  # somebody else's

    drafted.run(fill)
    with Brake(drafted, after=0):  # they begin together
        streams = [drafted.rounds("la la", each, draft_length=3) for each in params]
    replies = [stream.reply for stream in streams]
    assert [reply.token_ids for reply in replies] == before
    assert drafted.warnings == []
    assert drafted.generate("la la", params[0], draft_length=3).stats["num_draft_tokens"] > 0


def test_an_early_exit_drafts_nothing_where_the_targets_memory_is_full(tiny: TinyFiles, measured_home: Path) -> None:
    with LLM(tiny.quick.target, "early-exit:1", backend="reference", n_ctx=N_CTX, parallel=2, idle=False) as llm:

        def drafted(pair: Pair, n_free: int) -> int:
            batch, drafter = pair.state.batch, pair.state.models[0].drafter
            batch[0].truncate(0)
            batch[0].decode([5, 6], "none")
            batch.cells.take(1, batch.free_cells - n_free)  # somebody else's
            drafter.begin([5, 6, 7], target=batch[0])
            draft = drafter.draft([5, 6, 7], Plan(2), Proposer(SamplingParams(), Noise(0)))
            batch[0].truncate(2)
            batch.cells.cut(1, 0)
            return len(draft)

        assert llm.run(lambda pair: [drafted(pair, 1), drafted(pair, 0)]) == [1, 0]


def test_a_draft_that_fails_in_one_answer_drafts_on_in_the_others(
    drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    before = drafted.generate("la la lo", params, speculate=False).token_ids

    def fail(*given: object) -> Forward:
        raise EngineError("it broke")

    monkeypatch.setattr(memory_of(drafted)[1], "_decode", fail)
    with Brake(drafted, after=0):  # they begin together
        streams = [drafted.rounds("la la lo", params, draft_length=2) for _ in range(N_PARALLEL)]
    replies = [stream.reply for stream in streams]
    assert [reply.token_ids for reply in replies] == [before] * N_PARALLEL
    assert sum(reply.stats["num_draft_tokens"] == 0 for reply in replies) == 1
    assert len(drafted.warnings) == 1


def test_other_drafters_take_the_place_of_these_and_free_their_memory(drafted: LLM, tiny: TinyFiles) -> None:
    memory, params = memory_of(drafted), SamplingParams(max_tokens=20, ignore_eos=True)
    before = drafted.generate("la la lo", params).token_ids
    drafted.set_draft("ngram")
    assert memory.closed
    assert not any(context.model is memory.model for context in drafted.inspect().prefix_cache._batches)
    drafted.set_draft([tiny.quick.draft, "early-exit:1"])
    with Brake(drafted, after=0):  # they begin together
        streams = [drafted.rounds("la la lo", params, draft_length=2) for _ in range(N_PARALLEL)]
    assert [stream.reply.token_ids for stream in streams] == [before] * N_PARALLEL
    assert all("model" in stream.reply.stats["by_source"] for stream in streams)
    memory = memory_of(drafted)
    drafted.close()
    assert memory.closed


def test_where_an_engine_is_wrong_about_several_sequences_each_draft_has_a_context(
    tiny: TinyFiles, measured_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise EngineMismatch("no")

    monkeypatch.setattr(state, "ensure_batches", wrong)
    with LLM(tiny.quick.target, tiny.quick.draft, backend="reference", n_ctx=N_CTX, parallel=2, idle=False) as llm:
        assert isinstance(memory_of(llm), SequencesInTurn)
        contexts: list[Context] = [memory_of(llm)[i] for i in range(2)]
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        with Brake(llm, after=0):  # they begin together
            streams = [llm.rounds("la la lo", params, draft_length=2) for _ in range(2)]
        replies = [stream.reply for stream in streams]
        assert replies[0].token_ids == replies[1].token_ids
        assert all(reply.stats["num_draft_tokens"] for reply in replies)
        assert all(context.n_past for context in contexts)
