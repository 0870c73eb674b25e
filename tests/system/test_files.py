"""Files that are complete under their name, or not there."""

from __future__ import annotations

import ast
import json
import os
import stat
from pathlib import Path

import pytest

import localspec
from localspec.system.files import JsonStore, private_folder, write_atomically

posix_only = pytest.mark.skipif(os.name == "nt", reason="POSIX file modes and links")


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_appears_when_its_block_ends(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "x [1].json"
    for text in (b"first", b"second"):
        before = path.read_bytes() if path.exists() else None
        with write_atomically(path, durable=durable) as file:
            file.write(text)
            assert (path.read_bytes() if path.exists() else None) == before
        assert path.read_bytes() == text
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError, GeneratorExit])
def test_what_is_broken_off_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def write() -> None:
        with write_atomically(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["x"])


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    for path, error in ((tmp_path / "none" / "x", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error), write_atomically(path) as file:
            file.write(b"x")
    with pytest.raises(ValueError, match="null"), write_atomically(Path("a\0b")) as file:
        file.write(b"x")
    assert os.listdir(tmp_path) == []


@posix_only
def test_modes_and_links(tmp_path: Path) -> None:
    path, link = tmp_path / "x", tmp_path / "link"
    link.symlink_to(path)
    before = os.umask(0o022)
    try:
        for private, mode in ((False, 0o644), (True, 0o600)):
            with write_atomically(link, private=private) as file:
                file.write(b"new")
            assert (link.is_symlink(), stat.S_IMODE(path.stat().st_mode)) == (True, mode)
    finally:
        os.umask(before)


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    left = [tmp_path / f".{name}-0123.tmp" for name in ("x[1]", "y")]
    for path in left:
        path.touch()
        os.utime(path, (0, 0))
    recent = tmp_path / ".x[1]-4567.tmp"
    recent.touch()
    with write_atomically(tmp_path / "x[1]"):
        pass
    assert [path.exists() for path in (*left, recent)] == [False, True, True]


@posix_only
def test_a_private_folder_is_closed_to_others_even_if_it_was_there(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "deep" / "new"
    old.mkdir(mode=0o755)
    for folder in (old, new):
        private_folder(folder)
        private_folder(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


MODELS_AND_BUILDS = {"model_files", "backends"}  # Rooms that write weights and libraries, and no texts

HEADS = {f"heads/{name}.py" for name in ("assembly", "file", "kinds/eagle3", "training/distill")}
"""Finished heads go where drafters are looked for, as models do."""


def test_what_may_hold_texts_is_written_for_its_owner_alone() -> None:
    """Each call of ``write_atomically`` says so, but for those that write models."""
    package = Path(localspec.__file__).parent
    bare = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.partition("/")[0] in MODELS_AND_BUILDS or name in HEADS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "write_atomically":
                words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                if words.get("private") is not True:
                    bare.append(f"{name}:{node.lineno}")
    assert bare == []


KEY = {"engine": "x 1", "file": "abc"}


def test_what_is_put_is_got_by_its_key_alone(tmp_path: Path) -> None:
    JsonStore(tmp_path, 1).put(KEY, {"ms": 3})
    assert JsonStore(tmp_path, 1).get(KEY) == {"ms": 3}
    assert JsonStore(tmp_path, 1).get({**KEY, "file": "other"}) is None
    assert JsonStore(tmp_path, 2).get(KEY) is None


def test_a_damaged_or_foreign_file_is_a_missing_one_and_one_that_cannot_be_written_no_error(tmp_path: Path) -> None:
    store = JsonStore(tmp_path, 1)
    store.put(KEY, {"ms": 3})
    (file,) = tmp_path.iterdir()
    good = json.loads(file.read_text())
    for text in ("", "{", "[]", json.dumps(good | {"key": {}}), json.dumps(good | {"value": 7}), "\x00\xff"):
        file.write_text(text)
        assert store.get(KEY) is None
    store = JsonStore(file / "below", 1)
    store.put(KEY, {"ms": 3})
    assert store.get(KEY) is None
