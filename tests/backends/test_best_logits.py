"""The largest logits of rows, found by an engine where it computes them: the same ones, with the same values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from localspec.backends.base import Context, Forward, Model
from localspec.backends.best_rows import LEAST, MOST, best_pays
from localspec.backends.llama.binding import MOST_ROWS
from localspec.backends.llama.model import LlamaModel
from localspec.backends.llama.passes import BestLogits
from localspec.sampling.sampling import top_k_ids
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.contexts import fresh_rows, some_tokens
from tests.support.gguf_vocabs import spm_vocab


def loaded(path: Path) -> LlamaModel:
    model: LlamaModel = open_backend("llama-cpp").load(path, n_threads=1)
    if not model.binding.finds_best:
        pytest.skip("this llama-cpp-python has no samplers in its graph")
    return model


@pytest.fixture(scope="module")
def model(tiny: TinyFiles) -> Iterator[LlamaModel]:
    with loaded(tiny.spm) as model:
        model.__dict__["finds_best"] = True
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.new_context(256) as context:
        yield context


def is_best_of(forward: Forward, whole: np.ndarray, n_best: int) -> None:
    assert forward.ids.shape == forward.logits.shape == (len(whole), forward.ids.shape[1])
    assert n_best <= forward.ids.shape[1] < whole.shape[1]
    for ids, logits, row in zip(forward.ids, forward.logits, whole, strict=True):
        assert ids.tolist() == top_k_ids(row, len(ids)).tolist()
        assert logits.tolist() == row[ids].tolist()
    assert forward.best() == whole.argmax(axis=1).tolist()


@pytest.mark.parametrize("n_best", [1, 40, LEAST - 1, LEAST, 200])
def test_rows_hold_the_largest_logits(model: Model, n_best: int) -> None:
    """Of tokens and of rows of floats; hidden states come with them."""
    text, more = some_tokens(30), some_tokens(5, seed=1)
    rows = np.random.default_rng(0).standard_normal((5, model.n_embd)).astype(np.float32)
    with model.new_context(64, hidden=("layer:0", "norm")) as context:
        context.decode(text, "none")
        assert context.decode_floats(rows, range(5), "none", n_best).logits.shape == (0, model.n_vocab)
        feeds = (partial(context.decode, more), partial(context.decode_floats, rows, range(5)))
        for feed, logits in product(feeds, ("all", "last")):
            context.truncate(len(text))
            whole = feed(logits)
            expected = whole.logits.copy()
            context.truncate(len(text))
            best = feed(logits, n_best)
            is_best_of(best, expected, n_best)
            assert all(np.array_equal(states, best.hidden[name]) for name, states in whole.hidden.items())
            assert context.n_past == len(text) + 5


def test_what_cannot_be_had_so_is_whole(context: Context, model: Model) -> None:
    n_before, most = 0, MOST_ROWS
    for n_tokens, n_best in ((most + 1, 1), (2, MOST), (2, model.n_vocab)):
        forward = context.decode([7] * n_tokens, n_best=n_best)
        assert forward.ids is None
        assert forward.logits.shape == (n_tokens, model.n_vocab)
        n_before += n_tokens
        assert context.n_past == n_before
    assert context.decode([7] * most, n_best=1).ids is not None
    forward = context.decode([7] * (most + 1), "last", 1)
    assert len(forward) == 1
    assert forward.best()[0] < model.n_vocab


def test_equals_at_the_end_have_the_row_whole(tmp_path: Path) -> None:
    """Of a hundred that are equal the device could take any; and the memory is as if nothing had been tried."""
    shape, vocab = ggufs.Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32), spm_vocab()
    path = tmp_path / "equals.gguf"
    weights = ggufs.llama_weights(shape, len(vocab))
    weights["output.weight"][100:200] = 3.0 * weights["output.weight"][100]
    ggufs.write_llama(path, shape=shape, vocab=vocab, weights=weights)
    with loaded(path) as model, model.new_context(64) as plain:
        model.__dict__["finds_best"] = True
        context, n_whole = model.new_context(64), 0
        for token in some_tokens(12, n_vocab=99):
            found, whole = context.decode([token], n_best=50), plain.decode([token]).logits
            if found.ids is None:
                n_whole += 1
                assert np.array_equal(found.logits, whole)
            else:
                assert found.logits.min() < np.sort(found.logits)[0, -50]
        assert n_whole > 0
        assert context.tokens == plain.tokens
        context.close()


def test_where_the_device_cannot_rows_are_whole(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the means it leaves the chain out and counts every logit; without memory the engine would end the
    process, so that nothing is tried."""
    expected = fresh_rows(model, [5, 6, 7])
    for owner, name, found in (
        (model.binding.lib, "llama_get_sampled_candidates_count_ith", lambda *_: model.n_vocab),
        (BestLogits, "_has_room", lambda self: False),
    ):
        with model.new_context(256) as context, monkeypatch.context() as patch:
            patch.setattr(owner, name, found)
            assert np.array_equal(context.decode([5, 6, 7], n_best=1).logits, expected)
            patch.undo()
            assert (context.decode([8], n_best=1).ids is None) == (owner is not BestLogits)  # not asked again
            assert context.tokens == [5, 6, 7, 8]


def test_it_is_used_where_it_takes_less_time(model: Model) -> None:
    """On a CPU it is not: rows are at hand there. The trial itself leaves nothing behind."""
    with loaded(model.path) as other:
        assert isinstance(best_pays(other), bool)
        assert "finds_best" not in other.__dict__
        assert not other.finds_best
