"""Hidden states by name, rows of floats, passes that end early, beyond any order of operations (``test_backends``).

On the F32 file of these tests a state differs by at most a hundredth from the reference's, while that of another token,
layer or position differs by more than one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from localspec.backends.base import Context, Model, Piece
from localspec.backends.llama.model import LlamaContext, LlamaModel
from localspec.errors import Closed, ContextFull, UsageError
from tests.conftest import Backend, TinyFiles
from tests.support.contexts import (
    EMBEDDING,
    EVERY,
    SHAPE,
    WEIGHTS,
    agree,
    fresh,
    fresh_rows,
    rows,
    some_tokens,
    three_layers,
)


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.new_context(256, hidden=EVERY) as context:
        yield context


# What a state is.


def test_the_tolerance_tells_states_apart(reference: Backend, tiny: TinyFiles) -> None:
    """One of another token, of another layer, and one behind a foreign token: each is far outside the noise."""
    tokens = some_tokens(30)
    with reference.load(three_layers(tiny.folder)) as model:
        right, foreign = (fresh(model, text, 0, EVERY).hidden for text in (tokens, [7, *tokens[1:]]))
    for name in EVERY:
        assert np.abs(right[name][1:] - right[name][:-1]).max(axis=1).min() > 1
        assert np.median(np.abs(right[name][1:] - foreign[name][1:]).max(axis=1)) > 0.1  # less far behind it
    for one, other in pairwise(EVERY):
        assert np.abs(right[one] - right[other]).max(axis=1).min() > 0.5


def test_the_norm_is_that_of_the_last_layer_and_what_the_output_matrix_multiplies(context: Context) -> None:
    forward = context.decode(some_tokens(20))
    last, norm = (forward.hidden[name].astype(np.float64) for name in ("layer:2", "norm"))
    size = np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-5)
    assert np.abs(last / size * WEIGHTS["output_norm.weight"] - norm).max() < 1e-4
    assert np.abs(norm @ WEIGHTS["output.weight"].T - forward.logits).max() < 0.01


@pytest.mark.parametrize("names", [(), ("layer:1",), ("layer:2", "layer:0"), EVERY])
def test_logits_do_not_depend_on_what_is_returned(model: Model, names: tuple[str, ...]) -> None:
    """To the bit, over passes of many widths, twice each; and states outlive the next pass."""
    tokens = some_tokens(200)
    with model.new_context(256) as plain, model.new_context(256, hidden=names) as tapped:
        for _ in range(2):
            for width in (1, 1, 2, 8, 1, 40, 2, 100):
                piece = tokens[plain.n_past : plain.n_past + width]
                wanted, forward = plain.decode(piece).logits.copy(), tapped.decode(piece)
                assert np.array_equal(forward.logits, wanted), width
                assert {name: len(states) for name, states in forward.hidden.items()} == dict.fromkeys(names, width)
                before = {name: states.copy() for name, states in forward.hidden.items()}
                tapped.decode([5])
                tapped.truncate(plain.n_past)
                assert all(np.array_equal(forward.hidden[name], before[name]) for name in names)
            plain.truncate(0)
            tapped.truncate(0)


# How states leave a llama.cpp engine: by a callback.


@pytest.fixture
def tapped(context: Context) -> LlamaContext:
    if not isinstance(context, LlamaContext):
        pytest.skip("has no callback")
    return context


@pytest.mark.parametrize("when", ["name", "copy"])
def test_what_is_raised_while_the_engine_computes_is_raised_after_it(
    tapped: LlamaContext, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C in the callback does not reach the engine, which would go on with an answer that means nothing."""
    tokens = some_tokens(20)
    tapped.decode(tokens[:10])

    def raising(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tapped.model.binding.tensors, when, raising)
        with pytest.raises(KeyboardInterrupt):
            tapped.decode(tokens[10:15])
    assert tapped.tokens == tokens[:10]
    forward, wanted = tapped.decode(tokens[10:]), fresh(tapped.model, tokens, 10, EVERY)
    assert all(agree(tapped.model, forward.hidden[name], wanted.hidden[name]) for name in EVERY)


def test_a_state_that_lies_elsewhere_than_before_is_found(tapped: LlamaContext) -> None:
    """The engine promises no addresses; a pass that was looked for at the wrong ones is computed again."""
    tokens = some_tokens(25)
    wanted = fresh(tapped.model, tokens, 20, EVERY)
    tapped.decode(tokens[:20], "none")
    for _ in range(3):
        forward = tapped.decode(tokens[20:])
        assert all(agree(tapped.model, forward.hidden[name], wanted.hidden[name]) for name in EVERY)
        assert agree(tapped.model, forward.logits, wanted.logits)
        tapped.truncate(20)
        tap = tapped.passes.tap
        assert tap._known
        tap._known.clear()


def test_nothing_behind_the_first_layers_is_computed(tapped: LlamaContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine asks of each node before it computes it; after the end of a pass it asks of none, or of one."""
    functions = tapped.model.binding.tensors
    original, asked = functions.name, list[bytes]()

    def name(tensor: int) -> bytes:
        asked.append(original(tensor))
        return asked[-1]

    monkeypatch.setattr(functions, "name", name)
    tapped.decode_first_layers([5, 6, 7], 1)
    assert {node for node in asked if node.startswith(b"l_out")} == {b"l_out-0"}
    assert not any(node.startswith((b"Qcur-1", b"ffn_norm-1", b"result_norm")) for node in asked)


# Rows of floats.


def test_rows_are_moved_whole_after_a_pass_whose_state_could_not_be_taken_out(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the pass is over: when the sequence between two others goes, ik-llama moves the rows behind it."""
    if not isinstance(model, LlamaModel):
        pytest.skip("has no callback")

    def broken(*_: object) -> None:
        raise RuntimeError("no state")

    first, second, third = (some_tokens(60, seed=seed) for seed in range(3))
    with model.new_batch(3, 200, n_ctx=120, hidden=EVERY) as batch:
        batch.decode([Piece(0, first[:30]), Piece(1, second[:40]), Piece(2, third[:20])])
        with monkeypatch.context() as patch:
            patch.setattr(model.binding.tensors, "copy", broken)
            for feed in (lambda: batch[0].decode_first_layers([5], 1), lambda: batch[0].decode([5])):
                with pytest.raises(RuntimeError, match="no state"):
                    feed()
        batch[1].truncate(0)
        assert agree(model, rows(batch[2], third[20:40]), fresh_rows(model, third[:40], 20))
        assert agree(model, rows(batch[0], first[30:50]), fresh_rows(model, first[:50], 30))


# What is refused, and changes nothing.


def test_names_of_no_state_are_refused_and_others_taken_once(model: Model) -> None:
    for name in ("layer:3", "layer:-1", "layer:01", "Norm", ""):
        for make in (model.new_context, lambda n, hidden: model.new_batch(2, n, hidden=hidden)):
            with pytest.raises(UsageError, match="layer:0 to layer:2"):
                make(16, hidden=["norm", name])
    with model.new_context(16, hidden=["norm", "layer:1", "norm"]) as context:
        assert set(context.decode([5]).hidden) == set(context.hidden) == {"norm", "layer:1"}
        with pytest.raises(UsageError, match="not made to return 'layer:0'"):
            context.decode_first_layers([5], 1)
        with pytest.raises(UsageError, match="must lie in"):
            context.decode_first_layers([384], 2)
        assert context.tokens == [5]


def test_rows_and_numbers_of_layers_that_cannot_be(context: Context) -> None:
    good, names = EMBEDDING[:3], [10**6, 5]
    context.decode_floats(good[:2], names)  # which may be of another vocabulary
    assert context.reuse([*names, 7]) == 2
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
    for n_layers in (-1, 0, 3):
        with pytest.raises(UsageError, match=f"1 to 2 layers, not after {n_layers}"):
            context.decode_first_layers([5], n_layers)
    with pytest.raises(ContextFull):
        context.decode_floats(np.zeros((255, SHAPE.n_embd), np.float32), [0] * 255)
    assert context.tokens == names
    context.close()
    with pytest.raises(Closed):
        context.decode_floats(good, [1, 2, 3])
