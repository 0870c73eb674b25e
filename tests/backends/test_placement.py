"""Where weights go: what is refused, and that what is asked reaches the engine."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localspec import LLM, Placement
from localspec.backends.llama import ggml as ggml_module
from localspec.backends.llama.binding import Binding, Place, Placed, Places
from localspec.backends.llama.ggml import CPU, GPU, INTEGRATED, Ggml, GgmlDevice, engine_log
from localspec.backends.registry import engine_module
from localspec.controllers.calibration import curve_key
from localspec.errors import UsageError
from localspec.model_files.gguf import GGUFFile
from tests.conftest import Backend, TinyFiles, open_backend

PLACING = ("llama-cpp", "ik-llama")


@pytest.fixture(params=PLACING)
def engine(request: pytest.FixtureRequest) -> Backend:
    return open_backend(request.param)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> deque[str]:
    """All that the engines log."""
    monkeypatch.setattr(engine_log, "recent", deque(maxlen=10_000))
    return engine_log.recent


def moved(said: deque[str]) -> set[str]:
    """Tensors that the engine says were put elsewhere."""
    return {part for line in said if "overrid" in line for part in line.split() if ".weight" in part}


def first_row(backend: Backend, path: Any, **options: Any) -> tuple[np.ndarray, dict[str, str]]:
    """A row, and what is known of passes goes by."""
    with backend.load(path, n_threads=2, **options) as model, model.new_context(32) as context:
        return context.decode([3, 1, 4, 1, 5], "last").logits[0].copy(), curve_key(model, "f16")


def test_overridden_tensors_reach_the_engine(engine: Backend, tiny: TinyFiles, said: deque[str]) -> None:
    usual, _ = first_row(engine, tiny.spm)
    assert not moved(said)
    placed, _ = first_row(engine, tiny.spm, placement=Placement(override_tensor=(r"blk\.1\.ffn_(up|down)=CPU",)))
    assert moved(said) == {"blk.1.ffn_up.weight", "blk.1.ffn_down.weight"}
    assert np.allclose(usual, placed, atol=1e-4)


def test_experts_stay_on_the_cpu(engine: Backend, tiny: TinyFiles, said: deque[str]) -> None:
    usual, usual_key = first_row(engine, tiny.experts)
    for placement, layers in ((Placement(cpu_moe=True), (0, 1)), (Placement(n_cpu_moe=1), (0,))):
        said.clear()
        placed, key = first_row(engine, tiny.experts, placement=placement)
        assert key != usual_key, "passes may cost something else"
        assert moved(said) == {f"blk.{i}.ffn_{part}_exps.weight" for i in layers for part in ("gate", "up", "down")}
        assert np.allclose(usual, placed, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split_mode": "columns"}, "--split-mode must be none, layer, row"),
        ({"tensor_split": ()}, "--tensor-split takes shares"),
        ({"tensor_split": (0, 0)}, "not all 0"),
        ({"tensor_split": (1, float("nan"))}, "0 or more"),
        ({"tensor_split": (1, -1)}, "0 or more"),
        ({"tensor_split": "3,x"}, "--tensor-split takes shares"),
        ({"main_gpu": 1}, "--split-mode none"),
        ({"main_gpu": -1, "split_mode": "none"}, "--main-gpu must be"),
        ({"main_gpu": True, "split_mode": "none"}, "--main-gpu must be"),
        ({"n_cpu_moe": -1}, "--n-cpu-moe must be"),
        ({"n_cpu_moe": 1, "cpu_moe": True}, "use either --cpu-moe"),
        ({"cpu_moe": 3}, "on or off"),
        ({"device": ()}, "--device takes names"),
        ({"device": ("CUDA0", "CUDA0")}, "CUDA0 twice"),
        ({"device": "none,CUDA0"}, "cannot be combined with other devices"),
        ({"device": "none", "tensor_split": (1,)}, "nothing to split"),
        ({"split_mode": "none", "tensor_split": (1, 1)}, "cannot be combined with --split-mode none"),
        ({"override_tensor": "ffn"}, "PATTERN=BUFFER"),
        ({"override_tensor": "=CPU"}, "PATTERN=BUFFER"),
        ({"override_tensor": "ffn="}, "PATTERN=BUFFER"),
        ({"override_tensor": "f[=CPU"}, "not a valid regular expression"),
        ({"override_tensor": "(?i)ffn=CPU"}, "C\\+\\+"),
        ({"override_tensor": "x" * 300 + "=CPU"}, "PATTERN=BUFFER"),
        ({"override_tensor": 7}, "--override-tensor takes texts"),
        ({"rpc": "127.0.0.1"}, "HOST:PORT"),
        ({"rpc": "127.0.0.1:0"}, "HOST:PORT"),
        ({"rpc": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"rpc": "[::1]:50052"}, "HOST:PORT"),
        ({"rpc": "127.0.0.1:1;x"}, "HOST:PORT"),
        ({"rpc": ("127.0.0.1:1", "127.0.0.1:1")}, "each once"),
        ({"allow_insecure_rpc": True}, "needs --rpc"),
        ({"rpc": "127.0.0.1:1", "device": "none"}, "cannot be combined with --rpc"),
        ({"rpc": 5}, "--rpc takes texts"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        Placement(**options)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 250


def test_several_in_one_text() -> None:
    assert Placement(tensor_split="3,1") == Placement(tensor_split=(3, 1))  # type: ignore[arg-type]
    text = r"blk\.[0-9]{1,3}\.ffn=CPU,attn=RPC0[127.0.0.1:50052],x(?=y)=CUDA0"
    assert Placement(override_tensor=text).overrides(4) == [
        (r"blk\.[0-9]{1,3}\.ffn", "CPU"),
        ("attn", "RPC0[127.0.0.1:50052]"),
        ("x(?=y)", "CUDA0"),
    ]


def test_what_is_not_here_is_refused(tiny: TinyFiles) -> None:
    backend = open_backend("llama-cpp")
    for options, words in (
        ({"device": "CUDA7"}, "--device CUDA7: llama-cpp only has (the CPU|[A-Z])"),
        ({"tensor_split": (1,) * 17}, "--tensor-split"),
        ({"override_tensor": "nowhere=CPU"}, "matches no tensor"),
        ({"override_tensor": "ffn=CUDA7"}, "the model uses the buffers .*CPU"),
        ({"override_tensor": "embd=CUDA7"}, "token_embd.weight, which stays on the CPU"),
        ({"cpu_moe": True}, "not a mixture of experts"),
        ({"n_cpu_moe": 1}, "not a mixture of experts"),
    ):
        with pytest.raises(UsageError, match=words):
            backend.load(tiny.spm, placement=Placement(**options))  # type: ignore[arg-type]
    with backend.load(tiny.spm, placement=Placement(device=("none",))) as model:  # the next thing works
        assert model.capabilities.device == "cpu"


def test_splitting_needs_devices(engine: Backend, tiny: TinyFiles) -> None:
    if engine_module(engine.name).binding().gpu:
        pytest.skip("there is a GPU")
    for options in ({"split_mode": "row"}, {"tensor_split": (3, 1)}, {"split_mode": "none", "main_gpu": 0}):
        with pytest.raises(UsageError, match="only has the CPU"):
            engine.load(tiny.spm, placement=Placement(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["mlx", "reference"])
def test_engines_without_devices_say_so(tiny: TinyFiles, backend: str) -> None:
    with pytest.raises(UsageError, match=f"{backend} has no --cpu-moe; use --backend llama-cpp or ik-llama"):
        LLM(tiny.experts, backend=backend, placement=Placement(cpu_moe=True))
    with pytest.raises(UsageError, match="ik-llama has no --device"):
        LLM(tiny.experts, backend="ik-llama", placement=Placement(device="none"))
    with pytest.raises(UsageError, match="placement must be a Placement"):
        LLM(tiny.experts, placement="row")  # type: ignore[arg-type]


# What would be said to an engine that has two GPUs.

CARD, OTHER = Place("CUDA0", 11, "CUDA0", True), Place("Vulkan1", 12, "Vulkan1", False)
TWO = Places([CARD, OTHER], [CARD, OTHER], {"CPU": 1, "CUDA0": 2, "Vulkan1": 3}, 16)


def placed_on_two(tiny: TinyFiles, **options: Any) -> Placed:
    with GGUFFile(tiny.experts) as gguf:
        return Placed(Placement(**options), TWO, gguf, "llama-cpp")


def test_shares_and_modes_of_two_gpus(tiny: TinyFiles) -> None:
    params = pytest.importorskip("llama_cpp").llama_model_default_params()
    placed = placed_on_two(tiny, split_mode="layer", tensor_split=(3, 1), device="Vulkan1,CUDA0", cpu_moe=True)
    placed.fill(params)
    assert (params.split_mode, params.tensor_split[:3]) == (1, [3.0, 1.0, 0.0])
    assert placed.used == [OTHER, CARD]
    assert params.devices
    assert params.tensor_buft_overrides
    assert placed_on_two(tiny, split_mode="none", main_gpu=1).used == [OTHER]
    assert placed_on_two(tiny, split_mode="none").used == [CARD]


def test_what_an_engine_with_two_gpus_would_abort_on(tiny: TinyFiles) -> None:
    for options, words in (
        ({"split_mode": "row"}, "Vulkan1 cannot divide matrices"),
        ({"split_mode": "none", "main_gpu": 2}, "numbered 0 to 1"),
        ({"tensor_split": (1, 1, 1)}, "3 shares for 2 devices: CUDA0, Vulkan1"),
        ({"device": "CUDA0", "override_tensor": "exps=Vulkan1"}, "the model uses the buffers CPU, CUDA0"),
        ({"override_tensor": "token=CUDA0"}, "stays on the CPU"),
    ):
        with pytest.raises(UsageError, match=words):
            placed_on_two(tiny, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_gpu_layers", "placed", "device"),
    [
        (-1, None, "gpu"),
        (5, None, "gpu"),
        (4, None, "mixed"),  # the output matrix counts as a layer, and is the last to go there
        (1, None, "mixed"),
        (0, None, "cpu"),
        (-1, {"used": []}, "cpu"),
        (-1, {"keeps_some": True}, "mixed"),
        (-1, {"links": [SimpleNamespace(is_near=False)]}, "gpu"),
        (-1, {"links": [SimpleNamespace(is_near=False), SimpleNamespace(is_near=True)]}, "mixed"),
    ],
)
def test_a_model_that_leaves_work_to_the_cpu_is_not_on_a_gpu_alone(
    n_gpu_layers: int, placed: dict[str, Any] | None, device: str
) -> None:
    """Of four layers: what shares the processor with a draft model is not drafted for during its passes."""
    where = None if placed is None else SimpleNamespace(**{"used": [0], "keeps_some": False, "links": []} | placed)
    engine = SimpleNamespace(gpu=True)
    assert Binding.device(engine, n_gpu_layers, where, 4) == device  # type: ignore[arg-type]


def test_devices_are_read_from_the_engine() -> None:
    open_backend("llama-cpp")
    ggml = Ggml()
    cpu = next(device for device in ggml.devices() if device.kind == CPU)
    assert cpu.name == "CPU"
    assert cpu.description
    free, total = ggml.memory(cpu.handle)
    assert total >= free > 0


def test_devices_that_layers_are_put_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(kind: int, name: str) -> GgmlDevice:
        return GgmlDevice(len(name), kind, name, name, 0, False)

    cpu, card, empty, chip = device(CPU, "CPU"), device(GPU, "CUDA0"), device(GPU, "none"), device(INTEGRATED, "Vulkan")
    monkeypatch.setattr(ggml_module.Ggml, "__init__", lambda self: None)
    monkeypatch.setattr(ggml_module.Ggml, "memory", lambda self, handle: (0, 0) if handle == empty.handle else (1, 2))
    for devices, used in (([cpu, chip, card, empty], ["CUDA0"]), ([cpu, chip], ["Vulkan"]), ([cpu], [])):
        monkeypatch.setattr(ggml_module.Ggml, "devices", lambda self, found=devices: found)
        assert [each.name for each in ggml_module.llama_gpus()] == used
