"""Calibration: what is measured while other programs disturb, and what is kept on disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from localspec.controllers import calibration
from localspec.controllers.calibration import CalibrationCache, Timer, in_turns
from localspec.controllers.cost_model import PassTimes
from localspec.system.files import JsonStore
from localspec.system.steps import exhaust
from tests.support.machines import Machine, TimedContext

KEY = {"machine": "here", "file": "this"}


def measured(machine: Machine, patch: pytest.MonkeyPatch) -> PassTimes:
    machine.installed(patch)
    timed: Any = TimedContext(machine)
    timer = Timer(timed, timed, [1, 2, 3])
    exhaust(in_turns([timer]))
    assert timed.n_past == 0
    return timer.times()


def worst(times: PassTimes, machine: Machine) -> float:
    """How many times too long the worst point of a curve is."""
    return max(ms / machine.ms(width) for width, ms in times.curve.measured.items())


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


@pytest.mark.parametrize("seed", range(40))
def test_the_curve_is_that_of_undisturbed_passes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two of five passes take three times as long, though nobody is seen to use the CPUs."""
    chance = random.Random(seed)
    machine = Machine(lambda n, width: 3.0 if chance.random() < 0.4 else 1.0)
    times = measured(machine, monkeypatch)
    if not times.noisy:
        assert worst(times, machine) < 1.1
    # Of a width eight of nine passes or more are disturbed in 1 of 260 runs.
    assert sorted(ms / machine.ms(width) for width, ms in times.curve.measured.items())[-2] < 1.1


@pytest.mark.parametrize("width", [*calibration.WIDTHS, calibration.WIDE])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_outlier_of_six_seconds_changes_no_curve(monkeypatch: pytest.MonkeyPatch, width: int, which: int) -> None:
    seen: list[int] = []

    def longer(n: int, passed: int) -> float:
        if passed != width or n < 8:  # the first ones fill the context
            return 1.0
        seen.append(n)
        return 6000.0 / machine.ms(width) if len(seen) == which + 1 else 1.0

    machine = Machine(longer)
    times = measured(machine, monkeypatch)
    assert not times.noisy
    assert worst(times, machine) == pytest.approx(1.0)


@pytest.mark.parametrize("width", [2, 5, 12, 24, calibration.WIDE])
def test_outliers_that_agree_are_told_by_the_widths_beside_them(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """As many of one width as there usually are repeats, and nobody is seen to use the CPUs."""
    n_often = 9 if width in calibration.NARROW else 3
    seen: list[int] = []

    def longer(n: int, passed: int) -> float:
        if passed != width or n < 8:
            return 1.0
        seen.append(n)
        return 4.0 if len(seen) <= n_often else 1.0

    machine = Machine(longer)
    assert worst(measured(machine, monkeypatch), machine) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("longer", "others", "noisy", "n_passes"),
    [
        (lambda n, width: 1.0, lambda n: 0.0, False, range(80)),  # a quiet machine: three rounds
        (lambda n, width: 1.6 if width == 7 else 1.0, lambda n: 0.0, False, range(100, 1000)),  # a step of the engine
        (lambda n, width: 1.3 ** (n // 24) if width == 24 else 1.0, lambda n: 0.0, True, range(1000)),  # never repeats
        (lambda n, width: 2.0, lambda n: 0.4, True, range(1000)),  # load throughout
        (lambda n, width: 1.0 + n % 2, lambda n: 0.6 * (n % 2), True, range(1000)),  # at every second pass
        (lambda n, width: 2.0 if n < 40 else 1.0, lambda n: 0.5 * (n < 40), False, range(1000)),  # then it ends
    ],
)
def test_a_curve_is_provisional_where_rounds_do_not_agree(
    monkeypatch: pytest.MonkeyPatch, longer: Any, others: Any, noisy: bool, n_passes: range
) -> None:
    machine = Machine(longer, others)
    times = measured(machine, monkeypatch)
    assert times.noisy == noisy
    assert machine.n_passes in n_passes
    if not noisy:
        expected = {width: machine.ms(width) * (longer(99, width)) for width in times.curve.measured}
        assert times.curve.measured == pytest.approx(expected)


def test_a_provisional_curve_has_no_point_that_others_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one beside heavy load, which else held 1,230 ms at 24 tokens and 10,721 at 64."""
    machine = Machine(lambda n, width: {64: 5.0, 5: 4.0}.get(width, 1.0), lambda n: 0.9)
    times = measured(machine, monkeypatch)
    assert (times.noisy, times.others_share) == (True, pytest.approx(0.9))
    assert times(64) <= 3 * times(24)
    assert times(5) == times(6)


def test_what_takes_too_long_to_repeat_is_provisional(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda n, width: 1.0, slow=60.0)
    assert measured(machine, monkeypatch).noisy
    assert machine.n_passes < 40


LOADED = {"noisy": True, "others_share": 0.4}


@pytest.mark.parametrize(
    ("put", "noisy", "kept"),
    [
        ([({1: 10.0, 2: 30.0}, {"noisy": True})], True, {1: 10.0, 2: 30.0}),
        # It is repeated, and the best of both kept.
        ([({1: 10.0, 2: 30.0}, {"noisy": True}), ({1: 20.0, 2: 15.0}, {"noisy": True})], True, {1: 10.0, 2: 15.0}),
        # Two of a quiet machine that agree are one; beside the same load, perhaps, they prove nothing.
        ([({1: 10.0, 2: 12.0}, {"noisy": True}), ({1: 10.8, 2: 12.0}, {"noisy": True})], False, {1: 10.0, 2: 12.0}),
        ([({1: 10.0, 2: 12.0}, LOADED), ({1: 10.0, 2: 12.0}, LOADED)], True, {1: 10.0, 2: 12.0}),
        # A provisional curve replaces no other, and is replaced by one.
        ([({1: 10.0}, {}), ({1: 4.0}, {"noisy": True})], False, {1: 10.0}),
        ([({1: 10.0, 2: 30.0}, {"noisy": True}), ({1: 12.0, 2: 14.0}, {})], False, {1: 12.0, 2: 14.0}),
        # What makes no sense is measured anew.
        ([({2: 1.0}, {})], None, None),
        ([({1: -1.0}, {})], None, None),
        ([({1: float("nan")}, {})], None, None),
    ],
)
def test_the_best_of_what_was_measured_is_kept(tmp_path: Path, put: Any, noisy: bool | None, kept: Any) -> None:
    cache = CalibrationCache(tmp_path)
    for curve, options in put:
        cache.put(KEY, PassTimes(curve, **options))
    known = cache.get(KEY)
    assert (known and known.noisy, known and known.curve.measured) == (noisy, kept)
    cache.drop(KEY)
    assert cache.get(KEY) is None


@pytest.mark.parametrize(("busy", "worth"), [(0.0, True), (0.5, False)])
def test_nobody_waits_for_it_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: float, worth: bool) -> None:
    """Not while others use the CPUs, and not for ever where it never agrees."""
    monkeypatch.setattr(calibration, "busy_share", lambda seconds: busy)
    cache = CalibrationCache(tmp_path)
    assert cache.is_worth_waiting_for(KEY)
    for n in range(4):
        cache.put(KEY, PassTimes({1: 10.0 * 2**n}, noisy=True))
        assert cache.is_worth_waiting_for(KEY) == (worth and n < 2)


def test_a_curve_that_was_stored_before_outliers_were_looked_for_is_measured_again(tmp_path: Path) -> None:
    old = JsonStore(tmp_path, 8)
    old.put(KEY, {"ms": {"1": 50.0, "64": 6050.0}, "disturbed": 0, "quick": False})
    assert CalibrationCache(tmp_path).get(KEY) is None


def test_a_wide_pass_takes_time_even_where_a_disturbed_curve_falls() -> None:
    """As on a machine that was busy during the few passes of a quick calibration."""
    times = PassTimes({1: 300.0, 2: 250.0, 4: 150.0}, quick=True)
    assert [times(width) for width in (4, 5, 16)] == [150.0] * 3
    rising = PassTimes({1: 100.0, 3: 120.0})
    assert rising(5) == 140.0
