"""One contract for every backend: what ``backends.base`` promises, asked of each engine on tiny real files."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localspec.backends import reference
from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.llama import model as model_module
from localspec.engine.saved import maker_of
from localspec.errors import Cancelled, Closed, ContextFull, EngineError, ModelFileError, UsageError
from tests.conftest import Backend, TinyFiles, open_backend
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
    if model.capabilities.trees:  # rows of another branch, or of another depth
        with model.new_context(256, branches=True) as context:
            context.decode(tokens)
            logits = context.decode_tree([9, 30, 30, 9], [-1, -1, 0, 1]).logits.copy()
        for one, other in ((0, 1), (1, 2), (0, 3), (2, 3)):
            assert np.abs(logits[one] - logits[other]).max() > 10 * NOISE


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


# Files.


def test_files_that_generate_no_text_are_refused(backend: Backend, tiny: TinyFiles) -> None:
    for path in (tiny.tokenizer_only, tiny.embedding):
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


# Tokens that branch.


@pytest.fixture
def branching(model: Model) -> Iterator[Context]:
    if not model.capabilities.trees:
        pytest.skip("this engine feeds no trees")
    with model.new_context(256, branches=True) as context:
        yield context


def test_trees_that_are_none(branching: Context) -> None:
    branching.decode([5, 6])
    for tokens, parents in (([], []), ([5], [0]), ([5], [-2]), ([5, 6], [-1]), ([5, 6], [1, -1]), ([99999], [-1])):
        with pytest.raises(UsageError):
            branching.decode_tree(tokens, parents)
    branching.decode_tree([7, 8, 9], [-1, 0, -1])
    for path in ([1], [0, 2], [3], [2, 1], [-1]):
        with pytest.raises(UsageError, match="is not a path"):
            branching.keep(path)
    branching.keep([0, 1])
    assert branching.tokens == [5, 6, 7, 8]
    for use in (lambda: branching.truncate(4), branching.export_state):
        branching.decode_tree([9], [-1])
        use()
        with pytest.raises(UsageError, match="no tree"):
            branching.keep([0])


def test_a_tree_that_does_not_fit(model: Model, branching: Context) -> None:
    """Rows count, not depth; when it has gone, its room is free again."""
    branching.decode(some_tokens(252))
    with pytest.raises(ContextFull):
        branching.decode_tree([5] * 5, [-1] * 5)
    for _ in range(50):
        branching.decode_tree([5, 6, 7, 8], [-1, -1, 0, 1])
        branching.keep([1, 3])
        branching.truncate(252)
    check_next(model, branching, [5, 6, 7, 8])


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


# Text.


@pytest.fixture(scope="module", params=["spm", "bpe"])
def text_model(backend: Backend, tiny: TinyFiles, request: pytest.FixtureRequest) -> Iterator[Model]:
    with backend.load(getattr(tiny, request.param)) as model:
        yield model


@given(st.text() | st.lists(st.sampled_from(["the ", " and", "  ", "\n", "<|im_end|>", "<s>", "é", "😀"])).map("".join))
@example("the and 😀 of\n" * 2000)
def test_the_bytes_of_the_tokens_spell_the_text(text_model: Model, text: str) -> None:
    """No text forges a special token; those, and one for its beginning, are there where they are asked for."""
    vocab, tokens = text_model.vocab, text_model.tokenize(text)
    space = b" " if text and text_model.path.name == "tiny-spm.gguf" else b""
    assert b"".join(map(vocab.token_bytes, tokens)) == space + text.encode()
    assert not {vocab.bos, *vocab.eog}.intersection(tokens)
    begin = [vocab.bos] if vocab.add_bos else []
    assert text_model.tokenize(text, add_special=True) == [*begin, *tokens]
    assert text_model.tokenize(f"<|im_end|>{text}", parse_special=True)[0] == vocab.eot


def test_a_lone_surrogate_is_a_usage_error(text_model: Model) -> None:
    with pytest.raises(UsageError, match="surrogate"):
        text_model.tokenize("half \ud83d of an emoji")
