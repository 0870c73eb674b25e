"""Hidden states by name, rows of floats, passes that end early: what ``backends.base`` promises, asked of each engine.

The states of the reference backend are the measure for the others. On the F32 file of these tests a state differs by at
most a hundredth from the reference's, while that of another token, layer or position differs by more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import Context, FloatArray, Forward, Model, Piece, SequenceBatch
from localspec.backends.llama.model import LlamaContext, LlamaModel
from localspec.errors import Cancelled, Closed, ContextFull, UsageError
from tests.backends.test_backends import agree, fresh_rows, rows, some_tokens
from tests.conftest import Backend, TinyFiles
from tests.support import ggufs, several

SHAPE = ggufs.Shape(n_layer=3)
WEIGHTS = ggufs.llama_weights(SHAPE, 384)
EMBEDDING = WEIGHTS["token_embd.weight"]
WHOLE, CROPPED = ("layer:0", "layer:1"), ("layer:2", "norm")
EVERY = (*WHOLE, *CROPPED)


@pytest.fixture(scope="module")
def path(tiny: TinyFiles) -> Path:
    return ggufs.write_llama(tiny.folder / "tiny-three-layers.gguf", SHAPE, weights=WEIGHTS)


@pytest.fixture(scope="module")
def model(backend: Backend, path: Path) -> Iterator[Model]:
    with backend.load(path, n_threads=1) as model:
        yield model


@pytest.fixture(params=several.KINDS)
def context(request: pytest.FixtureRequest, model: Model) -> Iterator[Context]:
    with several.opened(model, request.param, 256, EVERY) as context:
        yield context


@pytest.fixture(scope="module")
def expected(path: Path) -> Callable[[list[int]], dict[str, FloatArray]]:
    """The reference's states of a text from its beginning."""

    def states(tokens: list[int]) -> dict[str, FloatArray]:
        with reference.load(path) as model, model.new_context(len(tokens), hidden=EVERY) as context:
            return dict(context.decode(tokens).hidden)

    return states


def check(model: Model, forward: Forward, wanted: dict[str, FloatArray], whole: slice, cropped: slice) -> None:
    """The states of a pass are those rows of the whole text."""
    for name, states in forward.hidden.items():
        assert states.dtype == np.float32
        assert agree(model, states, wanted[name][cropped if name in CROPPED else whole]), name


# What a state is.


def test_the_tolerance_tells_states_apart(expected: Callable[[list[int]], dict[str, FloatArray]]) -> None:
    """One of another token, of another layer, and one behind a foreign token: each is far outside the noise."""
    tokens = some_tokens(30)
    right, foreign = expected(tokens), expected([7, *tokens[1:]])
    for name in EVERY:
        assert np.abs(right[name][1:] - right[name][:-1]).max(axis=1).min() > 1
        assert np.median(np.abs(right[name][1:] - foreign[name][1:]).max(axis=1)) > 0.1  # less far behind it
    for one, other in pairwise(EVERY):
        assert np.abs(right[one] - right[other]).max(axis=1).min() > 0.5


def test_states_are_those_of_the_reference(model: Model, context: Context, expected: Any) -> None:
    tokens = some_tokens(40)
    forward = context.decode(tokens)
    assert set(forward.hidden) == set(EVERY)
    check(model, forward, expected(tokens), slice(0, 40), slice(0, 40))


def test_the_norm_is_what_the_output_matrix_multiplies(model: Model, context: Context) -> None:
    forward = context.decode(some_tokens(20))
    ours = forward.hidden["norm"].astype(np.float64) @ WEIGHTS["output.weight"].T
    assert np.abs(ours - forward.logits).max() < 0.01


def test_the_norm_follows_from_the_last_layer(context: Context) -> None:
    hidden = context.decode(some_tokens(20)).hidden
    last = hidden["layer:2"].astype(np.float64)
    size = np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-5)
    assert np.abs(last / size * WEIGHTS["output_norm.weight"] - hidden["norm"]).max() < 1e-4


@pytest.mark.parametrize("names", [(), ("norm",), ("layer:1",), ("layer:2", "layer:0"), EVERY])
def test_logits_do_not_depend_on_what_is_returned(model: Model, names: tuple[str, ...]) -> None:
    """To the bit, over passes of many widths, several times each."""
    tokens = some_tokens(200)
    with model.new_context(256) as plain, model.new_context(256, hidden=names) as tapped:
        for _ in range(2):
            for width in (1, 1, 2, 1, 3, 8, 1, 40, 2, 1, 100, 8):
                piece = tokens[plain.n_past : plain.n_past + width]
                wanted, forward = plain.decode(piece).logits.copy(), tapped.decode(piece)
                assert np.array_equal(forward.logits, wanted), width
                assert set(forward.hidden) == set(names)
                assert all(len(states) == width for states in forward.hidden.values())
            plain.truncate(0)
            tapped.truncate(0)


def test_states_of_any_width_are_those_of_the_whole_text(model: Model, context: Context, expected: Any) -> None:
    tokens = some_tokens(120)
    wanted = expected(tokens)
    for _ in range(2):
        for width in (1, 2, 1, 8, 1, 30, 2, 1, 5):
            start = context.n_past
            forward = context.decode(tokens[start : start + width])
            check(model, forward, wanted, slice(start, start + width), slice(start, start + width))
        context.truncate(0)


def test_states_outlive_the_next_pass(context: Context) -> None:
    hidden = context.decode(some_tokens(9)).hidden
    before = {name: states.copy() for name, states in hidden.items()}
    context.decode(some_tokens(9, seed=1))
    context.close()
    assert all(np.array_equal(hidden[name], before[name]) for name in EVERY)


# Prefill.


@pytest.mark.parametrize(("logits", "n_rows"), [("last", 1), ("none", 0)])
@pytest.mark.parametrize("n", [1, 2, 30])
def test_states_of_a_prefill(model: Model, context: Context, expected: Any, logits: Any, n_rows: int, n: int) -> None:
    """Before the last layer there is a row for every token; there and after it one for each row of logits."""
    tokens = some_tokens(40)
    wanted = expected(tokens)
    context.decode(tokens[:5], "none")
    for _ in range(2):  # known nodes are found in another way
        forward = context.decode(tokens[5 : 5 + n], logits)
        assert len(forward) == n_rows
        assert {name: len(forward.hidden[name]) for name in EVERY} == dict.fromkeys(WHOLE, n) | dict.fromkeys(
            CROPPED, n_rows
        )
        check(model, forward, wanted, slice(5, 5 + n), slice(5 + n - n_rows, 5 + n))
        context.truncate(5)


@pytest.mark.parametrize("logits", ["all", "last", "none"])
@pytest.mark.parametrize("interruptible", [False, True])
def test_states_of_a_call_longer_than_the_engines_batch(
    model: Model, expected: Any, logits: Any, interruptible: bool
) -> None:
    tokens = some_tokens(700)
    n_rows = {"all": 700, "last": 1, "none": 0}[logits]
    with model.new_context(800, hidden=EVERY) as context, model.new_context(800) as plain:
        if interruptible:
            context.interrupted = lambda: False
        forward = context.decode(tokens, logits)
        assert np.allclose(forward.logits, plain.decode(tokens, logits).logits, atol=0.05, rtol=0)
        check(model, forward, expected(tokens), slice(0, 700), slice(700 - n_rows, 700))


def test_a_call_that_was_stopped_leaves_rows_that_are_gone_on_from(model: Model, expected: Any) -> None:
    tokens = some_tokens(700)
    with model.new_context(800, hidden=EVERY) as context:
        context.interrupted = lambda: True
        with pytest.raises(Cancelled):
            context.decode(tokens, "last")
        done = context.n_past
        assert done < 700
        context.interrupted = None
        forward = context.decode(tokens[done:], "last")
    check(model, forward, expected(tokens), slice(done, 700), slice(699, 700))


# Rollback, states, broken passes.


def test_states_after_a_rollback(model: Model, context: Context, expected: Any) -> None:
    random = np.random.default_rng(1)
    for trial in range(12):
        context.decode(some_tokens(int(random.integers(1, 20)), seed=trial))
        context.truncate(int(random.integers(0, context.n_past + 1)))
        kept, more = list(context.tokens), some_tokens(int(random.integers(1, 9)), seed=100 + trial)
        part = slice(len(kept), len(kept) + len(more))
        check(model, context.decode(more), expected(kept + more), part, part)
        context.truncate(min(context.n_past, 60))


def test_states_after_an_import(model: Model, context: Context, expected: Any) -> None:
    """From a context that returns none into one that does, and the other way."""
    tokens = some_tokens(60)
    with model.new_context(128) as plain:
        plain.decode(tokens[:40])
        context.import_state(plain.export_state())
        check(model, context.decode(tokens[40:]), expected(tokens), slice(40, 60), slice(40, 60))
        plain.import_state(context.export_state())
        assert plain.decode([7]).hidden == {}
        assert agree(model, rows(plain, [8]), fresh_rows(model, [*tokens, 7, 8])[-1:])


def test_states_after_a_broken_pass(
    model: Model, context: Context, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(20)
    context.decode(tokens[:10])
    decode = type(context)._decode

    def interrupted(self: Context, tokens: list[int], logits: Any) -> None:
        decode(self, tokens[:3], logits)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(context), "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.decode([300] * 6)
    check(model, context.decode(tokens[10:]), expected(tokens), slice(10, 20), slice(10, 20))


@pytest.mark.parametrize("when", ["ask", "copy"])
def test_what_is_raised_while_the_engine_computes_is_raised_after_it(
    model: Model, context: Context, expected: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C in the callback does not reach the engine, which would go on with an answer that means nothing."""
    if not isinstance(context, LlamaContext):
        pytest.skip("has no callback")
    tokens = some_tokens(20)
    context.decode(tokens[:10])
    functions = model.binding.tensors  # type: ignore[attr-defined]

    def raising(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(functions, "name" if when == "ask" else "copy", raising)
        with pytest.raises(KeyboardInterrupt):
            context.decode(tokens[10:15])
    assert context.tokens == tokens[:10]
    check(model, context.decode(tokens[10:]), expected(tokens), slice(10, 20), slice(10, 20))


def test_a_state_that_lies_elsewhere_than_before_is_found(model: Model, context: Context, expected: Any) -> None:
    """The engine promises no addresses; a pass that was looked for at the wrong ones is computed again."""
    if not isinstance(context, LlamaContext):
        pytest.skip("is not asked for addresses")
    tokens = some_tokens(30)
    wanted = expected(tokens)
    context.decode(tokens[:20], "none")
    for logits, n_rows in (("all", 5), ("last", 1), ("none", 0)):
        for _ in range(2):
            forward = context.decode(tokens[20:25], logits)  # type: ignore[arg-type]
            check(model, forward, wanted, slice(20, 25), slice(25 - n_rows, 25))
            context.truncate(20)
            tap = context._passes.tap
            assert tap is not None
            assert tap._known
            tap._known.clear()
    assert agree(model, rows(context, tokens[20:]), fresh_rows(model, tokens)[20:])


# Rows of floats.


def test_embeddings_as_rows_are_as_good_as_tokens(model: Model, context: Context) -> None:
    """Together, one by one and mixed with tokens; the first row that a context ever reads is one of them."""
    tokens = some_tokens(60)
    with model.new_context(256, hidden=EVERY) as by_tokens:
        wanted = by_tokens.decode(tokens)
        wanted_logits, wanted_states = wanted.logits.copy(), wanted.hidden
    for widths in ([1] * 9, [60], [1, 2, 3, 4, 5, 20, 8]):
        for width in widths:
            part = slice(context.n_past, context.n_past + width)
            forward = context.decode_floats(EMBEDDING[tokens[part]], tokens[part])
            assert agree(model, forward.logits.copy(), wanted_logits[part])
            check(model, forward, dict(wanted_states), part, part)
            if context.n_past + 4 < len(tokens):
                part = slice(context.n_past, context.n_past + 2)
                assert agree(model, rows(context, tokens[part]), wanted_logits[part])
        assert context.tokens == tokens[: context.n_past]
        context.truncate(0)


def test_rows_that_are_no_embeddings(model: Model, context: Context) -> None:
    """Row by row and together; of a row that is half one embedding and half another, other logits than of either."""
    random = np.random.default_rng(0)
    floats = (EMBEDDING[some_tokens(20)] + random.standard_normal((20, SHAPE.n_embd))).astype(np.float32)
    together = context.decode_floats(floats, range(20)).logits.copy()
    context.truncate(0)
    one_by_one = [context.decode_floats(floats[i : i + 1], [i]).logits.copy() for i in range(20)]
    assert agree(model, together, np.concatenate(one_by_one))
    assert np.abs(together - fresh_rows(model, some_tokens(20))).max(axis=1).min() > 0.1


@pytest.mark.parametrize(("logits", "n_rows"), [("last", 1), ("none", 0)])
def test_fewer_logits_of_rows(model: Model, context: Context, expected: Any, logits: Any, n_rows: int) -> None:
    tokens = some_tokens(20)
    forward = context.decode_floats(EMBEDDING[tokens], tokens, logits)
    assert forward.logits.shape == (n_rows, model.n_vocab)
    check(model, forward, expected(tokens), slice(0, 20), slice(20 - n_rows, 20))


def test_rows_are_rolled_back_and_named_by_their_tokens(model: Model, context: Context) -> None:
    """The names may be of another vocabulary, are what reuse compares, and say nothing to the engine."""
    tokens = some_tokens(20)
    names = [10**6 + i for i in range(20)]
    wanted = fresh_rows(model, tokens)
    context.decode_floats(EMBEDDING[tokens], names)
    assert context.tokens == names
    assert context.reuse([*names[:12], 5, 6]) == 12
    forward = context.decode_floats(EMBEDDING[tokens[12:]], names[12:])
    assert agree(model, forward.logits, wanted[12:])


def test_rows_in_many_layouts(model: Model, context: Context) -> None:
    tokens = some_tokens(6)
    wanted = fresh_rows(model, tokens)
    embedding = EMBEDDING[tokens]
    for floats in (np.asfortranarray(embedding), embedding.astype(np.float64), np.repeat(embedding, 2, axis=0)[::2]):
        assert agree(model, context.decode_floats(floats, tokens).logits.copy(), wanted)
        context.truncate(0)


def test_rows_of_a_wrong_kind_are_refused(model: Model, context: Context) -> None:
    good = EMBEDDING[:3]
    context.decode([5, 6])
    for floats, tokens, words in (
        (good, [1, 2], r"shape \[2, 128\], not \[3, 128\]"),
        (good[:, :64], [1, 2, 3], r"shape \[3, 128\]"),
        (good[0], [1], "shape"),
        (good[:0], [], "at least one"),
        (np.where(good > 0, np.nan, good), [1, 2, 3], "finite"),
        (good, [1, 2, -1], "0 or more"),
    ):
        with pytest.raises(UsageError, match=words):
            context.decode_floats(floats, tokens)
    with pytest.raises(ContextFull):
        context.decode_floats(np.zeros((255, SHAPE.n_embd), np.float32), [0] * 255)
    assert context.tokens == [5, 6]
    context.close()
    with pytest.raises(Closed):
        context.decode_floats(good, [1, 2, 3])


# Passes that end early.


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("n", [1, 5])
def test_the_first_layers_alone(
    request: pytest.FixtureRequest, model: Model, context: Context, expected: Any, n_layers: int, n: int
) -> None:
    """Once and again, several in a row; what they leave when they are truncated is nothing, to the bit."""
    tokens = some_tokens(40)
    wanted = expected(tokens)
    with several.opened(model, request.node.callspec.params["context"], 256, EVERY) as undisturbed:
        undisturbed.decode(tokens[:20])
        for _ in range(2):
            whole = undisturbed.decode(tokens[20:25]).logits.copy()
            undisturbed.truncate(20)
    context.decode(tokens[:20])
    for _ in range(3):
        for start in (20, 20 + n):
            forward = context.decode_first_layers(tokens[start : start + n], n_layers)
            assert set(forward.hidden) == set(WHOLE[:n_layers])
            assert forward.logits.shape == (0, model.n_vocab)
            check(model, forward, wanted, slice(start, start + n), slice(0))
        assert context.tokens == tokens[: 20 + 2 * n]
        context.truncate(20)
        again = context.decode(tokens[20:25])
        assert np.array_equal(again.logits, whole)
        check(model, again, wanted, slice(20, 25), slice(20, 25))
        context.truncate(20)


def test_nothing_behind_the_first_layers_is_computed(
    model: Model, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine asks of each node before it computes it; after the end of a pass it asks of none, or of one."""
    if not isinstance(context, LlamaContext):
        pytest.skip("has no callback")
    functions = model.binding.tensors  # type: ignore[attr-defined]
    original, asked = functions.name, list[bytes]()

    def name(tensor: int) -> bytes:
        asked.append(original(tensor))
        return asked[-1]

    monkeypatch.setattr(functions, "name", name)
    context.decode_first_layers([5, 6, 7], 1)
    assert {node for node in asked if node.startswith(b"l_out")} == {b"l_out-0"}
    assert not any(node.startswith((b"Qcur-1", b"ffn_norm-1")) for node in asked)
    assert b"result_norm" not in asked


def test_the_first_layers_of_a_long_text(model: Model, expected: Any) -> None:
    tokens = some_tokens(600)
    with model.new_context(700, hidden=("layer:0",)) as context:
        forward = context.decode_first_layers(tokens, 1)
        check(model, forward, expected(tokens), slice(0, 600), slice(0))
        context.truncate(0)
        assert agree(model, rows(context, tokens[:30]), fresh_rows(model, tokens[:30]))


def test_rows_of_the_first_layers_are_never_built_on(model: Model, context: Context) -> None:
    tokens = some_tokens(20)
    context.decode(tokens[:10])
    context.decode_first_layers(tokens[10:13], 1)
    context.decode_first_layers(tokens[13:15], 1)
    for use in (
        lambda: context.decode([5]),
        lambda: context.decode_floats(EMBEDDING[:1], [0]),
        lambda: context.decode_first_layers([5], 2),
        context.export_state,
    ):
        with pytest.raises(UsageError, match="truncate them first"):
            use()
    context.truncate(12)
    with pytest.raises(UsageError, match="from 10 on"):
        context.decode([5])
    context.reuse(tokens[:10])
    context.decode_first_layers(tokens[10:12], 2)
    context.truncate(8)
    assert agree(model, rows(context, tokens[8:]), fresh_rows(model, tokens)[8:])


def test_an_import_replaces_rows_of_the_first_layers(model: Model, context: Context) -> None:
    tokens = some_tokens(20)
    context.decode(tokens[:10])
    state = context.export_state()
    context.decode_first_layers(tokens[10:15], 1)
    context.import_state(state)
    assert agree(model, rows(context, tokens[10:]), fresh_rows(model, tokens)[10:])


def _in_the_middle_of(model: Model, leave: Callable[[SequenceBatch], None]) -> None:
    """Something happens, and then a sequence between two others goes: rows behind it are moved where an engine does."""
    first, second, third = (some_tokens(60, seed=seed) for seed in range(3))
    with model.new_batch(3, 200, n_ctx=120, hidden=EVERY) as batch:
        for _ in range(2):
            batch[0].truncate(0)
            batch[2].truncate(0)
            batch.decode([Piece(0, first[:30]), Piece(1, second[:40]), Piece(2, third[:20])])
            leave(batch)
            batch[1].truncate(0)
            assert agree(model, rows(batch[2], third[20:40]), fresh_rows(model, third[:40])[20:])
            assert agree(model, rows(batch[0], first[30:50]), fresh_rows(model, first[:50])[30:])


def test_rows_are_moved_whole_after_an_early_exit(model: Model) -> None:
    def leave(batch: SequenceBatch) -> None:
        batch[0].decode_first_layers([5, 6], 1)
        batch[0].truncate(30)

    _in_the_middle_of(model, leave)


def test_rows_are_moved_whole_after_a_pass_that_failed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a state cannot be taken out, the pass is over; nothing else is."""
    if not isinstance(model, LlamaModel):
        pytest.skip("has no callback")

    def leave(batch: SequenceBatch) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("no state")

        with monkeypatch.context() as patch:
            patch.setattr(model.binding.tensors, "copy", broken)
            for feed in (lambda: batch[0].decode_first_layers([5], 1), lambda: batch[0].decode([5])):
                with pytest.raises(RuntimeError, match="no state"):
                    feed()
        assert batch[0].n_past == 30

    _in_the_middle_of(model, leave)


def test_another_sequence_begins_with_what_is_whole(model: Model) -> None:
    """Not with rows of the first layers; the sequence that has them goes on."""
    tokens = some_tokens(60)
    with model.new_batch(3, 200, n_ctx=120, hidden=EVERY) as batch:
        for first in (0, 25):
            batch[0].decode(tokens[first : first + 25])
            batch[0].decode_first_layers(tokens[first + 25 : first + 28], 1)
            assert batch[0].n_whole == first + 25 < batch[0].n_past
            with pytest.raises(UsageError, match=f"cannot copy {first + 26} of {first + 25}"):
                batch.copy_prefix(0, 1, first + 26)
            batch.copy_prefix(0, 1, first + 25)
            assert agree(model, rows(batch[1], tokens[first + 25 : 60]), fresh_rows(model, tokens)[first + 25 :])
            batch[0].decode_first_layers(tokens[first + 28 : first + 30], 1)
            batch[0].truncate(first + 25)
        assert agree(model, rows(batch[0], tokens[50:]), fresh_rows(model, tokens)[50:])


def test_numbers_of_layers_that_cannot_be(model: Model, context: Context) -> None:
    for n_layers in (-1, 0, 3, 4):
        with pytest.raises(UsageError, match=f"1 to 2 layers, not after {n_layers}"):
            context.decode_first_layers([5], n_layers)
    with model.new_context(16, hidden=("layer:1",)) as other:
        with pytest.raises(UsageError, match="not made to return 'layer:0'"):
            other.decode_first_layers([5], 1)
        with pytest.raises(UsageError, match="must lie in"):
            other.decode_first_layers([384], 2)
        assert other.n_past == 0
    with model.new_context(16) as plain, pytest.raises(UsageError, match="not made to return"):
        plain.decode_first_layers([5], 2)


# What a model says.


def test_a_model_says_what_it_can_return(model: Model, context: Context) -> None:
    assert (model.n_embd, model.n_layers) == (SHAPE.n_embd, 3)
    capabilities = model.capabilities
    assert capabilities.hidden
    assert capabilities.float_rows
    assert capabilities.first_layers
    assert context.hidden == EVERY
    with model.new_context(16, hidden=["norm", "layer:1", "norm"]) as other:
        assert other.hidden == ("norm", "layer:1")
        assert set(other.decode([5]).hidden) == {"norm", "layer:1"}
    with model.new_context(16) as plain:
        assert plain.hidden == ()
        assert plain.decode([5]).hidden == {}


@pytest.mark.parametrize("name", ["layer:3", "layer:-1", "layer:", "layer:01", "Norm", "", "logits"])
def test_names_that_mean_nothing_are_refused(model: Model, name: str) -> None:
    for make in (model.new_context, lambda n, hidden: model.new_batch(2, n, hidden=hidden)):
        with pytest.raises(UsageError, match="layer:0 to layer:2"):
            make(16, hidden=["norm", name])


def test_biases_of_queries_keys_and_values(backend: Backend, tiny: TinyFiles) -> None:
    """A head may have them: every engine adds those that a llama file has, and they matter."""
    random = np.random.default_rng(3)
    tokens = some_tokens(30)
    for parts in ("qkv", "k"):
        biases = {
            f"blk.{i}.attn_{part}.bias": random.standard_normal(len(WEIGHTS[f"blk.{i}.attn_{part}.weight"]))
            for i in range(3)
            for part in parts
        }
        path = ggufs.write_llama(tiny.folder / f"tiny-biases-{parts}.gguf", SHAPE, weights=WEIGHTS | biases)
        with backend.load(path, n_threads=1) as model, reference.load(path) as exact:
            ours = fresh_rows(model, tokens)
            assert agree(model, ours, fresh_rows(exact, tokens))
        with backend.load(tiny.folder / "tiny-three-layers.gguf", n_threads=1) as plain:
            assert np.abs(ours - fresh_rows(plain, tokens))[1:].max(axis=1).min() > 0.5
