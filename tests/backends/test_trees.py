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
    with model.new_context(256, branches=True) as context:
        yield context


def path_to(parents: Sequence[int], at: int) -> list[int]:
    return [] if at < 0 else [*path_to(parents, parents[at]), at]


def random_parents(random: np.random.Generator, n: int) -> list[int]:
    return [int(random.integers(max(-1, i - 4), i)) for i in range(n)]


def read(context: Context, text: list[int]) -> None:
    """Hold this text."""
    if (n := context.reuse(text)) < len(text):
        context.decode(text[n:], "none")


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
    with model.new_context(64, hidden=EVERY, branches=True) as context, model.new_context(64, hidden=EVERY) as alone:
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
        assert agree(model, rows(context, [5, 6, 7, 8]), fresh_rows(model, [*some_tokens(28), 5, 6, 7, 8])[-4:])


def test_a_window_is_one_of_positions(backend: Backend, tiny: TinyFiles) -> None:
    """Rows side by side count once towards what a sliding window sees."""
    if backend.name == "reference":
        pytest.skip("it computes no sliding windows")
    with backend.load(tiny.sliding, n_threads=1) as model:
        if not model.capabilities.trees:
            pytest.skip("this engine feeds no trees of this model")
        before, random = some_tokens(45), np.random.default_rng(6)
        with model.new_context(128, branches=True) as context:
            context.decode(before)
            for round_ in range(3):
                parents = random_parents(random, 10)
                tokens, before = some_tokens(10, seed=round_), list(context.tokens)
                check_rows(model, before, tokens, parents, context.decode_tree(tokens, parents))
                context.keep(path_to(parents, 9))


def test_trees_in_a_long_text_that_is_cut_and_goes_on(model: Model) -> None:
    """Side branches of many rows, memories of more than 256, and text that trees have known and that is gone."""
    random, text = np.random.default_rng(8), some_tokens(370)
    with model.new_context(800, branches=True) as context, model.new_context(800) as alone:
        context.decode(text)
        for round_ in range(12):
            n_side, n_main = int(random.integers(1, 13)), int(random.integers(1, 13))
            parents = [*range(-1, n_side - 1), -1, *range(n_side, n_side + n_main - 1)]
            if round_ % 2:
                parents += [n_side + int(random.integers(0, n_main)) for _ in range(3)]
            tokens = some_tokens(len(parents), seed=50 + round_)
            found = context.decode_tree(tokens, parents).logits.copy()
            for leaf in set(range(len(parents))) - set(parents):
                path = path_to(parents, leaf)
                read(alone, text)
                assert agree(model, found[path], alone.decode([tokens[at] for at in path]).logits), (round_, leaf)
            kept = path_to(parents, int(random.integers(0, len(parents))))
            context.keep(kept)
            text = [*text, *(tokens[at] for at in kept)]
            if round_ % 3 == 2:
                text = [*text[: int(random.integers(100, 350))], *some_tokens(60 * (round_ % 2), seed=round_)]
                read(context, text)
            assert context.tokens == text
        context.truncate(len(text) - 40)
        more = some_tokens(40, seed=9)
        assert agree(model, context.decode(more).logits, fresh_rows(model, [*text[:-40], *more], 800)[-40:])


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
            assert agree(model, rows(context, more), fresh_rows(model, [*before, tokens[14], tokens[1], *more])[-2:])


def test_states_go_between_contexts_that_branch_and_those_that_do_not(model: Model) -> None:
    if not model.capabilities.saves_state:
        pytest.skip("this engine saves no states")
    before, tokens, parents = some_tokens(45), some_tokens(7, seed=4), SHAPES["full, three deep"]
    more = some_tokens(5, seed=6)
    with model.new_context(128) as plain, model.new_context(128, branches=True) as context:
        plain.decode(before)
        for _ in range(2):
            context.import_state(plain.export_state())
            check_rows(model, before, tokens, parents, context.decode_tree(tokens, parents))
            context.keep([0, 2, 6])
            before = [*before, tokens[0], tokens[2], tokens[6]]
            plain.import_state(context.export_state())
            for each in (plain, context):
                assert each.tokens == before
                assert agree(model, rows(each, more), fresh_rows(model, [*before, *more])[-5:])
                each.truncate(len(before))


def test_contexts_that_were_not_made_for_trees_say_so(model: Model) -> None:
    with model.new_context(32) as context:
        if context.can_branch:
            pytest.skip("all of this engine's are")
        context.decode([5, 6])
        with pytest.raises(UsageError, match="not made for tokens that branch"):
            context.decode_tree([7, 8], [-1, -1])
        assert context.tokens == [5, 6]


@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_more_leaves_than_sequences(tiny: TinyFiles, engine: str) -> None:
    with open_backend(engine).load(tiny.spm, n_threads=1) as model, model.new_context(256, branches=True) as context:
        context.decode(some_tokens(20))
        wide = list(range(5, 5 + 64))
        assert len(context.decode_tree(wide, [-1] * 64)) == 64
        with pytest.raises(UsageError, match="64 leaves"):
            context.decode_tree([*wide, 4], [-1] * 65)
        more = some_tokens(4, seed=5)
        assert agree(model, rows(context, more), fresh_rows(model, [*some_tokens(20), *more])[-4:])


def test_a_cache_that_needs_flash_attention_is_refused(tiny: TinyFiles) -> None:
    with open_backend("ik-llama").load(tiny.spm, n_threads=1, kv_type="q8_0") as model:
        assert "flash attention" in str(model.why_no_trees())
        with model.new_context(32, branches=True) as context:
            assert not context.can_branch


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("engine", ["mlx", "llama-cpp"])
def test_a_quantised_cache(tiny: TinyFiles, engine: str, kv_type: str) -> None:
    """Kept rows move with their scales."""
    backend = open_backend(engine)
    with backend.load(tiny.spm, kv_type=kv_type) as model, model.new_context(128, branches=True) as context:
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
    with backend.load(tiny.recurrent, n_threads=1) as model, model.new_context(64, branches=True) as context:
        assert not model.capabilities.trees
        context.decode([5, 6])
        with pytest.raises(UsageError, match="does not take tokens that branch"):
            context.decode_tree([7, 8], [-1, -1])
        assert context.tokens == [5, 6]
