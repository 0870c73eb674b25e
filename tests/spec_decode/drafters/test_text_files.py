"""Which files of a folder are text that may be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec.errors import UsageError
from localspec.spec_decode.drafters.corpus import MOST_FILE_BYTES, PathSource
from localspec.system.steps import exhaust


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def readable(path: Path) -> dict[str, str]:
    """Name -> text of what a corpus of a path is made of."""
    source = PathSource(path)
    texts = {file.name: source.text(file.name) for file in exhaust(source.files())}
    return {name: text for name, text in texts.items() if text is not None}


def test_the_text_of_a_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.py": "a = 1\n",
            "deep/er/b.txt": "Grüße\n",
            "bom.txt": b"\xef\xbb\xbftext",
            "latin.txt": b"Gr\xfc\xdfe",
            "picture.png": b"\x89PNG\0\0",
            "late.bin": b"x" * 10_000 + b"\0",
            "empty": "",
            ".env": "SECRET=1",
            ".git/config": "[core]",
        },
    )
    (tmp_path / "large.log").write_bytes(b"")
    os.truncate(tmp_path / "large.log", MOST_FILE_BYTES + 1)
    assert readable(tmp_path) == {"a.py": "a = 1\n", "deep/er/b.txt": "Grüße\n", "bom.txt": "text"}
    assert readable(tmp_path / "a.py") == {"a.py": "a = 1\n"}


def test_what_git_ignores_is_not_read(tmp_path: Path) -> None:
    """Rules of the folder, of those within, of the repository around it and its own; the innermost decides."""
    write(
        tmp_path,
        {
            ".git/info/exclude": "private.txt\n",
            ".gitignore": "*.log\nbuild/\n!\n[\n/src/secret.txt\n",
            "x.log": "no",
            "src/.gitignore": "!keep.log\n*.tmp\n",
            "src/keep.log": "yes",
            "src/other.log": "no",
            "src/a.tmp": "no",
            "src/secret.txt": "no",
            "src/private.txt": "no",
            "src/build/out.txt": "no",
            "src/build.txt": "yes",
            "src/deep/secret.txt": "yes",
        },
    )
    wanted = {"keep.log", "build.txt", "deep/secret.txt"}
    assert set(readable(tmp_path / "src")) == wanted
    assert set(readable(tmp_path)) == {f"src/{name}" for name in wanted}


def test_no_link_is_followed(tmp_path: Path) -> None:
    write(tmp_path, {"outside/secret.txt": "no", "in/a.txt": "yes"})
    try:
        (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "outside" / "secret.txt")
        (tmp_path / "in" / "folder").symlink_to(tmp_path / "outside")
        (tmp_path / "alias").symlink_to(tmp_path / "in")
    except OSError:
        pytest.skip("no links here")
    assert readable(tmp_path / "in") == {"a.txt": "yes"}
    assert readable(tmp_path / "alias") == {"a.txt": "yes"}  # the folder that is named may be a link
    source = PathSource(tmp_path / "in")
    (tmp_path / "in" / "a.txt").unlink()
    (tmp_path / "in" / "a.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    if hasattr(os, "O_NOFOLLOW"):
        assert source.text("a.txt") is None  # it was a file when it was found


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "yes"})
    os.mkfifo(tmp_path / "pipe.txt")
    assert readable(tmp_path) == {"a.txt": "yes"}
    assert PathSource(tmp_path).text("pipe.txt") is None


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"corpus .*missing: No such file"):
        PathSource(tmp_path / "missing")


def test_a_folder_that_vanishes_is_not_empty(tmp_path: Path) -> None:
    write(tmp_path, {"in/a.txt": "yes"})
    source = PathSource(tmp_path / "in")
    (tmp_path / "in").rename(tmp_path / "gone")
    with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
        exhaust(source.files())
