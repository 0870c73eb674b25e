"""A machine with a made-up clock, whose CPUs others may use: for what measures passes and must not be misled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from localspec.controllers import calibration
from localspec.system.machine import CPUTimes


class Machine:
    """A clock that only passes move, and CPUs that others may use; it stands in for the module ``time``."""

    def __init__(
        self,
        longer: Callable[[int, int], float],  # how many times as long a pass takes, given its number and its width
        others: Callable[[int], float] = lambda n: 0.0,  # share of the CPUs that others use, given the last pass
        slow: float = 1.0,  # how many times as long everything takes
    ) -> None:
        self._longer, self._others, self._slow = longer, others, slow
        self.now, self.taken, self.n_passes = 0.0, 0.0, 0
        self.slower = 1.0  # as ``slow``, of the engine that computes now

    def ms(self, width: int) -> float:
        """What a pass takes where nobody disturbs it."""
        return (40.0 + 2.5 * width) * self._slow * self.slower

    def passes(self, width: int) -> None:
        seconds = self.ms(width) / 1e3 * self._longer(self.n_passes, width)
        self.now += seconds
        self.taken += self._others(self.n_passes) * seconds * 2
        self.n_passes += 1

    def perf_counter(self) -> float:
        return self.now

    def cpu_times(self) -> CPUTimes:
        return CPUTimes(self.now, self.taken, 0.0, 2)

    def installed(self, patch: pytest.MonkeyPatch) -> Machine:
        """Let calibration see this machine."""
        patch.setattr(calibration, "time", self)
        patch.setattr(calibration, "CPUTimes", SimpleNamespace(now=self.cpu_times))
        return self


class TimedContext:
    """A memory whose passes move a machine's clock, as those of an engine that is so much ``slower``; they compute
    nothing."""

    n_ctx = 256

    def __init__(self, machine: Machine, slower: float = 1.0) -> None:
        self._machine, self._slower, self.n_past = machine, slower, 0

    def __enter__(self) -> TimedContext:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def truncate(self, n: int) -> None:
        assert 0 <= n <= self.n_past
        self.n_past = n

    def decode(self, tokens: Sequence[int], logits: str = "all") -> None:
        self.n_past += len(tokens)
        assert self.n_past <= self.n_ctx
        self._machine.slower = self._slower
        self._machine.passes(len(tokens))
