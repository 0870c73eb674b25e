"""Embedding models on the real engines, against the same network in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.llama.embedding import EmbeddingModel
from localspec.errors import Closed, PromptTooLong, UnsupportedModel, UsageError
from tests.conftest import open_backend
from tests.support.embedders import (
    CLS,
    FIRST,
    LAST,
    MEAN,
    N_CTX,
    N_EMBD,
    RANK,
    SEP,
    WORDS,
    bert_states,
    bert_weights,
    pooled,
    write_bert,
)
from tests.support.ggufs import write_llama

CLOSE = 1e-3
"""Engines round activations to 16 bits in places; another network, pooling or mask differs by tenths."""


@pytest.fixture(autouse=True)
def _engine() -> None:
    open_backend("llama-cpp")


@pytest.mark.parametrize("pooling", [MEAN, FIRST, LAST])
def test_an_encoder_computes_what_numpy_does(pooling: int, tmp_path: Path) -> None:
    model = EmbeddingModel(write_bert(tmp_path / "bert.gguf", pooling))
    tokens = model.tokenize("the cats sat on a mat.")
    assert (tokens[0], tokens[-1]) == (CLS, SEP)
    assert [WORDS[token] for token in tokens[1:-1]] == ["▁the", "▁cat", "s", "▁sat", "▁on", "▁a", "▁mat", "▁."]
    text = [*tokens, *[6, 7, 8, 9, 10, 11] * 4][:N_CTX]
    for n in range(N_CTX, 0, -1):  # kernels are chosen by the length; and nothing is left of the text before
        text = text[:n]
        row = model.embed(text)
        assert row.shape == (N_EMBD,)
        assert np.abs(row - pooled(bert_states(text, bert_weights()), pooling)).max() < CLOSE
    model.close()


def test_a_decoder_that_pools_its_last_state(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "decoder.gguf", extra={"llama.pooling_type": LAST})
    model = EmbeddingModel(path)
    tokens = model.tokenize("the cat sat on the mat")
    same = write_llama(tmp_path / "same.gguf")  # the same weights, of which nothing says that they are pooled
    with reference.load(same) as exact, exact.new_context(64, hidden=("norm",)) as context:
        states = context.decode(tokens, "all").hidden["norm"]
    assert np.abs(model.embed(tokens) - pooled(states, LAST)).max() < CLOSE
    model.close()


def test_what_cannot_be_embedded_is_an_error(tmp_path: Path) -> None:
    path = write_bert(tmp_path / "bert.gguf")
    model = EmbeddingModel(path)
    with pytest.raises(PromptTooLong, match=f"33 tokens, and {N_CTX} fit"):
        model.embed([6] * (N_CTX + 1))
    for tokens in ([], [len(WORDS)], [-1]):
        with pytest.raises(UsageError):
            model.embed(tokens)
    model.close()
    model.close()
    with pytest.raises(Closed):
        model.embed([6])
    with pytest.raises(UsageError, match="--ctx 64"):
        EmbeddingModel(path, n_ctx=64)
    for other in (write_llama(tmp_path / "llama.gguf"), write_bert(tmp_path / "ranker.gguf", RANK)):
        with pytest.raises(UnsupportedModel, match="no embedding model"):
            EmbeddingModel(other)
