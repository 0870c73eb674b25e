"""What MLX's contexts do beyond the contract of every backend (``test_backends``): what a window shows, what a pass
fetches and waits for, one thread that computes, pairs of two engines."""

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
from localspec.backends.base import Context, FloatArray
from localspec.errors import Cancelled, Closed, EngineError, EngineUnavailable, UnsupportedModel, UsageError
from tests.backends.test_backends_memory import divergence
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.contexts import some_tokens
from tests.support.mlx_ggufs import TinyFile

mx = pytest.importorskip("mlx.core")

from localspec.backends import mlx  # noqa: E402
from localspec.backends.mlx.library import MLXLibrary, OwnerThread  # noqa: E402
from localspec.backends.mlx.model import MLXModel  # noqa: E402
from localspec.backends.mlx.network import Network  # noqa: E402

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


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of passes, as they come."""
    widths: list[int] = []
    states = Network.states

    def counted(self: Network, tokens: Any, *arguments: Any, **options: Any) -> Any:
        widths.append(tokens.shape[1])
        return states(self, tokens, *arguments, **options)

    monkeypatch.setattr(Network, "states", counted)
    return widths


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that MLX is evaluated on, as it is."""
    names: list[str] = []
    evaluate = mx.eval
    monkeypatch.setattr(
        mx, "eval", lambda *arrays: (names.append(threading.current_thread().name), evaluate(*arrays))[1]
    )
    return names


def plain_rows(model: MLXModel, tokens: list[int]) -> FloatArray:
    """All rows from mlx-lm's own model and cache, windows enforced by its mask alone."""
    from mlx_lm.models.cache import KVCache

    def compute() -> FloatArray:
        cache = [KVCache() for _ in range(model.network.n_layer)]
        logits = model.network.module(mx.array([tokens]), cache=cache)[0]
        return np.array(logits.astype(mx.float32))

    return model.owner.run(compute)


# Memories.


@pytest.mark.parametrize("widths", [[90], [1] * 90, [31, 1, 1, 2, 29, 5, 21], [33, 32, 25]])
def test_a_window_computes_what_a_mask_over_everything_does(sliding: MLXModel, widths: list[int]) -> None:
    """The window is 32 tokens: passes that end before it is full, fill it, and go over it."""
    tokens = some_tokens(90, seed=4)
    assert 32 in sliding.network.layer_windows
    with sliding.new_context(128) as context:
        rows = [context.decode(tokens[context.n_past : context.n_past + width]).logits.copy() for width in widths]
    assert divergence(plain_rows(sliding, tokens), np.concatenate(rows)) < EXACT


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
            assert [rows for window, rows in shown if window == 32] == [31 + n] * 5
            assert [rows for window, rows in shown if window is None] == [context.n_past]


def test_a_quantised_memory_is_smaller_and_nearly_as_exact(tiny: TinyFiles) -> None:
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


def test_attention_sinks_with_a_quantised_cache_are_refused(tmp_path: Path) -> None:
    path = TinyFile("gpt-oss").write(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match=r"attention sinks of model\.gguf .*; use f16 or --backend llama-cpp$"):
        mlx.load(path, kv_type="q8_0")


def test_a_recurrent_memory_replays_no_more_than_the_last_guesses(tiny: TinyFiles, fed: list[int]) -> None:
    """A rejected guess costs a pass over what was accepted with it, not over the conversation; and however many steps
    were made in the first layers, the state to go back to is kept."""
    with mlx.load(tiny.recurrent) as model, model.new_context(256, hidden=("layer:0",)) as context:
        context.decode(some_tokens(100), "none")
        fed.clear()
        for seed in range(6):
            n = context.n_past
            context.decode(some_tokens(5, seed))
            context.truncate(n + 2)
        context.decode([7])
        context.decode([8])
        context.truncate(context.n_past - 1)
        context.decode([9])
        assert fed == [5, *[2, 5] * 5, 2, 1, 1, 1]
        fed.clear()
        for token in some_tokens(9, seed=1):
            context.decode_first_layers([token], 1)
        context.truncate(context.n_past - 9)
        context.decode([7])
        assert fed == [1] * 10


# What a pass fetches and waits for.


@pytest.mark.parametrize("hidden", [(), ("layer:0", "layer:1", "norm")])
@pytest.mark.parametrize("logits", ["all", "last", "none"])
def test_a_pass_is_evaluated_and_waited_for_once(
    model: MLXModel, evaluations: list[str], logits: Any, hidden: tuple[str, ...]
) -> None:
    with model.new_context(64, hidden=hidden) as context:
        context.decode(some_tokens(20), "none")
        evaluations.clear()
        forward = context.decode([5, 6, 7], logits)
        kept = forward.logits.copy()
        for states in forward.hidden.values():
            states.sum()
        context.truncate(21)
        assert len(evaluations) == 1
        context.decode([8, 9, 10])
        assert np.array_equal(forward.logits, kept)


def test_only_the_rows_asked_for_reach_the_vocabulary(model: MLXModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a 152k vocabulary costs as much as a tenth of a small model."""
    n_rows: list[int] = []
    logits = Network.logits
    monkeypatch.setattr(
        Network, "logits", lambda self, hidden: (n_rows.append(hidden.shape[1]), logits(self, hidden))[1]
    )
    with model.new_context(64) as context:
        context.decode(some_tokens(10), "none")
        context.decode(some_tokens(10), "last")
        context.decode(some_tokens(3), "all")
    assert n_rows == [1, 3]


# Interruptions and failures.


def test_a_long_prompt_can_be_stopped(model: MLXModel, context: Context) -> None:
    """Between pieces, long before the 256 tokens after which the base class asks."""
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


def test_a_failed_pass_leaves_the_context_whole(
    model: MLXModel, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the layers have their rows when it breaks; the memory is built anew from the tokens."""
    tokens = some_tokens(40)
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
    assert divergence(plain_rows(model, tokens)[30:], context.decode(tokens[30:]).logits) < EXACT


# The owner thread.


def test_all_computing_is_done_by_one_thread(tiny: TinyFiles, evaluations: list[str]) -> None:
    """MLX's streams belong to threads: what one has begun another cannot always finish."""

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
    (name,) = set(evaluations)
    assert name.startswith("localspec-mlx")


def test_the_owner_hands_back_results_and_errors_until_it_has_ended() -> None:
    owner = OwnerThread()
    assert owner.run(lambda: 7) == 7
    assert owner.run(lambda: owner.run(lambda: 8)) == 8, "work that asks for more work must not wait for itself"
    with pytest.raises(ZeroDivisionError):
        owner.run(lambda: 1 // 0)
    owner.end()
    owner.end()
    with pytest.raises(Closed, match="the program is ending"):
        owner.run(lambda: 7)


# Choosing it.


def test_where_it_is_not_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name == "mlx-lm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(EngineUnavailable, match=r"mlx-lm is not installed; install it with: pip install"):
        MLXLibrary()
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


def test_a_model_is_not_divided_and_named_in_reports(tiny: TinyFiles) -> None:
    with mlx.load(tiny.spm, n_gpu_layers=0) as model:
        assert model.capabilities.device == "cpu"
        assert model.architecture == "llama"
        assert model.engine.startswith(f"mlx {importlib.metadata.version('mlx')}")
    assert mlx.binding().built_for
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
        assert (llm.backend_name, llm.inspect().state.models[0].model.backend) == (target, draft)
        prompt = "the rain in the and of"
        reply = llm.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True), draft_length=3)
        tokens = llm.tokenize(prompt, add_special=True)
    assert 10 < reply.stats.num_accepted_tokens < reply.stats.num_draft_tokens - 10
    assert replay(target, pair.target, tokens, reply.token_ids).max() < 0.05, "an emitted token is not the target's"


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
