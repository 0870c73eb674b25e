"""Calibration: what is measured while other programs disturb, and what is kept on disk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from localspec.backends.reference import ReferenceModel
from localspec.controllers.calibration import CalibrationCache, timing
from localspec.controllers.cost_model import PassTimes
from localspec.system.steps import exhaust
from tests.support import ggufs

KEY = {"machine": "here", "file": "this"}


class DisturbedContext:
    """A real context; passes take a time that is known, and some of them longer, as if another program had the CPU.

    It stands in for the module ``time`` as well: nothing else takes any.
    """

    def __init__(self, context: Any, share: float) -> None:
        self._context, self._share, self._random = context, share, random.Random(1)
        self._now = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def decode(self, tokens: Sequence[int], logits: str = "all") -> Any:
        self._now += self.ms(len(tokens)) / 1e3 * (3 if self._random.random() < self._share else 1)
        return self._context.decode(tokens, logits)

    def perf_counter(self) -> float:
        return self._now

    @staticmethod
    def ms(width: int) -> float:
        return 4.0 + 0.25 * width


@pytest.fixture
def context(tmp_path: Path) -> Any:
    model = ReferenceModel(ggufs.write_llama(tmp_path / "tiny.gguf", ggufs.Shape(), ggufs.bpe_vocab()))
    return model.new_context(256)


def test_a_pass_takes_longer_the_more_is_in_the_memory_and_never_less_than_nothing() -> None:
    """However small the weights are beside the keys and values of a token."""
    for growth in (0.0, 1e-5, 0.02, 1.0, 50.0):
        times = PassTimes({1: 5.0, 2: 6.0}, growth=growth)
        assert times(1) == pytest.approx(5.0)
        seen = []
        for times.n_past in (0, 1, 30, 64, 1000):
            seen.append(times(1))
            assert times(2) > times(1) > 0
        assert seen == sorted(seen)
    # Weights and as many bytes of keys and values again: twice as much to read.
    times = PassTimes({1: 5.0}, growth=1 / 64)
    assert times(1) == pytest.approx(5.0)
    times.n_past = 0
    assert times(1) == pytest.approx(2.5)


def test_the_curve_is_that_of_undisturbed_passes(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = DisturbedContext(context, 0.4)
    monkeypatch.setattr("localspec.controllers.calibration.time", disturbed)
    times = exhaust(timing(disturbed, disturbed, [1, 2, 3]))
    assert times.noisy
    # Nine passes a width, each disturbed with probability 0.4: in a run of 11 widths all nine are in 1 of 350 runs.
    assert sorted(ms / DisturbedContext.ms(width) for width, ms in times.curve.measured.items())[-2] < 1.1
    assert context.n_past == 0


def test_a_disturbed_measurement_is_repeated_at_the_next_load_and_the_best_of_both_kept(tmp_path: Path) -> None:
    cache = CalibrationCache(tmp_path)
    cache.put(KEY, PassTimes({1: 10.0, 2: 30.0}, noisy=True))
    first = cache.get(KEY)
    assert first is not None
    assert first.noisy
    cache.put(KEY, PassTimes({1: 20.0, 2: 15.0}, noisy=True))
    second = cache.get(KEY)
    assert second is not None
    assert second.curve.measured == {1: 10.0, 2: 15.0}
    cache.put(KEY, PassTimes({1: 20.0, 2: 15.0}, noisy=True))
    third = cache.get(KEY)
    assert third is not None
    assert not third.noisy  # a machine that is always busy is not measured at every load


def test_an_undisturbed_measurement_replaces_a_disturbed_one(tmp_path: Path) -> None:
    cache = CalibrationCache(tmp_path)
    cache.put(KEY, PassTimes({1: 10.0, 2: 30.0}, noisy=True))
    cache.put(KEY, PassTimes({1: 12.0, 2: 14.0}))
    kept = cache.get(KEY)
    assert kept is not None
    assert kept.curve.measured == {1: 12.0, 2: 14.0}
    assert not kept.noisy


def test_what_is_on_disk_and_makes_no_sense_is_measured_anew(tmp_path: Path) -> None:
    cache = CalibrationCache(tmp_path)
    for base in ({2: 1.0}, {1: -1.0}, {1: float("nan")}):
        cache.put(KEY, PassTimes(base))
        assert cache.get(KEY) is None
    cache.put(KEY, PassTimes({1: 1.0}))
    cache.drop(KEY)
    assert cache.get(KEY) is None


def test_a_wide_pass_takes_time_even_where_a_disturbed_curve_falls() -> None:
    """As on a machine that was busy during the few passes of a quick calibration."""
    times = PassTimes({1: 300.0, 2: 250.0, 4: 150.0}, quick=True)
    assert [times(width) for width in (4, 5, 16)] == [150.0] * 3
    rising = PassTimes({1: 100.0, 3: 120.0})
    assert rising(5) == 140.0
