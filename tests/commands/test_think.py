"""``--think``, ``--think-budget`` and ``/think``: what is thought is apart, dim, folded away or not done at all."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.commands.chat.chat import Chat
from localspec.commands.chat.commands import run_command
from localspec.commands.chat.screen import ChatScreen, TokensView
from localspec.spec_decode.rounds import SpecStats
from tests.support.emulator import Emulator
from tests.support.program import assert_one_line, localspec
from tests.support.scripted_llm import ScriptedLLM, make_round, speak, think_round
from tests.support.thinkers import write_thinker

pytestmark = pytest.mark.usefixtures("measured_home")


def test_generate_prints_the_answer_and_its_json_has_both(tmp_path: Path) -> None:
    path = write_thinker(tmp_path, "deepseek")
    command = ["generate", path, "--draft", "none", "--backend", "reference", "--temperature", "1", "--seed", "1"]
    command += ["--max-tokens", "40", "-p", "in the and"]
    reply = json.loads(localspec(*command, "--think-budget", "9", "--format", "json").stdout)
    assert reply["thinking"]
    assert reply["stats"]["num_forced_tokens"] > 0
    assert "thinking" not in json.loads(localspec(*command, "--think", "off", "--format", "json").stdout)
    assert localspec(*command, "--raw", "--think", "off").returncode == 2
    assert_one_line(localspec(*command, "--think", "much"), 2, "one of auto, on, off")
    only = localspec(*command, "--max-tokens", "9")  # thinking takes more
    note = b"localspec: no answer came after 9 tokens of thinking; --format json has it"
    assert (only.stdout.strip(), only.stderr.splitlines()[-1]) == (b"", note)
    assert b"no answer" not in localspec(*command, "--max-tokens", "9", "--think", "off").stderr


@pytest.mark.parametrize("folded", [False, True])
def test_thinking_is_dim_or_folded_away(folded: bool) -> None:
    terminal = Emulator()
    file, view = terminal.file, TokensView(terminal.chat_screen(folded=folded), SpecStats())
    mark = think_round("</think>")
    view.round(think_round("musing"))
    view.round(replace(mark, spans=[replace(mark.spans[0], part="mark")]))
    view.round(make_round(1, [], "said"))
    view.finish()
    shown = file.getvalue()
    assert ("\x1b[2;3mmusing" in shown, "thinking, " in shown) == (not folded, folded)
    assert ("</think>" in shown, "said" in shown) == (False, True)


@pytest.mark.parametrize("view", ["tokens", "reading", "rounds", "plain"])
@pytest.mark.parametrize("folded", [False, True])
def test_the_chat_says_that_nothing_but_thoughts_came(view: str, folded: bool) -> None:
    end = replace(make_round(1, [], ""), finish_reason="stop")
    script: Any = ScriptedLLM([[think_round("musing"), end], [think_round("musing"), *speak("said")]])
    out, errors = io.StringIO(), io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    screen = ChatScreen(out, errors)
    screen.folded = folded
    chat = Chat(script, screen, params=SamplingParams(), view=view)
    chat.ask("why?")
    assert "no answer came after 1 token of thinking" in out.getvalue()
    assert ("; /think show prints it" in out.getvalue()) is folded
    chat.ask("why?")
    assert out.getvalue().count("no answer came") == 1


def test_think_changes_how_the_next_question_is_asked(tmp_path: Path) -> None:
    with LLM(write_thinker(tmp_path, "deepseek"), draft=None, backend="reference", n_ctx=512, idle=False) as llm:
        out, errors = io.StringIO(), io.StringIO()
        chat = Chat(llm, ChatScreen(out, errors), params=SamplingParams(temperature=1.0, seed=1, max_tokens=30))
        assert run_command(chat, "/think 6")
        assert chat.ask("in the and")
        thought = chat.session.messages[-1]["reasoning_content"]
        assert thought not in out.getvalue()  # no terminal: only answers
        assert run_command(chat, "/think show")
        assert "think: auto, at most 6 tokens, shown" in errors.getvalue()
        assert run_command(chat, "/think off")
        assert chat.ask("in the and")
        assert "reasoning_content" not in chat.session.messages[-1]
        assert not run_command(chat, "/think perhaps")
        assert "/think takes a number" in errors.getvalue()
