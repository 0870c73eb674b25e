"""The engines: which are here, what they were built for, and how to get what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module

from localspec.backends import BACKENDS, candidates, unavailable_reason
from localspec.backends.builds import NATIVE_COMMAND, built_for, native_gain, system_info
from localspec.backends.gpus import ggml_devices, metal_gpu, used_gpus
from localspec.commands.doctor.facts import EngineFacts
from localspec.commands.report.model import Finding, Status
from localspec.model_files.sources.base import size_text
from localspec.runtime.load_options import LoadOptions

_LLAMA_CPP = "'llama-cpp-python>=0.3.36,<0.4'"
_BUILDS = {
    "NVIDIA": ("CUDA", "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native"),
    "Apple": ("Metal", "-DGGML_METAL=on"),
    "AMD": ("Vulkan", "-DGGML_VULKAN=on"),
    "other": ("Vulkan", "-DGGML_VULKAN=on"),
}
"""Graphics hardware -> what to build for it, and how."""

FOR_GPUS = ("llama-cpp", "mlx")
"""Engines that there are builds of for GPUs."""


def look_at_engines() -> list[EngineFacts]:
    """Load every engine that can be loaded."""
    return [_look(name) for name in BACKENDS]


def _look(name: str) -> EngineFacts:
    reason = unavailable_reason(name)
    if reason is not None:
        return EngineFacts(name, False, reason=reason)
    module = import_module(BACKENDS[name])
    if not hasattr(module, "binding"):
        return EngineFacts(name, True, built_for=["NumPy"], devices=[])
    binding = module.binding()
    version = str(getattr(binding, "version", "")) or None
    library = getattr(binding, "lib", None)
    gpu = bool(getattr(binding, "gpu", False))
    if not hasattr(library, "llama_print_system_info"):
        return EngineFacts(name, True, version, list(binding.built_for), metal_gpu() if gpu else [])
    devices = ggml_devices() if gpu else []
    gpus = None if devices is None else used_gpus(devices)
    return EngineFacts(name, True, version, built_for(system_info(library)), gpus)


def engine_findings(
    engines: Sequence[EngineFacts], gpus: Sequence[str], wanted: str, cpu: Sequence[str] = ()
) -> Iterator[Finding]:
    """The rows on the engines.

    Args:
        engines: what ``look_at_engines`` found.
        gpus: the graphics hardware.
        wanted: ``--backend``.
        cpu: the CPU's instruction sets.
    """
    # MLX without a GPU is there for tests, and never taken unless asked for.
    usable = [e for e in engines if e.usable and e.name != "reference" and (e.name != "mlx" or e.devices != [])]
    for engine in engines:
        if engine.name == "mlx" and not engine.usable and wanted != "mlx" and "Apple" not in gpus:
            continue
        if not engine.usable:
            what, _, hint = (engine.reason or "it cannot be used").partition("; install it with: ")
            needed = wanted == engine.name or (wanted == "auto" and not usable)
            yield Finding("fail" if needed else "info", engine.name, what, hint or _instead(engine.name))
        elif engine.name == "reference":
            if wanted == "reference":
                yield Finding("ok", engine.name, "NumPy, float64: exact and slow, for tests")
        else:
            yield Finding("ok" if engine in usable else "info", engine.name, _described(engine))
            if engine.name == "ik-llama" and (gain := native_gain(engine.built_for, cpu)) is not None:
                status: Status = "note" if wanted in ("auto", engine.name) else "info"
                yield Finding(status, "this CPU", f"ik-llama compiled for its {gain[0]}: {gain[1]}", NATIVE_COMMAND)
    if any(engine.usable and engine.name in FOR_GPUS and engine.devices != [] for engine in engines):
        return
    again = " --force-reinstall --no-cache-dir --no-deps" if any(e.name == "llama-cpp" for e in usable) else ""
    for gpu in gpus:
        if gpu in _BUILDS:
            kind, define = _BUILDS[gpu]
            text = f"a GPU{'' if gpu == 'other' else f' of {gpu}'} is here, but no engine is built for it"
            command = f'CMAKE_ARGS="{define}" pip install {_LLAMA_CPP}{again}'
            yield Finding("info" if gpu == "other" else "note", kind, text, command)


def _described(engine: EngineFacts) -> str:
    parts = [engine.version or "", " ".join(engine.built_for) or "built for any CPU of its kind"]
    for device in engine.devices or ():
        parts.append(f"{device.description} ({size_text(device.free_bytes)} of {size_text(device.total_bytes)} free)")
    return " · ".join(part for part in parts if part)


def _instead(name: str) -> str:
    if name == "ik-llama":
        return "compile llama.cpp for this machine: pip install 'localspec[llama-cpp]'"
    return f"install it anew: pip install --force-reinstall --no-cache-dir {_LLAMA_CPP}"


def preferred_engine(engines: Sequence[EngineFacts], load: LoadOptions) -> EngineFacts | None:
    """The engine that a model would be loaded with first; None where the one that was asked for cannot be used.

    Args:
        engines: what ``look_at_engines`` found.
        load: how it would be loaded.

    Raises:
        EngineUnavailable: there is none, or none for a GPU where layers are to go there.
    """
    by_name = {engine.name: engine for engine in engines}
    if load.backend == "auto":
        return by_name[load.placement.in_order(candidates(None if load.placement.rpc else load.n_gpu_layers))[0]]
    return by_name[load.backend] if by_name[load.backend].usable else None
