"""The speed-up formula, against sums written out."""

from __future__ import annotations

import pytest

from localspec.controllers.cost_model import PassTimes
from localspec.controllers.stopping import (
    best_length,
    best_speedup,
    break_even,
    expected_tokens,
    lowest_break_even,
    speedup,
)

LENGTHS = range(17)


def test_expected_tokens_are_a_geometric_sum() -> None:
    for a in (0.0, 0.25, 0.9, 1.0):
        for k in (0, 1, 5, 16):
            assert expected_tokens(a, k) == pytest.approx(sum(a**i for i in range(k + 1)))


def test_break_even() -> None:
    def times(width: int) -> float:
        return 50.0 + 6.0 * (width - 1) + (20.0 if width > 4 else 0.0)

    for k in LENGTHS[1:]:
        share = break_even(k, times, 10.0)
        assert share is not None
        assert speedup(share, k, times, 10.0) == pytest.approx(1.0, abs=1e-6)
    assert break_even(1, times, 10.0) == pytest.approx(16.0 / 50.0, abs=1e-6)  # a·t(1) = t(2) - t(1) + d
    assert break_even(3, lambda width: 50.0, 0.0) == pytest.approx(0.0, abs=1e-6)


def test_the_best_length() -> None:
    times = PassTimes({1: 10.0, 2: 11.0, 3: 12.0, 9: 18.0, 17: 26.0})
    assert best_speedup(0.0, LENGTHS, times, 5.0) == 1.0
    assert best_speedup(1.0, LENGTHS, times, 0.0) == pytest.approx(17 * 10 / 26)
    sums = [sum(0.8**i for i in range(k + 1)) / (times(k + 1) + 2 * k) for k in LENGTHS]
    assert best_speedup(0.8, LENGTHS, times, 2.0) == pytest.approx(max(sums) * times(1))
    assert best_length(0.8, LENGTHS, times, 2.0) == sums.index(max(sums))
    assert lowest_break_even(LENGTHS, times, 2.0) == break_even(1, times, 2.0)


def test_where_a_wider_pass_takes_as_much_longer_nothing_pays() -> None:
    def times(width: int) -> float:
        return 50.0 * width

    assert best_length(0.9, LENGTHS, times, 1.0) == 0
    assert break_even(3, times, 1.0) is None
    assert lowest_break_even(LENGTHS, times, 1.0) == 1.0
    assert best_length(0.9, LENGTHS, lambda width: 50.0, 0.0) == LENGTHS[-1]
