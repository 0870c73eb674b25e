"""Tokens that branch, in one pass: each row is that of its own path alone, and one path is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from localspec.backends.base import Context, Forward, Model
from localspec.errors import ContextFull, UsageError
from tests.backends.test_backends import NOISE, agree, fresh_rows, rows, some_tokens
from tests.conftest import Backend, TinyFiles, open_backend

EVERY = ("layer:0", "layer:1", "norm")

SHAPES = {
    "two leaves": [-1, -1],
    "a fork": [-1, 0, 0],
    "a chain": [-1, 0, 1, 2],
    "two chains side by side": [-1, 0, 1, -1, 3, 4],
    "a chain with leaves": [-1, 0, 1, 2, -1, 0, 1],
    "full, three deep": [-1, 0, 0, 1, 1, 2, 2],
    "three wide": [-1, -1, -1, 0, 1, 2, 0, 1, 2],
}


@pytest.fixture(scope="module")
def model(backend: Backend, tiny: TinyFiles) -> Iterator[Model]:
    with backend.load(tiny.spm, n_threads=1) as model:
        if not model.capabilities.trees:
            pytest.skip("this engine feeds no trees")
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.new_context(256) as context:
        yield context


def path_to(parents: Sequence[int], at: int) -> list[int]:
    return [] if at < 0 else [*path_to(parents, parents[at]), at]


def random_parents(random: np.random.Generator, n: int) -> list[int]:
    return [int(random.integers(max(-1, i - 4), i)) for i in range(n)]


def check_rows(model: Model, before: list[int], tokens: list[int], parents: Sequence[int], forward: Forward) -> None:
    assert len(forward) == len(tokens)
    for at in range(len(tokens)):
        path = [*before, *(tokens[i] for i in path_to(parents, at))]
        assert agree(model, forward.logits[at : at + 1], fresh_rows(model, path)[-1:]), at


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_before", [0, 1, 40])
def test_each_row_is_that_of_its_own_path(model: Model, context: Context, shape: str, n_before: int) -> None:
    before = some_tokens(n_before)
    if before:
        context.decode(before)
    parents = SHAPES[shape]
    tokens = some_tokens(len(parents), seed=2)
    check_rows(model, before, tokens, parents, context.decode_tree(tokens, parents))
    assert context.tokens == before


def test_the_branches_differ_by_more_than_noise(model: Model, context: Context) -> None:
    """The negative control: rows of another branch, or of another depth, are far from those of the right one."""
    context.decode(some_tokens(40))
    logits = context.decode_tree([9, 30, 30, 9], [-1, -1, 0, 1]).logits.copy()
    for left, right in ((0, 1), (1, 2), (0, 3), (2, 3)):
        assert np.abs(logits[left] - logits[right]).max() > 10 * NOISE


def test_random_trees_one_after_another(model: Model, context: Context) -> None:
    """Any path of each is kept; what follows is as after that text read afresh."""
    random = np.random.default_rng(3)
    context.decode(some_tokens(30))
    for round_ in range(12):
        parents = random_parents(random, int(random.integers(1, 12)))
        tokens, before = some_tokens(len(parents), seed=round_), list(context.tokens)
        check_rows(model, before, tokens, parents, context.decode_tree(tokens, parents))
        path = path_to(parents, int(random.integers(-1, len(parents))))
        context.keep(path)
        assert context.tokens == before + [tokens[at] for at in path]
        more = some_tokens(3, seed=100 + round_)
        assert agree(model, rows(context, more), fresh_rows(model, [*before, *(tokens[at] for at in path), *more])[-3:])
        context.truncate(context.n_past - int(random.integers(0, 4)))


def test_hidden_states_come_with_every_row(model: Model) -> None:
    if not model.capabilities.hidden:
        pytest.skip("this engine returns no states")
    before, tokens, parents = some_tokens(20), some_tokens(7, seed=4), SHAPES["full, three deep"]
    with model.new_context(64, hidden=EVERY) as context, model.new_context(64, hidden=EVERY) as alone:
        context.decode(before)
        forward = context.decode_tree(tokens, parents)
        for at in range(len(tokens)):
            alone.truncate(0)
            wanted = alone.decode([*before, *(tokens[i] for i in path_to(parents, at))])
            for name in EVERY:
                assert agree(model, forward.hidden[name][at : at + 1], wanted.hidden[name][-1:]), (name, at)
        taken = forward.take([0, 2, 6])
        assert agree(model, taken.logits, forward.logits[[0, 2, 6]])
        assert agree(model, taken.hidden["norm"], forward.hidden["norm"][[0, 2, 6]])


def test_whatever_comes_before_a_path_is_kept_drops_the_tree(model: Model, context: Context) -> None:
    before, tokens, parents = some_tokens(20), some_tokens(7, seed=4), SHAPES["full, three deep"]
    context.decode(before)
    more = some_tokens(4, seed=5)
    wanted = fresh_rows(model, before + more)[-4:]
    for disturb in (
        lambda: None,
        lambda: context.truncate(20),
        lambda: context.reuse(before),
        lambda: context.keep([]),
        lambda: context.decode_tree(tokens[:2], [-1, -1]),
        lambda: model.capabilities.saves_state and context.import_state(context.export_state()),
    ):
        context.decode_tree(tokens, parents)
        disturb()
        assert agree(model, rows(context, more), wanted)
        with pytest.raises(UsageError, match="no tree"):
            context.keep([0])
        context.truncate(20)
    context.decode_tree(tokens, parents)
    context.truncate(10)
    assert agree(model, rows(context, more), fresh_rows(model, before[:10] + more)[-4:])


def test_a_pass_that_breaks_off_leaves_the_memory_as_it_was(
    model: Model, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, more = some_tokens(20), some_tokens(4, seed=5)
    context.decode(before)
    for name in ("_decode_tree", "_keep"):
        real = getattr(type(context), name)

        def interrupted(self: Context, *arguments: object, real: object = real) -> None:
            real(self, *arguments)  # type: ignore[operator]
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(context), name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                context.keep([2] if len(context.decode_tree([9, 8, 7], [-1, 0, -1])) else [])
        assert context.tokens == before
        assert agree(model, rows(context, more), fresh_rows(model, before + more)[-4:])
        context.truncate(20)


def test_trees_that_are_none(model: Model, context: Context) -> None:
    context.decode([5, 6])
    for tokens, parents in (([], []), ([5], [0]), ([5], [-2]), ([5, 6], [-1]), ([5, 6], [1, -1]), ([99999], [-1])):
        with pytest.raises(UsageError):
            context.decode_tree(tokens, parents)
    context.decode_tree([7, 8, 9], [-1, 0, -1])
    for path in ([1], [0, 2], [3], [2, 1], [-1]):
        with pytest.raises(UsageError, match="no path"):
            context.keep(path)
    context.keep([0, 1])
    assert context.tokens == [5, 6, 7, 8]


def test_a_tree_that_does_not_fit(model: Model) -> None:
    """Rows count, not depth; when it has gone, its room is free again."""
    with model.new_context(32) as context:
        context.decode(some_tokens(28))
        with pytest.raises(ContextFull):
            context.decode_tree([5] * 5, [-1] * 5)
        for _ in range(50):
            context.decode_tree([5, 6, 7, 8], [-1, -1, 0, 1])
            context.keep([1, 3])
            context.truncate(28)
        assert agree(model, rows(context, [5, 6, 7, 8]), fresh_rows(model, [*some_tokens(28), 5, 6, 7, 8])[-4:])


def test_a_window_is_one_of_positions(backend: Backend, tiny: TinyFiles) -> None:
    """Rows side by side count once towards what a sliding window sees."""
    if backend.name == "reference":
        pytest.skip("it computes no sliding windows")
    with backend.load(tiny.sliding, n_threads=1) as model:
        if not model.capabilities.trees:
            pytest.skip("this engine feeds no trees of this model")
        before, random = some_tokens(45), np.random.default_rng(6)
        with model.new_context(128) as context:
            context.decode(before)
            for round_ in range(3):
                parents = random_parents(random, 10)
                tokens, before = some_tokens(10, seed=round_), list(context.tokens)
                check_rows(model, before, tokens, parents, context.decode_tree(tokens, parents))
                context.keep(path_to(parents, 9))


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_a_quantised_cache(tiny: TinyFiles, kv_type: str) -> None:
    """Kept rows move with their scales."""
    backend = open_backend("mlx")
    with backend.load(tiny.spm, kv_type=kv_type) as model, model.new_context(128) as context:
        random, before = np.random.default_rng(6), some_tokens(20)
        context.decode(before)
        for round_ in range(3):
            parents = random_parents(random, 8)
            tokens, before = some_tokens(8, seed=round_), list(context.tokens)
            check_rows(model, before, tokens, parents, context.decode_tree(tokens, parents))
            context.keep(path_to(parents, 7))


def test_memories_that_cannot_branch_say_so(backend: Backend, tiny: TinyFiles) -> None:
    if backend.name in ("reference", "ik-llama"):
        pytest.skip("it computes none")
    with backend.load(tiny.recurrent, n_threads=1) as model, model.new_context(64) as context:
        assert not model.capabilities.trees
        context.decode([5, 6])
        with pytest.raises(UsageError, match="cannot feed tokens that branch"):
            context.decode_tree([7, 8], [-1, -1])
        assert context.tokens == [5, 6]
