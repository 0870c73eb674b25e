"""What is remembered between chats: a file that people edit too."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from localspec.commands.chat.settings import ChatSettings, read_settings, remember, settings_file
from localspec.errors import UsageError
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
    assert read_settings() == (ChatSettings("rounds", ""), [])
    third.type("/system default", lambda s: s.count("(also in later chats)") == 2)
    assert read_settings() == (ChatSettings("rounds"), [])


def test_a_pipe_remembers_nothing() -> None:
    assert "later" not in Scripted().do("/view plain")
    assert not settings_file().exists()


CHANGES = [
    ("", 'view = "plain"\n'),
    ("# mine\nview = 'rounds' # so\n[chat]\nview = 'x'\n", "# mine\nview = \"plain\"\n[chat]\nview = 'x'\n"),
    ("[a]\nb = 1", 'view = "plain"\n[a]\nb = 1'),
    ("system = 'x'", "system = 'x'\nview = \"plain\"\n"),
    ('"view" = """\\\n  rounds"""\nother = [\n1]\n', 'view = "plain"\nother = [\n1]\n'),
    ("views = 'x'\n", "views = 'x'\nview = \"plain\"\n"),
    ('system = """\nview = 1\n"""\nview="rounds"\n', ""),  # what looks like the setting is not touched
]
"""Files, and what they are once the view is remembered; none where they are left alone."""


@pytest.mark.parametrize(("text", "wanted"), CHANGES, ids=range(len(CHANGES)))
def test_the_rest_of_the_file_stays(text: str, wanted: str) -> None:
    settings_file().write_text(text)
    if wanted:
        remember("view", "plain")
    else:
        with pytest.raises(UsageError, match=r"config\.toml cannot be changed"):
            remember("view", "plain")
    assert settings_file().read_text() == (wanted or text)


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
    settings_file().write_bytes(data)
    settings, (problem,) = read_settings()
    assert (settings, "\n" in problem, "config.toml" in problem) == (ChatSettings(), False, True)
    assert said in problem
    it = Scripted()
    it.chat.remembers = True
    shown = it.do("/view plain")
    assert it.chat.view == "plain"
    if "is not" in said:
        assert "only for this chat" in shown
        assert settings_file().read_bytes() == data


def test_what_cannot_be_written_is_a_line() -> None:
    settings_file().mkdir(parents=True)
    it = Scripted()
    it.chat.remembers = True
    assert "only for this chat: cannot read" in it.do("/system be brief")
    assert it.chat.session.system == "be brief"
