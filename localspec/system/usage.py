"""What this process and others take of the machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Of what psutil counts, where a system counts it; guests' time is in the user's already."""

BUSY = 0.15
"""Share of the CPUs' time, used by other programs, from which on timings are not trusted."""


@dataclass(frozen=True, slots=True)
class CPUTimes:
    """CPU time used up to a moment [seconds].

    Attributes:
        at: a clock that only goes forward.
        busy: of the CPUs that this process may use, by anybody; stolen by other guests included.
        own: of this process and all its threads.
        n_cpus: CPUs that this process may use.
    """

    at: float
    busy: float
    own: float
    n_cpus: int

    @classmethod
    def now(cls) -> CPUTimes:
        """Read the counters."""
        every = psutil.cpu_times(percpu=True)
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        ours = [times for number, times in enumerate(every) if number in allowed]
        busy = sum(getattr(times, name, 0.0) for times in ours for name in _BUSY)
        own = os.times()
        return cls(time.monotonic(), busy, own.user + own.system, max(1, len(ours)))


def others_share(spans: Iterable[tuple[CPUTimes, CPUTimes]]) -> float | None:
    """Share of the CPUs' time that others used in some spans, each between two readings; None of no time."""
    spans = list(spans)
    seconds = sum((after.at - before.at) * after.n_cpus for before, after in spans)
    others = sum((after.busy - before.busy) - (after.own - before.own) for before, after in spans)
    return round(min(1.0, max(0.0, others / seconds)), 4) if seconds > 0 else None


def busy_share(seconds: float = 0.25) -> float:
    """Share of all CPUs' time that others use, this process sleeping meanwhile; stolen by other guests included."""
    return psutil.cpu_percent(seconds) / 100


def lower_priority() -> None:
    """Let all other programs go first, from now on; for the calling thread, and for those that it starts."""
    process = psutil.Process()
    with suppress(psutil.Error, OSError):
        process.nice(getattr(psutil, "IDLE_PRIORITY_CLASS", 19))


def peak_memory_bytes() -> int | None:
    """The most memory that this process has had resident, mapped weights included; None where nobody counts it."""
    try:
        import resource
    except ImportError:
        return getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else most * 1024)
