"""Tokens that branch, in one pass, beyond any order of operations (``test_backends``)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from localspec.backends.base import Context, Model
from localspec.errors import ContextFull, UsageError
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support.contexts import NOISE, agree, check_next, fresh_rows, path_to, rows, some_tokens


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


def test_trees_in_a_long_text_that_is_cut_and_goes_on(model: Model) -> None:
    """Side branches of many rows, memories of more than 256, and text that trees have known and that is gone."""
    random, text = np.random.default_rng(8), some_tokens(370)
    with model.new_context(800, branches=True) as context:
        context.decode(text)
        for round_ in range(9):
            n_side, n_main = int(random.integers(1, 13)), int(random.integers(1, 13))
            parents = [*range(-1, n_side - 1), -1, *range(n_side, n_side + n_main - 1)]
            if round_ % 2:
                parents += [n_side + int(random.integers(0, n_main)) for _ in range(3)]
            tokens = some_tokens(len(parents), seed=50 + round_)
            found = context.decode_tree(tokens, parents).logits.copy()
            for leaf in set(range(len(parents))) - set(parents):
                path = path_to(parents, leaf)
                wanted = fresh_rows(model, [*text, *(tokens[at] for at in path)], len(text))
                assert agree(model, found[path], wanted), (round_, leaf)
            kept = path_to(parents, int(random.integers(0, len(parents))))
            context.keep(kept)
            text = [*text, *(tokens[at] for at in kept)]
            if round_ % 3 == 2:
                text = [*text[: int(random.integers(100, 350))], *some_tokens(60 * (round_ % 2), seed=round_)]
                if (n := context.reuse(text)) < len(text):
                    context.decode(text[n:], "none")
            assert context.tokens == text
        context.truncate(len(text) - 40)
        check_next(model, context, some_tokens(40, seed=9))


def test_what_lies_behind_a_dropped_branch_is_seen(model: Model) -> None:
    """ik-llama looks for the end of its memory at every 32nd place."""
    more = some_tokens(2, seed=7)
    for n_before in (18, 25, 31):
        before, tokens, parents = some_tokens(n_before), some_tokens(17, seed=3), [*range(-1, 13), -1, 14, 15]
        with model.new_context(128, branches=True) as context:
            context.decode(before)
            context.decode_tree(tokens, parents)
            context.keep([14, 15, 16])
            wanted = fresh_rows(model, [*before, *tokens[14:], *more])
            assert agree(model, rows(context, more), wanted[-2:])
            context.truncate(n_before + 1)  # a row in the midst of others
            assert agree(model, rows(context, [*tokens[15:], *more]), wanted[-4:])
            context.truncate(n_before + 1)
            assert len(context.decode_tree(tokens[:2], [-1, -1])) == 2
            context.keep([1])
            check_next(model, context, more)


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
