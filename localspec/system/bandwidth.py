"""Memory bandwidth, measured: what decoding one token at a time is bound by."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_CHUNK = 8 << 20
"""Bytes that a thread reads in one call; small ones spend their time between calls, large ones end unevenly."""

MOST, _LEAST = 512 << 20, 256 << 20
"""Bytes that are read: several times what the last-level caches of personal computers hold (up to 128 MB)."""


def measure_bandwidth(n_threads: int, *, available: int, seconds: float = 0.6) -> float | None:
    """Read an array that no cache holds, and take the fastest pass.

    NumPy's maximum of bytes compares 16 or 32 of them an instruction and releases the GIL, so that it waits for memory
    and for nothing else.

    Args:
        n_threads: threads that read at the same time.
        available: free memory [bytes], of which an eighth is used at most.
        seconds: how long to read; the array is filled before.

    Returns:
        Bytes per second, or None where memory is too short for such an array.
    """
    size = min(MOST, available // 8)
    if size < min(MOST, max(_LEAST, _CHUNK * n_threads)):
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
