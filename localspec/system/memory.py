"""Memory that can be had now. A container's limit counts, with what its processes already use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number of this size where there is no limit."""

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM, in bytes; None where it is not known.

    Attributes:
        total: what the machine has.
        available: what a process could take now without swapping.
        limit: a container's limit, where there is one.
    """

    total: int | None
    available: int | None
    limit: int | None = None


def read_memory(root: Path = _ROOT) -> Memory:
    """Read it from the system.

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
    if sys.platform == "darwin":
        return parse_vm_stat(output("vm_stat"), output("sysctl", "-n", "hw.memsize"))
    if sys.platform == "win32":
        return _windows()
    total, available = _meminfo(root)
    limit, headroom = _container(root)
    if headroom is not None:
        available = headroom if available is None else min(available, headroom)
    return Memory(total, available, limit if limit is not None and (total is None or limit < total) else None)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that a container may use; None where it is not limited."""
    shares = []
    for folder in _groups(root, "cpu"):
        if (text := _text(folder / "cpu.max")) is not None:
            quota, _, period = text.partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def output(*command: str) -> str:
    """What a command of the system prints; nothing where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_vm_stat(text: str, memsize: str) -> Memory:
    """macOS: pages that are free, or can be freed at once."""
    total = int(memsize) if memsize.strip().isdigit() else None
    size = re.search(r"page size of (\d+) bytes", text)
    pages = {name.lower(): int(n) for name, n in re.findall(r"^(?:Pages )?(.+?):\s+(\d+)\.", text, re.MULTILINE)}
    if size is None or "free" not in pages:
        return Memory(total, None)
    names = ("free", "inactive", "speculative", "purgeable")
    return Memory(total, int(size[1]) * sum(pages.get(name, 0) for name in names))


def _meminfo(root: Path) -> tuple[int | None, int | None]:
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE))
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    if total is None:
        try:  # another Unix
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
        except (ValueError, OSError):
            return None, None
    return int(total) * 1024, int(available) * 1024 if available is not None else None


def _container(root: Path) -> tuple[int | None, int | None]:
    """The tightest limit, and the least room under any limit, of the control groups around this process."""
    limits, rooms = [], []
    for folder in _groups(root, "memory"):
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = _text(folder / limit_name) or "", _text(folder / used_name) or ""
            if not limit.isdigit() or not used.isdigit() or int(limit) >= _UNLIMITED:
                continue
            # Cached pages of files are given up before anything is refused.
            cached = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", _text(folder / "memory.stat") or "", re.M)
            limits.append(int(limit))
            rooms.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(limits, default=None), min(rooms, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups this process is in, for a controller, the innermost first.

    Inside a container the path that the kernel tells may be the host's, while the container's own group is mounted as
    the root: every ancestor that exists is looked at.
    """
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
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


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def _windows() -> Memory:
    if sys.platform != "win32":
        return Memory(None, None)
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", "p1", "p2", "v1", "v2", "v3")),
        )

    status = Status(length=ctypes.sizeof(Status))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return Memory(None, None)
    return Memory(int(status.total), int(status.available))
