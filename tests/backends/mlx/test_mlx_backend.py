"""What MLX's contexts do beyond the contract of every backend (``test_backends``): windows, quantised and recurrent
memories, what a pass fetches and waits for, one thread that computes, pairs of two engines."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, SamplingParams, backends
from localspec.backends.base import Context, ContextState, FloatArray, layer_name
from localspec.errors import Cancelled, Closed, EngineError, EngineUnavailable, UnsupportedModel, UsageError
from localspec.model_files.gguf import GGUFFile
from tests.backends.test_backends import some_tokens
from tests.backends.test_backends_memory import check_rollback, divergence
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs

mx = pytest.importorskip("mlx.core")

from localspec.backends import mlx  # noqa: E402
from localspec.backends.mlx.library import MLXLibrary, OwnerThread  # noqa: E402
from localspec.backends.mlx.model import MLXModel  # noqa: E402

EXACT = 1e-5
"""Largest divergence [nats] of rows computed from the same float32 numbers in passes of other widths."""


@pytest.fixture(scope="module")
def model(tiny: TinyFiles) -> Iterator[MLXModel]:
    open_backend("mlx")
    with mlx.load(tiny.spm) as model:
        yield model


@pytest.fixture(scope="module")
def sliding(tiny: TinyFiles) -> Iterator[MLXModel]:
    with mlx.load(tiny.sliding) as model:
        yield model


@pytest.fixture
def context(model: MLXModel) -> Iterator[Context]:
    with model.new_context(256) as context:
        yield context


def plain_rows(model: MLXModel, tokens: list[int]) -> FloatArray:
    """All rows from mlx-lm's own model and cache, windows enforced by its mask alone."""
    from mlx_lm.models.cache import KVCache

    def compute() -> FloatArray:
        cache = [KVCache() for _ in range(model.network.n_layer)]
        logits = model.network.module(mx.array([tokens]), cache=cache)[0]
        return np.array(logits.astype(mx.float32))

    return model.owner.run(compute)


# Windows.


@pytest.mark.parametrize("widths", [[90], [1] * 90, [31, 1, 1, 2, 29, 5, 21], [33, 32, 25]])
def test_a_window_computes_what_a_mask_over_everything_does(sliding: MLXModel, widths: list[int]) -> None:
    """The window is 32 tokens: passes that end before it is full, fill it, and go over it."""
    tokens = some_tokens(90, seed=4)
    assert 32 in sliding.network.layer_windows
    wanted = plain_rows(sliding, tokens)
    with sliding.new_context(128) as context:
        rows, start = [], 0
        for width in widths:
            rows.append(context.decode(tokens[start : start + width]).logits.copy())
            start += width
    assert divergence(wanted, np.concatenate(rows)) < EXACT


def test_a_window_shows_attention_no_more_than_it_sees(sliding: MLXModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long context would cost what a full one does."""
    from localspec.backends.mlx.cache import PlainRows

    shown: list[tuple[int | None, int]] = []
    original = PlainRows.update_and_fetch

    def watch(self: Any, keys: Any, values: Any) -> Any:
        kept = original(self, keys, values)
        shown.append((self.window, kept[0].shape[-2]))
        return kept

    monkeypatch.setattr(PlainRows, "update_and_fetch", watch)
    with sliding.new_context(128) as context:
        context.decode(some_tokens(80), "none")
        for n in (1, 5):
            shown.clear()
            context.decode(some_tokens(n))
            windows = [rows for window, rows in shown if window == 32]
            assert len(windows) == 5
            assert set(windows) == {31 + n}
            assert [rows for window, rows in shown if window is None] == [context.n_past]


# Other memories.


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_a_quantised_memory_rolls_back(tiny: TinyFiles, kv_type: str) -> None:
    for path in (tiny.spm, tiny.sliding):
        with mlx.load(path, kv_type=kv_type) as model:
            assert model.kv_type == kv_type
            check_rollback(model, some_tokens(100), [100, 98, 60, 33, 31, 1, 0], 1e-4, 128)


def test_a_quantised_memory_is_smaller_and_nearly_as_exact(tiny: TinyFiles, model: MLXModel) -> None:
    tokens, sizes, rows = some_tokens(64), {}, {}
    for kv_type in ("f16", "q8_0", "q4_0"):
        with mlx.load(tiny.spm, kv_type=kv_type) as other, other.new_context(128) as context:
            rows[kv_type] = context.decode(tokens).logits.copy()
            sizes[kv_type] = context.state_bytes
    # 8 bits and, in float32, a scale and an offset for every 32 values: 10 of 32 bits; 4 bits: 6.
    assert sizes["q8_0"] == sizes["f16"] * 10 / 32
    assert sizes["q4_0"] == sizes["f16"] * 6 / 32
    assert divergence(rows["f16"], rows["q8_0"]) < 0.01
    assert 0 < divergence(rows["f16"], rows["q8_0"]) < divergence(rows["f16"], rows["q4_0"]) < 0.5


def test_memories_that_cannot_be_are_refused(tiny: TinyFiles, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'q5_1' is not one of f16, f32, q8_0, q4_0"):
        mlx.load(tiny.spm, kv_type="q5_1")
    odd = ggufs.write_llama(tmp_path / "odd.gguf", ggufs.Shape(n_embd=96, n_head=4, n_head_kv=2))
    with pytest.raises(UsageError, match=r"multiples of 32; the heads of odd\.gguf are 24 wide"):
        mlx.load(odd, kv_type="q8_0")


def test_a_recurrent_memory_replays(tiny: TinyFiles) -> None:
    with mlx.load(tiny.recurrent) as model:
        assert model.capabilities.rollback == "replay"
        check_rollback(model, some_tokens(60), [60, 59, 57, 30, 1, 0], 1e-4, 128)


def test_a_recurrent_memory_replays_no_more_than_the_last_guesses(tiny: TinyFiles) -> None:
    """A rejected guess costs a pass over what was accepted with it, not over the conversation."""
    with mlx.load(tiny.recurrent) as model, model.new_context(256) as context:
        context.decode(some_tokens(100), "none")
        fed: list[int] = []
        original = context._compute
        context._compute = lambda tokens, *args: (fed.append(len(tokens)), original(tokens, *args))[1]  # type: ignore[method-assign]
        for seed in range(6):
            n = context.n_past
            context.decode(some_tokens(5, seed))
            context.truncate(n + 2)
        context.decode([7])
        context.decode([8])
        context.truncate(context.n_past - 1)
        context.decode([9])
        assert fed == [5, *[2, 5] * 5, 2, 1, 1, 1]


# What a pass fetches and waits for.


@pytest.mark.parametrize("hidden", [(), ("layer:0", "layer:1", "norm")])
@pytest.mark.parametrize("logits", ["all", "last", "none"])
def test_a_pass_is_evaluated_and_waited_for_once(
    model: MLXModel, monkeypatch: pytest.MonkeyPatch, logits: str, hidden: tuple[str, ...]
) -> None:
    with model.new_context(64, hidden=hidden) as context:
        context.decode(some_tokens(20), "none")
        evaluations: list[int] = []
        evaluate = mx.eval
        monkeypatch.setattr(mx, "eval", lambda *arrays: (evaluations.append(1), evaluate(*arrays))[1])
        forward = context.decode([5, 6, 7], logits)  # type: ignore[arg-type]
        if len(forward):
            np.argmax(forward.logits, axis=1)
        for states in forward.hidden.values():
            states.sum()
        context.truncate(21)
        assert len(evaluations) == 1


def test_logits_are_not_copied(context: Context) -> None:
    forward = context.decode([5, 6, 7])
    assert np.shares_memory(forward.logits, forward.logits)
    kept = forward.logits
    before = kept.copy()
    context.decode([8, 9, 10])
    assert np.array_equal(kept, before)


def test_only_the_rows_asked_for_reach_the_vocabulary(model: MLXModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a 152k vocabulary costs as much as a tenth of a small model."""
    n_rows: list[int] = []
    network = model.network
    head = network._head
    object.__setattr__(network, "_head", lambda hidden: (n_rows.append(hidden.shape[1]), head(hidden))[1])
    try:
        with model.new_context(64) as context:
            context.decode(some_tokens(10), "none")
            context.decode(some_tokens(10), "last")
            context.decode(some_tokens(3), "all")
    finally:
        object.__setattr__(network, "_head", head)
    assert n_rows == [1, 3]


# Hidden states, rows of floats, first layers: what the contract says, for the other memories.


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("file", ["spm", "sliding", "recurrent"])
def test_states_of_every_memory_after_rollbacks(tiny: TinyFiles, file: str, kv_type: str) -> None:
    """Past the window, over several pieces of a pass, after first layers alone; relative to the states' own size."""
    tokens, other = some_tokens(90), some_tokens(40, seed=1)
    with mlx.load(getattr(tiny, file), kv_type=kv_type) as model:
        names = [*map(layer_name, range(model.n_layers)), "norm"]
        with model.new_context(128, hidden=names) as fresh, model.new_context(128) as unwatched:
            fresh.decode(tokens[:50], "none")
            wanted = fresh.decode(tokens[50:])
            unwatched.decode(tokens[:50], "none")
            assert np.array_equal(unwatched.decode(tokens[50:]).logits, wanted.logits)
        with model.new_context(128, hidden=names) as context:
            context.decode(tokens[:49], "none")
            for token in other[:6]:
                context.decode_first_layers([token], 1)
            context.truncate(51)
            context.decode_first_layers(other[2:], 1)
            context.truncate(49)
            context.decode([*tokens[49:51], *other])
            context.truncate(50)
            found = context.decode(tokens[50:])
        for name in names:
            assert found.hidden[name].shape == (40, model.n_embd)
            error = np.abs(found.hidden[name] - wanted.hidden[name]).max() / np.abs(wanted.hidden[name]).max()
            assert error < 1e-4, name
        assert divergence(wanted.logits, found.logits) < EXACT


def test_first_layers_replay_no_more_than_the_last_guesses(tiny: TinyFiles) -> None:
    """However many steps were made in them: the state to go back to is kept."""
    with mlx.load(tiny.recurrent) as model, model.new_context(256, hidden=("layer:0",)) as context:
        context.decode(some_tokens(100), "none")
        fed: list[int] = []
        original = context._compute
        context._compute = lambda tokens, *args: (fed.append(len(tokens)), original(tokens, *args))[1]  # type: ignore[method-assign]
        for token in some_tokens(9, seed=1):
            context.decode_first_layers([token], 1)
        context.truncate(100)
        context.decode([7])
        assert fed == [1] * 10


def test_a_memory_that_is_fed_again_takes_no_floats(tiny: TinyFiles) -> None:
    with (
        mlx.load(tiny.recurrent) as model,
        model.new_context(64) as context,
        pytest.raises(UsageError, match=r"cannot be fed with rows of floats for tiny-mamba\.gguf"),
    ):
        context.decode_floats(np.zeros((1, model.n_embd), np.float32), [5])


def test_rows_of_floats_after_a_failure_are_gone(model: MLXModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be fed again from their names; the tokens before them can."""
    tokens, floats = some_tokens(20), np.ones((3, model.n_embd), np.float32)
    with model.new_context(64) as context:
        context.decode(tokens)
        context.decode_floats(floats, [5, 6, 7])
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", lambda *arrays: (_ for _ in ()).throw(RuntimeError("out of memory, say")))
            with pytest.raises(EngineError, match="out of memory, say"):
                context.decode_floats(floats, [5, 6, 7])
        assert context.tokens == tokens
        rows = context.decode([8]).logits.copy()
    assert divergence(plain_rows(model, [*tokens, 8])[20:], rows) < EXACT


# Interruptions and failures.


def test_a_long_prompt_can_be_stopped(model: MLXModel) -> None:
    """Between pieces, long before the 256 tokens after which the base class asks."""
    with model.new_context(512) as context:
        context.decode(some_tokens(8), "none")
        asked: list[int] = []
        context.interrupted = lambda: (asked.append(1), len(asked) == 3)[1]
        with pytest.raises(Cancelled):
            context.decode(some_tokens(200), "last")
        assert len(asked) == 3
        assert context.n_past == 8
        context.interrupted = None
        rows = context.decode(some_tokens(20, seed=1)).logits.copy()
    assert divergence(plain_rows(model, some_tokens(8) + some_tokens(20, seed=1))[8:], rows) < EXACT


def test_a_failed_pass_leaves_the_context_whole(model: MLXModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers have their rows when it breaks; the memory is built anew from the tokens."""
    tokens = some_tokens(40)
    with model.new_context(128) as context:
        context.decode(tokens[:30], "none")
        layer = model.network.module.layers[1]
        call = type(layer).__call__

        def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is layer:
                raise RuntimeError("out of memory, say")
            return call(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(layer), "__call__", broken)
            with pytest.raises(EngineError, match=r"failed to decode 3 tokens: out of memory, say"):
                context.decode([5, 6, 7])
        assert context.tokens == tokens[:30]
        rows = context.decode(tokens[30:]).logits.copy()
    assert divergence(plain_rows(model, tokens)[30:], rows) < EXACT


# The owner thread.


def test_all_computing_is_done_by_one_thread(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's streams belong to threads: what one has begun another cannot always finish."""
    names: set[str] = set()
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (names.add(threading.current_thread().name), evaluate(*arrays))[1])

    def live() -> None:
        with mlx.load(tiny.sliding) as model, model.new_context(64) as context:
            context.decode(some_tokens(10))
            context.truncate(3)
            context.decode([5])

    threads = [threading.Thread(target=live) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(names) == 1
    assert names.pop().startswith("localspec-mlx")


def test_the_owner_hands_back_results_and_errors() -> None:
    owner = OwnerThread()
    assert owner.run(lambda: 7) == 7
    assert owner.run(lambda: owner.run(lambda: 8)) == 8, "work that asks for more work must not wait for itself"
    with pytest.raises(ZeroDivisionError):
        owner.run(lambda: 1 // 0)


def test_an_owner_that_has_ended_says_so() -> None:
    owner = OwnerThread()
    owner.end()
    owner.end()
    with pytest.raises(Closed, match="the program is ending"):
        owner.run(lambda: 7)


# Saved states.


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("file", ["spm", "sliding", "recurrent"])
def test_a_saved_state_goes_on_in_another_context(tiny: TinyFiles, file: str, kv_type: str) -> None:
    tokens = some_tokens(50)
    with mlx.load(getattr(tiny, file), kv_type=kv_type) as model:
        with model.new_context(64) as context:
            context.decode(tokens[:40], "none")
            context.truncate(38)
            state = context.export_state()
            assert state.n_bytes == context.state_bytes
            wanted = context.decode(tokens[38:]).logits.copy()
        with model.new_context(96) as other:
            other.decode([5, 6, 7])
            other.import_state(state)
            assert other.tokens == tokens[:38]
            assert divergence(wanted, other.decode(tokens[38:]).logits) < EXACT
            if model.capabilities.rollback == "exact":
                other.truncate(20)
                assert divergence(plain_or_fresh(model, tokens[:25], 20), other.decode(tokens[20:25]).logits) < EXACT


def plain_or_fresh(model: MLXModel, tokens: list[int], start: int) -> FloatArray:
    with model.new_context(64) as context:
        return context.decode(tokens).logits[start:].copy()


def test_a_state_that_does_not_fit_is_refused(tiny: TinyFiles, model: MLXModel, sliding: MLXModel) -> None:
    with model.new_context(64) as context, sliding.new_context(64) as foreign:
        context.decode(some_tokens(9))
        foreign.decode(some_tokens(9))
        state = context.export_state()
        short = {name: array[..., :-1, :] for name, array in state.arrays.items()}
        for wrong in (foreign.export_state(), ContextState(state.tokens, short), ContextState(state.tokens, {})):
            with pytest.raises(EngineError, match="saved state"):
                context.import_state(wrong)
            assert context.n_past == 0
            context.decode([5, 6])
        context.import_state(state)
        assert context.n_past == 9


# Choosing it.


def test_without_the_packages_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name == "mlx-lm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(EngineUnavailable, match=r"mlx-lm is not installed; install it with: pip install"):
        MLXLibrary()


def test_where_there_is_no_mlx_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(EngineUnavailable, match="Apple silicon"):
        MLXLibrary()


def test_auto_takes_it_on_a_mac_for_its_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    open_backend("ik-llama")
    assert "mlx" not in backends.candidates(), "on Linux it is there to be tested"

    class Metal:
        gpu = True

    with monkeypatch.context() as patch:
        patch.setattr(mlx, "binding", Metal)
        assert "mlx" not in backends.candidates()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "mlx" not in backends.candidates(), "without a GPU it is slow"
        patch.setattr(mlx, "binding", Metal)
        assert backends.candidates()[:2] == ["mlx", "ik-llama"]
        assert "mlx" not in backends.candidates(0)
        assert backends.candidates(99) == ["mlx"]


def test_auto_goes_on_to_an_engine_that_knows_the_architecture(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_backend("llama-cpp")

    def unknown(path: Path, **options: Any) -> Any:
        raise UnsupportedModel(f"{path.name}: the mlx backend does not know the architecture 'xyz'")

    monkeypatch.setattr(backends, "candidates", lambda n: ["mlx", "llama-cpp"])
    monkeypatch.setattr(mlx, "load", unknown)
    remarks: list[str] = []
    with backends.load(tiny.spm, warn=remarks.append) as model:
        assert model.backend == "llama-cpp"
    assert "'xyz'" in remarks[0]
    assert "trying llama-cpp" in remarks[0]
    with pytest.raises(UnsupportedModel):
        backends.load(tiny.spm, "mlx")


def test_a_model_is_not_divided(tiny: TinyFiles) -> None:
    with mlx.load(tiny.spm, n_gpu_layers=0) as model:
        assert model.capabilities.device == "cpu"
    if not mlx.binding().gpu:
        with pytest.raises(EngineUnavailable, match="no GPU here"):
            mlx.load(tiny.spm, n_gpu_layers=5)


def test_a_context_beyond_what_it_computes_rightly_is_refused(model: MLXModel) -> None:
    network = model.network
    object.__setattr__(network, "max_context", 4096)
    try:
        with pytest.raises(UsageError, match="at most 4096 tokens"):
            model.new_context(5000)
        model.new_context(4096).close()
    finally:
        object.__setattr__(network, "max_context", None)


# Pairs of two engines.


@pytest.mark.parametrize(("target", "draft"), [("mlx", "llama-cpp"), ("mlx", "reference"), ("llama-cpp", "mlx")])
def test_target_and_draft_on_different_engines(tiny: TinyFiles, target: str, draft: str) -> None:
    """Half of the drafts are accepted and half are not; the text is the target's own, replayed token by token."""
    open_backend(target)
    open_backend(draft)
    pair = tiny.pair
    with LLM(pair.target, draft=pair.draft, backend=target, draft_backend=draft, n_ctx=512) as llm:
        model, draft_model = llm.inspect().target, llm.inspect().state.models[0].model
        assert (model.backend, draft_model.backend) == (target, draft)
        prompt = "the rain in the and of"
        reply = llm.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True), draft_length=3)
        tokens = model.tokenize(prompt, add_special=True)
    assert 10 < reply.stats.num_accepted_tokens < reply.stats.num_draft_tokens - 10
    margins = replay(target, pair.target, tokens, reply.token_ids)
    assert margins.max() < 0.05, "an emitted token is not the target's"


def replay(backend: str, path: Path, prompt: list[int], answer: list[int]) -> FloatArray:
    """How far each emitted token is below the argmax, computed one token a pass."""
    margins = []
    with open_backend(backend).load(path) as model, model.new_context(512) as context:
        context.decode(prompt[:-1], "none")
        for token, following in zip([prompt[-1], *answer[:-1]], answer, strict=True):
            row = context.decode([token], "last").logits[0]
            margins.append(float(row.max() - row[following]))
    return np.array(margins, dtype=np.float32)


def test_an_unknown_draft_backend_is_refused_before_anything_is_loaded(tiny: TinyFiles) -> None:
    with pytest.raises(UsageError, match="unknown backend 'lama'"):
        LLM(tiny.pair.target, draft=tiny.pair.draft, draft_backend="lama")


def test_the_engine_is_named_in_reports(model: MLXModel) -> None:
    assert model.engine.startswith(f"mlx {importlib.metadata.version('mlx')}")
    assert mlx.binding().built_for
    with GGUFFile(model.path) as file:
        assert model.architecture == file.architecture
