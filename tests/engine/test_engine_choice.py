"""Which engine ``auto`` takes: what a quiet machine chooses, whatever ran beside the measurement, or the usual one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.controllers.calibration import WIDE, curve_key, curves
from localspec.controllers.cost_model import PassTimes
from localspec.engine import loading as loading_module
from localspec.engine.loading import (
    ENGINES,
    EngineTimes,
    compared,
    comparing_engines,
    compiled_gain,
    compiled_offer_once,
    forget,
    ordered,
)
from localspec.engine.options import LoadOptions
from localspec.system.files import home
from localspec.system.steps import exhaust
from tests.conftest import TinyFiles
from tests.support.machines import Machine, TimedContext

USUAL, OTHER = ENGINES
NAMES = list(ENGINES)
OPTIONS = LoadOptions(n_threads=2)


@pytest.fixture(autouse=True)
def two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "unavailable_reason", lambda name: None)
    binding = SimpleNamespace(version="1")
    monkeypatch.setattr(loading_module, "engine_module", lambda name: SimpleNamespace(binding=lambda: binding))


class Engine:
    """A model on an engine that is so many times as slow as the machine's passes say."""

    n_threads, size_bytes, placement = 2, 1000, ""
    capabilities = SimpleNamespace(device="cpu")

    def __init__(self, backend: str, path: Path, machine: Machine, slower: float) -> None:
        self.backend, self.engine, self.path = backend, f"{backend} 1", path
        self._machine, self._slower = machine, slower

    def new_context(self, n_ctx: int) -> Any:
        return TimedContext(self._machine, self._slower)

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return [1, 2, 3]


def compare(path: Path, patch: pytest.MonkeyPatch, slower: float, machine: Machine | None = None) -> EngineTimes:
    """Compare the engines of which the other is so many times as slow as the usual one."""
    machine = (machine or Machine(lambda n, width: 1.0)).installed(patch)
    one, two = (Engine(name, path, machine, rate) for name, rate in ((USUAL, 1.0), (OTHER, slower)))
    exhaust(comparing_engines(192, OPTIONS, one, two))  # type: ignore[arg-type]
    return compared(path, OPTIONS)


def hit(busy: list[bool], times: float, otherwise: float) -> Callable[..., float]:
    """A figure of those passes that are hit, and of others."""
    return lambda n, width=0: times if busy[n] else otherwise


def order(path: Path, on_gpu: bool = False, warn: Callable[[str], None] = str, kv_type: str = "f16") -> list[str]:
    return ordered(NAMES, path, replace(OPTIONS, kv_cache_type=kv_type), on_gpu, warn)


@pytest.mark.parametrize(("slower", "taken"), [(0.5, OTHER), (0.8, OTHER), (0.9, USUAL), (1.0, USUAL), (2.0, USUAL)])
def test_on_a_quiet_machine_it_is_the_faster_one_if_by_enough(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, slower: float, taken: str
) -> None:
    assert order(tiny.bpe) == NAMES
    assert not compare(tiny.bpe, monkeypatch, slower).provisional
    for name, rate in ((USUAL, 1.0), (OTHER, slower)):  # both curves are kept
        engine: Any = Engine(name, tiny.bpe, Machine(lambda n, width: 1.0), rate)
        times = curves().get(curve_key(engine, "f16"))
        assert (times.noisy, times(1)) == (False, pytest.approx(42.5 * rate))
    assert order(tiny.bpe)[0] == taken
    assert order(tiny.bpe, on_gpu=True) == NAMES
    assert order(tiny.bpe, kv_type="q8_0") == NAMES
    monkeypatch.setattr(loading_module, "unavailable_reason", lambda name: "not this one")
    assert order(tiny.bpe) == NAMES  # engines of other versions


@pytest.mark.parametrize("slower", [0.7, 1.0])
def test_neither_an_outlier_nor_load_in_half_of_the_passes_changes_a_choice(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    """One pass takes six seconds; or load is seen, or unseen: that shows in repeats that do not agree."""
    machines = [(Machine(hit([n == at for n in range(10_000)], 150.0, 1.0)), True) for at in range(160)]
    for seed in range(10):
        chance = random.Random(seed)
        busy = [chance.random() < 0.5 for _ in range(10_000)]
        machines += [(Machine(hit(busy, 2.2, 1.0), hit(busy, seen, 0.0)), seen > 0) for seen in (0.0, 0.6)]
    for machine, is_known in machines:
        found = compare(tiny.bpe, monkeypatch, slower, machine)
        taken = order(tiny.bpe)[0]
        assert taken == (OTHER if slower < 1 else USUAL) or (taken == USUAL and (found.provisional or not is_known))


@pytest.mark.parametrize("disturbed", [USUAL, OTHER])
def test_load_in_the_turns_of_one_engine_changes_no_choice(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, disturbed: str
) -> None:

    def is_hit() -> bool:
        return (machine.slower == 1.0) == (disturbed == USUAL)

    machine = Machine(lambda n, width: 2.2 if is_hit() else 1.0, lambda n: 0.5 * is_hit())
    found = compare(tiny.bpe, monkeypatch, 1.01, machine)
    assert found.provisional
    assert order(tiny.bpe) == NAMES


def test_load_throughout_is_no_ground_for_a_choice_and_it_is_measured_again(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare(tiny.bpe, monkeypatch, 0.5, Machine(lambda n, width: 2.0, lambda n: 0.45))
    assert found.provisional
    assert found.others_share == pytest.approx(0.45)
    assert order(tiny.bpe) == NAMES
    assert not compare(tiny.bpe, monkeypatch, 0.5).provisional
    assert order(tiny.bpe)[0] == OTHER
    forget(tiny.bpe, OPTIONS)
    assert compared(tiny.bpe, OPTIONS) is None
    assert order(tiny.bpe) == NAMES


def test_what_another_version_kept_is_not_read(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(tiny.bpe, monkeypatch, 0.5)
    (kept,) = (home() / "engines").glob("*.json")
    stored = json.loads(kept.read_text())
    for value in ({"day": "1 Jan 2027"}, stored["value"] | {"seconds": 3}):
        kept.write_text(json.dumps(stored | {"value": value}))
        assert order(tiny.bpe) == NAMES


def test_what_is_said_of_it_is_said_once_and_names_the_way_back(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    compare(tiny.bpe, monkeypatch, 0.9)
    order(tiny.bpe, warn=said.append)
    assert said == []
    found = compare(tiny.bpe, monkeypatch, 0.5)
    for _ in range(2):
        order(tiny.bpe, warn=said.append)
    assert said == [
        f"Engine for {tiny.bpe.name}: llama-cpp (measured faster on {found.day}; localspec doctor --calibrate measures "
        "again, --backend ik-llama overrides)"
    ]


AVX2 = b"AVX = 1 | AVX2 = 1 | AVX512 = 0 | FMA = 1 | "
DEAR = {1: 100.0, 2: 127.0, 4: 170.0, 8: 260.0, WIDE: 1200.0}


@pytest.fixture
def avx512(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A wheel of ik-llama on a CPU with AVX512-VNNI; on two machines compiling halved all passes, or left a tenth."""
    lib = SimpleNamespace(llama_print_system_info=lambda: AVX2)
    binding = SimpleNamespace(version="1", lib=lib, compiled=None, is_earlier=False)
    engine = SimpleNamespace(
        binding=lambda: binding,
        compiled_library=lambda: binding.compiled,
        compiled_earlier=lambda: binding.is_earlier,
        EARLIER="compiled by an earlier version",
    )
    monkeypatch.setattr(loading_module, "engine_module", lambda name: engine)
    monkeypatch.setattr(loading_module, "cpu_features", lambda: ["AVX2", "AVX-512", "AVX512-VNNI"])
    monkeypatch.setattr(loading_module, "NATIVE_TIMES", {"AVX512-VNNI": ({1: 0.5, 8: 0.5}, {1: 0.1, 256: 0.1})})
    return binding


def test_what_a_compiled_engine_gains_is_estimated_from_measured_passes(
    avx512: SimpleNamespace, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other, on_gpu = (
        Engine(name, tiny.bpe, Machine(lambda n, width: 1.0), 1.0) for name in ("ik-llama", "llama-cpp", "ik-llama")
    )
    on_gpu.capabilities = SimpleNamespace(device="gpu")
    found = compiled_gain(model, PassTimes(DEAR))
    assert found == ("AVX512-VNNI", pytest.approx(2.0), pytest.approx(10.0))
    assert compiled_gain(model, PassTimes(DEAR, noisy=True)) is None  # provisional
    assert compiled_gain(other, PassTimes(DEAR)) is compiled_gain(on_gpu, PassTimes(DEAR)) is None
    avx512.lib.llama_print_system_info = lambda: AVX2 + b"AVX512_VNNI = 1 | "  # compiled already
    assert compiled_gain(model, PassTimes(DEAR)) is None
    avx512.lib.llama_print_system_info = lambda: AVX2
    avx512.compiled = Path("libllama.so")  # with nothing that the wheel's has not
    assert compiled_gain(model, PassTimes(DEAR)) is None
    avx512.compiled = None
    monkeypatch.setattr(loading_module, "NATIVE_TIMES", {"AVX512-VNNI": ({1: 0.96, 8: 0.96}, {1: 0.1, 8: 0.1})})
    assert compiled_gain(model, PassTimes(DEAR)) is None  # on one machine it was next to nothing
    monkeypatch.setattr(loading_module, "cpu_features", lambda: ["AVX2"])
    assert compiled_gain(model, PassTimes(DEAR)) is None


def test_a_compiled_engine_is_offered_once_for_each_build(avx512: SimpleNamespace, tiny: TinyFiles) -> None:
    model: Any = Engine("ik-llama", tiny.bpe, Machine(lambda n, width: 1.0), 1.0)
    assert compiled_offer_once(model, PassTimes(DEAR, noisy=True)) is None
    line = compiled_offer_once(model, PassTimes(DEAR))
    assert "an estimated 2.00 to 10.00 times as fast here (a second row costs 0.27 of a token now)" in line
    assert line.endswith(": localspec engine build")
    assert compiled_offer_once(model, PassTimes(DEAR)) is None
    model.engine = "ik-llama 2"
    assert compiled_offer_once(model, PassTimes(DEAR)) == line
    model.engine, avx512.compiled, avx512.is_earlier = "ik-llama 3", Path("libllama.so"), True
    told = compiled_offer_once(model, PassTimes(DEAR, noisy=True))
    assert told == "compiled by an earlier version: localspec engine build"
