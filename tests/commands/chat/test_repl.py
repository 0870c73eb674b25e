"""The chat as a person meets it: the real program in a real terminal, on tiny models."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_cli import PROGRAM, localspec
from tests.conftest import TinyFiles
from tests.support.endless import write_endless
from tests.support.saved_chats import saved_turns
from tests.support.scripted_llm import DEMO
from tests.support.tmux import Tmux
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("measured_home")
Open = Callable[..., Tmux]
READY = "· /help"
"""The status line under the first prompt."""


@pytest.fixture
def open_chat(tmp_path: Path, tiny: TinyFiles) -> Iterator[Open]:
    """Opens ``localspec chat`` in a terminal: short greedy answers, three guesses a round, reference engine."""
    terminals: list[Tmux] = []

    def start(
        *options: str, model: Path | None = None, draft: Path | str | None = None, env: dict[str, str] | None = None,
        columns: int = 80, lines: int = 40, command: list[str] | None = None,
    ) -> Tmux:  # fmt: skip
        arguments = [
            "chat", str(model or tiny.pair.target), "--draft", str(draft or tiny.pair.draft), "--draft-only",
            "--draft-length", "3", "--backend", "reference", "--temperature", "0", "--max-tokens", "30", *options,
        ]  # fmt: skip
        terminals.append(
            Tmux(
                command or [*PROGRAM, *arguments],
                tmp_path,
                {"PYTHONPATH": str(Path(__file__).parents[3]), **(env or {})},
                columns,
                lines,
            )
        )
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def at_empty_prompt(screen: str) -> bool:
    """Whether the chat waits for a line of which nothing was typed yet."""
    return screen.rstrip().splitlines()[-2] == ">"


def leave(terminal: Tmux) -> None:
    """Press Ctrl-D at a prompt; between two of them it would be lost."""
    terminal.wait(at_empty_prompt)
    terminal.keys("C-d")


def answers(screen: str) -> int:
    """How many answers were cut at the token budget: how the short ones here end."""
    return screen.count("[cut short: max_tokens is 30")


# -- an ordinary chat --------------------------------------------------------------------------------------------------


def test_a_chat_from_start_to_end(open_chat: Open, tiny: TinyFiles) -> None:
    terminal = open_chat()
    screen = terminal.wait(READY)
    assert f"{tiny.pair.target.stem} · reference · context 2048" in screen
    assert f"Guessing by {tiny.pair.draft.stem}." in screen
    assert "the model's own" in screen
    terminal.type("hello there")
    screen = terminal.wait(lambda s: answers(s) == 1 and "tok/s" in s)
    status = next(line for line in reversed(screen.splitlines()) if line.strip())
    assert re.fullmatch(r"[\d.]+ tok/s( · ×[\d.]+)? · \d+ of \d+ guesses right", status)
    terminal.type("and again")
    terminal.wait(lambda s: answers(s) == 2)
    terminal.type("/stats")
    screen = terminal.wait("guess  1 ")
    assert re.search(r"guess  1  [█░]{30} ", screen)
    terminal.type("/why")
    terminal.wait("Guessing 3 tokens at a time, as asked")
    leave(terminal)
    assert "Traceback" not in terminal.wait("EXIT 0")


def test_the_second_turn_decodes_only_what_is_new(open_chat: Open, tmp_path: Path) -> None:
    terminal = open_chat()
    terminal.wait(READY)
    terminal.type("hello there " * 20)
    terminal.wait(lambda s: answers(s) == 1)
    terminal.type("and again")
    terminal.wait(lambda s: answers(s) == 2)
    terminal.type(f"/save {tmp_path / 'a.chat'}")
    terminal.wait("saved to")
    first, second = (turn["stats"] for turn in saved_turns(tmp_path / "a.chat"))
    assert first["cached_tokens"] < first["prompt_tokens"] - 3  # the beginning was read while nobody typed
    # The text of the first answer may be cut into other tokens than it was made of, so its last ones can differ.
    assert second["cached_tokens"] >= first["prompt_tokens"] - 1


def test_the_text_on_the_screen_is_the_text_that_was_verified(open_chat: Open, tmp_path: Path) -> None:
    terminal = open_chat()
    terminal.wait(READY)
    terminal.type("hello there")
    screen = terminal.wait(lambda s: answers(s) == 1)
    terminal.type(f"/save {tmp_path / 'a.chat'}")
    terminal.wait("saved to")
    turn = saved_turns(tmp_path / "a.chat")[0]
    shown = screen.split("> hello there\n")[1].split("[cut short")[0]
    wanted = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), turn["assistant"])
    assert "".join(shown.split()) == "".join(wanted.split())
    assert any(not guess["accepted"] for event in turn["rounds"] for guess in event["draft"]), "nothing was rejected"


def scripted(pace: float, *gate: Path) -> list[str]:
    """The chat over prepared answers: every other round has a guess ``WRONG`` that is rejected.

    With a gate the answer stops behind the first of these until that file is there.
    """
    return [sys.executable, "-m", "tests.support.scripted_llm", str(pace), *map(str, gate)]


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"])
def test_rejected_guesses_appear_struck_through_and_are_gone_afterwards(
    open_chat: Open, env: dict[str, str], tmp_path: Path
) -> None:
    terminal = open_chat(command=scripted(0.02, tmp_path / "gate"), env=env)
    terminal.wait(READY)
    terminal.type("hello")
    seen = terminal.wait("WRONG", escapes=True)
    before = re.search(r"((?:\x1b\[[0-9;:]*m)+)WRONG", seen)
    assert before is not None
    assert "9" in re.findall(r"\d+", before[1])  # struck through
    (tmp_path / "gate").touch()
    terminal.wait(lambda s: "émigré naïve 🙂 too." in s and s.rstrip().endswith("guesses right"))
    final = terminal.screen()
    assert "WRONG" not in final
    assert "Here is a function that reverses a list. It walks from both ends towards the\nmiddle and swaps" in final
    assert "    while left < right:\n        items[left], items[right] = items[right], items[left]\n" in final
    coloured = terminal.screen(escapes=True)
    colours = re.findall(r"\x1b\[(?:[0-9;]*;)?3[1-7]m", coloured)
    assert bool(colours) is not bool(env)
    assert "\x1b[1m" in coloured  # the draft's tokens are bold, with colours or without


def test_views(open_chat: Open) -> None:
    terminal = open_chat()
    terminal.wait(READY)
    terminal.type("/view rounds")
    terminal.type("hello there")
    screen = terminal.wait(lambda s: answers(s) == 1)
    lanes = re.findall(r"^ +\d+ +(\d)/3 model +\d+\+ *\d+ ms  [✓✗].*$", screen, re.MULTILINE)
    assert len(lanes) > 5
    assert set(lanes) & {"0", "1", "2"}
    assert all(len(line) <= 80 for line in screen.splitlines())
    terminal.type("/view plain")
    terminal.type("hello there")
    terminal.wait(lambda s: answers(s) == 2)
    plain = terminal.screen(escapes=True).split("/view plain")[1]
    answer = plain.split("hello there")[1].split("[cut short")[0]
    assert "\x1b[32m" not in answer
    terminal.type("/view oops")
    terminal.wait("no view 'oops'")


@pytest.mark.parametrize(("columns", "lines"), [(80, 40), (34, 10)])
def test_the_reading_view(open_chat: Open, tmp_path: Path, columns: int, lines: int) -> None:
    terminal = open_chat(command=scripted(0.02, tmp_path / "gate"), columns=columns, lines=lines)
    terminal.wait("/help lists")
    terminal.type("/view reading")
    terminal.wait("view: reading")
    terminal.type("hello")
    terminal.wait(lambda s: "\nHere is a" in s and "tok/s" in s)
    (tmp_path / "gate").touch()
    screen = terminal.wait(lambda s: "émigré naïve 🙂 too." in s and at_empty_prompt(s))
    shown = screen.split("> hello\n")[1]
    assert "WRONG" not in shown
    assert "```" not in shown
    assert shown.count("── 1 python ──") == 1
    assert "Here is a function that reverses a list. It walks from both" in " ".join(shown.split())
    assert "    while left < right:\n" in shown
    assert shown.count("tok/s") == 1
    coloured = terminal.screen(escapes=True).split("── 1 python")[1]
    assert re.search(r"\x1b\[[0-9;]*(3|9)[1-7]m(def|while)", coloured)
    # The same again from a file, with what was said by somebody who typed meanwhile.
    terminal.type(f"/save {tmp_path / 'a.chat'}")
    terminal.wait("saved to")
    terminal.type(f"/load {tmp_path / 'a.chat'}")
    terminal.wait(lambda s: s.count("── 1 python ──") == 2)


def test_race(open_chat: Open) -> None:
    terminal = open_chat(lines=60)
    terminal.wait(READY)
    terminal.type("hello there")
    terminal.wait(lambda s: answers(s) == 1)
    terminal.type("/race")
    screen = terminal.wait("same text: all 30 tokens are equal")
    assert "plain (ran first)" in screen
    assert len(re.findall(r"30 tokens, [\d.]+ s, [\d.]+ tok/s", screen)) == 2
    assert re.search(r"×[\d.]+ to ×[\d.]+ of plain[^;]*; \d+ of \d+ guesses right\.", " ".join(screen.split()))


def test_commands_that_change_the_chat(open_chat: Open, tmp_path: Path, tiny: TinyFiles) -> None:
    path = tmp_path / "a.chat"
    terminal = open_chat()
    terminal.wait(READY)
    terminal.type("first question")
    terminal.wait(lambda s: answers(s) == 1)
    terminal.type("second question")
    terminal.wait(lambda s: answers(s) == 2)
    terminal.type("/undo")
    terminal.wait("undone: second question")
    terminal.type(f"/save {path}")
    terminal.wait("saved to")
    terminal.type("/retry")
    terminal.wait(lambda s: answers(s) == 3)
    terminal.type("/draft ngram")
    terminal.wait("Guessing by copying from the text.")
    terminal.type(f"/draft {tiny.pair.draft} ngram")
    screen = terminal.wait("Guessing by copying from the text and pair-draft.")
    assert "loading" not in screen
    terminal.type(f"/draft {tiny.pair.draft} only")
    terminal.wait("\nGuessing by pair-draft.\n")
    terminal.type(f"/draft {tiny.pair.draft}")
    terminal.wait(lambda s: s.count("Guessing by copying from the text and pair-draft.") == 2)
    terminal.type("/draft none")
    terminal.wait("Guessing is off.")
    terminal.type("/length auto")
    terminal.wait("guesses at a time: auto")
    terminal.type("/set max_tokens 3")
    terminal.wait("max_tokens 3")
    terminal.type("/system You are terse.")
    terminal.wait("system prompt: You are terse.")
    terminal.type("/sett")
    terminal.wait("did you mean /set?")
    terminal.type("third")
    terminal.wait("[cut short: max_tokens is 3;")
    terminal.type(f"/load {path}")
    screen = terminal.wait("loaded 1 turn")
    assert "> first question" in screen.split("loaded 1 turn")[1]
    (tmp_path / "foreign.json").write_text("{}")
    terminal.type(f"/load {tmp_path / 'foreign.json'}")
    terminal.wait(lambda s: "is not a saved session" in " ".join(s.split()))
    terminal.type("/quit")
    terminal.wait("EXIT 0")


# -- the keyboard ------------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(open_chat: Open, tmp_path: Path) -> None:
    model = write_endless(tmp_path / "endless.gguf", tmp_path / "endless-draft.gguf")
    terminal = open_chat("--max-tokens", "100000", "--ctx", "4000", model=model, draft=tmp_path / "endless-draft.gguf")
    terminal.wait(READY)
    terminal.type("go on")
    terminal.wait("guesses right")
    terminal.keys("-l", "typed ahead")
    terminal.keys("C-c")
    screen = terminal.wait("[stopped; what was said is kept")
    terminal.wait("> typed ahead")
    assert "^C" not in screen
    terminal.keys("C-c")  # throws the line away
    terminal.type("/set max_tokens 5")
    terminal.type("another question")
    terminal.wait("[cut short: max_tokens is 5;")
    terminal.type(f"/save {tmp_path / 'a.chat'}")
    terminal.wait("saved to")
    first, second = saved_turns(tmp_path / "a.chat")
    assert (first["user"], first["finish_reason"]) == ("go on", "cancelled")
    assert first["assistant"]
    assert second["user"] == "another question"
    assert second["stats"]["prompt_tokens"] > first["stats"]["completion_tokens"]


def test_ctrl_c_at_an_empty_prompt_hints_and_ctrl_d_leaves(open_chat: Open) -> None:
    terminal = open_chat()
    terminal.wait(READY)
    terminal.keys("C-c")
    terminal.wait(
        lambda s: "Ctrl-D or /quit leaves" in s and at_empty_prompt(s)
    )  # between prompts it is no end of input
    terminal.keys("C-d")
    terminal.wait("EXIT 0")


def test_ctrl_c_while_loading(open_chat: Open, tmp_path: Path) -> None:
    script = "import time; from localspec import llm; llm.Pair = lambda *a: (print('loading'), time.sleep(600))\n"
    script += f"from localspec.__main__ import main; main(['chat', {str(write_endless(tmp_path / 'm.gguf'))!r}])"
    terminal = open_chat(command=[sys.executable, "-c", script])
    terminal.wait("loading")
    terminal.keys("C-c")
    screen = terminal.wait("EXIT 130")
    assert screen.split("EXIT")[0].strip().splitlines()[-1] == "localspec: interrupted"
    assert "Traceback" not in screen


def test_what_is_pasted_while_the_model_loads_is_unseen_and_one_message(
    open_chat: Open, tmp_path: Path, tiny: TinyFiles
) -> None:
    arguments = ["chat", str(tiny.pair.target), "--draft", "none", "--backend", "reference", "--max-tokens", "3"]
    script = f"""
import os, time
from localspec import llm
from localspec.__main__ import main
load = llm.Pair
def wait(path, draft, options, report):
    report("loading", 0.0)
    while not os.path.exists({str(tmp_path / "gate")!r}):
        time.sleep(0.02)
    return load(path, draft, options, report)
llm.Pair = wait
main({arguments!r})
"""
    terminal = open_chat(command=[sys.executable, "-c", script], columns=200, lines=60)
    terminal.wait("loading 0%")
    terminal.paste("one\n/quit\nthree" + " words" * 1000)  # more than a line may have where the terminal edits lines
    terminal.keys("-l", "!")
    assert "three" not in terminal.screen()
    (tmp_path / "gate").touch()
    screen = terminal.wait(lambda s: s.replace("\n", "").count("words") == 1000 and "words!" in s.replace("\n", ""))
    assert "> one\n. /quit\n. three words" in screen
    assert screen.count("three") == 1
    assert "cut short" not in screen


def test_what_is_pasted_into_an_answer_waits_as_one_message(open_chat: Open, tmp_path: Path) -> None:
    terminal = open_chat(command=scripted(0.02, tmp_path / "gate"))
    terminal.wait(READY)
    terminal.type("hello")
    terminal.wait("Here is a")
    terminal.paste("one\ntwo")
    (tmp_path / "gate").touch()
    terminal.wait("> one\n. two\n")
    assert terminal.screen().count("Here is") == 1


def test_words_stay_whole_while_the_window_changes(open_chat: Open) -> None:
    terminal = open_chat(command=scripted(0.2))
    terminal.wait(READY)
    terminal.type("hello")
    for columns in (50, 80, 43, 61):
        before = len(terminal.screen().split())
        terminal.wait(lambda s, n=before: len(s.split()) > n + 5)
        terminal.resize(columns)
    screen = terminal.wait(lambda s: "\n```python" in s)
    shown = screen.split("> hello")[1].split("```")[0].split()
    wanted = DEMO.split("```")[0].split()
    assert shown == wanted


@pytest.mark.parametrize("columns", [30, 47])
def test_what_is_typed_and_what_goes_wrong_is_broken_between_words(open_chat: Open, columns: int) -> None:
    terminal = open_chat(command=scripted(0.0), columns=columns)
    terminal.wait("/help lists")
    question = "a question of many words that takes several lines of this narrow window"
    terminal.type(question)
    screen = terminal.wait("too.")
    assert screen.split("> a question")[1].split("Here is")[0].split() == question.split()[2:]
    terminal.type("/nonsense")
    screen = terminal.wait("send it as text)" if columns > 40 else "as text)")
    wanted = (
        "localspec: no command /nonsense: /help lists the commands (start the line with a space to send it as text)"
    )
    assert " ".join(screen[screen.rindex("localspec:") :].split()).startswith(wanted)


def test_several_lines_history_and_completion(open_chat: Open) -> None:
    terminal = open_chat(command=scripted(0.0))
    terminal.wait(READY)
    terminal.type("one \\")
    terminal.wait("\n.\n")
    terminal.keys("-l", "two")
    terminal.keys("M-Enter")
    terminal.type("three")
    terminal.wait("> one\n. two\n. three\nHere is")
    terminal.keys("Up")
    terminal.wait(lambda s: s.count("> one") == 2)
    terminal.keys("C-c")
    terminal.wait(at_empty_prompt)
    terminal.keys("-l", "/rac")
    terminal.keys("Tab")
    terminal.wait("> /race")
    terminal.keys("C-c")
    terminal.wait(at_empty_prompt)
    terminal.keys("-l", "/view ro")
    terminal.keys("Tab")
    terminal.keys("Enter")
    terminal.wait("view: rounds")


def test_the_history_file_is_private_and_is_used_again(open_chat: Open, isolated_home: Path) -> None:
    terminal = open_chat(command=scripted(0.0))
    terminal.wait(READY)
    terminal.type("remember me")
    terminal.wait("too.")
    leave(terminal)
    terminal.wait("EXIT 0")
    assert (isolated_home / "history").stat().st_mode & 0o077 == 0
    assert "remember me" in (isolated_home / "history").read_text()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_turn_is_one_line_and_the_chat_goes_on(open_chat: Open) -> None:
    terminal = open_chat("--ctx", "80", "--max-tokens", "5")
    terminal.wait(READY)
    terminal.type("word " * 60)
    terminal.wait("localspec: the prompt has")
    terminal.type("hi")
    terminal.wait("[cut short: max_tokens is 5")


def test_a_full_context_is_said(open_chat: Open) -> None:
    terminal = open_chat("--ctx", "40", "--max-tokens", "1000")
    terminal.wait(READY)
    terminal.type("hi")
    terminal.wait("[cut short: the context of 40 tokens is full")


# -- lesser terminals, and none ----------------------------------------------------------------------------------------


def test_a_dumb_terminal(open_chat: Open, tmp_path: Path) -> None:
    terminal = open_chat(
        command=["script", "-qc", shlex.join(scripted(0.0)), str(tmp_path / "log")], env={"TERM": "dumb"}
    )
    terminal.wait("\n>")
    terminal.type("hello")
    terminal.wait("guesses right)")
    terminal.type("/view rounds")
    terminal.type("hello")
    terminal.wait("✗WRONG")
    terminal.keys("C-d")
    terminal.wait("EXIT 0")
    assert "\x1b" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("columns", [40, 80])
def test_nothing_runs_over_the_edge(open_chat: Open, columns: int) -> None:
    terminal = open_chat(command=scripted(0.02), columns=columns)
    terminal.wait("/help lists")
    terminal.type("hello")
    screen = terminal.wait(lambda s: "naïve" in s and s.count("tok/s") == 1)
    prose = screen.split("> hello\n")[1].split("```")[0]
    assert not re.search(r"\n ", prose)
    assert " ".join(prose.split()).startswith(
        "Here is a function that reverses a list. It walks from both ends towards"
    )
    assert "宽字符也必须保持可读，不能在行尾被切成两半" in "".join(screen.split())


def test_piped_each_line_is_a_turn(tiny: TinyFiles) -> None:
    options = ["--draft", tiny.pair.draft, "--backend", "reference", "--temperature", "0", "--max-tokens", "12"]
    result = localspec("chat", tiny.pair.target, *options, stdin="hello there\n\n/nonsense é\n".encode())
    assert result.returncode == 0
    first = localspec("generate", tiny.pair.target, *options, "-p", "hello there").stdout
    assert result.stdout.startswith(first)
    assert len(result.stdout) > len(first)
    assert b"> " not in result.stdout.replace(first, b"")
    assert b"\x1b[" not in result.stdout
    assert b"cut short" not in result.stdout


def test_piped_a_turn_that_fails_is_a_status(tiny: TinyFiles) -> None:
    options = ["--draft", "none", "--backend", "reference", "--ctx", "64", "--max-tokens", "4"]
    result = localspec("chat", tiny.pair.target, *options, stdin=b"word " * 60 + b"\nhi")
    assert result.returncode == 1
    assert result.stderr.decode().count("localspec: the prompt has") == 1
    assert result.stdout


def test_nothing_on_standard_input_is_a_chat_without_turns(tiny: TinyFiles) -> None:
    result = localspec("chat", tiny.pair.target, "--draft", "none", "--backend", "reference")
    assert (result.returncode, result.stdout) == (0, b"")


@pytest.mark.real
@pytest.mark.slow
def test_the_real_pair(open_chat: Open, real_model: Any, tmp_path: Path) -> None:
    target, draft = real_model("qwen2.5-coder-1.5b"), real_model("qwen2.5-coder-0.5b")
    command = [*PROGRAM, "chat", str(target), "--draft", str(draft), "--draft", "ngram", "--draft-length", "4"]
    terminal = open_chat(command=[*command, "--temperature", "0", "--max-tokens", "60"])
    terminal.wait(READY)
    terminal.type("Write a Python function that adds two numbers.")
    terminal.wait(lambda s: "```python" in s and ("[cut short" in s or s.count("```") == 2))
    terminal.type("/race")
    terminal.wait("of plain")
    leave(terminal)
    terminal.wait("EXIT 0")


def test_standard_error_is_free_of_engine_noise(tiny: TinyFiles) -> None:
    command = [*PROGRAM, "chat", str(tiny.pair.target), "--draft", "none", "--max-tokens", "2"]
    result = subprocess.run(command, input=b"hi\n", capture_output=True, check=True, timeout=PATIENCE)
    for line in result.stderr.decode().splitlines():
        assert re.match(r"checking|measuring|\[cut short|note:", line), line
