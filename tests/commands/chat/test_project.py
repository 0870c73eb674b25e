"""The project of a folder: named once, and a chat that is started there copies from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.commands.chat.chat import kept_project, with_project
from localspec.commands.options import RunOptions
from localspec.errors import UsageError
from tests.conftest import TinyFiles
from tests.support.program import localspec


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    for name in ("project", "here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "project"


def test_a_project_is_kept_for_the_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, spec = RunOptions(), f"corpus:{project}"
    assert with_project(plain, None) is plain
    named = with_project(plain, "../project")
    assert named.drafters() == ["auto", spec]
    assert with_project(plain, None).drafters() == ["auto", spec]
    assert with_project(RunOptions(draft=["ngram"]), None).drafters() == ["ngram", spec]
    assert with_project(RunOptions(draft=["none"]), None).drafters() == []  # what was asked for goes before
    assert named.draft_may_come_late == RunOptions().draft_may_come_late
    monkeypatch.chdir("../there")
    assert with_project(plain, None) is plain
    monkeypatch.chdir("../here")
    project.rename(project.with_name("moved"))
    assert with_project(plain, None) is plain
    project.with_name("moved").rename(project)
    assert with_project(plain, "none") is plain
    assert kept_project() is None
    with pytest.raises(UsageError, match="project missing: No such file"):
        with_project(plain, "missing")


def test_in_a_chat(tiny: TinyFiles, project: Path) -> None:
    (project / "a.txt").write_text("some text of mine\n")
    options = ["--draft", "ngram", "--backend", "reference", "--max-tokens", "4", "--no-idle"]
    lines = [f"/project {project}", "hi", "/project", "/project missing", "/draft", "/project none", "/project"]
    done = localspec("chat", tiny.quick.target, *options, stdin="\n".join(lines).encode())
    said = done.stderr.decode().splitlines()
    guessing = f"Guessing by copying from the text and copying from {project}."
    project_lines = [f"project: {project}. {guessing}"] * 2 + ["project: none. Guessing by copying from the text."] * 2
    assert [line for line in said if line.startswith("project: ")] == project_lines
    assert guessing in said
    assert any(line.startswith("localspec: project missing: No such file") for line in said)
    assert kept_project() is None
