"""Rounds: verdicts by hand, on drafts that are chains and that branch, and statistics; the law: ``test_exactness``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from localspec import LLM
from localspec.sampling.sampling import Noise, SamplingParams
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, SpecStats, Verdict
from localspec.spec_decode.verification import verify
from tests.conftest import TinyFiles
from tests.support.scripted_llm import Guess, make_round
from tests.support.trees import draft_tree

GREEDY = SamplingParams()
PARENTS = (-1, 0, 1, 0, 3, -1)


def rows_for(*tokens: int) -> np.ndarray:
    """Logits whose argmaxes are these tokens [n_tokens, 10]."""
    rows = np.zeros((len(tokens), 10), dtype=np.float32)
    rows[np.arange(len(tokens)), list(tokens)] = 5.0
    return rows


def draft_of(*ids: int, parents: Sequence[int] | None = None) -> Draft:
    tokens = [DraftToken(id_, "test", 0.5, None, 0.5) for id_ in ids]
    return Draft(tokens) if parents is None else draft_tree(tokens, parents)


def tree() -> Draft:
    """1 -> (2 -> 3, 4 -> 5), 6."""
    return draft_of(1, 2, 3, 4, 5, 6, parents=PARENTS)


@pytest.mark.parametrize(
    ("draft", "says", "verdict"),
    [
        (draft_of(), (7,), Verdict(0, 7, "plain")),
        (draft_of(3, 4, 5), (3, 4, 5, 6), Verdict(3, 6, "bonus")),
        (draft_of(9, 4, 5), (3, 4, 5, 6), Verdict(0, 3, "recovered")),
        (draft_of(3, 9, 5), (3, 4, 5, 6), Verdict(1, 4, "recovered")),
        (draft_of(3, 4, 9), (3, 4, 5, 6), Verdict(2, 5, "recovered")),
        (tree(), (1, 2, 3, 9, 0, 0, 0), Verdict(3, 9, "bonus", (0, 1, 2))),
        (tree(), (1, 4, 0, 0, 5, 8, 0), Verdict(3, 8, "bonus", (0, 3, 4))),
        (tree(), (1, 4, 0, 0, 7, 0, 0), Verdict(2, 7, "recovered", (0, 3))),
        (tree(), (6, 0, 0, 0, 0, 0, 7), Verdict(1, 7, "bonus", (5,))),
        (tree(), (8, 0, 0, 0, 0, 0, 0), Verdict(0, 8, "recovered", ())),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.01, seed=1)])
def test_the_path_that_the_target_takes_is_accepted(
    draft: Draft, says: Sequence[int], verdict: Verdict, params: SamplingParams
) -> None:
    """Rows that do not lie on it are not looked at."""
    rows = rows_for(*says)
    rows[[i + 1 for i in range(len(draft)) if i not in verdict.accepted]] = np.nan
    assert verify(draft, rows, [0, 1], params, Noise(0)) == verdict


def test_a_tie_goes_to_the_lower_id_as_in_plain_decoding() -> None:
    rows = rows_for(3, 6)
    rows[0, 2] = rows[0, 3]
    for ids in (None, np.tile(np.arange(10), (2, 1))):
        assert verify(draft_of(3), rows, [0, 1], GREEDY, Noise(0), ids) == Verdict(0, 2, "recovered")


@pytest.mark.parametrize(("id_", "parent"), [(9, 6), (9, -2), (6, -1), (2, 0)])
def test_a_draft_token_follows_one_that_is_there_and_is_not_there_twice(id_: int, parent: int) -> None:
    with pytest.raises(ValueError, match="draft token"):
        tree().add(DraftToken(id_, "test", 0.5), parent)


def test_statistics_and_events_of_a_tree() -> None:
    emitted = [EmittedToken(1, "accepted"), EmittedToken(4, "accepted"), EmittedToken(7, "recovered")]
    round_ = Round(0, tree(), Verdict(2, 7, "recovered", (0, 3)), emitted, 1.0, 2.0)
    assert round_.accepted == [True, False, False, True, False, False]
    assert round_.tokens_expected == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.25 + 0.125 + 0.5)
    assert [each["parent"] for each in round_.as_event()["draft"]] == [*PARENTS]
    stats = SpecStats()
    stats.add(round_)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 2)
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([1, 1, 1], [1, 1, 0])


ESTIMATES = ("estimated_plain_tokens_per_second", "estimated_speedup")
RIGHT: list[Guess] = [("a", "ngram", True)]


def stats_of(*passes: tuple[list[Guess], float]) -> SpecStats:
    """Of rounds with these guesses, whose passes took so many milliseconds."""
    stats = SpecStats()
    for i, (guesses, ms) in enumerate(passes):
        stats.add(make_round(i, guesses, "x", ms=ms))
    return stats


def test_an_answer_without_drafts_or_passes_of_its_own_has_no_estimate() -> None:
    """Whatever was calibrated, and where its passes were other answers' too."""
    stats = stats_of(*[([], 100.0)] * 9)
    stats.seconds_plain_token = 0.05
    shared = stats_of(*[([], 100.0)] * 5, (RIGHT, 120.0))
    shared.seconds_one_token = None
    assert [each[name] for each in (stats, shared) for name in ESTIMATES] == [None] * 4


def test_the_estimate_is_of_the_answers_own_one_token_passes_where_it_has_some() -> None:
    stats = stats_of(([], 100.0), ([], 110.0), ([], 6000.0), (RIGHT, 125.0))  # one of them was an outlier
    stats.seconds_plain_token = 0.01  # the calibration was of another hour
    assert stats["estimated_plain_tokens_per_second"] == pytest.approx(1 / 0.11)
    few = stats_of(([], 100.0), ([], 6000.0), (RIGHT, 125.0))
    assert few["estimated_speedup"] is None
    few.seconds_plain_token = 0.11
    assert few["estimated_plain_tokens_per_second"] == pytest.approx(1 / 0.11)


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


def test_what_a_drafter_does_at_the_beginning_is_time_of_the_first_round(tiny: TinyFiles) -> None:
    """Else a comparison of rounds would leave it out."""
    begin = NgramDrafter.begin

    def slowly(self: NgramDrafter, *args: Any, **options: Any) -> None:
        time.sleep(0.05)
        begin(self, *args, **options)

    options: Any = {"backend": "reference", "idle": False, "n_ctx": 64}
    with LLM(tiny.quick.target, "ngram", **options) as llm, patch.object(NgramDrafter, "begin", slowly):
        first, *others = llm.rounds("one two", SamplingParams(max_tokens=4, ignore_eos=True))
    assert first.ms_draft >= 50 > min(other.ms_draft for other in others)
