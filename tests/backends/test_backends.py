"""One contract for every backend: what ``backends.base`` promises, asked of each engine on tiny real files."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import Context, ContextState, FloatArray, Model
from localspec.backends.llama import model as model_module
from localspec.engine.saved import maker_of
from localspec.errors import Cancelled, Closed, ContextFull, EngineError, ModelFileError, UsageError
from tests.conftest import Backend, TinyFiles
from tests.support.contexts import (
    EMBEDDING,
    EVERY,
    NOISE,
    agree,
    check_next,
    fresh_rows,
    rows,
    some_tokens,
    try_any_order,
)
from tests.support.memory import growth_per_cycle, resident_mb


@pytest.fixture(scope="module")
def oracle(model: Model) -> Iterator[Model]:
    """What rows are compared with: the reference's, or those of a fresh context where they must be equal to the bit."""
    with ExitStack() as stack:
        yield model if model.capabilities.batch_invariant else stack.enter_context(reference.load(model.path))


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.new_context(256) as context:
        yield context


# What the memory holds, whatever is done.


@pytest.mark.parametrize("hidden", [(), EVERY])
def test_anything_in_any_order(
    model: Model, oracle: Model, hidden: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden and not model.capabilities.hidden:
        pytest.skip("this engine returns no states")
    monkeypatch.setattr(model_module, "N_ALONE", 2)
    try_any_order(model, oracle, hidden=hidden, embedding=EMBEDDING)


def test_anything_with_inputs_longer_than_the_engines_batch(model: Model, oracle: Model) -> None:
    hidden = EVERY if model.capabilities.hidden else ()
    try_any_order(model, oracle, hidden=hidden, embedding=EMBEDDING, n_examples=4, n_steps=30, size=9)


def test_the_tolerance_tells_noise_from_a_defect(model: Model) -> None:
    """A row off by one, a position off by one and one foreign token far back all lie far outside the noise."""
    tokens = some_tokens(40)
    right = fresh_rows(model, tokens)
    shifted = fresh_rows(model, tokens[1:])
    foreign = fresh_rows(model, [*tokens[:20], 7, *tokens[21:]])
    assert np.isfinite(right).all()
    assert np.abs(right[1:] - right[:-1]).max(axis=1).min() > 10 * NOISE
    assert np.abs(right[1:] - shifted).max(axis=1).min() > 2 * NOISE
    assert np.abs(right[21:] - foreign[21:]).max(axis=1).min() > NOISE


@pytest.mark.parametrize("shared", [False, True])
def test_an_input_is_interrupted_between_its_pieces(model: Model, oracle: Model, shared: bool) -> None:
    tokens = some_tokens(700)
    with model.new_batch(2, 800) if shared else model.new_context(800) as memory:
        context, asked = memory[0] if shared else memory, list[int]()
        context.interrupted = lambda: (asked.append(context.n_past), len(asked) == 2)[1]
        with pytest.raises(Cancelled):
            context.decode(tokens, "last")
        assert len(asked) == 2
        assert context.n_past <= 512
        assert context.tokens == tokens[: context.n_past]
        assert context.n_free == 800 - context.n_past
        context.interrupted = lambda: False
        assert agree(model, context.decode(tokens[context.n_past :], "last").logits, fresh_rows(oracle, tokens, 699))


def test_what_makes_no_sense_is_refused_and_changes_nothing(model: Model, context: Context) -> None:
    context.decode([5, 6])
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: context.decode([]), "at least one token"),
        *((lambda n=n: context.truncate(n), "cannot truncate 2 tokens") for n in (-1, 3)),  # type: ignore[misc]
        *((lambda token=token: context.decode([7, token]), r"0\.\.383") for token in (-1, 384, 10**6)),  # type: ignore[misc]
        *((lambda n=n: model.new_context(n), "at least 1") for n in (0, -5)),  # type: ignore[misc]
    ]
    for use, words in refused:
        with pytest.raises(UsageError, match=words):
            use()
        assert context.tokens == [5, 6]
    check_next(model, context, [8])


# States.


def test_states_that_do_not_fit_are_refused(model: Model, context: Context) -> None:
    if not model.capabilities.saves_state:
        pytest.skip("this engine cannot save states")
    tokens = some_tokens(100)
    context.decode(tokens)
    state = context.export_state()
    assert state.n_bytes > 0
    before = {name: array.copy() for name, array in state.arrays.items()}
    with model.new_context(64) as small:
        small.decode(tokens[:5])
        with pytest.raises(ContextFull, match="room for 64"):
            small.import_state(state)
        check_next(model, small, tokens[5:9])
    broken = ContextState(state.tokens, {name: array[:-1] for name, array in state.arrays.items()})
    for bad in (broken, ContextState(state.tokens, {})):
        with pytest.raises(EngineError):
            context.import_state(bad)
        assert context.n_past == 0
        check_next(model, context, tokens[:9])
    for name, array in state.arrays.items():  # they share no memory with the context
        assert array.flags.c_contiguous
        assert np.array_equal(array, before[name])
        assert np.dtype(array.dtype).kind in "uif"
    context.import_state(state)
    context.close()
    for use in (context.export_state, lambda: context.import_state(state)):
        with pytest.raises(Closed):
            use()


# Files.


def test_files_that_generate_no_text_are_refused(backend: Backend, tiny: TinyFiles, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.spm.read_bytes()[:-5000])
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"PK\x03\x04 something else entirely" * 100)
    for path in (tiny.tokenizer_only, tiny.embedding, cut, foreign):
        with pytest.raises(ModelFileError) as error:
            backend.load(path)
        assert "\n" not in str(error.value)
        assert path.name in str(error.value)


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="names of files are Unicode there")
def test_a_file_name_that_is_no_utf_8(backend: Backend, tiny: TinyFiles, tmp_path: Path) -> None:
    """As disks from before have them; the name is shown with a U+FFFD."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.gguf"))
    path.write_bytes(tiny.bpe.read_bytes())
    with backend.load(path) as model, model.new_context(16) as context:
        assert len(context.decode([5, 6])) == 2
        assert maker_of(model)["name"] == "caf\ufffd.gguf"


def test_loading_reports_progress_and_can_be_cancelled(backend: Backend, tiny: TinyFiles) -> None:
    seen: list[float] = []
    backend.load(tiny.spm, progress=lambda fraction: seen.append(fraction) or True).close()
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
    with pytest.raises(EngineError):
        backend.load(tiny.spm, progress=lambda fraction: False)


def test_a_model_says_what_it_is(backend: Backend, tiny: TinyFiles) -> None:
    with backend.load(tiny.spm, n_threads=1) as model:
        assert (model.backend, model.path, model.n_vocab) == (backend.name, tiny.spm, 384)
        assert (model.n_ctx_train, model.size_bytes) == (2048, tiny.spm.stat().st_size)
        assert model.capabilities.rollback == "exact"
        assert model.capabilities.batch_invariant == backend.exact
        assert "<|im_start|>" in str(model.chat_template)
        assert any(digit in model.engine for digit in "0123456789")


# Life and death.


def test_closing_twice_is_harmless_and_use_after_it_is_refused(backend: Backend, tiny: TinyFiles) -> None:
    model = backend.load(tiny.spm)
    context = model.new_context(32)
    context.decode([5])
    context.close()
    context.close()
    for use in (lambda: context.decode([5]), lambda: context.truncate(0), lambda: context.reuse([5])):
        with pytest.raises(Closed):
            use()
    model.close()
    model.close()
    for use in (lambda: model.new_context(32), lambda: model.tokenize("text")):  # type: ignore[assignment]
        with pytest.raises(Closed):
            use()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reopening_leaks_nothing(backend: Backend, tiny: TinyFiles) -> None:
    """A leaked context or model is over 1 MB."""
    kept: list[Context | Model] = []

    def residents(n_lives: int, *, leak: bool) -> list[float]:
        found = []
        for _ in range(n_lives):
            model = backend.load(tiny.spm, n_threads=1)
            context = model.new_context(512)
            context.decode(some_tokens(16))
            kept.extend([context, model])
            while kept and not leak:
                kept.pop(0).close()
            found.append(resident_mb())
        return found

    assert growth_per_cycle(residents(11, leak=False)) < 0.3
    try:
        assert growth_per_cycle(residents(7, leak=True)) > 0.6, "this test would not see a leak"
    finally:
        for each in kept:
            each.close()


def test_two_models_and_two_threads_at_once(backend: Backend, tiny: TinyFiles, model: Model) -> None:
    tokens = some_tokens(20)
    found: dict[int, FloatArray] = {}

    def work(seed: int) -> None:
        with model.new_context(64) as context:
            context.decode(some_tokens(20, seed), "none")
            context.truncate(0)
            found[seed] = rows(context, tokens)

    with backend.load(tiny.bpe) as other:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        theirs = fresh_rows(other, tokens)
        for thread in threads:
            thread.join(60)
    wanted = fresh_rows(model, tokens)
    assert all(agree(model, found[seed], wanted) for seed in range(2))
    assert np.abs(wanted - theirs).max() > 10 * NOISE
