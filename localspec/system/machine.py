"""What the machine has: threads to use, instruction sets, a name for reports and cache keys, graphics hardware."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from functools import cache
from pathlib import Path

from localspec.system.probing import output, read_text

_ROOT = Path("/")

_X86 = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX",
}
_ARM = {"asimd": "NEON", "asimdhp": "FP16", "asimddp": "DOTPROD", "i8mm": "I8MM", "bf16": "BF16", "sve": "SVE"}
_APPLE = {"FEAT_FP16": "FP16", "FEAT_DotProd": "DOTPROD", "FEAT_I8MM": "I8MM", "FEAT_BF16": "BF16", "FEAT_SME": "SME"}
_APPLE_INTEL = {"AVX1.0": "AVX", "AVX2": "AVX2", "FMA": "FMA", "F16C": "F16C", "AVX512F": "AVX-512"}
_WINDOWS = {39: "AVX", 40: "AVX2", 41: "AVX-512", 43: "DOTPROD"}
"""PF_AVX…, PF_AVX2…, PF_AVX512F… and PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE of winnt.h"""

_WHEELS_USE = {
    ("linux", "x86_64"): {"AVX2": "AVX2", "FMA": "FMA", "F16C": "F16C"},
    ("linux", "aarch64"): {"DOTPROD": "dot products (ARMv8.2)", "FP16": "half floats (ARMv8.2)"},
    ("win32", "amd64"): {"AVX2": "AVX2"},
}
"""Instruction sets that ready-made wheels use, by system and processor."""


def prepare_threads() -> None:
    """Let the engines' threads spin at their barriers only briefly; call before an engine's library is loaded.

    GNU OpenMP spins for milliseconds by default. A spinning thread whose partner has lost its core to another program
    burns whole time slices: on 2 cores shared with other work, single passes of 50 ms were measured at over 2 s, and
    at 50 to 90 ms with 1,000 spins. Not spinning at all doubles the time of a pass on an idle machine; 1,000 spins
    cost nothing there. Whatever the user has set stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def usable_cpus() -> int:
    """Logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def default_threads() -> int:
    """Physical cores this process may use: hyper-threads share the units that decoding is bound by."""
    import psutil

    available = usable_cpus()
    if sys.platform == "darwin":
        # Efficiency cores make every barrier wait for them.
        found = _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu")
        return max(1, min(available, int(found))) if found.isdigit() else available
    n_logical, n_physical = psutil.cpu_count(), psutil.cpu_count(logical=False)
    return max(1, available // 2) if n_logical and n_physical and n_physical < n_logical else available


@cache
def missing_cpu_features() -> list[str]:
    """What this CPU lacks of the instructions that ready-made wheels use; empty too where that cannot be found out."""
    wanted = _WHEELS_USE.get((sys.platform, platform.machine().lower()), {})
    found = _features(_ROOT)
    return [] if found is None else [label for feature, label in wanted.items() if feature not in found]


def cpu_features(root: Path = _ROOT) -> list[str]:
    """Instruction sets that matter for inference; empty where that cannot be found out."""
    return _features(root) or []


def _features(root: Path) -> list[str] | None:
    if sys.platform == "linux":
        flags = set(read_text(root / "proc/cpuinfo").split())
        return [label for flag, label in (_X86 | _ARM).items() if flag in flags] if flags else None
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ["NEON", *(label for key, label in _APPLE.items() if _sysctl(f"hw.optional.arm.{key}") == "1")]
    if sys.platform == "darwin":
        names = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".upper().split()
        return [label for name, label in _APPLE_INTEL.items() if name in names]
    if sys.platform == "win32":
        import ctypes

        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return [label for bit, label in _WINDOWS.items() if present(bit)]
    return None


@cache
def cpu_name() -> str:
    """The CPU's marketing name."""
    if sys.platform == "linux":
        for line in read_text(_ROOT / "proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    name = _sysctl("machdep.cpu.brand_string") if sys.platform == "darwin" else ""
    return name or platform.processor() or platform.machine()


def visible_gpus(root: Path = _ROOT) -> list[str]:
    """Graphics hardware that the system shows: ``NVIDIA``, ``AMD``, ``Apple``, ``other``."""
    if sys.platform == "darwin":
        return ["Apple"] if platform.machine() == "arm64" else []
    found = []
    if (root / "proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        found.append("NVIDIA")
    if (root / "dev/kfd").exists():
        found.append("AMD")
    if not found and any((root / "dev/dri").glob("renderD*")):
        found.append("other")
    return found


def _sysctl(key: str) -> str:
    return output("sysctl", "-n", key)
