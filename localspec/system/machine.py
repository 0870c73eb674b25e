"""What the CPU is and has: threads to use, instruction sets, a name for reports and cache keys."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

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


def prepare_threads() -> None:
    """Let the engines' threads spin at their barriers only briefly; call before an engine's library is loaded.

    GNU OpenMP spins for milliseconds by default. A spinning thread whose partner has lost its core to another program
    burns whole time slices: on 2 cores shared with other work, single passes of 50 ms were measured at over 2 s, and
    at 50 to 90 ms with 1,000 spins. Not spinning at all doubles the time of a pass on an idle machine; 1,000 spins
    cost nothing there. Whatever the user has set stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@cache
def default_threads() -> int:
    """Physical cores this process may use: hyper-threads share the units that decoding is bound by."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sys.platform == "darwin":
        # Efficiency cores make every barrier wait for them.
        found = _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu")
        return max(1, min(available, int(found))) if found.isdigit() else max(1, available)
    try:
        smt = Path("/sys/devices/system/cpu/smt/active").read_text().strip() == "1"
    except OSError:
        smt = sys.platform == "win32" and available > 2
    return max(1, available // 2 if smt else available)


@cache
def missing_cpu_features() -> list[str]:
    """What this CPU lacks of the instructions that ready-made wheels use; empty too where that cannot be found out."""
    machine = platform.machine().lower()
    if sys.platform == "linux":
        wanted = {
            "x86_64": {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C"},
            "aarch64": {"asimddp": "dot products (ARMv8.2)", "asimdhp": "half floats (ARMv8.2)"},
        }.get(machine, {})
        try:
            flags = set(Path("/proc/cpuinfo").read_text().split())
        except OSError:
            return []
        return [label for flag, label in wanted.items() if flag not in flags]
    if sys.platform == "win32" and machine == "amd64":
        import ctypes

        pf_avx2_instructions_available = 40
        return [] if ctypes.windll.kernel32.IsProcessorFeaturePresent(pf_avx2_instructions_available) else ["AVX2"]
    return []


def cpu_features(root: Path = _ROOT) -> list[str]:
    """Instruction sets that matter for inference; empty where that cannot be found out."""
    machine = platform.machine().lower()
    if sys.platform == "linux":
        try:
            flags = set(re.split(r"\s+", (root / "proc/cpuinfo").read_text()))
        except OSError:
            return []
        return [label for flag, label in (_X86 | _ARM).items() if flag in flags]
    if sys.platform == "darwin" and machine == "arm64":
        told = [label for key, label in _APPLE.items() if _sysctl(f"hw.optional.arm.{key}")[:1] == "1"]
        return ["NEON", *told]
    if sys.platform == "darwin":
        names = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".upper().split()
        known = {"AVX1.0": "AVX", "AVX2": "AVX2", "FMA": "FMA", "F16C": "F16C", "AVX512F": "AVX-512"}
        return [label for name, label in known.items() if name in names]
    if sys.platform == "win32":
        import ctypes

        # PF_AVX…, PF_AVX2…, PF_AVX512F… and PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE of winnt.h
        known_bits = {39: "AVX", 40: "AVX2", 41: "AVX-512", 43: "DOTPROD"}
        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return [label for bit, label in known_bits.items() if present(bit)]
    return []


@cache
def cpu_name() -> str:
    """The CPU's marketing name."""
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    if sys.platform == "darwin" and (name := _sysctl("machdep.cpu.brand_string")):
        return name
    return platform.processor() or platform.machine()


def _sysctl(key: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
