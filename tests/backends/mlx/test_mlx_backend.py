"""What MLX does beyond the contract of every backend: what passes cost, several sequences in one, the thread that
computes, pairs of two engines."""

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
from localspec.backends.base import Piece
from localspec.controllers.batching import SharedPasses
from localspec.errors import Closed, EngineError, EngineUnavailable, UsageError
from tests.backends.mlx.test_mlx_network import FILES
from tests.backends.test_backends_memory import divergence
from tests.conftest import TinyFiles, open_backend
from tests.engine.test_parallel_choice import loaded_with
from tests.support.contexts import check_next, every_state, some_tokens, try_any_order
from tests.support.memory import passes_of, share_every_pass
from tests.support.mlx_ggufs import TinyFile
from tests.support.program import apart
from tests.support.replaying import margins, rows_at_width
from tests.support.waiting import Brake

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402

from localspec.backends import mlx  # noqa: E402
from localspec.backends.mlx.architecture import ARCHITECTURES  # noqa: E402
from localspec.backends.mlx.library import MLXLibrary, OwnerThread  # noqa: E402
from localspec.backends.mlx.model import MLXModel, MLXSequences  # noqa: E402
from localspec.backends.mlx.network import Network  # noqa: E402


@pytest.fixture(scope="module")
def model(tiny: TinyFiles) -> Iterator[MLXModel]:
    open_backend("mlx")
    with mlx.load(tiny.spm) as model:
        yield model


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
    sinks = TinyFile("gpt-oss").write(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match=r"attention sinks of model\.gguf .*; use f16 or --backend llama-cpp$"):
        mlx.load(sinks, kv_type="q8_0")
    settings = {"rope.scaling.original_context_length": 256}
    factors = {f"rope_factors_{each}.weight": np.linspace(1, 8, 24, dtype=np.float32) for each in ("long", "short")}
    phi = TinyFile("phi3", settings, extra=factors).write(tmp_path / "phi.gguf")
    with mlx.load(phi) as model:  # another model where texts are longer
        with pytest.raises(UsageError, match="at most 256 tokens"):
            model.new_context(257)
        model.new_context(256).close()


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


@pytest.mark.parametrize("hidden", [(), ("layer:0", "layer:1", "norm")])
def test_a_pass_is_evaluated_once_and_reads_each_weight_once(
    model: MLXModel, evaluations: list[str], monkeypatch: pytest.MonkeyPatch, hidden: tuple[str, ...]
) -> None:
    """Of one sequence or several. Only the rows that are asked for reach the vocabulary: one of 152k tokens costs as
    much as a tenth of a small model."""
    called: dict[str, list[int]] = {}

    def count(kind: Any) -> None:
        call = kind.__call__

        def counted(self: Any, x: Any, *args: Any, **options: Any) -> Any:
            called.setdefault(f"{kind.__name__} {id(self)}", []).append(x.shape[1])
            return call(self, x, *args, **options)

        monkeypatch.setattr(kind, "__call__", counted)

    network = model.network.module
    trunk, head = (f"{type(each).__name__} {id(each)}" for each in (network.model, network.lm_head))
    for kind in (type(network.model), nn.Linear, nn.QuantizedLinear):
        count(kind)
    with model.new_batch(3, 96, hidden=hidden) as batch:
        batch.decode([Piece(0, some_tokens(9), "none"), Piece(2, some_tokens(4), "none")])
        for pieces, n_rows, n_wanted in (
            ([Piece(0, [5, 6, 7]), Piece(1, some_tokens(4), "none"), Piece(2, [8, 9], "last")], 9, [4]),
            ([Piece(1, [5, 6, 7])], 3, [3]),
            ([Piece(1, [5, 6, 7], "last")], 3, [1]),
            ([Piece(1, [5, 6, 7], "none")], 3, []),
        ):
            evaluations.clear()
            called.clear()
            found = batch.decode(pieces)
            for states in (each for forward in found for each in forward.hidden.values()):
                states.sum()
            assert sum(map(len, found)) == sum(n_wanted)
            assert len(evaluations) == 1
            assert called.pop(trunk) == [n_rows]
            assert called.pop(head, []) == n_wanted
            assert len(called) == 7 * model.n_layers
            assert set(map(tuple, called.values())) == {(n_rows,)}


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [(name, "f16") for name in (*ARCHITECTURES, "llama, types of 256", "llama, biases")] + [("gemma3", "q8_0")],
)
def test_anything_in_any_order_with_every_architecture(name: str, kv_type: str, tmp_path: Path) -> None:
    with mlx.load(FILES[name].write(tmp_path / "model.gguf"), kv_type=kv_type) as model:
        assert model.capabilities.batches == (not model.network.recurrent)
        noise = 0.2 if kv_type == "q8_0" else 0.01
        try_any_order(model, model, hidden=every_state(model), noise=noise, n_examples=2, n_steps=30)


def broken_layer(monkeypatch: pytest.MonkeyPatch, model: MLXModel, error: BaseException) -> None:
    """The second layer's attention fails over the second sequence: some memories have their rows, of some layers."""
    attention = model.network.module.layers[1]["self_attn"]
    call, n = type(attention).__call__, 0

    def broken(self: Any, *args: Any) -> Any:
        nonlocal n
        n += self is attention
        if n == 2:
            raise error
        return call(self, *args)

    monkeypatch.setattr(type(attention), "__call__", broken)


@pytest.mark.parametrize("error", [RuntimeError("out of memory, say"), KeyboardInterrupt()])
def test_a_failure_leaves_all_memories_as_before(
    model: MLXModel, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    batch = model.new_batch(4, 512)
    batch.decode([Piece(i, some_tokens(12 + 9 * i, seed=i), "none") for i in range(3)])  # the last is empty
    held, n_free = [list(batch[i].tokens) for i in range(4)], batch.free_cells
    modules = [(layer["self_attn"], dict(layer["self_attn"])) for layer in model.network.module.layers]
    with monkeypatch.context() as patch:
        broken_layer(patch, model, error)
        with pytest.raises((EngineError, KeyboardInterrupt), match=r"sequences: out of memory, say|^$"):
            batch.decode([Piece(i, some_tokens(30, seed=60 + i), "last") for i in range(4)])
    assert [batch[i].tokens for i in range(4)] == held
    assert batch.free_cells == n_free
    assert [(layer["self_attn"], dict(layer["self_attn"])) for layer in model.network.module.layers] == modules
    for i in (3, 1, 0, 2):
        check_next(model, batch[i], some_tokens(3, seed=70 + i))
    batch.close()


def test_all_computing_is_done_by_one_thread(tiny: TinyFiles, evaluations: list[str]) -> None:
    """MLX's streams belong to threads: what one has begun another cannot always finish."""
    path = tiny.sliding

    def live() -> None:
        with mlx.load(path) as model, model.new_context(64) as context:
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


def test_where_it_is_not_it_says_so(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name == "mlx-lm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    if not mlx.binding().gpu:
        with pytest.raises(EngineUnavailable, match="no GPU here"):
            mlx.load(tiny.spm, n_gpu_layers=5)
    with monkeypatch.context() as patch:  # of which only the record is left
        patch.delitem(sys.modules, "mlx_lm", raising=False)
        patch.setattr("localspec.backends.mlx.library.find_spec", lambda name: None)
        with pytest.raises(EngineUnavailable, match=r"mlx-lm is not installed; install it with: pip install"):
            MLXLibrary()
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(EngineUnavailable, match=r"mlx-lm is not installed; install it with: pip install"):
        MLXLibrary()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(EngineUnavailable, match="Apple silicon"):
        MLXLibrary()
    without = "import sys; sys.modules['mlx'] = None\nfrom localspec.backends.registry import unavailable_reason as why"
    assert "install it with: pip install 'localspec[mlx]'" in apart(f"{without}\nprint(why('mlx'))")


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


@pytest.mark.parametrize(("target", "draft"), [("mlx", "llama-cpp"), ("mlx", "reference"), ("llama-cpp", "mlx")])
def test_target_and_draft_on_different_engines(tiny: TinyFiles, target: str, draft: str) -> None:
    """Half of the drafts are accepted and half are not; the text is the target's own, replayed token by token."""
    open_backend(target)
    open_backend(draft)
    pair, prompt = tiny.pair, "the rain in the and of"
    with LLM(pair.target, draft=pair.draft, backend=target, draft_backend=draft, n_ctx=512, n_threads=1) as llm:
        assert (llm.backend_name, llm.inspect().state.models[0].model.backend) == (target, draft)
        reply = llm.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True), draft_length=3)
        rows = rows_at_width(1, llm, llm.tokenize(prompt, add_special=True), reply.token_ids)
    assert 10 < reply.stats.num_accepted_tokens < reply.stats.num_draft_tokens - 10
    assert margins(rows, reply.token_ids).max() < 0.05, "an emitted token is not the target's"


def test_answers_share_passes(tiny: TinyFiles, measured_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is taken to pass over the cells of its own answer, not over those of all."""
    loaded_with("gpu", monkeypatch)
    share_every_pass(monkeypatch)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    n_held, n_cells = list[int](), list[int]()
    observe = SharedPasses.observe

    def observed(self: Any, width: int, ms: float, cells: int) -> None:
        n_cells.append(cells)
        n_held.append(batch.n_cells - batch.free_cells)
        observe(self, width, ms, cells)

    with LLM(tiny.quick.target, None, backend="mlx", n_ctx=384, parallel=3, idle=False, remember=False) as llm:
        batch = llm.inspect().state.batch
        assert isinstance(batch, MLXSequences)
        fed = passes_of(batch, monkeypatch)
        monkeypatch.setattr(SharedPasses, "observe", observed)
        prompts = [llm.tokenize("la la lo " * n) for n in (12, 16, 20)]
        with Brake(llm, after=0):  # they begin together
            streams = [llm.rounds(prompt, params) for prompt in prompts]
        assert all(stream.reply.token_ids for stream in streams)
    assert max(map(len, fed)) == 3
    assert 0 < max(n_cells) <= max(map(len, prompts)) + 24 + 2 < max(n_held)
