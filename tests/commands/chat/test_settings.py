"""What is remembered between chats: settings, in a file that people edit too, and the project of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.commands import config
from localspec.commands.chat.chat import kept_project, with_project
from localspec.commands.options import RunOptions
from localspec.engine.saved import read
from localspec.errors import UsageError
from tests.commands.chat.conftest import Open
from tests.commands.chat.test_chat import Scripted
from tests.conftest import TinyFiles
from tests.support.program import localspec
from tests.support.thinkers import write_thinker

pytestmark = pytest.mark.usefixtures("measured_home")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("project", "here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "project"


def test_view_and_system_prompt_are_remembered(open_chat: Open) -> None:
    it = Scripted()
    it.chat.remembers = True
    for line in ("/view rounds", "/system Be brief."):
        assert "(also in later chats)" in it.do(line)
    assert config.read() == {"chat": {"view": "rounds", "system": "Be brief."}}
    later = open_chat("--max-tokens", "4")
    assert "note: system prompt, as remembered: Be brief." in later.ready()
    later.type("hello", "/3 model")  # a round's line
    later.type("/system none", "system prompt: none (also in later chats)")
    assert config.read() == {"chat": {"view": "rounds", "system": ""}}
    later.type("/system default", lambda s: s.count("(also in later chats)") == 2)
    assert config.read() == {"chat": {"view": "rounds"}}


def test_the_usual_system_prompt_is_that_of_all_commands() -> None:
    assert "later" not in Scripted().do("/view plain")
    assert not config.settings_file().exists()  # a pipe remembers nothing
    config.settings_file().write_text("system = 'Be kind.'\n[chat]\nsystem = 'Be brief.'\n")
    it = Scripted()
    it.chat.remembers = True
    assert "system prompt: Be kind. (also in later chats)" in it.do("/system default")
    assert config.read() == {"system": "Be kind."}


def test_what_cannot_be_kept_holds_for_this_chat(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it, path = Scripted(), config.settings_file()
    it.chat.remembers = True
    path.write_text("view = ")
    assert "only for this chat" in it.do("/view plain")
    assert (it.chat.view, path.read_text()) == ("plain", "view = ")
    monkeypatch.setattr("localspec.commands.chat.commands.keep_project", lambda path: None)
    assert f"project: {project}. " in it.do(f"/project {project}")


def test_a_project_is_kept_for_the_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, spec = RunOptions(), f"corpus:{project}"
    assert with_project(plain, None) is plain
    named = with_project(plain, "../project")
    assert named.drafters() == with_project(plain, None).drafters() == ["auto", spec]
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


def test_think_changes_how_the_next_question_is_asked(tmp_path: Path) -> None:
    model, chat = write_thinker(tmp_path, "deepseek"), tmp_path / "a.chat"
    options = ["--draft", "none", "--backend", "reference", "--temperature", "1", "--seed", "1", "--max-tokens", "30"]
    lines = ["/think 6", "in the and", "/think show", "/think off", "in the and", "/think perhaps", f"/save {chat}"]
    done = localspec("chat", model, *options, stdin="\n".join(lines).encode())
    first, second = (message for message in read(chat, memory=False)[0]["messages"] if message["role"] == "assistant")
    assert done.stdout.decode().count(first["reasoning_content"]) == 1  # no terminal: only what was asked for
    assert "reasoning_content" not in second
    for said in ("think: auto, at most 6 tokens, shown", "/think takes a number"):
        assert said in done.stderr.decode()
