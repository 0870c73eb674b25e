"""What the chat exchanges with the rest of the desk: files, the editor, the clipboard, earlier conversations."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from localspec.commands.chat import chat as chat_module
from localspec.commands.chat.chat import AttachedFile, with_files, without_files
from tests.commands.chat.conftest import Open, is_at_empty_prompt
from tests.commands.chat.test_chat import Scripted
from tests.conftest import TinyFiles
from tests.support.program import localspec
from tests.support.saved_chats import saved_turns
from tests.support.scripted_llm import speak, think_round

pytestmark = pytest.mark.usefixtures("measured_home")


def script(path: Path, lines: str) -> Path:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


def test_a_file_is_what_ngrams_draft_from_unless_they_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "my a.py"
    path.write_text("print(1)\n")
    it = Scripted()
    for names, expected in ((["ngram", "x"], "print(1)\n"), (["x"], None)):
        it.llm.draft_names = names
        it.do(f"/file {path}")
        it.chat.say("change it")
        it.do("/retry")
        it.chat.say("thanks")
        assert [options["prediction"] for options in it.llm.options[-3:]] == [expected, expected, None]
        *_, changed, last = it.said("user")
        assert (last, changed) == ("thanks", f"{path}:\n```py\nprint(1)\n```\n\nchange it")


def test_files_that_cannot_go_are_one_line_and_those_that_wait_stay(tmp_path: Path) -> None:
    it, good = Scripted(), tmp_path / "good.txt"
    assert "with the next message: no file" in it.do("/file")
    for name, data, said in (
        ("binary", b"a\0b", "UTF-8 text"),
        ("latin", b"\xff\xfe\xfa", "UTF-8 text"),
        ("empty", b" \n", "is empty"),
        ("long", b"word " * 5000, "5,000 tokens, and the context is 4,096"),
        ("good.txt", b"words", ""),
        ("missing", None, "No such file"),
        (".", None, "Is a directory"),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        assert said in (it.fail if said else it.do)(f"/file {tmp_path / name}")
    it.llm.job = None  # whatever is asked fails
    assert not it.chat.say("question")
    assert [file.path for file in it.chat.attached] == [good]  # it waits for an answer
    it.do("/file none")
    assert it.chat.attached == []


def test_a_fence_holds_a_file_with_fences_and_the_question_is_shown_with_their_names() -> None:
    text = with_files("q", [AttachedFile(Path("a.md"), "````\nx\n````")])
    assert text == "a.md:\n`````md\n````\nx\n````\n`````\n\nq"
    files = [AttachedFile(Path("a b.md"), "```\nx\n```\n\ny:\n"), AttachedFile(Path("c"), "1")]
    assert without_files(with_files("a.py:\n```\nq\n```", files)) == "[a b.md] [c] a.py:\n```\nq\n```"


def test_a_message_from_the_editor(open_chat: Open, tmp_path: Path) -> None:
    editor = script(tmp_path / "editor", 'printf "%s, and\\nmore\\n" "$(cat "$2")" > "$2"')
    terminal = open_chat(scripted=0.0, env={"VISUAL": f"{editor} -x", "EDITOR": "/nonsense"})
    terminal.ready()
    terminal.type("/edit begun", "> begun, and\n. more")
    terminal.keys("Enter")
    terminal.wait("too.")
    terminal.at_empty_prompt()
    terminal.keys("-l", "half a line")
    terminal.keys("C-x")
    terminal.keys("C-e")
    terminal.wait("> half a line, and\n. more")
    terminal.keys("C-c")
    # One that fails loses nothing.
    script(editor, 'printf "written" > "$2"; exit 3')
    screen = terminal.type("/edit begun", "> written")
    assert "ended with status 3" in " ".join(screen.split())
    terminal.keys("C-c")
    editor.unlink()
    screen = terminal.type("/edit begun again", "\n> begun again")
    assert ("ended with status 127" in " ".join(screen.split()), "Traceback" in screen) == (True, False)
    terminal.keys("C-c")
    # Ctrl-C in it is its own, and it has the terminal as usual.
    script(editor, 'trap "" INT; echo ready; read line; printf "%s" "$line" > "$2"; echo "echo $(stty -a)"')
    terminal.type("/edit", "ready")
    terminal.keys("C-c")
    terminal.keys("C-c")
    screen = terminal.type("typed in it", "> typed in it")
    assert re.search(r"[^-]\becho\b", screen.split("\necho ", 1)[1])


@pytest.mark.parametrize("way", ["tmux", "OSC 52"])
def test_an_answer_and_its_code_are_copied(open_chat: Open, way: str) -> None:
    env = {"DISPLAY": "", "WAYLAND_DISPLAY": "", **({} if way == "tmux" else {"TMUX": ""})}
    terminal = open_chat(scripted=0.0, env=env)
    terminal.ready()
    terminal.type("hello", lambda s: "too." in s and is_at_empty_prompt(s))
    screen = terminal.type("/copy 1", "copied code block 1")
    assert way in screen
    code = terminal.buffer()
    assert code.startswith("def reverse(")
    assert code.endswith("    return items\n")
    terminal.type("/copy", "copied the answer")
    assert terminal.buffer().endswith("émigré naïve 🙂 too.")
    terminal.type("/copy 2", "/copy takes a number from 1 to 1")


def test_copying_with_the_desk_s_tool_and_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted()
    it.llm.answers = [[replace(think_round("hm"), finish_reason="length")], speak("words to copy")]
    it.chat.say("q")
    assert "there is no answer to copy yet" in it.fail("/copy")  # it was only thought
    it.chat.say("q")
    for name in ("DISPLAY", "TMUX", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    tool = script(tmp_path / "wl-copy", f"cat > {tmp_path}/copied")
    it.do("/copy")
    assert (tmp_path / "copied").read_text() == "words to copy"
    script(tool, "exit 1")
    assert "cannot copy: wl-copy failed" in it.fail("/copy")
    monkeypatch.setenv("SSH_CONNECTION", "a b c d")  # the tool's clipboard is another computer's
    assert "no tool for it was found" in it.fail("/copy")


def kept_chat(home: Path, name: str, *said: str) -> Scripted:
    it = Scripted("an answer")
    it.chat.keep_in = home / "chats" / f"{name}.chat"
    for question in said:
        assert it.chat.say(question)
    return it


OPTIONS = ["--draft", "none", "--backend", "reference", "--temperature", "0", "--max-tokens", "4"]


def test_a_conversation_is_gone_on_with(open_chat: Open, tiny: TinyFiles, isolated_home: Path) -> None:
    for keeps_none in ([], ["--continue", "--no-keep"]):  # a pipe, and what says so
        assert localspec("chat", tiny.pair.target, *keeps_none, *OPTIONS, stdin=b"one\n").returncode == 0
        assert not (isolated_home / "chats").exists()
    first = localspec("chat", tiny.pair.target, "--continue", *OPTIONS, stdin=b"first question\n")
    assert b"no saved conversation yet" in first.stderr
    (kept,) = (isolated_home / "chats").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    # Where no model is named, it goes on with the one that the conversation was with.
    assert localspec("chat", "--continue", *OPTIONS, stdin=b"/undo\nfirst question\n").returncode == 0
    second = open_chat("--continue", "--max-tokens", "5")
    screen = second.wait(lambda s: "loaded 1 turn" in s and "/help" in s)
    assert screen.index("the model's own") < screen.index("loaded 1 turn") < screen.index("> first question")
    second.type("second question", "[cut short: max_tokens is 5")
    assert [turn["user"] for turn in saved_turns(kept)] == ["first question", "second question"]
    second.type("/undo", "undone")
    assert [turn["user"] for turn in saved_turns(kept)] == ["first question"]
    assert re.search(r"\n\*  1  \d{4}-\d\d-\d\d \d\d:\d\d     1 turn  first", second.type("/sessions", "1 turn  first"))


def test_the_last_conversations_are_listed_and_chosen(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted()
    it.chat.screen.terminal = True
    assert "no conversation is saved yet" in it.fail("/sessions")
    for name in ("rivers", "hills"):
        kept_chat(isolated_home, name, f"about {name}")
    (isolated_home / "chats" / "damaged.chat").write_text("x")
    os.utime(isolated_home / "chats" / "rivers.chat", (1, 1))
    for columns, shown in (("80", "1 turn  about"), ("40", "  1  about")):  # a narrow list is of questions
        monkeypatch.setenv("COLUMNS", columns)
        listed = it.do("/sessions")
        assert listed.index(f"{shown} hills") < listed.index("about rivers")
    assert "> about rivers\nan answer" in it.do("/sessions 2")
    assert "takes a number from 1 to 2" in it.fail("/sessions 3")
    assert "deleted 3 saved conversations" in it.do("/sessions forget")
    assert list((isolated_home / "chats").iterdir()) == []


def test_only_the_latest_conversations_are_kept(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more where an old one cannot be deleted: on Windows another program may have it open."""
    monkeypatch.setattr(chat_module, "MOST", 3)
    for i in range(5):
        it = kept_chat(isolated_home, str(i), f"question {i}")
        path = it.chat.keep_in
        os.utime(path, (i, i))
        it.chat.keep_at(path)
        it.chat.say("again")  # the present one takes no other's place twice
        os.utime(path, (i, i))
    assert [chat.questions[0] for chat in chat_module.kept_chats()] == ["question 4", "question 3", "question 2"]
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError))
    assert len(saved_turns(kept_chat(isolated_home, "new", "another").chat.keep_in)) == 1


def test_two_chats_that_go_on_with_one_conversation_keep_both(isolated_home: Path) -> None:
    first, second = kept_chat(isolated_home, "a", "begun"), kept_chat(isolated_home, "a")
    path = first.chat.keep_in
    second.do("/sessions 1")
    assert first.chat.say("here")
    assert second.chat.say("there")
    second.do("/undo", "/undo")
    assert second.chat.say("elsewhere")
    assert second.chat.say("to the end")
    said = {chat.path == path: saved_turns(chat.path) for chat in chat_module.kept_chats()}
    assert {mine: [turn["user"] for turn in turns] for mine, turns in said.items()} == {
        True: ["begun", "here"],
        False: ["elsewhere", "to the end"],
    }


def test_what_is_kept_waits_for_no_engine_and_costs_no_answer(
    isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = kept_chat(isolated_home, "a")
    monkeypatch.setattr(it.llm, "run", None)  # where a draft model may be loading
    assert it.chat.say("question")
    assert len(saved_turns(it.chat.keep_in)) == 1
    shutil.rmtree(isolated_home / "chats")
    (isolated_home / "chats").write_text("a file in the folder's place")
    for notes in (1, 0):
        assert it.chat.say("question")
        assert it.errors.count("this conversation is not saved") == notes
