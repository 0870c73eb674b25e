"""The GPUs that engines compute on."""

from __future__ import annotations

import pytest

from localspec import backends
from localspec.backends.llama import ggml as ggml_module
from localspec.backends.llama.ggml import Device


def test_devices_are_read_from_the_engine() -> None:
    if backends.unavailable_reason("llama-cpp") is not None:
        pytest.skip("llama-cpp-python is not installed")
    devices = ggml_module.ggml_devices()
    assert devices is not None
    cpus = [device for kind, device in devices if kind == 0]
    assert cpus[0].name == "CPU"
    assert cpus[0].description
    assert cpus[0].total_bytes >= cpus[0].free_bytes > 0


def test_devices_that_layers_are_put_on() -> None:
    cpu, card, chip = (Device(name, name, 1, 2, False) for name in ("CPU", "CUDA0", "Vulkan0"))
    empty = Device("CUDA1", "no memory", 0, 0, False)
    assert ggml_module.used_gpus([(0, cpu), (2, chip), (1, card), (1, empty)]) == [card]
    assert ggml_module.used_gpus([(0, cpu), (2, chip)]) == [chip]
    assert ggml_module.used_gpus([(0, cpu)]) == []
