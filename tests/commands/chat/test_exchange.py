"""What the chat exchanges with the rest of the desk: files, the editor, the clipboard, earlier conversations."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.commands.chat import chat as chat_module
from localspec.commands.chat.chat import AttachedFile, with_files, without_files
from localspec.commands.chat.prompt import is_open, unquoted
from tests.commands.chat.test_chat import Scripted, questions
from tests.commands.chat.test_repl import READY, answers, at_empty_prompt, leave, open_chat, scripted
from tests.commands.test_cli import localspec
from tests.conftest import TinyFiles
from tests.support.saved_chats import saved_turns
from tests.support.scripted_llm import think_round
from tests.support.tmux import Tmux

pytestmark = pytest.mark.usefixtures("measured_home")
__all__ = ["open_chat"]  # a fixture
Open = Callable[..., Tmux]


def script(path: Path, lines: str) -> Path:
    """An executable file."""
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_goes_with_the_next_message_and_its_path_is_completed(open_chat: Open, tmp_path: Path) -> None:
    (tmp_path / "my notes.txt").write_text("alpha beta\ngamma delta\n")
    terminal = open_chat("--max-tokens", "3")
    terminal.wait(READY)
    terminal.keys("-l", f"/file {tmp_path}/my")
    terminal.keys("Tab")
    terminal.wait(lambda s: "notes.txt" in s.replace("\n", ""))
    terminal.keys("Enter")
    terminal.wait(lambda s: "(2 lines)" in " ".join(s.split()))
    terminal.type("what is it")
    terminal.wait("[cut short: max_tokens is 3")
    terminal.type("and now")
    terminal.wait(lambda s: s.count("[cut short: max_tokens is 3") == 2)
    terminal.type(f"/save {tmp_path / 'a.chat'}")
    terminal.wait("saved to")
    first, second = (turn["user"] for turn in saved_turns(tmp_path / "a.chat"))
    assert first == f"{tmp_path}/my notes.txt:\n```txt\nalpha beta\ngamma delta\n```\n\nwhat is it"
    assert second == "and now"


def test_a_file_is_what_ngrams_draft_from_unless_they_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("print(1)\n")
    it = Scripted()
    for names, expected in ((["ngram", "x"], "print(1)\n"), (["x"], None)):
        it.llm.draft_names = names
        assert it.run(f"/file {path}")
        it.chat.say("change it")
        assert it.llm.options[-1]["prediction"] == expected
        it.run("/retry")
        assert it.llm.options[-1]["prediction"] == expected
        it.chat.say("thanks")
        assert it.llm.options[-1]["prediction"] is None
        assert questions(it)[-1] == "thanks"
        assert questions(it)[-2].endswith("print(1)\n```\n\nchange it")


def test_files_that_cannot_go_are_one_line_and_those_that_wait_stay(tmp_path: Path) -> None:
    it, good = Scripted(), tmp_path / "good.txt"
    good.write_text("words")
    assert it.run(f"/file {good}")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "long").write_text("word " * 5000)
    for name, words in {
        "none": "with the next message: no file", "missing": "No such file", ".": "Is a directory",
        "binary": "UTF-8 text", "latin": "UTF-8 text", "empty": "is empty",
        "long": "5,000 tokens, and the context is 4,096",
    }.items():  # fmt: skip
        if name == "none":
            continue
        assert not it.run(f"/file {tmp_path / name}")
        errors = it.errors
        assert words in errors
        assert errors.count("localspec: ") == 1
    assert [file.path for file in it.chat.attached] == [good]
    assert it.run("/file none")
    assert it.chat.attached == []


def test_a_file_stays_for_the_next_message_where_no_answer_came_about(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("words")
    it = Scripted()
    it.run(f"/file {path}")
    it.llm.submitter = None  # type: ignore[assignment, method-assign] # whatever is asked fails
    assert not it.chat.say("question")
    assert [file.path for file in it.chat.attached] == [path]


def test_a_fence_holds_a_file_with_fences() -> None:
    text = with_files("q", [AttachedFile(Path("a.md"), "````\nx\n````")])
    assert text == "a.md:\n`````md\n````\nx\n````\n`````\n\nq"


def test_a_question_is_shown_with_the_names_of_its_files() -> None:
    files = [AttachedFile(Path("a b.md"), "```\nx\n```\n\ny:\n"), AttachedFile(Path("c"), "1")]
    assert without_files(with_files("a.py:\n```\nq\n```", files)) == "[a b.md] [c] a.py:\n```\nq\n```"


# -- the editor --------------------------------------------------------------------------------------------------------


def test_a_message_from_the_editor(open_chat: Open, tmp_path: Path) -> None:
    editor = script(tmp_path / "editor", 'printf "%s, and\\nmore\\n" "$(cat "$2")" > "$2"')
    terminal = open_chat(command=scripted(0.0), env={"VISUAL": f"{editor} -x", "EDITOR": "/nonsense"})
    terminal.wait(READY)
    terminal.type("/edit begun")
    terminal.wait("> begun, and\n. more")
    terminal.keys("Enter")
    terminal.wait("too.")
    terminal.wait(at_empty_prompt)
    terminal.keys("-l", "half a line")
    terminal.keys("C-x")
    terminal.keys("C-e")
    terminal.wait("> half a line, and\n. more")


def test_an_editor_that_fails_loses_nothing(open_chat: Open, tmp_path: Path) -> None:
    editor = script(tmp_path / "editor", 'printf "written" > "$1"; exit 3')
    terminal = open_chat(command=scripted(0.0), env={"EDITOR": str(editor)})
    terminal.wait(READY)
    terminal.type("/edit begun")
    screen = terminal.wait("> written")
    assert "ended with status 3" in " ".join(screen.split())
    terminal.keys("C-c")
    editor.unlink()
    terminal.type("/edit begun again")
    screen = terminal.wait("\n> begun again")
    assert "cannot run" in screen
    assert "Traceback" not in screen


def test_ctrl_c_in_the_editor_is_the_editor_s_and_it_has_the_terminal_as_usual(open_chat: Open, tmp_path: Path) -> None:
    editor = script(
        tmp_path / "editor", 'trap "" INT; echo ready; read line; printf "%s" "$line" > "$1"; echo "echo $(stty -a)"'
    )
    terminal = open_chat(command=scripted(0.0), env={"EDITOR": str(editor)})
    terminal.wait(READY)
    terminal.type("/edit")
    terminal.wait("ready")
    terminal.keys("C-c")
    terminal.keys("C-c")
    terminal.type("typed in it")
    screen = terminal.wait("> typed in it")
    assert re.search(r"[^-]\becho\b", screen.split("echo ", 1)[1])


# -- several lines, and what was typed before --------------------------------------------------------------------------


def test_quotes_hold_several_lines(open_chat: Open, tmp_path: Path) -> None:
    terminal = open_chat(command=scripted(0.0))
    terminal.wait(READY)
    terminal.type('"""/help is')
    terminal.type("")
    terminal.type('a word"""')
    terminal.wait("too.")
    terminal.type(f"/save {tmp_path / 'a.chat'}")
    terminal.wait("saved to")
    assert saved_turns(tmp_path / "a.chat")[0]["user"] == "/help is\n\na word"


@pytest.mark.parametrize(
    ("text", "still_open", "message"),
    [
        ("plain", False, "plain"),
        ('"""', True, '"""'),
        ('""""', True, '""""'),
        ('"""a', True, '"""a'),
        ('"""a\nb"""', False, " a\nb"),
        ('"""\na\n"""  ', False, " a"),
        ('""""""', False, " "),
        ('say """x"""', False, 'say """x"""'),
    ],
)
def test_quotes(text: str, still_open: bool, message: str) -> None:
    assert (is_open(text), unquoted(text)) == (still_open, message)


def test_ctrl_r_searches_what_was_typed_before(open_chat: Open) -> None:
    terminal = open_chat(command=scripted(0.0))
    terminal.wait(READY)
    for question in ("alpha question", "beta question"):
        terminal.type(question)
        terminal.wait(lambda s, asked=question: f"> {asked}" in s and at_empty_prompt(s))
    terminal.keys("C-r")
    terminal.keys("-l", "alph")
    terminal.wait("I-search backward: alph")
    terminal.keys("Enter")
    terminal.wait(lambda s: s.count("> alpha question") == 2)
    terminal.keys("Enter")
    terminal.wait(lambda s: s.count("naïve") == 3 and at_empty_prompt(s))


# -- the clipboard -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["tmux", "OSC 52"])
def test_an_answer_and_its_code_are_copied(open_chat: Open, way: str) -> None:
    env = {"DISPLAY": "", "WAYLAND_DISPLAY": "", **({} if way == "tmux" else {"TMUX": ""})}
    terminal = open_chat(command=scripted(0.0), env=env)
    terminal.wait(READY)
    terminal.type("/copy")
    terminal.wait("there is no answer to copy yet")
    terminal.type("hello")
    terminal.wait(lambda s: "too." in s and at_empty_prompt(s))
    terminal.type("/copy 1")
    screen = terminal.wait("copied code block 1")
    assert way in screen
    code = terminal.buffer()
    assert code.startswith("def reverse(")
    assert code.endswith("    return items\n")
    terminal.type("/copy")
    terminal.wait("copied the answer")
    assert terminal.buffer().endswith("émigré naïve 🙂 too.")
    terminal.type("/copy 2")
    terminal.wait("/copy takes a number from 1 to 1")


def test_an_answer_that_was_only_thought_is_not_copied() -> None:
    it = Scripted()
    it.llm.answers = [[replace(think_round("hm"), finish_reason="length")]]
    assert it.chat.say("q")
    assert not it.run("/copy")
    assert "there is no answer to copy yet" in it.errors


def test_copying_with_the_desk_s_tool_and_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted("words to copy")
    it.chat.say("q")
    for name in ("DISPLAY", "TMUX", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    tool = script(tmp_path / "wl-copy", f"cat > {tmp_path}/copied")
    assert it.run("/copy")
    assert (tmp_path / "copied").read_text() == "words to copy"
    script(tool, "exit 1")
    assert not it.run("/copy")
    assert "cannot copy: wl-copy failed" in it.errors
    monkeypatch.setenv("SSH_CONNECTION", "a b c d")  # the tool's clipboard is another computer's
    assert not it.run("/copy")
    assert "no tool for it was found" in it.errors


# -- conversations of earlier days -------------------------------------------------------------------------------------


def test_a_conversation_is_gone_on_with(open_chat: Open, isolated_home: Path) -> None:
    first = open_chat("--max-tokens", "4", "--continue")
    first.wait("no saved conversation yet")
    first.wait(READY)
    first.type("first question")
    first.wait("[cut short: max_tokens is 4")
    leave(first)
    first.wait("EXIT 0")
    (kept,) = (isolated_home / "chats").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    second = open_chat("--continue", "--max-tokens", "5")
    screen = second.wait(lambda s: "loaded 1 turn" in s and READY.removeprefix("· ") in s)
    assert screen.index("the model's own") < screen.index("loaded 1 turn") < screen.index("> first question")
    second.type("second question")
    second.wait("[cut short: max_tokens is 5")
    assert [turn["user"] for turn in saved_turns(kept)] == ["first question", "second question"]
    second.type("/undo")
    second.wait("undone")
    assert [turn["user"] for turn in saved_turns(kept)] == ["first question"]
    second.type("/sessions")
    screen = second.wait("1 turn  first question")
    assert re.search(r"^\*  1  \d{4}-\d\d-\d\d \d\d:\d\d     1 turn  first question$", screen, re.MULTILINE)


def test_the_last_conversations_are_listed_and_chosen(open_chat: Open, isolated_home: Path) -> None:
    terminal = open_chat(command=scripted(0.0))
    terminal.wait(READY)
    terminal.type("/sessions")
    terminal.wait("no conversation is saved yet")
    for question in ("about rivers", "about hills"):
        it = Scripted("an answer")
        it.chat.keep_in = isolated_home / "chats" / f"{question.split()[1]}.chat"
        assert it.chat.say(question)
    (isolated_home / "chats" / "damaged.chat").write_text("x")
    os.utime(isolated_home / "chats" / "rivers.chat", (1, 1))
    terminal.type("/sessions")
    screen = terminal.wait("about rivers")
    assert screen.index("about hills") < screen.index("about rivers")
    terminal.type("/sessions 2")
    terminal.wait("> about rivers\nan answer")
    terminal.type("/sessions 3")
    terminal.wait("takes a number from 1 to 2")
    terminal.type("/sessions forget")
    terminal.wait("deleted 3 saved conversations")
    assert list((isolated_home / "chats").iterdir()) == []


def test_only_the_latest_conversations_are_kept(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MOST", 3)
    for i in range(5):
        it = Scripted("an answer")
        it.chat.keep_in = isolated_home / "chats" / f"{i}.chat"
        it.chat.say(f"question {i}")
        os.utime(it.chat.keep_in, (i, i))
        it.chat.keep_at(it.chat.keep_in)
        it.chat.say("again")  # the present one takes no other's place twice
        os.utime(it.chat.keep_in, (i, i))
    assert [chat.question for chat in chat_module.kept_chats()] == ["question 4", "question 3", "question 2"]


@pytest.mark.parametrize(("columns", "shown"), [("80", "1 turn  about rivers"), ("40", "*  1  about rivers")])
def test_a_narrow_list_of_conversations_is_of_questions(
    columns: str, shown: str, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    it = Scripted("an answer")
    it.chat.keep_in = isolated_home / "chats" / "a.chat"
    it.chat.say("about rivers")
    it.run("/sessions")
    assert shown in it.out


def test_two_chats_that_go_on_with_one_conversation_keep_both(isolated_home: Path) -> None:
    path = isolated_home / "chats" / "a.chat"
    first, second = Scripted("an answer"), Scripted("an answer")
    first.chat.keep_in = path
    assert first.chat.say("begun")
    second.chat.keep_in = path
    assert second.run("/sessions 1")
    assert first.chat.say("here")
    assert second.chat.say("there")
    assert second.run("/undo")
    assert second.run("/undo")
    assert second.chat.say("elsewhere")
    assert second.chat.say("to the end")
    said = {chat.path == path: saved_turns(chat.path) for chat in chat_module.kept_chats()}
    assert {mine: [turn["user"] for turn in turns] for mine, turns in said.items()} == {
        True: ["begun", "here"],
        False: ["elsewhere", "to the end"],
    }


def test_what_is_kept_waits_for_no_engine(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted("an answer")
    monkeypatch.setattr(it.llm, "run", None)  # where a draft model may be loading
    it.chat.keep_in = isolated_home / "chats" / "a.chat"
    assert it.chat.say("question")
    assert len(saved_turns(it.chat.keep_in)) == 1


def test_a_home_that_cannot_be_written_costs_a_note_and_no_answer(isolated_home: Path) -> None:
    it = Scripted("an answer", "another")
    (isolated_home / "chats").write_text("a file in the folder's place")
    it.chat.keep_in = isolated_home / "chats" / "x.chat"
    assert it.chat.say("question")
    assert "this conversation is not saved" in it.errors
    assert it.chat.say("question")
    assert "not saved" not in it.errors


def test_a_pipe_goes_on_with_a_conversation_and_alone_keeps_none(tiny: TinyFiles, isolated_home: Path) -> None:
    options = ["--draft", "none", "--backend", "reference", "--temperature", "0", "--max-tokens", "4"]
    assert localspec("chat", tiny.pair.target, *options, stdin=b"one\n").returncode == 0
    assert not (isolated_home / "chats").exists()
    assert localspec("chat", tiny.pair.target, "--continue", *options, stdin=b"two\n").returncode == 0
    # Where no model is named, it goes on with the one that the conversation was with.
    assert localspec("chat", "--continue", *options, stdin=b"three\n").returncode == 0
    (kept,) = (isolated_home / "chats").iterdir()
    assert [turn["user"] for turn in saved_turns(kept)] == ["two", "three"]


def test_a_chat_is_not_kept_where_that_was_asked_for(open_chat: Open, isolated_home: Path) -> None:
    terminal = open_chat("--no-keep")
    terminal.wait(READY)
    terminal.type("hello")
    terminal.wait(lambda s: answers(s) == 1)
    assert not (isolated_home / "chats").exists()
