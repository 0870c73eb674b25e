"""What is remembered between chats: a file that people edit too."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.commands import config
from tests.commands.chat.conftest import Open
from tests.commands.chat.test_chat import Scripted

pytestmark = pytest.mark.usefixtures("measured_home")


def test_view_and_system_prompt_are_remembered(open_chat: Open, isolated_home: Path) -> None:
    first = open_chat("--max-tokens", "4")
    first.ready()
    first.type("/view rounds", "view: rounds (also in later chats)")
    first.type("/system Be brief.", "system prompt: Be brief. (also in later chats)")
    first.leave()
    second = open_chat("--max-tokens", "4")
    assert "note: system prompt, as remembered: Be brief." in second.ready()
    second.type("hello", "/3 model")  # a round's line
    second.type("/system", "system prompt: Be brief.")
    third = open_chat("--system", "Be long.")
    assert "as remembered" not in third.ready()
    third.type("/system none", "system prompt: none (also in later chats)")
    assert config.read() == {"chat": {"view": "rounds", "system": ""}}
    third.type("/system default", lambda s: s.count("(also in later chats)") == 2)
    assert config.read() == {"chat": {"view": "rounds"}}


def test_a_pipe_remembers_nothing() -> None:
    assert "later" not in Scripted().do("/view plain")
    assert not config.settings_file().exists()


def test_a_view_that_cannot_be_kept_holds_for_this_chat() -> None:
    config.settings_file().write_text("view = ")
    it = Scripted()
    it.chat.remembers = True
    assert "only for this chat" in it.do("/view plain")
    assert it.chat.view == "plain"
    assert config.settings_file().read_text() == "view = "


def test_the_usual_system_prompt_is_that_of_all_commands() -> None:
    config.settings_file().write_text("system = 'Be kind.'\n[chat]\nsystem = 'Be brief.'\n")
    it = Scripted()
    it.chat.remembers = True
    assert "system prompt: Be kind. (also in later chats)" in it.do("/system default")
    assert config.read() == {"system": "Be kind."}


def test_what_cannot_be_written_is_a_line() -> None:
    config.settings_file().mkdir(parents=True)
    it = Scripted()
    it.chat.remembers = True
    assert "only for this chat: cannot read" in it.do("/system be brief")
    assert it.chat.session.system == "be brief"
