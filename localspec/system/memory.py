"""Memory that can be had now. A container's limit counts, with what its processes already use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localspec.system.probing import read_text

_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number of this size where there is no limit."""

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """RAM, in bytes.

    Attributes:
        total: what the machine has.
        available: what a process could take now without swapping.
        limit: a container's limit, where there is one.
    """

    total: int
    available: int
    limit: int | None = None

    @property
    def usable(self) -> int:
        """What this process may use of it at most."""
        return self.limit or self.total


def read_memory(root: Path = _ROOT) -> SystemMemory:
    """Read it from the system.

    Args:
        root: where ``/proc`` and ``/sys`` are, with what is said of containers.
    """
    import psutil

    found = psutil.virtual_memory()
    limit, room = _container(root)
    available = found.available if room is None else min(found.available, room)
    return SystemMemory(found.total, available, limit if limit is not None and limit < found.total else None)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that a container may use; None where it is not limited."""
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
    """The control groups this process is in, for a controller, the innermost first.

    Inside a container the path that the kernel gives may be the host's, while the container's own group is mounted as
    the root: every ancestor that exists is looked at.
    """
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
    """What this process keeps in memory, mapped files included."""
    import psutil

    return int(psutil.Process().memory_info().rss)
