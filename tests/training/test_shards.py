"""Shards: what was written is read back, and a run that was cut off loses nothing that was on disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from localspec.heads.training.shards import Passage, ShardError, Shards, as_states
from tests.support.lessons import MADE_UP_TAPS as TAPS
from tests.support.lessons import MADE_UP_WIDTH as WIDTH
from tests.support.lessons import made_up


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = [made_up("a", 5), made_up("b", 17, held_out=True), made_up("c", 1)]
    shards = Shards(tmp_path, TAPS, WIDTH)
    shards.append(written[:2])
    shards.append(written[2:])
    again = Shards(tmp_path, TAPS, WIDTH)
    for found in (shards.passages, again.passages):
        assert len(found) == 3
        for one, other in zip(written, found, strict=True):
            for field in Passage.__slots__:
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)
    assert shards.n_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_what_was_under_way_counts_once_after_a_run_was_cut_off(tmp_path: Path) -> None:
    shards = Shards(tmp_path, TAPS, WIDTH)
    shards.append([made_up("a", 5)], [made_up("b", 3), made_up("c", 4)])
    # "b" came to its end, and the run was killed between the two files of the next minute.
    before = (tmp_path / "unfinished.shard").read_bytes()
    shards.append([made_up("b", 9)])
    (tmp_path / "unfinished.shard").write_bytes(before)
    for _ in range(2):
        found = Shards(tmp_path, TAPS, WIDTH).passages
        assert [(each.name, len(each)) for each in found] == [("a", 5), ("b", 9), ("c", 4)]


def test_a_damaged_shard_is_left_out_and_said(tmp_path: Path) -> None:
    shards = Shards(tmp_path, TAPS, WIDTH)
    for name in "abcd":
        shards.append([made_up(name, 6)])
    whole = (tmp_path / "00001.shard").read_bytes()
    (tmp_path / "00000.shard").write_bytes(whole[:-10])
    (tmp_path / "00001.shard").write_bytes(b"")
    (tmp_path / "00002.shard").write_bytes(b"GGUF" + whole)
    found = Shards(tmp_path, TAPS, WIDTH)
    assert [each.name for each in found.passages] == ["d"]
    assert [line.split()[0] for line in found.remarks] == ["00000.shard", "00001.shard", "00002.shard"]
    found.append([made_up("e", 2)])
    assert [each.name for each in Shards(tmp_path, TAPS, WIDTH).passages] == ["d", "e"]


def test_shards_of_other_taps_are_refused(tmp_path: Path) -> None:
    Shards(tmp_path, TAPS, WIDTH).append([made_up("a", 5)])
    with pytest.raises(ShardError, match="layer:0, norm"):
        Shards(tmp_path, ("norm",), WIDTH)


def test_states_that_float16_cannot_hold_stay_finite() -> None:
    kept = as_states(np.array([[1e6, -1e6, 2.0]], dtype=np.float32))
    assert np.isfinite(kept).all()
    assert kept[0, 2] == 2.0


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
def test_examples_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    """They are made of the user's chats and texts."""
    before = os.umask(0o022)
    try:
        shards = Shards(tmp_path / "shards", TAPS, WIDTH)
        shards.append([made_up("a", 5)], [made_up("b", 5)])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (shards.folder, *shards.folder.iterdir())}
    assert len(modes) == 3
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes
