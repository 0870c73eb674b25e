"""What a scheduler does with several sequences: shared prefixes, one room for all, states out and in, broken passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from localspec.backends.base import Context, Model, Piece, SequenceBatch
from localspec.errors import Cancelled, Closed, ContextFull, EngineError, UsageError
from tests.backends.test_backends import NOISE, agree, fresh_rows, rows, some_tokens
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support import ggufs


@pytest.fixture(scope="module")
def model(backend: Backend, tiny: TinyFiles) -> Iterator[Model]:
    """With heads of 64 channels, on which ik-llama's flash attention ends the process over rows of two sequences."""
    shape = ggufs.Shape(n_layer=2, n_head=2, n_head_kv=1)
    with backend.load(ggufs.write_llama(tiny.folder / "tiny-several.gguf", shape), n_threads=1) as model:
        yield model


@pytest.fixture
def batch(model: Model) -> Iterator[SequenceBatch]:
    with model.new_batch(4, 512) as batch:
        yield batch


def check_next(model: Model, context: Context, more: list[int]) -> None:
    """Feed a sequence, and compare with a context of its own."""
    text = [*context.tokens, *more]
    assert agree(model, rows(context, more), fresh_rows(model, text, 512)[-len(more) :])


def test_each_piece_says_which_rows_it_wants(model: Model, batch: SequenceBatch) -> None:
    texts = [some_tokens(20, seed=i) for i in range(4)]
    wanted = [fresh_rows(model, text) for text in texts]
    found = batch.decode(
        [Piece(3, texts[3][:9], "none"), Piece(0, texts[0][:5]), Piece(2, texts[2], "last"), Piece(1, texts[1][:1])]
    )
    assert [len(forward) for forward in found] == [0, 5, 1, 1]
    assert agree(model, found[1].logits, wanted[0][:5])
    assert agree(model, found[2].logits, wanted[2][-1:])
    assert agree(model, found[3].logits, wanted[1][:1])
    found = batch.decode([Piece(0, texts[0][5:], "none"), Piece(3, texts[3][9:])])
    assert agree(model, found[1].logits, wanted[3][9:])
    (none,) = batch.decode([Piece(1, texts[1][1:], "none")])
    assert none.logits.shape == (0, model.n_vocab)
    assert [batch[i].tokens for i in range(4)] == texts


def test_a_prefix_is_shared_and_each_goes_its_way(model: Model, batch: SequenceBatch) -> None:
    prompt = some_tokens(60, seed=9)
    batch[0].decode(prompt, "none")
    batch[1].decode(some_tokens(30, seed=1), "none")
    for target, n in ((1, 60), (2, 41), (3, 1)):
        batch.copy_prefix(0, target, n)
        assert batch[target].tokens == prompt[:n]
    texts = [some_tokens(12, seed=20 + i) for i in range(4)]
    found = batch.decode([Piece(i, texts[i]) for i in range(4)])
    starts = (60, 60, 41, 1)
    for i in range(4):
        wanted = fresh_rows(model, prompt[: starts[i]] + texts[i])[starts[i] :]
        assert agree(model, found[i].logits, wanted), i
    batch[0].truncate(0)  # the others keep what was its
    check_next(model, batch[0], some_tokens(50, seed=5))
    batch[1].truncate(30)  # within what is shared
    check_next(model, batch[1], some_tokens(9, seed=6))
    check_next(model, batch[2], some_tokens(9, seed=7))
    batch.copy_prefix(2, 3, 62)  # of one that was a copy
    check_next(model, batch[3], some_tokens(9, seed=8))
    batch.copy_prefix(2, 3, 0)
    assert batch[3].tokens == []


def test_the_room_is_one(model: Model) -> None:
    with model.new_batch(3, 64, n_ctx=48) as batch:
        assert (batch.n_cells, batch.n_ctx, batch[1].n_ctx, batch.free_cells) == (64, 48, 48, 64)
        batch[0].decode(some_tokens(40), "none")
        batch[1].decode(some_tokens(20), "none")
        assert batch.free_cells == 4
        for feed in (
            lambda: batch[2].decode(some_tokens(5), "none"),
            lambda: batch.decode([Piece(0, [7, 8]), Piece(1, [7]), Piece(2, [7, 8])]),
            lambda: batch.decode([Piece(2, [7]), Piece(1, [7] * 4)]),
        ):
            with pytest.raises(ContextFull, match="3 sequences holds 64 tokens; 4 are free and 5 more do not fit"):
                feed()
        with pytest.raises(ContextFull, match="holds 48 tokens; 40 are used and 9 more"):
            batch[0].decode(some_tokens(9), "none")
        assert [batch[i].n_past for i in range(3)] == [40, 20, 0]
        batch.decode([Piece(0, [7, 8]), Piece(1, [9]), Piece(2, [7])])
        assert batch.free_cells == 0
        batch[0].truncate(10)
        assert batch.free_cells == 32
        check_next(model, batch[2], some_tokens(32, seed=3))
        batch[1].close()
        assert batch.free_cells == 21
        with pytest.raises(Closed):
            batch[1].decode([7])
        check_next(model, batch[0], some_tokens(21, seed=4))
        assert batch.free_cells == 0


def test_a_shared_prefix_takes_its_room_once(model: Model) -> None:
    with model.new_batch(3, 96) as batch:
        batch[0].decode(some_tokens(40), "none")
        batch.copy_prefix(0, 1, 40)
        once = batch.shares_prefix
        assert batch.free_cells == (56 if once else 16)
        if once:
            batch.copy_prefix(1, 2, 30)
            assert batch.free_cells == 56
            batch.decode([Piece(i, some_tokens(18, seed=i), "none") for i in range(3)])
            assert batch.free_cells == 2
            batch[0].truncate(0)
            assert batch.free_cells == 20  # 40 are still the second's
            batch[1].truncate(0)
            assert batch.free_cells == 48  # 30 are still the third's
            check_next(model, batch[0], some_tokens(48, seed=7))
            batch[2].truncate(0)
            assert batch.free_cells == 48
        else:
            with pytest.raises(ContextFull, match="16 are free and 30 more"):
                batch.copy_prefix(0, 2, 30)
            assert batch[2].tokens == []
            assert batch.free_cells == 16


def test_prefixes_that_cannot_be_copied(batch: SequenceBatch) -> None:
    batch[0].decode(some_tokens(10), "none")
    for source, target, n, words in (
        (0, 0, 5, "to itself"),
        (0, 1, 11, "cannot copy 11 of 10"),
        (0, 1, -1, "cannot copy -1"),
        (0, 4, 1, "not 4"),
        (-1, 0, 1, "not -1"),
    ):
        with pytest.raises(UsageError, match=words):
            batch.copy_prefix(source, target, n)
    assert batch[0].n_past == 10


# States.


def test_a_state_goes_to_another_sequence_and_back(model: Model, batch: SequenceBatch) -> None:
    text = some_tokens(70)
    batch[0].decode(some_tokens(33, seed=1), "none")
    batch[2].decode(text, "none")
    state = batch[2].export_state()
    assert state.tokens == tuple(text)
    assert 0 < state.n_bytes <= batch[2].state_bytes
    batch[2].truncate(0)
    check_next(model, batch[0], some_tokens(40, seed=2))
    batch[1].decode(some_tokens(20, seed=3), "none")
    n_free = batch.free_cells
    batch[1].import_state(state)
    assert batch[1].tokens == text
    assert batch.free_cells == n_free - 50
    batch[2].import_state(state)
    batch[1].truncate(65)
    check_next(model, batch[1], some_tokens(9, seed=4))
    check_next(model, batch[2], some_tokens(9, seed=5))
    check_next(model, batch[0], some_tokens(9, seed=6))


def scattered(batch: SequenceBatch, text: list[int]) -> None:
    """Feed a text to sequence 1 so that its rows lie in pieces, and not in order, between those of others."""
    batch[0].decode(some_tokens(50, seed=50), "none")
    for start in range(0, len(text), 7):
        batch.decode([Piece(i, text[start : start + 7] if i == 1 else [7 + start, 8, 9], "none") for i in (0, 1, 3)])
        if start == 28:
            batch[0].truncate(20)
        batch[1].truncate(batch[1].n_past - 2)
        batch[1].decode(text[batch[1].n_past : start + 7], "none")


def test_states_go_between_a_sequence_and_a_context(model: Model, batch: SequenceBatch) -> None:
    text = some_tokens(70)
    scattered(batch, text)
    state = batch[1].export_state()
    with model.new_context(128) as context:
        context.import_state(state)
        assert context.tokens == text
        for n in (60, 31, 64):
            context.truncate(min(n, context.n_past))
            check_next(model, context, some_tokens(20, seed=n))
        state = context.export_state()
        again = context.tokens
        for sequence in (3, 2):
            batch[sequence].import_state(state)
            assert batch[sequence].tokens == again
        check_next(model, batch[3], some_tokens(5, seed=1))
        batch[2].truncate(11)
        check_next(model, batch[2], some_tokens(5, seed=2))
        check_next(model, batch[1], some_tokens(5, seed=3))


def test_states_that_do_not_fit(model: Model, batch: SequenceBatch) -> None:
    batch[0].decode(some_tokens(500), "none")
    batch[1].decode(some_tokens(6), "none")
    state = batch[0].export_state()
    with pytest.raises(ContextFull, match="6 are free and 500 more"):
        batch[1].import_state(state)
    assert batch[1].n_past == 6
    batch[0].import_state(state)  # in its own place
    check_next(model, batch[0], [9, 8, 7])
    batch[0].truncate(300)
    wrong = type(state)(state.tokens[:40], {name: array[:1] for name, array in state.arrays.items()})
    with pytest.raises(EngineError):
        batch[1].import_state(wrong)
    assert batch[1].tokens == []
    assert batch.free_cells == 212
    check_next(model, batch[1], some_tokens(20, seed=1))
    check_next(model, batch[0], some_tokens(20, seed=2))
    batch[1].import_state(type(state)((), {}))
    assert batch.free_cells == 512 - 320


# Ends before the end.


@pytest.mark.parametrize("logits", ["all", "last"])
def test_a_pass_is_stopped_between_its_parts(model: Model, logits: Any) -> None:
    """It is taken back from all, those that were done too."""
    texts = [some_tokens(300, seed=i) for i in range(3)]
    with model.new_batch(3, 1200) as batch:
        batch.decode([Piece(i, texts[i][:20], "none") for i in range(3)])
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked == 2

        batch.interrupted = stop
        with pytest.raises(Cancelled):
            batch.decode([Piece(i, texts[i][20:], logits) for i in range(3)])
        batch.interrupted = None
        assert [batch[i].tokens for i in range(3)] == [text[:20] for text in texts]
        assert batch.free_cells == 1140
        for i in range(3):
            check_next(model, batch[i], texts[i][20:40])


def test_one_sequence_is_stopped_as_a_context_is(model: Model) -> None:
    with model.new_batch(2, 1000) as batch:
        batch[0].interrupted = lambda: True
        with pytest.raises(Cancelled):
            batch[0].decode(some_tokens(600), "none")
        assert batch[0].tokens == some_tokens(600)[:256]
        assert batch.free_cells == 744
        batch[0].interrupted = None
        check_next(model, batch[0], [5, 6, 7])


def test_a_failed_pass_leaves_no_rows_behind(
    model: Model, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [some_tokens(40, seed=i) for i in range(4)]
    batch.decode([Piece(i, texts[i][:9], "none") for i in range(2)])
    decode: Callable[..., Any] = type(batch)._decode

    def broken(self: Any, pieces: Any) -> None:
        decode(self, pieces)
        raise KeyboardInterrupt

    for feed in (
        lambda: batch.decode([Piece(0, [7, 7]), Piece(1, [7]), Piece(2, texts[2])]),
        lambda: batch[1].decode([7, 7, 7]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(type(batch), "_decode", broken)
            with pytest.raises(KeyboardInterrupt):
                feed()
        assert batch.free_cells == 494
    for i in range(4):
        check_next(model, batch[i], texts[i][9:20])


def test_a_context_that_lost_its_memory_is_not_gone_on_from(reference: Backend, tiny: TinyFiles) -> None:
    """As one does whose device was away; what is fed in turns knows it by its length."""
    with reference.load(tiny.quick.target) as model, model.new_batch(2, 64) as batch:
        batch.decode([Piece(0, [5, 6, 7]), Piece(1, [5, 6])])
        batch._contexts[0].truncate(0)  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="sequence 0 was lost"):
            batch.decode([Piece(1, [7]), Piece(0, [8])])
        assert [batch[i].tokens for i in range(2)] == [[], [5, 6]]
        assert batch.free_cells == 62
        batch.decode([Piece(1, [7]), Piece(0, [5, 6, 7])])


def test_closing_a_batch_closes_its_sequences(model: Model) -> None:
    batch = model.new_batch(2, 64)
    first = batch[0]
    first.decode([5])
    batch.close()
    batch.close()
    for use in (
        lambda: batch.decode([Piece(0, [5])]),
        lambda: batch[0],
        lambda: first.decode([5]),
        lambda: batch.copy_prefix(0, 1, 1),
        lambda: batch.truncate(0, 0),
    ):
        with pytest.raises(Closed):
            use()


def test_what_cannot_be_a_batch(model: Model) -> None:
    for n_sequences, n_cells, n_ctx in ((0, 16, None), (2, 0, None), (2, 16, 0)):
        with pytest.raises(UsageError, match="at least 1"):
            model.new_batch(n_sequences, n_cells, n_ctx=n_ctx)


# Everything at once.


def anything(model: Model, seed: int, noise: float = NOISE) -> None:
    """Sixty things done to five sequences: each is what its tokens say, and the room is what they take."""
    random, n = np.random.default_rng(seed), 5

    def numbers(most: int) -> int:
        return int(random.integers(most))

    with model.new_batch(n, 300, n_ctx=150) as batch, model.new_context(150) as alone:
        for _ in range(60):
            i, j, *more = (int(number) for number in random.permutation(n))
            try:
                match random.choice(["feed", "feed", "feed", "cut", "empty", "copy", "move"]):
                    case "feed":
                        fed = [i, j, *more][: 1 + numbers(n)]
                        pieces = [Piece(k, some_tokens(1 + numbers(30), seed=numbers(99))) for k in fed]
                        for piece, forward in zip(pieces, batch.decode(pieces), strict=True):
                            alone.truncate(0)
                            wanted = rows(alone, batch[piece.sequence].tokens)[-len(forward) :]
                            assert agree(model, forward.logits, wanted, noise)
                    case "cut":
                        batch.truncate(i, numbers(batch[i].n_past + 1))
                    case "empty":
                        batch.truncate(i, 0)
                    case "copy":
                        batch.copy_prefix(i, j, numbers(batch[i].n_past + 1))
                    case "move":
                        batch[j].import_state(batch[i].export_state())
            except ContextFull:
                batch.truncate(max(range(n), key=lambda k: batch[k].n_past), 0)
        held, total = 300 - batch.free_cells, sum(batch[k].n_past for k in range(n))
        assert held == total or (batch.shares_prefix and held < total)
        for k in range(n):
            batch.truncate(k, 0)
        assert batch.free_cells == 300


@pytest.mark.parametrize("seed", range(3))
def test_anything_in_any_order(model: Model, seed: int) -> None:
    anything(model, seed)


# Memories of other kinds.


@pytest.mark.parametrize("seed", range(2))
def test_anything_in_a_sliding_window(fast_backend: Backend, tiny: TinyFiles, seed: int) -> None:
    """llama.cpp gives cells before the window to other sequences: a cut then has to read again."""
    with fast_backend.load(tiny.sliding, n_threads=1) as model:
        anything(model, seed, 0.1)


def test_a_state_of_a_sliding_window_can_be_cut(fast_backend: Backend, tiny: TinyFiles) -> None:
    """llama.cpp leaves what lies before the window out of it."""
    text = some_tokens(90)
    with fast_backend.load(tiny.sliding, n_threads=1) as model, model.new_context(128) as context:
        context.decode(text, "none")
        state = context.export_state()
        with model.new_batch(2, 256) as batch:
            for one in (context, batch[1]):
                for n in (90, 85, 50, 20):
                    one.import_state(state)
                    one.truncate(n)
                    wanted = fresh_rows(model, text[:n] + some_tokens(5, seed=1))[n:]
                    assert agree(model, rows(one, some_tokens(5, seed=1)), wanted, 0.1), n


@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_anything_in_a_memory_that_cannot_be_rewound(engine: str, tiny: TinyFiles) -> None:
    with open_backend(engine).load(tiny.hybrid, n_threads=1) as model:
        assert not model.new_batch(1, 8).shares_prefix
        anything(model, 0)
