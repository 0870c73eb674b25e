"""Several sequences side by side: each is as if it were alone, whatever the others are fed and lose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends.base import FloatArray, Model, Piece, SequenceBatch
from localspec.backends.llama.batch import MAX_SEQUENCES, LlamaSequences
from localspec.errors import Closed, ContextFull, UsageError
from tests.backends.test_backends import agree, some_tokens
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support import ggufs

EVERY = ("layer:0", "layer:1", "layer:2", "norm")


@pytest.fixture(scope="module")
def path(tiny: TinyFiles) -> Path:
    """With heads of 64 channels, on which ik-llama's flash attention ends the process over rows of two sequences."""
    return ggufs.write_llama(tiny.folder / "tiny-side-by-side.gguf", ggufs.Shape(n_layer=3, n_head=2, n_head_kv=1))


@pytest.fixture(scope="module")
def model(backend: Backend, path: Path) -> Iterator[Model]:
    with backend.load(path, n_threads=1) as model:
        yield model


@pytest.fixture
def batch(model: Model) -> Iterator[SequenceBatch]:
    with model.new_batch(4, 4 * 96, n_ctx=96, hidden=EVERY) as batch:
        yield batch


def alone(model: Model, tokens: list[int]) -> tuple[FloatArray, dict[str, FloatArray]]:
    """Logits and states of every token of a sequence by itself."""
    with model.new_context(len(tokens), hidden=EVERY) as context:
        forward = context.decode(tokens)
        return forward.logits.copy(), dict(forward.hidden)


def check_feeding(
    model: Model, batch: SequenceBatch, texts: list[list[int]], pieces: list[tuple[int, int]], logits: Any
) -> None:
    """Feed (sequence, how many of its next tokens), and compare with each alone."""
    starts = [batch[sequence].n_past for sequence, _ in pieces]
    fed = [Piece(s, texts[s][start : start + n], logits) for (s, n), start in zip(pieces, starts, strict=True)]
    forwards = batch.decode(fed)
    singles = [alone(model, texts[s][: start + n]) for (s, n), start in zip(pieces, starts, strict=True)]
    firsts = [start if logits == "all" else start + n - 1 for (_, n), start in zip(pieces, starts, strict=True)]
    for forward, single, first, start in zip(forwards, singles, firsts, starts, strict=True):
        assert agree(model, forward.logits, single[0][first:])
        assert set(forward.hidden) == set(batch.hidden)
        for name, states in forward.hidden.items():
            assert agree(model, states, single[1][name][first if name in EVERY[2:] else start :]), name


@pytest.mark.parametrize("logits", ["all", "last"])
def test_each_sequence_is_as_if_alone(model: Model, batch: SequenceBatch, logits: Any) -> None:
    texts = [some_tokens(96, seed=i) for i in range(4)]
    check_feeding(model, batch, texts, [(2, 20), (0, 1)], logits)
    check_feeding(model, batch, texts, [(0, 7), (1, 30), (2, 2), (3, 1)], logits)
    for _ in range(3):
        check_feeding(model, batch, texts, [(3, 1), (1, 1), (0, 1), (2, 1)], logits)
    assert [batch[i].n_past for i in range(4)] == [11, 33, 25, 4]
    batch.truncate(1, 5)
    batch.truncate(2, 0)
    batch.truncate(0, 11)
    check_feeding(model, batch, texts, [(1, 12), (2, 3)], logits)
    assert [batch[i].n_past for i in range(4)] == [11, 17, 3, 4]


def test_sequences_come_and_go_until_memory_is_in_pieces(model: Model) -> None:
    """Full sequences give up their places, which are scattered by then, to new and longer ones."""
    random = np.random.default_rng(0)
    with model.new_batch(4, 4 * 64, n_ctx=64, hidden=("norm",)) as batch:
        texts = [some_tokens(64, seed=i) for i in range(4)]
        for sequence in range(4):
            batch.decode([Piece(sequence, texts[sequence][: 10 + sequence])])
        for round_ in range(6):
            while all(batch[i].n_past < 64 for i in range(4)):
                check = round_ % 2 == 0 and batch[0].n_past % 16 == 0
                pieces = [(i, 1) for i in range(4)]
                if check:
                    check_feeding(model, batch, texts, pieces, "all")
                else:
                    batch.decode([Piece(i, [texts[i][batch[i].n_past]]) for i, _ in pieces])
            for i in range(4):
                if batch[i].n_past == 64 or random.random() < 0.3:
                    batch.truncate(i, 0)
                    texts[i] = some_tokens(64, seed=100 * round_ + i)
                    check_feeding(model, batch, texts, [(i, int(random.integers(20, 50)))], "last")


def test_more_rows_than_the_engine_takes_at_once(model: Model) -> None:
    texts = [some_tokens(200, seed=i) for i in range(3)]
    with model.new_batch(3, 600, hidden=EVERY) as batch:
        for logits in ("all", "last"):
            check_feeding(model, batch, texts, [(0, 200), (2, 190), (1, 199)], logits)
            for i in range(3):
                batch.truncate(i, 0)


def test_a_sequence_behind_a_long_one(model: Model) -> None:
    """Its keys lie in other blocks of the memory than the other's: kernels that skip blocks must not skip these."""
    texts = [some_tokens(400, seed=i) for i in range(2)]
    with model.new_batch(2, 800, hidden=EVERY) as batch:
        check_feeding(model, batch, texts, [(0, 300)], "last")
        check_feeding(model, batch, texts, [(1, 20)], "all")
        check_feeding(model, batch, texts, [(1, 3), (0, 2)], "all")


def test_a_batch_that_returns_no_states(model: Model) -> None:
    texts = [some_tokens(20, seed=i) for i in range(2)]
    with model.new_batch(2, 32) as batch:
        assert batch.hidden == ()
        check_feeding(model, batch, texts, [(0, 9), (1, 4)], "all")
        check_feeding(model, batch, texts, [(1, 2), (0, 1)], "last")


def test_refusals_leave_everything_as_it_was(model: Model, batch: SequenceBatch) -> None:
    texts = [some_tokens(96, seed=i) for i in range(4)]
    check_feeding(model, batch, texts, [(0, 9), (1, 90)], "last")
    for pieces, error, words in (
        ([], UsageError, "at least one piece"),
        ([(0, [5]), (0, [6])], UsageError, "no two of one sequence"),
        ([(0, [5]), (2, [])], UsageError, "at least one token"),
        ([(0, [5]), (4, [5])], UsageError, "not 4"),
        ([(-1, [5])], UsageError, "not -1"),
        ([(0, [5, 384])], UsageError, r"0\.\.383"),
        ([(0, [5]), (1, [5] * 7)], ContextFull, "the context holds 96 tokens; 90 are used and 7 more"),
    ):
        with pytest.raises(error, match=words):
            batch.decode([Piece(*piece) for piece in pieces])
    for sequence, n in ((0, 10), (0, -1), (4, 0)):
        with pytest.raises(UsageError):
            batch.truncate(sequence, n)
    check_feeding(model, batch, texts, [(1, 6), (0, 3)], "all")
    with pytest.raises(UsageError, match="at least 1"):
        model.new_batch(0, 16)
    with pytest.raises(UsageError, match="at least 1"):
        model.new_batch(2, 0)


def test_a_broken_pass_is_taken_back_from_all(
    model: Model, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [some_tokens(40, seed=i) for i in range(4)]
    check_feeding(model, batch, texts, [(0, 9), (1, 9)], "last")
    decode = type(batch)._decode

    def interrupted(self: Any, pieces: Any) -> None:
        decode(self, [Piece(pieces[0].sequence, pieces[0].tokens[:2])])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(batch), "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.decode([Piece(0, [7, 7, 7]), Piece(1, [7])])
    check_feeding(model, batch, texts, [(1, 3), (0, 3)], "all")


def test_closing(model: Model) -> None:
    batch = model.new_batch(2, 16)
    batch.decode([Piece(0, [5])])
    batch.close()
    batch.close()
    for use in (lambda: batch.decode([Piece(0, [5])]), lambda: batch.truncate(0, 0), lambda: batch[0].n_past):
        with pytest.raises(Closed):
            use()


def test_llama_engines_feed_them_in_one_pass_and_others_in_turns(backend: Backend, model: Model) -> None:
    with model.new_batch(2, 16) as batch:
        assert isinstance(batch, LlamaSequences) == ("llama" in backend.name)
    if "llama" in backend.name:
        with pytest.raises(UsageError, match="at most"):
            model.new_batch(MAX_SEQUENCES + 1, 16)


def test_sequences_in_a_sliding_window(fast_backend: Backend, tiny: TinyFiles) -> None:
    texts = [some_tokens(100, seed=i) for i in range(2)]
    with fast_backend.load(tiny.sliding, n_threads=1) as model, model.new_batch(2, 200, hidden=("norm",)) as batch:
        batch.decode([Piece(0, texts[0][:90], "last"), Piece(1, texts[1][:20], "last")])
        batch.truncate(0, 60)
        forwards = batch.decode([Piece(1, texts[1][20:70]), Piece(0, texts[0][60:66])])
        with model.new_context(100, hidden=("norm",)) as context:
            for text, first, end, forward in ((texts[1], 20, 70, forwards[0]), (texts[0], 60, 66, forwards[1])):
                context.truncate(0)
                wanted = context.decode(text[:end])
                assert np.abs(wanted.logits[first:] - forward.logits).max() < 0.1
                assert np.abs(wanted.hidden["norm"][first:] - forward.hidden["norm"]).max() < 0.05
                assert np.abs(wanted.logits[first - 1 : -1] - forward.logits).max(axis=1).min() > 0.3


@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_a_memory_that_cannot_be_rewound_is_one_of_many(engine: str, tiny: TinyFiles) -> None:
    texts = [some_tokens(40, seed=i) for i in range(2)]
    with open_backend(engine).load(tiny.hybrid, n_threads=1) as model, model.new_batch(2, 128) as batch:
        batch.decode([Piece(0, texts[0][:10]), Piece(1, texts[1][:5])])
        batch.decode([Piece(1, texts[1][5:9])])
        batch.truncate(0, 4)
        forwards = batch.decode([Piece(0, texts[0][4:20]), Piece(1, texts[1][9:12])])
        ours = np.concatenate([forward.logits for forward in forwards])
        with model.new_context(64) as context:
            wanted = context.decode(texts[0][:20]).logits[4:].copy()
            context.truncate(0)
            wanted = np.concatenate([wanted, context.decode(texts[1][:12]).logits[9:]])
    assert np.abs(ours - wanted).max() < 0.05


def test_rows_are_right_after_other_sequences_were_cut(model: Model) -> None:
    """ik-llama finds the last cell in use by samples; a gap at one of them hid what lies behind it from a pass."""
    texts = [some_tokens(96, seed=i) for i in range(4)]
    for n in (2, 3, 4):
        singles = [alone(model, texts[i])[0] for i in range(n - 1)]
        for left in (0, 20):
            with model.new_batch(n, n * 96) as batch:
                for at in range(60):
                    batch.decode([Piece(i, [texts[i][at]]) for i in range(n)])
                batch.truncate(n - 1, left)
                for at in range(60, 80):
                    forwards = batch.decode([Piece(i, [texts[i][at]]) for i in range(n - 1)])
                    found = np.concatenate([forward.logits for forward in forwards])
                    assert agree(model, found, np.array([rows[at] for rows in singles])), (n, left, at)
