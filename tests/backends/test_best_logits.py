"""The largest logits of rows, found by llama.cpp in the graph of a pass: the same ones, with the same values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Context, Forward
from localspec.backends.best_logits import LEAST, MOST, MOST_ROWS, BestLogits, best_pays
from localspec.backends.llama_family import LlamaModel
from localspec.sampling.rows import top_k_ids
from tests.backends.test_backends import fresh_rows, some_tokens
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.gguf_vocabs import spm_vocab


def loaded(path: Path) -> LlamaModel:
    model = open_backend("llama-cpp").load(path, n_threads=1)
    assert isinstance(model, LlamaModel)
    if not model.binding.finds_best:
        pytest.skip("this llama-cpp-python has no samplers in its graph")
    return model


@pytest.fixture(scope="module")
def model(tiny: TinyFiles) -> Iterator[LlamaModel]:
    with loaded(tiny.spm) as model:
        model.__dict__["finds_best"] = True
        yield model


@pytest.fixture
def context(model: LlamaModel) -> Iterator[Context]:
    with model.new_context(256) as context:
        yield context


def is_best_of(forward: Forward, whole: np.ndarray, n_best: int) -> None:
    assert forward.ids is not None
    assert forward.ids.shape == forward.logits.shape == (len(whole), forward.ids.shape[1])
    assert n_best <= forward.ids.shape[1] < whole.shape[1]
    for ids, logits, row in zip(forward.ids, forward.logits, whole, strict=True):
        assert ids.tolist() == top_k_ids(row, len(ids)).tolist()
        assert logits.tolist() == row[ids].tolist()
    assert forward.best() == whole.argmax(axis=1).tolist()


@pytest.mark.parametrize("n_best", [1, 40, LEAST - 1, LEAST, 200])
def test_rows_hold_the_largest_logits(model: LlamaModel, context: Context, n_best: int) -> None:
    text, more = some_tokens(30), some_tokens(5, seed=1)
    context.decode(text, "none")
    whole = context.decode(more).logits.copy()
    context.truncate(len(text))
    is_best_of(context.decode_best(more, n_best), whole, n_best)
    context.truncate(len(text))
    last = context.decode(more, "last").logits.copy()
    context.truncate(len(text))
    is_best_of(context.decode_best(more, n_best, "last"), last, n_best)
    assert context.tokens == [*text, *more]


def test_whole_rows_come_as_before_in_between(context: Context, model: LlamaModel) -> None:
    tokens = some_tokens(24)
    expected = fresh_rows(model, tokens)
    for start in range(0, 24, 6):
        assert context.decode_best(tokens[start : start + 2], 1).ids is not None
        context.decode(tokens[start + 2 : start + 3], "none")
        rows = context.decode(tokens[start + 3 : start + 6]).logits
        assert rows.shape == (3, model.n_vocab)
        assert np.abs(rows - expected[start + 3 : start + 6]).max() < 0.05


def test_what_cannot_be_had_so_is_whole(context: Context, model: LlamaModel) -> None:
    n_before = 0
    for n_tokens, n_best in ((MOST_ROWS + 1, 1), (2, MOST), (2, model.n_vocab)):
        forward = context.decode_best([7] * n_tokens, n_best)
        assert forward.ids is None
        assert forward.logits.shape == (n_tokens, model.n_vocab)
        n_before += n_tokens
        assert context.n_past == n_before
    assert context.decode_best([7] * MOST_ROWS, 1).ids is not None


def test_hidden_states_come_with_them(model: LlamaModel) -> None:
    tokens = some_tokens(6)
    with (
        model.new_context(64, hidden=("layer:0", "norm")) as one,
        model.new_context(64, hidden=("layer:0", "norm")) as other,
    ):
        whole, best = one.decode(tokens), other.decode_best(tokens, 3)
        is_best_of(best, whole.logits, 3)
        for name, states in whole.hidden.items():
            assert np.array_equal(states, best.hidden[name]), name


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
            found, whole = context.decode_best([token], 50), plain.decode([token]).logits
            if found.ids is None:
                n_whole += 1
                assert np.array_equal(found.logits, whole)
            else:
                assert found.logits.min() < np.sort(found.logits)[0, -50]
        assert n_whole > 0
        assert context.tokens == plain.tokens
        context.close()


def test_a_device_without_the_means_gives_whole_rows(
    model: LlamaModel, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cannot, the engine leaves the chain out and counts every logit."""
    monkeypatch.setattr(model.binding.lib, "llama_get_sampled_candidates_count_ith", lambda *_: model.n_vocab)
    expected = fresh_rows(model, [5, 6, 7])
    assert np.array_equal(context.decode_best([5, 6, 7], 1).logits, expected)
    monkeypatch.undo()
    assert context.decode_best([8], 1).ids is None  # it is not asked again
    assert context.tokens == [5, 6, 7, 8]


def test_without_memory_for_it_nothing_is_tried(
    model: LlamaModel, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would end the process."""
    monkeypatch.setattr(BestLogits, "_has_room", lambda self: False)
    assert context.decode_best([5, 6], 1).ids is None


def test_it_is_used_where_it_takes_less_time(model: LlamaModel) -> None:
    """On a CPU it is not: rows are at hand there. The trial itself leaves nothing behind."""
    with loaded(model.path) as other:
        assert isinstance(best_pays(other), bool)
        assert "finds_best" not in other.__dict__
        assert not other.finds_best


SETTINGS = {
    "greedy": SamplingParams(max_tokens=48),
    "top-k": SamplingParams(temperature=1.0, top_k=40, seed=3, max_tokens=48),
    "top-k and top-p": SamplingParams(temperature=0.9, top_k=12, top_p=0.9, seed=4, max_tokens=48),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_answers_are_the_same(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    """Drafts of a fixed length, so that passes are as wide and round alike."""
    open_backend("llama-cpp")
    n_read = 0
    read = BestLogits.read

    def counted(self: BestLogits, *arguments: int) -> object:
        nonlocal n_read
        n_read += 1
        return read(self, *arguments)

    monkeypatch.setattr(BestLogits, "read", counted)
    texts = []
    for finds_best in (False, True):
        monkeypatch.setattr(LlamaModel, "finds_best", finds_best)
        with LLM(tiny.pair.target, draft=tiny.pair.draft, draft_length=3, backend="llama-cpp", n_threads=1) as llm:
            n_read = 0
            texts.append([llm.generate(p, SETTINGS[settings]).token_ids for p in ("one two three", "four five")])
            assert bool(n_read) == finds_best
    assert texts[0] == texts[1]
