"""Memory: how that of a process grows which does the same over and over, and what those of a pair hold."""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from localspec.backends.base import Forward, Piece, SequenceBatch
from localspec.controllers import batching
from localspec.engine.pair import Pair
from localspec.system.machine import trim_heap

WARM_UP = 2  # Cycles that are not judged: tables, caches and threads' stacks come with the first, and stay


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


def shared_memories(pair: Pair) -> list[SequenceBatch]:
    """Those that answers share: of the target, and of draft models."""
    every = [pair.state.batch, *(draft.memory.batch for draft in pair.state.models)]
    return [memory for memory in every if memory is not None]


def check_only_conversations_are_held(pair: Pair) -> None:
    """Every cell in use is one of a conversation that is kept; without these all are free."""
    for memory in shared_memories(pair):
        contexts = [memory[i] for i in range(memory.n_sequences)]
        assert memory.n_cells - memory.free_cells <= sum(context.n_past for context in contexts)
        for context in contexts:
            context.truncate(0)
        assert memory.free_cells == memory.n_cells


def share_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no answer wait for others because wide passes are slow on this machine."""
    monkeypatch.setattr(batching, "TURNS_GAIN", math.inf)


def passes_of(memory: SequenceBatch, monkeypatch: pytest.MonkeyPatch) -> list[list[Piece]]:
    """From now on, what each pass of a memory is fed."""
    fed: list[list[Piece]] = []
    decode = memory.decode

    def recorded(pieces: Sequence[Piece]) -> list[Forward]:
        fed.append(list(pieces))
        return decode(pieces)

    monkeypatch.setattr(memory, "decode", recorded)
    return fed
