"""How far a long prompt is read, on a terminal and in recordings."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.commands.chat.conftest import Open
from tests.conftest import TinyFiles
from tests.support.interrupting import interrupted
from tests.support.program import localspec

LONG_TEXT = "la lo li lu " * 120


def test_generate_has_an_event_for_each_piece_and_replay_steps_over_them(tiny: TinyFiles, tmp_path: Path) -> None:
    options = [tiny.quick.target, "--draft", "none", "--backend", "reference", "--ctx", "2048", "--max-tokens", "3"]
    asked = ["generate", *options, "-p", LONG_TEXT, "--raw", "--format", "events"]
    done = localspec(*asked)
    assert (done.returncode, b"reading" in done.stderr) == (0, False)  # no terminal, no line
    *events, _ = map(json.loads, done.stdout.splitlines())
    kinds = [event["type"] for event in events]
    assert kinds == sorted(kinds)
    assert kinds.count("prompt") > 3
    (recording := tmp_path / "recording").write_bytes(done.stdout)
    assert localspec("replay", recording, "--html", tmp_path / "page.html").returncode == 0
    out, errors = interrupted("call localspec.spec_decode.rounds:PromptProgress.as_event", asked, count=2)
    *events, answer = map(json.loads, out.splitlines())
    assert {event["type"] for event in events} == {"prompt"}
    assert (answer["finish_reason"], answer["token_ids"], errors[-1]) == ("cancelled", [], "localspec: interrupted")


HELD = """
import os, sys, time
from localspec.spec_decode.decoder import SpeculativeDecoder
commit, n = SpeculativeDecoder.commit, [0]

def held(self, forward):
    n[0] += 1
    time.sleep(0.15 * (n[0] < 4))  # a line is drawn ten times a second at most
    while n[0] == 3 and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    return commit(self, forward)

SpeculativeDecoder.commit = held
from localspec.__main__ import main
main(sys.argv[2:])
"""
"""``localspec``, which waits after the second piece of its first prompt for a file."""


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_terminal_shows_it_and_ctrl_c_ends_it(open_chat: Open, tiny: TinyFiles, tmp_path: Path, command: str) -> None:
    gate, text = tmp_path / "gate", tmp_path / "long.txt"
    text.write_text(LONG_TEXT)
    options = [str(tiny.quick.target), "--draft", "none", "--backend", "reference", "--ctx", "4096"]
    asks = ["-p", LONG_TEXT, "--raw"] if command == "generate" else ["--no-keep"]
    terminal = open_chat(
        command=[sys.executable, "-c", HELD, str(gate), command, *options, *asks, "--max-tokens", "3"], columns=100
    )
    if command == "chat":
        terminal.wait("/help lists")
        terminal.type(f"/file {text}", "with the next message")
        terminal.type("hello")
    seen = terminal.wait(lambda screen: "tok/s" in screen and " left" in screen)
    assert re.search(r"reading (the prompt: )?\d[\d,]* of \d[\d,]* tokens · [\d,]+ tok/s · (\d+ min )?\d+ s left", seen)
    terminal.keys("C-c")
    gate.touch()
    if command == "generate":
        assert "reading" not in terminal.wait("EXIT 130")
        return
    terminal.wait("stopped")
    assert "reading" not in terminal.at_empty_prompt().split("hello")[-1]
    terminal.answered("hello", 1)
