"""Builds of an engine: which one is loaded, what it was compiled for, and what one for this very CPU would bring.

A wheel is compiled for the oldest CPU it is meant for; the same source compiled here may use all that this one has.
Such builds bear one version and differ in their kernels: in what a pass costs, and in what may be wrong with it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

# Names in the engines' own words -> as people write them. SSE and the like every CPU has.
_FEATURES = {
    "AVX": "AVX", "AVX2": "AVX2", "FMA": "FMA", "F16C": "F16C", "AVX_VNNI": "AVX-VNNI", "AVX512": "AVX-512",
    "AVX512_VNNI": "AVX512-VNNI", "AVX512_BF16": "AVX512-BF16", "AMX_INT8": "AMX", "NEON": "NEON", "FP16_VA": "FP16",
    "DOTPROD": "DOTPROD", "MATMUL_INT8": "I8MM", "SVE": "SVE", "SME": "SME",
}  # fmt: skip

BEYOND_AVX2 = ("AVX512-VNNI", "AVX-VNNI", "AVX-512", "AVX512-BF16")
"""What ik_llama.cpp has kernels for and its x86-64 wheels are not compiled for."""

_GAINS = {
    "AVX512-VNNI": "t(2)/t(1) 1.27→1.13, t(8) ×0.79 (Xeon)",
    "AVX-VNNI": "not measured (GCC 11, Clang 12)",
}
"""An instruction set -> what ik-llama gains when it is compiled for it: passes over 2 and 8 tokens, against its wheel's
(benchmarks/RESULTS.md), or which compilers know it. One that is not here brings next to nothing: without VNNI its
kernels for quantised weights remain those for AVX2, and on ARM they use dot products and half floats, which its wheels
are compiled for, and neither I8MM nor SVE."""

NATIVE_COMMAND = "python -m localspec.backends.native_build"
"""Compiles ik-llama for this CPU, with the Python that runs localspec."""


def system_info(library: Any) -> str:
    """The line that llama.cpp prints about itself."""
    function = library.llama_print_system_info
    if isinstance(library, ctypes.CDLL):
        function.argtypes, function.restype = [], ctypes.c_char_p
    return (function() or b"").decode("utf-8", "replace")


def built_for(system_info: str) -> list[str]:
    """What llama.cpp's line on itself means: devices first, then instruction sets.

    The line reads ``CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | …``, or in older versions only
    ``AVX2 = 1 | …``.
    """
    devices: list[str] = []
    features: list[str] = []
    for part in system_info.split("|"):
        device, colon, setting = part.rpartition(":")
        if colon and (name := device.strip()) != "CPU":
            devices.append(name)
        key, _, value = setting.partition("=")
        if key.strip() in _FEATURES and value.strip() == "1":
            features.append(_FEATURES[key.strip()])
    return [*dict.fromkeys(devices), *dict.fromkeys(features)]


def native_gain(built: Collection[str], cpu: Collection[str]) -> tuple[str, str] | None:
    """What ik-llama would gain if it were compiled for this CPU: the instruction set it is for, and how much.

    None where that is nothing worth waiting for, or where it was done already.

    Args:
        built: what the build that is here was compiled for.
        cpu: what the CPU has.
    """
    if any(feature in built for feature in BEYOND_AVX2):
        return None
    return next(((feature, gain) for feature, gain in _GAINS.items() if feature in cpu), None)


def foreign_features(built: Collection[str], cpu: Collection[str]) -> list[str]:
    """What a build needs that its wheels would not, and this CPU lacks: it was compiled on another machine."""
    return [feature for feature in built if feature in BEYOND_AVX2 and feature not in cpu] if cpu else []


def digest(folder: Path) -> str:
    """Eight hexadecimal digits that tell a build from others: of its libraries' sizes and samples of what is in them.

    Args:
        folder: where its libraries lie; the kernels may be in another one than the interface.
    """
    found = hashlib.sha256()
    names = {path for pattern in ("*ggml*", "*llama*") for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(names):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(32):
                file.seek(size * i // 32)
                found.update(file.read(4096))
    return found.hexdigest()[:8]
