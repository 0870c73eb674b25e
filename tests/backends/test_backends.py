"""One contract for every backend: what ``backends.base`` promises, asked of each engine on tiny real files.

On the reference backend logits must be equal to the bit. The fast engines round differently with the width of a pass:
on the F32 file of these tests two ways of computing a row differ by at most a few thousandths, while a row computed
from a wrong position or a stale cache differs by several units (``test_the_tolerance_tells_noise_from_a_defect``).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec.backends.base import Context, ContextState, FloatArray, Model
from localspec.engine.saved import maker_of
from localspec.errors import Cancelled, Closed, ContextFull, EngineError, ModelFileError, UsageError
from tests.conftest import Backend, TinyFiles
from tests.support import several
from tests.support.memory import growth_per_cycle, resident_mb

NOISE = 0.05
"""Largest difference of two logits that rounding explains on the tiny F32 file."""


@pytest.fixture(scope="module")
def model(backend: Backend, tiny: TinyFiles) -> Iterator[Model]:
    with backend.load(tiny.spm, n_threads=1) as model:
        yield model


@pytest.fixture(params=several.KINDS)
def context(request: pytest.FixtureRequest, model: Model) -> Iterator[Context]:
    with several.opened(model, request.param, 256) as context:
        yield context


def some_tokens(n: int, seed: int = 0, n_vocab: int = 384) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, n_vocab, n)]


def rows(context: Context, tokens: list[int]) -> FloatArray:
    """One row per token, from one pass."""
    return context.decode(tokens).logits.copy()


def rows_one_by_one(context: Context, tokens: list[int]) -> FloatArray:
    """The same rows from passes of one token."""
    return np.concatenate([context.decode([token]).logits.copy() for token in tokens])


def fresh_rows(model: Model, tokens: list[int], n_ctx: int = 256) -> FloatArray:
    with model.new_context(n_ctx) as context:
        return rows(context, tokens)


def agree(model: Model, left: FloatArray, right: FloatArray, noise: float = NOISE) -> bool:
    assert left.shape == right.shape
    if model.capabilities.batch_invariant:
        return bool(np.array_equal(left, right))
    return float(np.abs(left - right).max(initial=0.0)) < noise


# What a row means.


def test_rows_belong_to_their_tokens(model: Model, context: Context) -> None:
    tokens = some_tokens(40)
    wide = rows(context, tokens)
    context.truncate(0)
    narrow = rows_one_by_one(context, tokens)
    assert wide.shape == (40, model.n_vocab)
    assert agree(model, wide, narrow)


def test_the_tolerance_tells_noise_from_a_defect(model: Model) -> None:
    """A row off by one, a position off by one and one foreign token far back all lie far outside the noise."""
    tokens = some_tokens(40)
    right = fresh_rows(model, tokens)
    shifted = fresh_rows(model, tokens[1:])
    foreign = fresh_rows(model, [*tokens[:20], 7, *tokens[21:]])
    assert np.abs(right[1:] - right[:-1]).max(axis=1).min() > 10 * NOISE
    assert np.abs(right[1:] - shifted).max(axis=1).min() > 2 * NOISE
    assert np.abs(right[21:] - foreign[21:]).max(axis=1).min() > NOISE


def test_last_and_none(model: Model, context: Context) -> None:
    tokens = some_tokens(12)
    everything = fresh_rows(model, tokens)
    assert len(context.decode(tokens[:6], "none")) == 0
    assert context.decode(tokens[6:7], "none").logits.shape == (0, model.n_vocab)
    last = context.decode(tokens[7:], "last").logits
    assert last.shape == (1, model.n_vocab)
    assert agree(model, last, everything[-1:])


def test_logits_are_float32_rows(model: Model, context: Context) -> None:
    logits = context.decode([5, 6]).logits
    assert logits.dtype == np.float32
    assert logits.shape == (2, model.n_vocab)
    assert np.isfinite(logits).all()


# Prefill.


@pytest.mark.parametrize("seed", range(4))
def test_chunked_prefill_equals_one_shot(model: Model, context: Context, seed: int) -> None:
    tokens = some_tokens(200, seed)
    one_shot = fresh_rows(model, tokens)
    random = np.random.default_rng(seed)
    pieces: list[FloatArray] = []
    while context.n_past < len(tokens):
        chunk = tokens[context.n_past : context.n_past + int(random.integers(1, 50))]
        mode = random.choice(["all", "last", "none"])
        start = context.n_past
        logits = context.decode(chunk, mode).logits.copy()
        wanted = {"all": one_shot[start : start + len(chunk)], "none": one_shot[:0]}
        wanted["last"] = one_shot[start + len(chunk) - 1 : start + len(chunk)]
        assert agree(model, logits, wanted[mode])
        pieces.append(logits)
    assert context.tokens == tokens


def test_a_prompt_longer_than_the_engines_batch(model: Model) -> None:
    tokens = some_tokens(700)
    with model.new_context(800) as context:
        together = rows(context, tokens)
        context.truncate(0)
        context.decode(tokens[:650], "none")
        tail = rows(context, tokens[650:])
        context.truncate(0)
        last = context.decode(tokens, "last").logits.copy()
    assert together.shape == (700, model.n_vocab)
    assert agree(model, together[650:], tail)
    assert agree(model, together[:40], fresh_rows(model, tokens[:40]))
    assert agree(model, together[-1:], last)


# Rollback.


def test_truncate_then_decode_equals_fresh(model: Model, context: Context) -> None:
    """Twenty times in a row on one context: cut anywhere, go on with something else, in passes of any width."""
    random = np.random.default_rng(1)
    for trial in range(20):
        more = some_tokens(int(random.integers(1, 30)), seed=100 + trial)
        if random.random() < 0.5:
            context.decode(more)
        else:
            rows_one_by_one(context, more)
        context.truncate(int(random.integers(0, context.n_past + 1)))
        kept = list(context.tokens)
        more = some_tokens(int(random.integers(1, 9)), seed=200 + trial)
        wanted = fresh_rows(model, kept + more)[len(kept) :]
        assert agree(model, rows(context, more), wanted)
        assert context.tokens == kept + more
        context.truncate(min(context.n_past, 120))


def test_truncate_to_where_it_is_changes_nothing(model: Model, context: Context) -> None:
    tokens = some_tokens(10)
    context.decode(tokens[:8])
    context.truncate(8)
    assert agree(model, rows(context, tokens[8:]), fresh_rows(model, tokens)[8:])


def test_truncate_out_of_range(context: Context) -> None:
    context.decode([5, 6, 7])
    for n in (-1, 4):
        with pytest.raises(UsageError, match="cannot truncate 3 tokens"):
            context.truncate(n)
    assert context.n_past == 3


def test_a_full_context_can_be_rolled_back_and_filled_again(model: Model) -> None:
    """No hidden growth: rejected rows give their room back, over and over."""
    with model.new_context(64) as context:
        context.decode(some_tokens(56))
        for i in range(100):
            context.decode(some_tokens(8, seed=i))
            context.truncate(56)
        tail = rows(context, some_tokens(8, seed=500))
    assert agree(model, tail, fresh_rows(model, some_tokens(56) + some_tokens(8, seed=500))[56:])


def test_reuse_keeps_the_common_prefix(model: Model, context: Context) -> None:
    tokens = some_tokens(20)
    context.decode(tokens)
    assert context.reuse([*tokens[:12], 9, 9]) == 12
    assert context.tokens == tokens[:12]
    assert context.reuse(tokens) == 12
    assert context.reuse(tokens[:5]) == 5
    assert agree(model, rows(context, tokens[5:]), fresh_rows(model, tokens)[5:])
    assert context.reuse([]) == 0
    assert context.n_past == 0
    assert context.reuse(tokens) == 0


# States.


def test_a_state_given_back_is_as_if_nothing_had_happened(model: Model, context: Context) -> None:
    """Exported, disturbed, imported: into the same context and a larger one; then cut, gone on with, exported again."""
    if not model.capabilities.saves_state:
        pytest.skip("this engine cannot save states")
    tokens = some_tokens(150)
    rows(context, tokens[:100])
    state = context.export_state()
    assert state.tokens == tuple(tokens[:100])
    assert 0 < state.n_bytes <= context.state_bytes
    rows(context, some_tokens(40, seed=9))
    context.truncate(20)
    with model.new_context(512) as larger:
        for each in (context, larger):
            each.import_state(state)
            assert each.tokens == tokens[:100]
            assert agree(model, rows(each, tokens[100:]), fresh_rows(model, tokens)[100:])
            each.truncate(60)
            other = some_tokens(8, seed=3)
            assert agree(model, rows(each, other), fresh_rows(model, tokens[:60] + other)[60:])
            again = each.export_state()
            assert again.tokens == (*tokens[:60], *other)
        larger.import_state(again)
        assert agree(model, rows(larger, [7]), fresh_rows(model, [*again.tokens, 7])[-1:])


def test_states_do_not_share_memory_with_the_context(model: Model, context: Context) -> None:
    if not model.capabilities.saves_state:
        pytest.skip("this engine cannot save states")
    tokens = some_tokens(30)
    rows(context, tokens)
    state = context.export_state()
    before = {name: array.copy() for name, array in state.arrays.items()}
    context.truncate(0)
    rows(context, some_tokens(60, seed=5))
    for name, array in state.arrays.items():
        assert array.flags.c_contiguous
        assert np.array_equal(array, before[name])
    assert np.dtype(array.dtype).kind in "uif"


def test_states_that_do_not_fit_are_refused(model: Model, context: Context) -> None:
    if not model.capabilities.saves_state:
        pytest.skip("this engine cannot save states")
    tokens = some_tokens(100)
    rows(context, tokens)
    state = context.export_state()
    with model.new_context(64) as small:
        rows(small, tokens[:5])
        with pytest.raises(ContextFull, match="room for 64"):
            small.import_state(state)
        assert small.tokens == tokens[:5]
    broken = ContextState(state.tokens, {name: array[:-1] for name, array in state.arrays.items()})
    for bad in (broken, ContextState(state.tokens, {})):
        with pytest.raises(EngineError):
            context.import_state(bad)
        assert context.n_past == 0
        assert agree(model, rows(context, tokens[:9]), fresh_rows(model, tokens[:9]))
    context.import_state(state)
    context.close()
    for use in (context.export_state, lambda: context.import_state(state)):
        with pytest.raises(Closed):
            use()


def test_a_state_of_nothing(model: Model, context: Context) -> None:
    if not model.capabilities.saves_state:
        pytest.skip("this engine cannot save states")
    state = context.export_state()
    tokens = some_tokens(9)
    rows(context, tokens)
    context.import_state(state)
    assert context.n_past == 0
    assert agree(model, rows(context, tokens), fresh_rows(model, tokens))


# Interruption.


def test_a_long_input_can_be_interrupted_between_its_pieces(model: Model) -> None:
    tokens = some_tokens(700)
    with model.new_context(800) as context:
        asked: list[int] = []

        def interrupted() -> bool:
            asked.append(context.n_past)
            return len(asked) == 2

        context.interrupted = interrupted
        with pytest.raises(Cancelled):
            context.decode(tokens, "last")
        assert len(asked) == 2
        assert context.n_past <= 512
        assert context.tokens == tokens[: context.n_past]
        context.interrupted = lambda: False
        last = context.decode(tokens[context.n_past :], "last").logits.copy()
    assert agree(model, last, fresh_rows(model, tokens, 800)[-1:])


def test_an_interrupted_pass_leaves_no_rows_behind(
    model: Model, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(20)
    context.decode(tokens[:10])
    decode = type(context)._decode

    def interrupted(self: Context, tokens: list[int], logits: str) -> None:
        decode(self, tokens[:3], logits)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(context), "_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.decode([300] * 6)
    assert context.tokens == tokens[:10]
    assert agree(model, rows(context, tokens[10:]), fresh_rows(model, tokens)[10:])


# Refusals.


def test_a_full_context_refuses_and_stays_as_it_was(model: Model) -> None:
    tokens = some_tokens(32)
    with model.new_context(32) as context:
        context.decode(tokens[:30])
        with pytest.raises(ContextFull, match="holds 32 tokens; 30 are used and 3 more do not fit"):
            context.decode(some_tokens(3, seed=9))
        assert context.tokens == tokens[:30]
        assert agree(model, rows(context, tokens[30:]), fresh_rows(model, tokens)[30:])
        with pytest.raises(ContextFull):
            context.decode([5])


@pytest.mark.parametrize("token", [-1, 384, 10**6])
def test_ids_out_of_range_are_refused(model: Model, context: Context, token: int) -> None:
    context.decode([5, 6])
    with pytest.raises(UsageError, match=r"0\.\.383"):
        context.decode([7, token])
    assert context.tokens == [5, 6]
    assert agree(model, rows(context, [8]), fresh_rows(model, [5, 6, 8])[2:])


def test_no_tokens_and_no_room_are_refused(model: Model, context: Context) -> None:
    with pytest.raises(UsageError, match="at least one token"):
        context.decode([])
    for n_ctx in (0, -5):
        with pytest.raises(UsageError, match="at least 1"):
            model.new_context(n_ctx)


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
    with pytest.raises(Closed):
        model.new_context(32)
    with pytest.raises(Closed):
        model.tokenize("text")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reopening_twenty_times_leaks_nothing(backend: Backend, tiny: TinyFiles) -> None:
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

    assert growth_per_cycle(residents(25, leak=False)) < 0.3
    try:
        assert growth_per_cycle(residents(10, leak=True)) > 0.6, "this test would not see a leak"
    finally:
        for each in kept:
            each.close()


def test_two_contexts_of_one_model_do_not_mix(model: Model) -> None:
    left, right = some_tokens(30, seed=1), some_tokens(30, seed=2)
    with model.new_context(64) as a, model.new_context(128) as b:
        of_left, of_right = [], []
        for i in range(0, 30, 3):
            of_left.append(rows(a, left[i : i + 3]))
            of_right.append(rows(b, right[i : i + 3]))
            if i == 15:
                b.truncate(10)
                b.decode(right[10:18])
    assert agree(model, np.concatenate(of_left), fresh_rows(model, left))
    assert agree(model, np.concatenate(of_right), fresh_rows(model, right))


def test_two_models_at_once(backend: Backend, tiny: TinyFiles, model: Model) -> None:
    tokens = some_tokens(10)
    with backend.load(tiny.bpe) as other, model.new_context(32) as a, other.new_context(32) as b:
        ours, theirs = rows(a, tokens), rows(b, tokens)
    assert agree(model, ours, fresh_rows(model, tokens))
    assert np.abs(ours - theirs).max() > 10 * NOISE


def test_decoding_from_another_thread(model: Model) -> None:
    tokens = some_tokens(20)
    results: dict[int, FloatArray] = {}

    def work(seed: int) -> None:
        with model.new_context(64) as context:
            context.decode(some_tokens(20, seed), "none")
            context.truncate(0)
            results[seed] = rows(context, tokens)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wanted = fresh_rows(model, tokens)
    assert agree(model, results[0], wanted)
    assert agree(model, results[1], wanted)


def test_loading_reports_progress_and_can_be_cancelled(backend: Backend, tiny: TinyFiles) -> None:
    seen: list[float] = []
    backend.load(tiny.spm, progress=lambda fraction: seen.append(fraction) or True).close()
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
    with pytest.raises(EngineError):
        backend.load(tiny.spm, progress=lambda fraction: False)


def test_a_model_says_what_it_is(backend: Backend, tiny: TinyFiles, model: Model) -> None:
    assert model.backend == backend.name
    assert model.path == tiny.spm
    assert model.n_vocab == 384
    assert model.n_ctx_train == 2048
    assert model.size_bytes == tiny.spm.stat().st_size
    assert model.capabilities.rollback == "exact"
    assert model.capabilities.batch_invariant == backend.exact
    assert model.chat_template is not None
    assert "<|im_start|>" in model.chat_template
    assert any(digit in model.engine for digit in "0123456789")
