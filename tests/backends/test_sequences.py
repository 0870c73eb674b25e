"""Several sequences in one memory, beyond any order of operations (``test_backends``): room, refusals, long passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localspec.backends.base import Model, Piece, SequenceBatch
from localspec.backends.llama import model as model_module
from localspec.backends.llama.binding import MAX_SEQUENCES
from localspec.backends.llama.model import LlamaSequences, SequencesOrOne
from localspec.errors import Closed, ContextFull, EngineError, UsageError
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support.contexts import EVERY, check_next, some_tokens


@pytest.fixture
def batch(model: Model) -> Iterator[SequenceBatch]:
    with model.new_batch(4, 512) as batch:
        yield batch


# Room.


def test_a_shared_prefix_takes_its_room_once(model: Model) -> None:
    with model.new_batch(3, 96) as batch:
        batch[0].decode(some_tokens(40), "none")
        batch.copy_prefix(0, 1, 40)
        if not batch.shares_prefix:
            assert batch.free_cells == 16
            with pytest.raises(ContextFull, match="16 are free and 30 more"):
                batch.copy_prefix(0, 2, 30)
            assert batch[2].tokens == []
            assert batch.free_cells == 16
            return
        batch.copy_prefix(1, 2, 30)
        assert batch.free_cells == 56
        batch.decode([Piece(i, some_tokens(18, seed=i), "none") for i in range(3)])
        for sequence, n_free in ((0, 20), (1, 48)):  # of what it shared the others keep 40, then 30
            batch[sequence].truncate(0)
            assert batch.free_cells == n_free
        check_next(model, batch[0], some_tokens(48, seed=7))
        batch[2].truncate(0)
        assert batch.free_cells == 48


def test_pieces_and_states_that_do_not_fit(model: Model, batch: SequenceBatch) -> None:
    batch[0].decode(some_tokens(500), "none")
    batch[1].decode(some_tokens(6), "none")
    state = batch[0].export_state()
    with pytest.raises(ContextFull, match="6 are free and 7 more"):
        batch.decode([Piece(0, [7] * 3), Piece(1, [7] * 4)])
    with pytest.raises(ContextFull, match="6 are free and 500 more"):
        batch[1].import_state(state)
    assert batch[1].n_past == 6
    batch[0].import_state(state)  # in its own place
    batch[0].truncate(300)
    for size in (1, -1, None):
        arrays = {name: array[:size] for name, array in state.arrays.items()} if size else {}
        with pytest.raises(EngineError):
            batch[1].import_state(type(state)(state.tokens[:40], arrays))
        assert (batch[1].tokens, batch.free_cells) == ([], 212)
    for i in range(2):
        check_next(model, batch[i], some_tokens(20, seed=i))
    batch[1].import_state(type(state)((), {}))
    assert batch.free_cells == 512 - 320


def test_what_makes_no_sense_is_refused_and_changes_nothing(model: Model) -> None:
    with model.new_batch(4, 4 * 96, n_ctx=96, hidden=EVERY) as batch:
        batch.decode([Piece(0, some_tokens(9), "last"), Piece(1, some_tokens(90), "last")])
        batch[2].decode(some_tokens(5))
        batch[2].decode_first_layers([5, 6], 1)
        refused: dict[Callable[[], Any], str] = {
            lambda: batch.decode([]): "at least one piece",
            lambda: batch.decode([Piece(0, [5]), Piece(0, [6])]): "no two of one sequence",
            lambda: batch.decode([Piece(0, [5]), Piece(3, [])]): "at least one token",
            lambda: batch.decode([Piece(0, [5]), Piece(4, [5])]): "not 4",
            lambda: batch.decode([Piece(-1, [5])]): "not -1",
            lambda: batch.decode([Piece(0, [5, 384])]): r"0\.\.383",
            lambda: batch.decode([Piece(0, [5]), Piece(2, [5])]): "truncate them first",
            lambda: batch.truncate(0, 10): "cannot truncate 9 tokens",
            lambda: batch[0].truncate(-1): "cannot truncate",
            lambda: batch[0].decode([-1]): r"0\.\.383",
            lambda: batch.copy_prefix(0, 0, 5): "to itself",
            lambda: batch.copy_prefix(2, 1, 6): "cannot copy 6 of 5",
            lambda: batch.copy_prefix(0, 1, -1): "cannot copy -1",
            lambda: batch.copy_prefix(0, 4, 1): "not 4",
            lambda: model.new_batch(0, 16): "at least 1",
            lambda: model.new_batch(2, 0): "at least 1",
            lambda: model.new_batch(2, 16, n_ctx=0): "at least 1",
        }
        for use, words in refused.items():
            with pytest.raises(UsageError, match=words):
                use()
        with pytest.raises(ContextFull, match="the context holds 96 tokens; 90 are used and 7 more"):
            batch.decode([Piece(0, [5]), Piece(1, [5] * 7)])
        assert [batch[i].n_past for i in range(4)] == [9, 90, 7, 0]
        batch.decode([Piece(1, some_tokens(6)), Piece(0, some_tokens(3))])
        check_next(model, batch[0], [7])


# The end of a memory, and of a pass.


def test_closing_a_batch_closes_its_sequences(
    model: Model, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes none out of the memory first, which may be that of a device that is gone."""
    first = batch[0]
    batch.decode([Piece(0, [5, 6]), Piece(1, [7])])
    state = first.export_state()
    batch[1].close()
    assert batch.free_cells == 510
    with pytest.raises(Closed):
        batch[1].decode([7])
    if isinstance(batch, LlamaSequences):
        monkeypatch.setattr(type(first), "empty", lambda self: pytest.fail("a sequence was taken out"))
    batch.close()
    batch.close()
    for use in (
        lambda: batch.decode([Piece(0, [5])]),
        lambda: batch[0],
        lambda: first.decode([5]),
        first.export_state,
        lambda: first.import_state(state),
        lambda: batch.copy_prefix(0, 1, 1),
        lambda: batch.truncate(0, 0),
    ):
        with pytest.raises(Closed):
            use()


def test_a_pass_whose_rollback_fails_too_fails_as_that_says(
    reference: Backend, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one over a recurrent memory does, which then is empty, when its device goes away."""
    with reference.load(tiny.quick.target) as model, model.new_batch(2, 64) as batch:
        batch.decode([Piece(0, [5, 6, 7]), Piece(1, [5, 6])])
        first = batch[0]

        def fails(*_: object) -> None:
            raise EngineError("the pass failed")

        def loses(n: int) -> None:
            assert n <= first.n_past, "it is asked to go back to what it does not have"
            if n:
                first._forget()
                raise EngineError("so did going back")

        monkeypatch.setattr(first, "_decode", fails)
        monkeypatch.setattr(first, "_truncate", loses)
        with pytest.raises(EngineError, match="so did going back"):
            batch.decode([Piece(1, [7]), Piece(0, [8])])
        assert [batch[i].tokens for i in range(2)] == [[], [5, 6]]
        assert batch.free_cells == 62


def test_llama_engines_feed_them_in_one_pass_and_others_in_turns(model: Model, batch: SequenceBatch) -> None:
    assert isinstance(batch, LlamaSequences) == ("llama" in model.backend)
    if "llama" in model.backend:
        with pytest.raises(UsageError, match="at most"):
            model.new_batch(MAX_SEQUENCES + 1, 16)


# One sequence that is fed alone, where it is computed in a context of its own: there and back.


@pytest.fixture
def either(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[SequencesOrOne]:
    monkeypatch.setattr(model_module, "N_ALONE", 3)
    with (
        open_backend("ik-llama").load(tiny.spm, n_threads=1) as model,
        model.new_batch(4, 512, hidden=["norm"]) as batch,
    ):
        assert isinstance(batch, SequencesOrOne)
        yield batch


def check_alone(batch: SequencesOrOne, sequence: int, seed: int, n: int = 5) -> None:
    """Feed a sequence alone, compare, and take part of it back."""
    check_next(batch.model, batch[sequence], some_tokens(n, seed=seed))
    batch.truncate(sequence, batch[sequence].n_past - n // 2)


def test_one_goes_to_a_context_of_its_own_and_back(either: SequencesOrOne) -> None:
    """When that is: what is computed there and here is what any order of operations compares."""
    check_alone(either, 2, 0, 40)
    check_alone(either, 1, 3, 30)  # in the memory of all, while the other is apart
    assert either.apart is either[2]
    either.decode([Piece(1, some_tokens(4)), Piece(2, some_tokens(4))])
    check_alone(either, 2, 1, 9)  # alone in its pass, but others hold tokens
    assert either.apart is None
    either.truncate(1, 0)
    for seed in range(4):
        check_alone(either, 2, 30 + seed)
    assert either.apart is either[2]
    state = either[2].export_state()
    either.truncate(2, 0)
    either[1].import_state(state)  # alone: where it is to be computed
    assert either.apart is either[1]


def test_what_cannot_go_back_stays(either: SequencesOrOne, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise EngineError("the saved state was rejected")

    either[0].decode(some_tokens(20), "none")
    with monkeypatch.context() as patch:
        patch.setattr(model_module, "restore", refuses)
        with pytest.raises(EngineError, match="rejected"):
            either.decode([Piece(0, [5]), Piece(1, [6])])
    assert (either[0].n_past, either[1].n_past, either.apart) == (20, 0, either[0])
    check_alone(either, 0, 1)
    either.decode([Piece(0, some_tokens(4)), Piece(1, some_tokens(4))])
    check_next(either.model, either[0], [7])


def test_where_a_cache_is_of_another_type_all_lie_together(tiny: TinyFiles) -> None:
    with open_backend("ik-llama").load(tiny.bpe, n_threads=1, kv_type="q8_0") as model, model.new_batch(2, 64) as batch:
        assert not isinstance(batch, SequencesOrOne)
