"""Several sequences in one pass on MLX, beyond the contract of every backend (``test_sequences``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Piece, SequenceBatch
from localspec.controllers.batching import SharedPasses
from localspec.errors import EngineError
from tests.backends.mlx.test_mlx_network import FILES
from tests.conftest import TinyFiles, open_backend
from tests.engine.test_parallel_choice import loaded_with
from tests.support.contexts import check_next, every_state, some_tokens, try_any_order
from tests.support.memory import passes_of
from tests.support.waiting import Brake

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402

from localspec.backends import mlx  # noqa: E402
from localspec.backends.mlx.architecture import ARCHITECTURES  # noqa: E402
from localspec.backends.mlx.model import MLXModel, MLXSequences  # noqa: E402


@pytest.fixture(scope="module")
def model(tiny: TinyFiles) -> Iterator[MLXModel]:
    open_backend("mlx")
    with mlx.load(tiny.bpe) as model:
        yield model


@pytest.fixture
def batch(model: MLXModel) -> Iterator[SequenceBatch]:
    with model.new_batch(4, 512) as batch:
        yield batch


@pytest.mark.parametrize("hidden", [(), ("layer:0", "norm")])
def test_a_pass_is_evaluated_once_and_each_linear_layer_reads_its_weights_once(
    model: MLXModel, monkeypatch: pytest.MonkeyPatch, hidden: tuple[str, ...]
) -> None:
    called: dict[str, list[int]] = {}

    def count(kind: Any) -> None:
        call = kind.__call__

        def counted(self: Any, x: Any, *args: Any, **options: Any) -> Any:
            called.setdefault(f"{kind.__name__} {id(self)}", []).append(x.shape[1])
            return call(self, x, *args, **options)

        monkeypatch.setattr(kind, "__call__", counted)

    evaluations: list[int] = []
    evaluate = mx.eval
    with model.new_batch(3, 96, hidden=hidden) as batch:
        batch.decode([Piece(0, some_tokens(9), "none"), Piece(2, some_tokens(4), "none")])
        trunk = model.network.module.model
        for kind in (type(trunk), nn.Linear, nn.QuantizedLinear):
            count(kind)
        monkeypatch.setattr(mx, "eval", lambda *arrays: (evaluations.append(1), evaluate(*arrays))[1])
        found = batch.decode([Piece(0, [5, 6, 7]), Piece(1, some_tokens(4), "none"), Piece(2, [8, 9], "last")])
    assert [len(forward) for forward in found] == [3, 0, 1]
    assert evaluations == [1]
    assert called.pop(f"{type(trunk).__name__} {id(trunk)}") == [9]
    head = model.network.module.lm_head
    assert called.pop(f"{type(head).__name__} {id(head)}") == [4]  # the rows that are asked for
    assert len(called) == 7 * model.n_layers
    assert set(map(tuple, called.values())) == {(9,)}


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
    model: MLXModel, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
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


def test_answers_share_passes(tiny: TinyFiles, measured_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is taken to pass over the cells of its own answer, not over those of all."""
    loaded_with("gpu", monkeypatch)
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
