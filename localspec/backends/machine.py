"""What the CPU is and has: threads to use, instruction sets, a name for reports and cache keys."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path


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
    except OSError:
        return ""
    return done.stdout.strip()
