"""Facts kept on disk: found again, never believed when damaged or foreign, never in the way."""

from __future__ import annotations

import json
from pathlib import Path

from localspec.system.files import JsonStore

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
