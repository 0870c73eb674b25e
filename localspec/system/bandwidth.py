"""Memory bandwidth, measured: what decoding one token at a time is bound by."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from localspec.system.probing import output, read_text

_CHUNK = 8 << 20
"""Bytes that a thread reads in one call; small ones spend their time between calls, large ones end unevenly."""

_LEAST = 256 << 20


def measure_bandwidth(n_threads: int, *, seconds: float = 0.6, available: int | None = None) -> float | None:
    """Read an array several times larger than the last-level cache, and take the fastest pass.

    NumPy's maximum of bytes compares 16 or 32 of them an instruction and releases the GIL, so that it waits for memory
    and for nothing else.

    Args:
        n_threads: threads that read at the same time.
        seconds: how long to read; the array is filled before.
        available: free memory [bytes], of which an eighth is used at most.

    Returns:
        Bytes per second, or None where memory is too short for an array that no cache holds.
    """
    cache = last_level_cache_bytes()
    size = max(_LEAST, 3 * cache)
    if available is not None and size > available // 8:
        size = available // 8
        if size < 2 * cache or size < _CHUNK * n_threads:
            return None
    size -= size % _CHUNK
    array = np.empty(size, dtype=np.uint8)
    chunks = [array[start : start + _CHUNK] for start in range(0, size, _CHUNK)]
    shares = [chunks[i::n_threads] for i in range(n_threads)]

    def fill(share: list[np.ndarray]) -> None:
        for chunk in share:
            chunk.fill(1)

    def read(share: list[np.ndarray]) -> None:
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


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Size of all last-level caches together; 32 MiB where it is unknown."""
    if sys.platform == "darwin":
        sizes = [output("sysctl", "-n", name) for name in ("hw.perflevel0.l2cachesize", "hw.l3cachesize")]
        # The size of the system-level cache behind these is unknown; the largest had 96 MB.
        return max([96 << 20, *(int(size) for size in sizes if size.isdigit())])
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    by_level: dict[int, dict[str, int]] = {}
    for index in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size = read_text(index / "level"), re.fullmatch(r"(\d+)([KMG])", read_text(index / "size"))
        if level.isdigit() and size is not None:
            shared = read_text(index / "shared_cpu_list")
            by_level.setdefault(int(level), {})[shared] = int(size[1]) * units[size[2]]
    return sum(by_level[max(by_level)].values()) if by_level else 32 << 20
