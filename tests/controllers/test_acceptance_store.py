"""What was learned of a pair is kept on disk, for each way of sampling by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.controllers.acceptance import COPIED, SourceAcceptance
from localspec.controllers.learned import AcceptanceStore
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.base import DrafterInfo

MODEL = DrafterInfo("model", runs_model=True)
KEY = {"engine": "x 1", "file": "abc"}


def test_what_was_learned_outlives_the_process_and_stays_with_its_way_of_sampling(tmp_path: Path) -> None:
    greedy, free = SamplingParams(), SamplingParams(temperature=1.0)
    first = AcceptanceStore(tmp_path, KEY)
    table = first.source(greedy, MODEL)
    assert first.source(greedy, MODEL) is table
    before = table.expected(0.97)
    for _ in range(50):
        table.observe(0.97, 0.0)
    first.save()
    second = AcceptanceStore(tmp_path, KEY)
    restored = second.source(greedy, MODEL)
    assert table.expected(0.97) < restored.expected(0.97) < before - 0.3
    untouched = AcceptanceStore(None, KEY)
    for sampled in (False, True):
        table = second.source(free, MODEL, sampled=sampled)
        assert table.as_dict() == untouched.source(free, MODEL, sampled=sampled).as_dict()
        assert table.expected(0.35) != before
    other = AcceptanceStore(tmp_path, {**KEY, "file": "other"})
    assert other.source(greedy, MODEL).expected(0.97) == before


def test_how_often_second_tokens_are_right_is_kept_too(tmp_path: Path) -> None:
    first = AcceptanceStore(tmp_path, KEY)
    table = first.source(SamplingParams(), MODEL)
    before = table.sibling(0.6)
    for _ in range(50):
        table.observe_sibling(0.6, 1.0)
    first.save()
    restored = AcceptanceStore(tmp_path, KEY).source(SamplingParams(), MODEL)
    assert table.sibling(0.6) > restored.sibling(0.6) > before + 0.2


def test_what_makes_no_sense_is_not_believed() -> None:
    table = AcceptanceStore(None, KEY).source(SamplingParams(), MODEL)
    before = table.as_dict()
    damaged = [
        {"hits": [5] * 12, "seen": [1] * 12},
        *({"beside": each} for each in ([], [[1, 2, 3]] * 12, [[5, 1]] * 12, 7)),
    ]
    for nonsense in (*(before | each for each in damaged), {"hits": "x"}, [], None, 3):
        table.restore(nonsense)
        assert table.as_dict() == before


def test_a_new_text_is_expected_to_copy_as_texts_do_and_what_confidences_mean_is_kept() -> None:
    table = SourceAcceptance(COPIED)
    usual, before = table.mean(), table.expected(0.97)
    for _ in range(50):
        table.notice(0.97)
        table.observe(0.97, 0.0)
    table.new_text()
    assert table.histograms == [list(each) for each in COPIED.histograms]
    assert table.expected(0.97) < before - 0.2
    for _ in range(8):
        table.new_text()
    assert table.mean() == pytest.approx(usual, abs=1e-3), "and fades from text to text"
