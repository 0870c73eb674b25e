"""What makes a machine slower than it could be: a battery, a setting, heat."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from localspec.system.probing import output, read_text

_ROOT = Path("/")


def on_battery(root: Path = _ROOT) -> bool | None:
    """Whether the machine runs on battery; None where there is none, or the system does not say."""
    if sys.platform != "linux":
        import psutil

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
    """A setting that keeps the clock low, in words; None where there is none."""
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
    """How often heat or a power limit slowed a CPU since boot; on macOS 1 while it does. None where that is unknown."""
    if sys.platform == "darwin":
        limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", output("pmset", "-g", "therm"))
        return int(int(limit[1]) < 100) if limit else None
    counters = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    found = [int(text) for text in map(read_text, counters) if text.isdigit()]
    return sum(found) if found else None


def throttled(before: int | None, after: int | None) -> bool | None:
    """Whether the CPU was slowed between two readings of ``throttle_count``."""
    if before is None or after is None:
        return None
    return after > 0 if sys.platform == "darwin" else after > before
