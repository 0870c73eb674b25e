"""What the statistics of an answer say of plain decoding: nothing that nothing explains."""

from __future__ import annotations

import pytest

from localspec.spec_decode.rounds import SpecStats
from tests.support.scripted_llm import Guess, make_round

ESTIMATES = ("estimated_plain_tokens_per_second", "estimated_speedup")
RIGHT: list[Guess] = [("a", "ngram", True)]


def stats_of(*passes: tuple[list[Guess], float]) -> SpecStats:
    """Of rounds with these guesses, whose passes took so many milliseconds."""
    stats = SpecStats()
    for i, (guesses, ms) in enumerate(passes):
        stats.add(make_round(i, guesses, "x", ms=ms))
    return stats


def test_an_answer_without_drafts_has_no_estimate_whatever_was_calibrated() -> None:
    stats = stats_of(*[([], 100.0)] * 9)
    stats.seconds_plain_token = 0.05
    assert [stats[name] for name in ESTIMATES] == [None, None]


def test_the_estimate_is_of_the_answers_own_one_token_passes_where_it_has_some() -> None:
    stats = stats_of(([], 100.0), ([], 110.0), ([], 6000.0), (RIGHT, 125.0))  # one of them was an outlier
    stats.seconds_plain_token = 0.01  # the calibration was of another hour
    assert stats["estimated_plain_tokens_per_second"] == pytest.approx(1 / 0.11)
    few = stats_of(([], 100.0), ([], 6000.0), (RIGHT, 125.0))
    assert few["estimated_speedup"] is None
    few.seconds_plain_token = 0.11
    assert few["estimated_plain_tokens_per_second"] == pytest.approx(1 / 0.11)


def test_passes_that_were_other_answers_too_are_no_basis() -> None:
    stats = stats_of(*[([], 100.0)] * 5, (RIGHT, 120.0))
    stats.seconds_one_token = None
    assert stats["estimated_speedup"] is None


def test_of_several_answers_those_without_drafts_count_as_they_went() -> None:
    plain = stats_of(*[([], 200.0)] * 4)  # a slow hour: it explains nothing of the other answer
    drafted = stats_of(*[([], 100.0)] * 4, *[(RIGHT, 115.0)] * 4)
    both = SpecStats.total([plain, drafted.as_dict()])
    tokens, seconds = 4 + 12, 4 * 0.2 + 12 * 0.1
    assert both["estimated_plain_tokens_per_second"] == pytest.approx(tokens / seconds)
    assert both["estimated_speedup"] == pytest.approx(seconds / (4 * 0.2 + 4 * 0.1 + 4 * 0.12))
    assert SpecStats.total([plain, plain])["estimated_speedup"] is None
    unknown = stats_of(*[(RIGHT, 115.0)] * 4)
    assert SpecStats.total([drafted, unknown])["estimated_speedup"] is None
