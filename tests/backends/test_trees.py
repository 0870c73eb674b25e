"""Tokens that branch, in one pass, beyond any order of operations (``test_backends``)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from localspec.backends.base import Context, Model
from localspec.errors import ContextFull, UsageError
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support.contexts import NOISE, check_next, some_tokens


@pytest.fixture(scope="module")
def model(backend: Backend, tiny: TinyFiles) -> Iterator[Model]:
    with backend.load(tiny.spm, n_threads=1) as model:
        if not model.capabilities.trees:
            pytest.skip("this engine feeds no trees")
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.new_context(256, branches=True) as context:
        yield context


def test_the_branches_differ_by_more_than_noise(context: Context) -> None:
    """The negative control: rows of another branch, or of another depth, are far from those of the right one."""
    context.decode(some_tokens(40))
    logits = context.decode_tree([9, 30, 30, 9], [-1, -1, 0, 1]).logits.copy()
    for left, right in ((0, 1), (1, 2), (0, 3), (2, 3)):
        assert np.abs(logits[left] - logits[right]).max() > 10 * NOISE


def test_trees_that_are_none(context: Context) -> None:
    context.decode([5, 6])
    for tokens, parents in (([], []), ([5], [0]), ([5], [-2]), ([5, 6], [-1]), ([5, 6], [1, -1]), ([99999], [-1])):
        with pytest.raises(UsageError):
            context.decode_tree(tokens, parents)
    context.decode_tree([7, 8, 9], [-1, 0, -1])
    for path in ([1], [0, 2], [3], [2, 1], [-1]):
        with pytest.raises(UsageError, match="is not a path"):
            context.keep(path)
    context.keep([0, 1])
    assert context.tokens == [5, 6, 7, 8]


def test_a_tree_that_does_not_fit(model: Model) -> None:
    """Rows count, not depth; when it has gone, its room is free again."""
    with model.new_context(32, branches=True) as context:
        context.decode(some_tokens(28))
        with pytest.raises(ContextFull):
            context.decode_tree([5] * 5, [-1] * 5)
        for _ in range(50):
            context.decode_tree([5, 6, 7, 8], [-1, -1, 0, 1])
            context.keep([1, 3])
            context.truncate(28)
        check_next(model, context, [5, 6, 7, 8])


@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_more_leaves_than_sequences(tiny: TinyFiles, engine: str) -> None:
    with open_backend(engine).load(tiny.spm, n_threads=1) as model, model.new_context(256, branches=True) as context:
        context.decode(some_tokens(20))
        wide = list(range(5, 5 + 64))
        assert len(context.decode_tree(wide, [-1] * 64)) == 64
        with pytest.raises(UsageError, match="64 leaves"):
            context.decode_tree([*wide, 4], [-1] * 65)
        check_next(model, context, some_tokens(4, seed=5))


def test_memories_that_cannot_branch_say_so(tiny: TinyFiles) -> None:
    with open_backend("ik-llama").load(tiny.spm, n_threads=1, kv_type="q8_0") as model:
        assert "flash attention" in str(model.why_no_trees())
        with model.new_context(32, branches=True) as context:
            assert not context.can_branch
    for engine, file, words in (
        ("llama-cpp", tiny.spm, "not made for tokens that branch"),
        ("llama-cpp", tiny.recurrent, "does not take tokens that branch"),
        ("mlx", tiny.recurrent, "does not take tokens that branch"),
    ):
        with open_backend(engine).load(file, n_threads=1) as model:
            assert model.capabilities.trees == (file == tiny.spm)
            with model.new_context(64, branches=file != tiny.spm) as context:
                context.decode([5, 6])
                with pytest.raises(UsageError, match=words):
                    context.decode_tree([7, 8], [-1, -1])
                assert context.tokens == [5, 6]
