"""How much of prompts is read beside answers, in worlds whose costs are known."""

from __future__ import annotations

import numpy as np
import pytest

from localspec.controllers import batching as batching_module
from localspec.controllers.batching import LEAST_ROWS, LONG_EVERY, LONG_MS, STALL, PromptPieces
from localspec.controllers.cost_model import PassTimes
from tests.support.simulator import CURVES

MOST = 128


def endless(pieces: PromptPieces, times: PassTimes, n_answers: int, n_passes: int) -> list[int]:
    """The rows of prompts in passes that so many answers are in, beside a prompt without an end."""
    found = []
    for _ in range(n_passes):
        (rows,) = pieces.divide(n_answers, [10**6], [0], MOST)
        pieces.observe(n_answers, rows, times(n_answers + rows))
        found.append(rows)
    return found


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_one_of_so_many_passes_may_be_long_and_none_too_long(curve: str, n: int) -> None:
    times, n_passes = PassTimes(dict(CURVES[curve])), 2000
    rows = endless(PromptPieces(times), times, n, n_passes)
    ms = [times(n + each) for each in rows]
    short = STALL * times(1)
    n_long = sum(took > max(short, times(n + LEAST_ROWS)) + 1e-6 for took in ms)
    assert n_long <= n_passes / LONG_EVERY + 1
    assert max(ms) <= max(LONG_MS, short, times(n + LEAST_ROWS)) + 1e-6
    assert sum(rows) > n_passes  # it gets on


def test_half_is_for_the_prompt_that_came_first_and_half_for_the_shortest() -> None:
    times = PassTimes({1: 10.0, 4: 15.0, 8: 22.0, MOST: 100.0})
    pieces = PromptPieces(times)
    endless(pieces, times, 4, 3)  # the next long pass has to wait
    long, middle, short = pieces.divide(4, [10**4, 60, 1], [0, 0, 0], MOST)
    assert short == 1
    assert long >= middle > 0
    assert times(4 + long + middle + short) <= STALL * times(1)


def test_nobody_else_s_prompt_keeps_the_first_from_being_read() -> None:
    times = PassTimes({1: 10.0, 4: 15.0, 8: 22.0, MOST: 100.0})
    pieces, left = PromptPieces(times), 1000
    for _ in range(400):
        first, *_ = rows = pieces.divide(4, [left, 60, 60, 60], [0, 0, 0, 0], MOST)
        pieces.observe(4, sum(rows), times(4 + sum(rows)))
        left = max(0, left - first)
    assert left == 0


def test_higher_priorities_go_first() -> None:
    pieces = PromptPieces(PassTimes(dict(CURVES["ik"])))
    assert pieces.divide(0, [500, 40, 60], [-1, 0, 0], MOST) == [28, 40, 60]
    assert pieces.divide(0, [500, 40, 900], [0, 0, 1], MOST) == [0, 0, MOST]


def test_where_nobody_waits_pieces_are_whole() -> None:
    pieces = PromptPieces(PassTimes(dict(CURVES["ik"])))
    assert pieces.divide(0, [10**4], [0], MOST) == [MOST]
    assert pieces.divide(0, [40, 7], [0, 0], MOST) == [40, 7]
    assert pieces.divide(3, [], [], MOST) == []


@pytest.mark.parametrize("dearer", [0.5, 2.0])
def test_what_rows_of_prompts_cost_is_learned(dearer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds, and what there is room for is used, where they cost half or twice as much as t(w) says."""
    monkeypatch.setattr(batching_module, "LONG_MS", 0.0)
    rng, times, n = np.random.default_rng(0), PassTimes({1: 40.0, 65: 360.0}), 2

    def true(rows: int) -> float:
        return times(n) + dearer * (times(n + rows) - times(n))

    pieces, found = PromptPieces(times), []
    for _ in range(200):
        (rows,) = pieces.divide(n, [10**6], [0], MOST)
        pieces.observe(n, rows, true(rows) * rng.normal(1, 0.03))
        found.append(rows)
    settled = round(float(np.median(found[100:])))
    assert true(settled) <= 1.1 * STALL * times(1)
    assert true(settled + 4) >= 0.9 * STALL * times(1)
