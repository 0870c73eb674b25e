"""What the machine was doing while things were timed: other programs, heat and clock, power, energy, memory."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.system import power

_ROOT = Path("/")
_CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment; None where the system does not tell.

    Attributes:
        at: a clock that only goes forward [seconds].
        busy: time that all of our CPUs were busy or taken by other guests [seconds].
        own: CPU time of this process and all its threads [seconds].
        n_cpus: CPUs this process may use.
        throttled: how often heat or a power limit slowed a CPU; see ``power.throttle_count``.
        microjoules: energy counters by domain.
    """

    at: float
    busy: float | None
    own: float
    n_cpus: int
    throttled: int | None
    microjoules: dict[str, int]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What happened in some spans of time.

    Attributes:
        others_share: share of the CPUs' time that others used, stolen time included.
        clock_mhz: mean clock of our CPUs at the end.
        temperature_c: of the processor at the end.
        throttled: whether heat or a power limit slowed a CPU.
        joules: energy of the processor packages; everything on the machine, not this program alone.
    """

    others_share: float | None
    clock_mhz: float | None
    temperature_c: float | None
    throttled: bool | None
    joules: float | None


class Watcher:
    """Reads the machine's counters.

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self._counters = energy_counters(root)

    @property
    def measures_energy(self) -> bool:
        """Whether the system lets us read how much energy the processor takes."""
        return bool(self._counters)

    def read(self) -> Reading:
        """The counters now."""
        times = os.times()
        microjoules = {name: counter.read() for name, counter in self._counters.items()}
        return Reading(
            at=time.monotonic(),
            busy=self._busy(),
            own=times.user + times.system,
            n_cpus=len(self._cpus) if self._cpus else os.cpu_count() or 1,
            # On macOS this starts a program.
            throttled=None if sys.platform == "darwin" else power.throttle_count(self._root),
            microjoules={name: value for name, value in microjoules.items() if value is not None},
        )

    def over(self, spans: Sequence[tuple[Reading, Reading]]) -> Conditions:
        """What happened in some spans of time, each between two readings, one after the other."""
        seconds = sum((after.at - before.at) * after.n_cpus for before, after in spans)
        others = None
        if seconds > 0 and all(each.busy is not None for span in spans for each in span):
            busy = sum((after.busy or 0.0) - (before.busy or 0.0) for before, after in spans)
            own = sum(after.own - before.own for before, after in spans)
            others = min(1.0, max(0.0, (busy - own) / seconds))
        joules = None
        if all(after.microjoules and after.microjoules.keys() == before.microjoules.keys() for before, after in spans):
            joules = 1e-6 * sum(
                self._counters[name].difference(before.microjoules[name], value)
                for before, after in spans
                for name, value in after.microjoules.items()
            )
        throttled = [power.throttled(before.throttled, after.throttled) for before, after in spans]
        return Conditions(
            others_share=None if others is None else round(others, 4),
            clock_mhz=clock_mhz(self._root, self._cpus),
            temperature_c=temperature_c(self._root),
            throttled=None if None in throttled else any(throttled),
            joules=None if joules is None else round(joules, 6),
        )

    def _busy(self) -> float | None:
        """Seconds that our CPUs were not idle, since boot."""
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
            wanted = None if self._cpus is None else {f"cpu{n}" for n in self._cpus}
            rows = [line.split() for line in lines if line.startswith("cpu") and line[3:4].isdigit()]
            rows = [row for row in rows if wanted is None or row[0] in wanted]
            # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in user's already
            ticks = sum(sum(map(int, row[1:4])) + sum(map(int, row[6:9])) for row in rows)
            return ticks / os.sysconf("SC_CLK_TCK") if rows else None
        except (OSError, ValueError):
            return None


class EnergyCounter:
    """One domain of the power capping interface (RAPL): microjoules that only grow, until they wrap around."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "energy_uj"
        self._range = _number(folder / "max_energy_range_uj") or 0

    def read(self) -> int | None:
        return _number(self._path)

    def difference(self, before: int, after: int) -> int:
        """Microjoules between two readings less than one wrap apart."""
        return after - before if after >= before else after - before + self._range


def energy_counters(root: Path = _ROOT) -> dict[str, EnergyCounter]:
    """The processor packages that can be read, by domain; since Linux 5.10 that takes a permission, as a rule root's.

    Cores and graphics are parts of their package; the memory is not, where it has a domain of its own.
    """
    found = {}
    for folder in sorted((root / "sys/class/powercap").glob("*:*")):
        name = _text(folder / "name")
        if not (name.startswith("package") or name == "dram"):
            continue
        counter = EnergyCounter(folder)
        # The same domain can be there twice, for two ways of reading it.
        domain = f"{name} {folder.name.partition(':')[2].split(':')[0]}" if name == "dram" else name
        if domain not in found and counter.read() is not None:
            found[domain] = counter
    return found


def clock_mhz(root: Path = _ROOT, cpus: list[int] | None = None) -> float | None:
    """Mean clock of some CPUs, of all if None."""
    found = []
    for path in (root / _CPUS).glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        number, khz = path.parent.parent.name[3:], _number(path)
        if khz is not None and (cpus is None or (number.isdigit() and int(number) in cpus)):
            found.append(khz / 1e3)
    return round(statistics.fmean(found), 1) if found else None


def temperature_c(root: Path = _ROOT) -> float | None:
    """Of the processor: what its own sensor says, else the warmest thermal zone of the board."""
    own: list[float] = []
    others: list[float] = []
    for zone in (root / "sys/class/thermal").glob("thermal_zone*"):
        milli = _number(zone / "temp")
        if milli is not None and 0 < milli < 150_000:
            is_cpu = any(mark in _text(zone / "type").lower() for mark in ("cpu", "pkg", "soc", "tctl"))
            (own if is_cpu else others).append(milli / 1e3)
    for chip in (root / "sys/class/hwmon").glob("hwmon*"):
        if _text(chip / "name") in ("coretemp", "k10temp", "zenpower", "cpu_thermal"):
            readings = [_number(path) for path in chip.glob("temp*_input")]
            own += [milli / 1e3 for milli in readings if milli is not None and 0 < milli < 150_000]
    return round(max(own or others), 1) if own or others else None


def peak_memory_bytes() -> int | None:
    """The most memory that this process has had resident, mapped weights included."""
    try:
        import resource
    except ImportError:
        return None  # Windows
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else most * 1024)


def load_average() -> float | None:
    """Programs that wanted to run, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else None
