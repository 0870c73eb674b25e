"""What is remembered between chats: a file that people edit too."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from localspec.commands.chat.settings import ChatSettings, read_settings, remember, settings_file
from localspec.errors import UsageError
from tests.commands.chat.test_chat import Scripted
from tests.commands.chat.test_repl import READY, Open, leave, open_chat

pytestmark = pytest.mark.usefixtures("measured_home")
__all__ = ["open_chat"]  # a fixture


def test_view_and_system_prompt_are_remembered(open_chat: Open, isolated_home: Path) -> None:
    first = open_chat("--max-tokens", "4")
    first.wait(READY)
    first.type("/view rounds")
    first.wait("view: rounds (also in later chats)")
    first.type("/system Be brief.")
    first.wait("system prompt: Be brief. (also in later chats)")
    leave(first)
    first.wait("EXIT 0")
    second = open_chat("--max-tokens", "4")
    second.wait("note: system prompt, as remembered: Be brief.")
    second.wait(READY)
    second.type("hello")
    second.wait("/3 model")  # a round's line
    second.type("/system")
    second.wait("system prompt: Be brief.")
    third = open_chat("--system", "Be long.")
    third.wait(READY)
    third.type("/system none")
    third.wait("system prompt: none (also in later chats)")
    assert "as remembered" not in third.screen()
    assert read_settings() == (ChatSettings("rounds", ""), [])
    third.type("/system default")
    third.wait(lambda s: s.count("(also in later chats)") == 2)
    assert read_settings() == (ChatSettings("rounds"), [])


def test_a_pipe_remembers_nothing(isolated_home: Path) -> None:
    it = Scripted()
    it.run("/view plain")
    assert "later" not in it.errors
    assert not settings_file().exists()


CHANGES = [
    ("", 'view = "plain"\n'),
    ("# mine\nview = 'rounds' # so\n[chat]\nview = 'x'\n", "# mine\nview = \"plain\"\n[chat]\nview = 'x'\n"),
    ("[a]\nb = 1", 'view = "plain"\n[a]\nb = 1'),
    ("system = 'x'", "system = 'x'\nview = \"plain\"\n"),
    ('"view" = """\\\n  rounds"""\nother = [\n1]\n', 'view = "plain"\nother = [\n1]\n'),
    ("views = 'x'\n", "views = 'x'\nview = \"plain\"\n"),
]
"""Files, and what they are once the view is remembered."""


@pytest.mark.parametrize(("text", "wanted"), CHANGES, ids=range(len(CHANGES)))
def test_the_rest_of_the_file_stays(text: str, wanted: str, isolated_home: Path) -> None:
    isolated_home.mkdir(exist_ok=True)
    settings_file().write_text(text)
    remember("view", "plain")
    assert settings_file().read_text() == wanted


def test_a_text_that_looks_like_the_setting_is_not_touched(isolated_home: Path) -> None:
    isolated_home.mkdir(exist_ok=True)
    settings_file().write_text(text := 'system = """\nview = 1\n"""\nview="rounds"\n')
    with pytest.raises(UsageError, match=r"config\.toml cannot be changed"):
        remember("view", "plain")
    assert settings_file().read_text() == text


@pytest.mark.parametrize("text", ['a"b\\c\nd\te\x7f\x01é 你 🙂', "", "'''", "[x]", "#"])
def test_any_text_comes_back(text: str, isolated_home: Path) -> None:
    remember("system", "another")
    remember("view", "rounds")
    remember("system", text)
    assert read_settings() == (ChatSettings("rounds", text), [])
    assert settings_file().stat().st_mode & 0o077 == 0
    remember("system", None)
    assert tomllib.loads(settings_file().read_text()) == {"view": "rounds"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"view = ", "is not TOML"),
        (b"\xff", "is not UTF-8"),
        (b"view = 'oops'", "there is no view 'oops'"),
        (b"veiw = 'plain'", "there is no setting 'veiw'"),
        (b"system = 3", "system must be a text, not 3"),
        (b"system = {a = 1979-05-27}", "system must be a text"),
    ],
)
def test_a_bad_file_is_a_line_and_what_is_no_toml_is_not_written_over(
    data: bytes, said: str, isolated_home: Path
) -> None:
    isolated_home.mkdir(exist_ok=True)
    settings_file().write_bytes(data)
    settings, (problem,) = read_settings()
    assert settings == ChatSettings()
    assert said in problem
    assert "\n" not in problem
    assert "config.toml" in problem
    it = Scripted()
    it.chat.remembers = True
    assert it.run("/view plain")
    assert it.chat.view == "plain"
    if "is not" in said:
        assert "only for this chat" in it.errors
        assert settings_file().read_bytes() == data


def test_what_cannot_be_written_is_a_line(isolated_home: Path) -> None:
    settings_file().mkdir(parents=True)
    it = Scripted()
    it.chat.remembers = True
    assert it.run("/system be brief")
    assert it.chat.session.system == "be brief"
    assert "only for this chat: cannot read" in it.errors
