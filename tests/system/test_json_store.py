"""Facts kept on disk: found again, never believed when damaged or foreign, never in the way."""

from __future__ import annotations

import json
from pathlib import Path

from localspec.controllers.experience import Experience
from localspec.sampling.sampling import SamplingParams
from localspec.system.json_store import JsonStore

KEY = {"engine": "x 1", "file": "abc"}


def test_what_is_put_is_got_by_its_key_alone(tmp_path: Path) -> None:
    JsonStore(tmp_path, 1).put(KEY, {"ms": 3})
    assert JsonStore(tmp_path, 1).get(KEY) == {"ms": 3}
    assert JsonStore(tmp_path, 1).get({**KEY, "file": "other"}) is None
    assert JsonStore(tmp_path, 2).get(KEY) is None
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_or_foreign_file_is_a_missing_one(tmp_path: Path) -> None:
    store = JsonStore(tmp_path, 1)
    store.put(KEY, {"ms": 3})
    (file,) = tmp_path.iterdir()
    good = json.loads(file.read_text())
    for text in ("", "{", "[]", json.dumps(good | {"key": {}}), json.dumps(good | {"value": 7}), "\x00\xff"):
        file.write_text(text)
        assert store.get(KEY) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = JsonStore(tmp_path / "file" / "below", 1)
    store.put(KEY, {"ms": 3})
    assert store.get(KEY) is None


def test_experience_outlives_the_process_and_stays_with_its_way_of_sampling(tmp_path: Path) -> None:
    greedy, free = SamplingParams(), SamplingParams(temperature=1.0)
    first = Experience(tmp_path, KEY)
    table = first.source(greedy, "model", copies=False)
    assert first.source(greedy, "model", copies=False) is table
    before = table.expected(0.97)
    for _ in range(50):
        table.observe(0.97, 0.0)
        table.notice(0.97)
    first.save()
    second = Experience(tmp_path, KEY)
    restored = second.source(greedy, "model", copies=False)
    assert table.expected(0.97) < restored.expected(0.97) < before - 0.3
    assert restored.climates[0][-2] > restored.typical[0][-2] + 0.2
    untouched = Experience(None, KEY)
    for sampled in (False, True):
        table = second.source(free, "model", copies=False, sampled=sampled)
        assert table.as_dict() == untouched.source(free, "model", copies=False, sampled=sampled).as_dict()
        assert table.expected(0.35) != before
    assert Experience(tmp_path, {**KEY, "file": "other"}).source(greedy, "model", copies=False).expected(0.97) == before


def test_senseless_experience_is_not_believed(tmp_path: Path) -> None:
    for nonsense in ({"hits": [5] * 12, "seen": [1] * 12, "climates": []}, {"hits": "x"}, [], None, 3):
        fresh = Experience(None, KEY).source(SamplingParams(), "model", copies=False)
        before = fresh.as_dict()
        fresh.restore(nonsense)
        assert fresh.as_dict() == before
