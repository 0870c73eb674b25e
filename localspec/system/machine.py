"""This machine: threads, instruction sets, graphics hardware, memory, bandwidth, load, and what slows it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from localspec.system.process import output, read_text

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
# PF_AVX…, PF_AVX2…, PF_AVX512F… and PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE of winnt.h
_WINDOWS = {39: "AVX", 40: "AVX2", 41: "AVX-512", 43: "DOTPROD"}

# Instruction sets that ready-made wheels use, by system and processor.
_WHEELS_USE = {
    ("linux", "x86_64"): {"AVX2": "AVX2", "FMA": "FMA", "F16C": "F16C"},
    ("linux", "aarch64"): {"DOTPROD": "dot products (ARMv8.2)", "FP16": "half floats (ARMv8.2)"},
    ("win32", "amd64"): {"AVX2": "AVX2"},
}


def prepare_threads() -> None:
    """Let the engines' threads spin at their barriers only briefly; call before an engine's library is loaded.

    A spinning thread whose partner has lost its core to another program burns whole time slices; 1,000 spins cost
    nothing on an idle machine. The user's own setting stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def default_threads() -> int:
    """Physical cores this process may use: hyper-threads share the units that decoding is bound by."""
    available = usable_cpus()
    if sys.platform == "darwin":
        # Efficiency cores make every barrier wait for them.
        found = _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu")
        return max(1, min(available, int(found))) if found.isdigit() else available
    n_logical, n_physical = psutil.cpu_count(), psutil.cpu_count(logical=False)
    return max(1, available // 2) if n_logical and n_physical and n_physical < n_logical else available


@cache
def missing_cpu_features() -> list[str]:
    """What this CPU lacks of the instructions that ready-made wheels use; empty too where that is unknown."""
    wanted = _WHEELS_USE.get((sys.platform, platform.machine().lower()), {})
    found = _features(_ROOT)
    return [] if found is None else [label for feature, label in wanted.items() if feature not in found]


def cpu_features(root: Path = _ROOT) -> list[str]:
    """Instruction sets that matter for inference; empty where unknown."""
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
        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return [label for bit, label in _WINDOWS.items() if present(bit)]
    return None


def cpu_flags() -> frozenset[str]:
    """All that Linux says the CPU has, in its own words; on other systems ``cpu_features``."""
    lines = read_text(_ROOT / "proc/cpuinfo").splitlines()
    found = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return frozenset(cpu_features() if found is None else found)


@cache
def cpu_name() -> str:
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


@cache
def cuda_version() -> tuple[int, int] | None:
    """The newest version of CUDA that NVIDIA's driver runs; None where that is unknown."""
    found = re.search(r"CUDA Version: *(\d+)\.(\d+)", output("nvidia-smi"))
    return (int(found[1]), int(found[2])) if found else None


def _sysctl(key: str) -> str:
    return output("sysctl", "-n", key)


_UNLIMITED = 1 << 60  # Version 1 of control groups writes a number of this size where there is no limit


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """RAM [bytes]: of the machine, what a process could take now without swapping, and a container's limit."""

    total: int
    available: int
    limit: int | None = None

    @property
    def usable(self) -> int:
        return self.limit or self.total


def read_memory(root: Path = _ROOT) -> SystemMemory:
    """Memory of the system within a container's limit; ``root`` is where ``/proc`` and ``/sys`` are."""
    found = psutil.virtual_memory()
    limit, room = _container(root)
    available = found.available if room is None else min(found.available, room)
    return SystemMemory(found.total, available, limit if limit is not None and limit < found.total else None)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that a container may use; None: no limit."""
    shares = []
    for folder in _groups(root, "cpu"):
        version_1 = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
        quota, _, period = (read_text(folder / "cpu.max") or version_1).partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _container(root: Path) -> tuple[int | None, int | None]:
    """The tightest limit, and the least room under any limit, of the control groups around this process."""
    limits, rooms = [], []
    for folder in _groups(root, "memory"):
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = read_text(folder / limit_name), read_text(folder / used_name)
            if not limit.isdigit() or not used.isdigit() or int(limit) >= _UNLIMITED:
                continue
            # Cached pages of files are given up before anything is refused.
            cached = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", read_text(folder / "memory.stat"), re.M)
            limits.append(int(limit))
            rooms.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(limits, default=None), min(rooms, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups of this process for a controller, the innermost first: every ancestor that exists, as inside a
    container the kernel's path may be the host's, while its own group is mounted as the root."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [controllers, controller] if controllers else ["", "unified"]
        for mount in dict.fromkeys(mounts):
            base = root / "sys/fs/cgroup" / mount
            inner = Path(path.strip("/"))
            for part in [inner, *inner.parents]:
                if ".." not in part.parts and (base / part).is_dir():
                    yield base / part


def process_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


# Of what psutil counts, where a system counts it; guests' time is in the user's already.
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")

BUSY = 0.15  # Share of the CPUs' time, used by other programs, from which on timings are not trusted


@dataclass(frozen=True, slots=True)
class CPUTimes:
    """CPU time used up to a moment [seconds]."""

    at: float  # of a clock that only goes forward
    busy: float  # by all programs and other guests, on the CPUs that this process may use
    own: float  # by this process
    n_cpus: int

    @classmethod
    def now(cls) -> CPUTimes:
        every = psutil.cpu_times(percpu=True)
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        ours = [times for number, times in enumerate(every) if number in allowed]
        busy = sum(getattr(times, name, 0.0) for times in ours for name in _BUSY)
        own = os.times()
        return cls(time.monotonic(), busy, own.user + own.system, max(1, len(ours)))


def others_share(spans: Iterable[tuple[CPUTimes, CPUTimes]]) -> float | None:
    """Share of the CPUs' time that others used in spans between two readings; None of no time."""
    spans = list(spans)
    seconds = sum((after.at - before.at) * after.n_cpus for before, after in spans)
    others = sum((after.busy - before.busy) - (after.own - before.own) for before, after in spans)
    return round(min(1.0, max(0.0, others / seconds)), 4) if seconds > 0 else None


def busy_share(seconds: float = 0.25) -> float:
    """Share of all CPUs' time that others use while this process sleeps for so many seconds."""
    return psutil.cpu_percent(seconds) / 100


def lower_priority(pid: int | None = None) -> None:
    """Let all other programs go first, from now on: for the calling thread, or a process, and what these start."""
    with suppress(psutil.Error, OSError):
        psutil.Process(pid).nice(getattr(psutil, "IDLE_PRIORITY_CLASS", 19))


def peak_memory_bytes() -> int | None:
    """The most memory that this process has had resident, mapped weights included; None: unknown."""
    try:
        import resource
    except ImportError:
        return getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else most * 1024)


# Memory bandwidth bounds decoding one token at a time.

# Bytes that a thread reads in one call; small ones spend their time between calls, large ones end unevenly.
_CHUNK = 8 << 20

# Bytes that are read: several times what the last-level caches of personal computers hold (up to 128 MB).
MOST, _LEAST = 512 << 20, 256 << 20


def measure_bandwidth(n_threads: int, *, available: int, seconds: float = 0.6) -> float | None:
    """Bytes per second of the fastest pass over an array that no cache holds; None where memory is too short for one.

    The array takes an eighth of the ``available`` memory [bytes] at most. NumPy's maximum waits for memory alone.
    """
    import numpy as np  # this module is imported by commands that need no arrays

    size = min(MOST, available // 8)
    if size < min(MOST, max(_LEAST, _CHUNK * n_threads)):
        return None
    size -= size % _CHUNK
    array = np.empty(size, dtype=np.uint8)
    chunks = [array[start : start + _CHUNK] for start in range(0, size, _CHUNK)]
    shares = [chunks[i::n_threads] for i in range(n_threads)]

    def fill(share: list[Any]) -> None:
        for chunk in share:
            chunk.fill(1)

    def read(share: list[Any]) -> None:
        for chunk in share:
            chunk.max()

    best = 0.0
    with ThreadPoolExecutor(n_threads) as threads:
        list(threads.map(fill, shares))  # by the threads that read it: memory lies near who first writes it
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            list(threads.map(read, shares))
            best = max(best, size / (time.perf_counter() - started))
    return best


def on_battery(root: Path = _ROOT) -> bool | None:
    """Whether the machine runs on battery; None: it has none, or that is unknown."""
    if sys.platform != "linux":
        battery = psutil.sensors_battery()
        return None if battery is None or battery.power_plugged is None else not battery.power_plugged
    # psutil takes the battery of a wireless mouse for the machine's.
    mains, discharging = [], False
    for supply in sorted((root / "sys/class/power_supply").glob("*")):
        kind = read_text(supply / "type")
        if kind in ("Mains", "USB"):
            mains.append(read_text(supply / "online") == "1")
        elif kind == "Battery" and read_text(supply / "scope") != "Device":
            discharging |= read_text(supply / "status") == "Discharging"
    if discharging:
        return not any(mains)
    return False if mains else None


def slow_clock(root: Path = _ROOT) -> str | None:
    """A setting that keeps the clock low, in words; None: none."""
    if sys.platform == "darwin":
        return "low power mode is on" if re.search(r"lowpowermode\s+1", output("pmset", "-g")) else None
    if (profile := read_text(root / "sys/firmware/acpi/platform_profile")) in ("low-power", "quiet", "cool"):
        return f"the platform profile is {profile}"
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    limit, most = read_text(frequency / "scaling_max_freq"), read_text(frequency / "cpuinfo_max_freq")
    if limit.isdigit() and most.isdigit() and int(limit) < 0.9 * int(most):
        return f"the clock is limited to {int(limit) / 1e6:.1f} of {int(most) / 1e6:.1f} GHz"
    # With the pstate drivers "powersave" is the ordinary governor; with the older ones it means the lowest clock.
    if read_text(frequency / "scaling_governor") == "powersave" and "pstate" not in read_text(
        frequency / "scaling_driver"
    ):
        return "the powersave governor keeps the clock at its lowest"
    return None


def throttle_count(root: Path = _ROOT) -> int | None:
    """How often heat or a power limit slowed a CPU since boot; on macOS 1 while it does. None: unknown."""
    if sys.platform == "darwin":
        limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", output("pmset", "-g", "therm"))
        return int(int(limit[1]) < 100) if limit else None
    counters = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    found = [int(text) for text in map(read_text, counters) if text.isdigit()]
    return sum(found) if found else None


def throttled(before: int | None, after: int | None) -> bool | None:
    if before is None or after is None:
        return None
    return after > 0 if sys.platform == "darwin" else after > before


def trim_heap() -> None:
    """Give freed memory back: glibc keeps 20 to 80 MB after an engine was closed."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(ctypes.c_size_t(0))
