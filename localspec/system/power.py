"""What makes a machine slower than it could be just now: other programs, a battery, heat."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from localspec.system.memory import output

_ROOT = Path("/")
_CPUS = "sys/devices/system/cpu"


def busy_share(seconds: float = 0.25, root: Path = _ROOT) -> float | None:
    """Share of all CPUs' time that others use, this process sleeping meanwhile; stolen by other guests included."""
    before = _ticks(root)
    if before is not None:
        time.sleep(seconds)
        after = _ticks(root)
        if after is not None and (total := sum(after) - sum(before)) > 0:
            idle = sum(after[3:5]) - sum(before[3:5])
            return min(1.0, max(0.0, 1.0 - idle / total))
    if not hasattr(os, "getloadavg"):
        return None
    return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _ticks(root: Path) -> list[int] | None:
    """Clock ticks since boot: user, nice, system, idle, iowait, irq, softirq, steal."""
    try:
        first = (root / "proc/stat").read_text().partition("\n")[0].split()
        return [int(n) for n in first[1:9]]
    except (OSError, ValueError):
        return None


def on_battery(root: Path = _ROOT) -> bool | None:
    """Whether the machine runs on battery; None where there is none, or it is not told."""
    if sys.platform == "darwin":
        return parse_pmset_battery(output("pmset", "-g", "batt"))
    mains, discharging = [], False
    for supply in sorted((root / "sys/class/power_supply").glob("*")):
        kind = _read(supply / "type")
        if kind in ("Mains", "USB"):
            mains.append(_read(supply / "online") == "1")
        elif kind == "Battery" and _read(supply / "scope") != "Device":  # a mouse has a battery, too
            discharging |= _read(supply / "status") == "Discharging"
    if discharging:
        return not any(mains)
    return False if mains else None


def parse_pmset_battery(text: str) -> bool | None:
    """``pmset -g batt``: what the machine draws its power from."""
    source = re.search(r"drawing from '([^']+)'", text)
    return source[1] == "Battery Power" if source else None


def slow_clock(root: Path = _ROOT) -> str | None:
    """A setting that keeps the clock low, in words; None where there is none."""
    if sys.platform == "darwin":
        return "low power mode is on" if re.search(r"lowpowermode\s+1", output("pmset", "-g")) else None
    if (profile := _read(root / "sys/firmware/acpi/platform_profile")) in ("low-power", "quiet", "cool"):
        return f"the platform profile is {profile}"
    frequency = root / _CPUS / "cpu0/cpufreq"
    limit, most = _read(frequency / "scaling_max_freq"), _read(frequency / "cpuinfo_max_freq")
    if limit.isdigit() and most.isdigit() and int(limit) < 0.9 * int(most):
        return f"the clock is limited to {int(limit) / 1e6:.1f} of {int(most) / 1e6:.1f} GHz"
    # With the pstate drivers "powersave" is the ordinary governor; with the older ones it means the lowest clock.
    if _read(frequency / "scaling_governor") == "powersave" and "pstate" not in _read(frequency / "scaling_driver"):
        return "the powersave governor keeps the clock at its lowest"
    return None


def throttle_count(root: Path = _ROOT) -> int | None:
    """How often heat or a power limit slowed a CPU since boot; on macOS 1 while it does. None where it is not told."""
    if sys.platform == "darwin":
        limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", output("pmset", "-g", "therm"))
        return int(int(limit[1]) < 100) if limit else None
    found = [_read(path) for path in (root / _CPUS).glob("cpu[0-9]*/thermal_throttle/*_throttle_count")]
    return sum(int(n) for n in found if n.isdigit()) if found else None


def throttled(before: int | None, after: int | None) -> bool | None:
    """Whether the CPU was slowed between two readings of ``throttle_count``."""
    if before is None or after is None:
        return None
    return after > 0 if sys.platform == "darwin" else after > before


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
