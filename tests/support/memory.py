"""How the memory of a process that does the same thing over and over grows."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from localspec.system.machine import trim_heap

WARM_UP = 2
"""Cycles that are not judged: tables, caches and threads' stacks come with the first, and stay."""


def resident_mb() -> float:
    """Memory of this process that is in RAM now, without what lies free in the C library: a leak could hide in that."""
    gc.collect()
    trim_heap()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def allocated_mb() -> float:
    """What Python and NumPy hold now, while ``tracemalloc`` runs; other than memory in RAM it is nobody else's."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1e6


def growth_per_cycle(mb: Sequence[float]) -> float:
    """What one more cycle usually adds: the median of the differences between neighbours after the warm-up.

    A leak is in every difference. What an allocator keeps or gives back now and then is in few of them, however large
    it is, and which cycle that happens in depends on the machine.
    """
    judged = mb[WARM_UP:]
    assert len(judged) >= 5, "too few cycles to judge"
    return statistics.median(after - before for before, after in itertools.pairwise(judged))
