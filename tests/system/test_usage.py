"""CPU time of others, as shares of spans."""

from __future__ import annotations

import os

import pytest

from localspec.system.machine import CPUTimes, others_share, peak_memory_bytes


def test_others_cpu_time_is_what_is_not_ours() -> None:
    before = CPUTimes(at=10.0, busy=100.0, own=5.0, n_cpus=4)
    # In two seconds the four CPUs were busy for 0.8 s each, of which half a second in all was ours.
    after = CPUTimes(at=12.0, busy=103.2, own=5.5, n_cpus=4)
    assert others_share([(before, after)]) == pytest.approx(2.7 / 8, abs=1e-4)
    later = CPUTimes(at=14.0, busy=103.2, own=5.5, n_cpus=4)
    assert others_share([(before, after), (after, later)]) == pytest.approx(2.7 / 16, abs=1e-4)


def test_counters_that_tick_coarsely_give_no_share_below_nothing() -> None:
    before = CPUTimes(at=0.0, busy=0.0, own=0.0, n_cpus=1)
    assert others_share([(before, CPUTimes(at=1.0, busy=0.0, own=0.01, n_cpus=1))]) == 0.0
    assert others_share([(before, before)]) is None
    assert others_share([]) is None


def test_the_counters_are_this_machine_s() -> None:
    before = CPUTimes.now()
    sum(i * i for i in range(2_000_000))
    after = CPUTimes.now()
    assert after.own > before.own
    assert after.busy >= before.busy
    assert after.at > before.at
    assert 1 <= after.n_cpus <= (os.cpu_count() or 1)
    assert (peak_memory_bytes() or 0) > 1 << 20
