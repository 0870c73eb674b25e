"""What was learned of a pair is kept on disk, for each way of sampling by itself."""

from __future__ import annotations

from pathlib import Path

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
        table.notice(0.97)
    first.save()
    second = AcceptanceStore(tmp_path, KEY)
    restored = second.source(greedy, MODEL)
    assert table.expected(0.97) < restored.expected(0.97) < before - 0.3
    assert restored.histograms[0][-2] > restored.typical[0][-2] + 0.2
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
    former = {name: value for name, value in table.as_dict().items() if name != "beside"}
    restored.restore(former)  # of a version that had none
    assert restored.sibling(0.6) > before
    for nonsense in ([], [[1, 2, 3]] * 12, [[5, 1]] * 12, 7):
        unchanged = restored.as_dict()
        restored.restore(table.as_dict() | {"beside": nonsense})
        assert restored.as_dict() == unchanged


def test_what_makes_no_sense_is_not_believed(tmp_path: Path) -> None:
    for nonsense in ({"hits": [5] * 12, "seen": [1] * 12, "histograms": []}, {"hits": "x"}, [], None, 3):
        fresh = AcceptanceStore(None, KEY).source(SamplingParams(), MODEL)
        before = fresh.as_dict()
        fresh.restore(nonsense)
        assert fresh.as_dict() == before
