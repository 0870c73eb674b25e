"""One sequence of several that is fed alone, where it is computed in a context of its own: there and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec.backends.base import Context, Model, Piece, SequenceBatch
from localspec.backends.llama import batch as batch_module
from localspec.backends.llama.batch import SequencesOrOne
from localspec.errors import Cancelled, EngineError
from tests.backends.test_backends import agree, fresh_rows, rows, some_tokens
from tests.conftest import TinyFiles, open_backend


@pytest.fixture(scope="module")
def model(tiny: TinyFiles) -> Iterator[Model]:
    with open_backend("ik-llama").load(tiny.spm, n_threads=1) as model:
        yield model


@pytest.fixture
def batch(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[SequenceBatch]:
    monkeypatch.setattr(batch_module, "N_ALONE", 3)
    with model.new_batch(4, 512, hidden=["norm"]) as batch:
        yield batch


def apart(batch: SequenceBatch) -> int | None:
    assert isinstance(batch, SequencesOrOne)
    return batch._apart


def check_next(model: Model, context: Context, seed: int, n: int = 5) -> None:
    """Feed a sequence alone, and compare with a context of its own; then take part of it back."""
    more = some_tokens(n, seed=seed)
    text = [*context.tokens, *more]
    assert agree(model, rows(context, more), fresh_rows(model, text, 512)[-n:])
    context.truncate(len(text) - n // 2)


def check_together(model: Model, batch: SequenceBatch, seed: int, *sequences: int) -> None:
    pieces = [Piece(i, some_tokens(4, seed=seed + i)) for i in sequences]
    for piece, forward in zip(pieces, batch.decode(pieces), strict=True):
        wanted = fresh_rows(model, batch[piece.sequence].tokens, 512)[-4:]
        assert agree(model, forward.logits, wanted), piece.sequence
        assert len(forward.hidden["norm"]) == 4


def test_it_goes_there_and_back(model: Model, batch: SequenceBatch) -> None:
    batch[2].decode(some_tokens(40), "none")
    assert apart(batch) == 2
    check_next(model, batch[2], 1)
    batch.copy_prefix(2, 0, 25)
    assert apart(batch) is None
    assert batch.free_cells == 512 - batch[2].n_past
    check_together(model, batch, 10, 0, 2)
    batch[3].decode(some_tokens(9), "none")  # alone in its pass, but others hold tokens
    assert apart(batch) is None
    check_together(model, batch, 20, 3, 2, 0)
    batch.truncate(0, 0)
    batch.truncate(3, 0)
    for i in range(3):
        assert apart(batch) is None
        check_next(model, batch[2], 30 + i)
    assert apart(batch) == 2
    check_next(model, batch[2], 40)
    check_together(model, batch, 50, 1, 2)
    assert apart(batch) is None
    held = batch[1].n_past + batch[2].n_past
    assert batch.free_cells == 512 - held
    for i in range(4):
        batch.truncate(i, 0)
    check_next(model, batch[3], 60)  # nothing of those before is left there
    assert apart(batch) == 3


def test_another_takes_its_place_when_it_is_empty(model: Model, batch: SequenceBatch) -> None:
    check_next(model, batch[1], 1, 30)
    batch.truncate(1, 0)
    check_next(model, batch[3], 2, 30)
    assert apart(batch) == 3
    check_next(model, batch[1], 3, 30)  # in the memory of all, while the other is apart
    assert apart(batch) == 3
    check_next(model, batch[3], 4)
    check_together(model, batch, 5, 1, 3)


def test_states_go_in_and_out_of_it(model: Model, batch: SequenceBatch) -> None:
    batch[0].decode(some_tokens(50), "none")
    state = batch[0].export_state()
    assert batch[0].state_bytes >= state.arrays["sequence"].nbytes
    batch[1].import_state(state)
    assert apart(batch) == 0
    check_together(model, batch, 1, 0, 1)
    batch.truncate(0, 0)
    batch[1].import_state(state)  # alone: where it is to be computed
    assert apart(batch) == 1
    check_next(model, batch[1], 2)
    batch[1].import_state(state)
    assert batch[1].tokens == list(state.tokens)
    check_next(model, batch[1], 3)
    with model.new_context(64) as context:
        context.import_state(batch[1].export_state())
        check_next(model, context, 4)


def test_a_pass_that_is_broken_off_leaves_it_as_it_was(model: Model, batch: SequenceBatch) -> None:
    batch[0].decode(some_tokens(20), "none")
    batch.interrupted = lambda: True
    with pytest.raises(Cancelled):
        batch.decode([Piece(0, some_tokens(300), "none")])
    batch.interrupted = None
    assert batch[0].n_past == 20
    check_next(model, batch[0], 1)
    assert apart(batch) == 0


def test_without_memory_for_a_context_of_its_own_all_lie_together(
    model: Model, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Context:
        raise EngineError("not enough memory")

    monkeypatch.setattr(model, "new_context", full)
    batch[0].decode(some_tokens(20), "none")
    monkeypatch.undo()
    check_next(model, batch[0], 1)
    state = batch[0].export_state()
    batch[0].import_state(state)
    check_next(model, batch[0], 2)
    assert apart(batch) is None


def test_what_cannot_go_back_stays(model: Model, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise EngineError("the saved state was rejected")

    batch[0].decode(some_tokens(20), "none")
    monkeypatch.setattr("localspec.backends.llama.batch.restore", refuses)
    with pytest.raises(EngineError, match="rejected"):
        batch.decode([Piece(0, [5]), Piece(1, [6])])
    monkeypatch.undo()
    assert (batch[0].n_past, batch[1].n_past, apart(batch)) == (20, 0, 0)
    check_next(model, batch[0], 1)
    check_together(model, batch, 2, 0, 1)


def test_where_a_cache_is_of_another_type_all_lie_together(tiny: TinyFiles) -> None:
    with open_backend("ik-llama").load(tiny.bpe, n_threads=1, kv_type="q8_0") as model, model.new_batch(2, 64) as batch:
        assert not isinstance(batch, SequencesOrOne)
