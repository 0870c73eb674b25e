"""The chat as a person meets it: the real program in a real terminal, on tiny models."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.commands.chat.prompt import open_history
from tests.commands.chat.conftest import Open, is_at_empty_prompt
from tests.conftest import TinyFiles
from tests.support.endless import write_endless
from tests.support.program import PROGRAM, localspec
from tests.support.scripted_llm import DEMO
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("measured_home")

COLOUR = r"\x1b\[(?:[0-9;]*;)?3[1-7]m"


def test_a_chat_from_start_to_end(open_chat: Open, tiny: TinyFiles) -> None:
    terminal = open_chat(lines=70)
    screen = terminal.ready()
    for words in (f"{tiny.pair.target.stem} · reference · context 2048", f"Guessing by {tiny.pair.draft.stem}."):
        assert words in screen
    assert "the model's own" in screen
    question = "hello there " * 5
    terminal.answered(question, 1)
    screen = terminal.wait(lambda s: "tok/s" in s.rstrip().splitlines()[-1])
    assert re.fullmatch(r"[\d.]+ tok/s( · ×[\d.]+)? · \d+ of \d+ guesses right", screen.rstrip().splitlines()[-1])
    # The text on the screen is the text that was verified, and the second turn decodes only what is new.
    (turn,) = terminal.saved()
    shown = screen.split(f"> {question.strip()}\n")[1].split("[cut short")[0]
    wanted = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), turn["assistant"])
    assert "".join(shown.split()) == "".join(wanted.split())
    assert any(not guess["accepted"] for event in turn["rounds"] for guess in event["draft"]), "nothing was rejected"
    terminal.answered("and again", 2)
    first, second = (turn["stats"] for turn in terminal.saved())
    assert first["cached_tokens"] < first["prompt_tokens"] - 3  # the beginning was read before it was asked
    # The text of the first answer may be cut into other tokens than it was made of, so its last ones can differ.
    assert second["cached_tokens"] >= first["prompt_tokens"] - 1
    assert re.search(r"guess 1 +[█░]{30} ", terminal.type("/stats", "guess 1 "))
    terminal.type("/why", "Guessing 3 tokens at a time, as asked")
    screen = terminal.type("/race", "same text: all 30 tokens are equal")
    assert len(re.findall(r"30 tokens, [\d.]+ s, [\d.]+ tok/s", screen)) == 2
    assert re.search(r"×[\d.]+ to ×[\d.]+ of plain[^;]*; \d+ of \d+ guesses right\.", " ".join(screen.split()))
    assert "Traceback" not in terminal.leave()


def test_answers_on_a_terminal(open_chat: Open, tmp_path: Path) -> None:
    """Rejected guesses appear struck through and are gone afterwards; the reading view; at all sizes on an emulated
    terminal."""
    terminal = open_chat(scripted=0.02, gate=tmp_path / "gate", lines=60)
    terminal.ready()
    terminal.type("hello")
    seen = terminal.wait("WRONG", escapes=True)
    before = re.search(r"((?:\x1b\[[0-9;:]*m)+)WRONG", seen)
    assert "9" in re.findall(r"\d+", before[1])  # struck through
    terminal.paste("one\ntwo")  # into an answer: it waits as one message
    (tmp_path / "gate").touch()
    screen = terminal.wait("> one\n. two\n")
    assert screen.count("Here is") == 1
    assert "WRONG" not in screen
    assert "Here is a function that reverses a list. It walks from both ends towards the\nmiddle and swaps" in screen
    assert "    while left < right:\n        items[left], items[right] = items[right], items[left]\n" in screen
    coloured = terminal.screen(escapes=True)
    assert re.search(COLOUR, coloured)
    assert "\x1b[1m" in coloured  # the draft's tokens are bold, with colours or without
    terminal.keys("C-c")
    terminal.type("/view reading", "view: reading")
    terminal.type("again")
    screen = terminal.wait(lambda s: s.count("émigré naïve 🙂 too.") == 2 and "tok/s" in s and is_at_empty_prompt(s))
    shown = screen.split("> again\n")[1]
    assert [shown.count(part) for part in ("WRONG", "```", "── 1 python ──", "tok/s")] == [0, 0, 1, 1]
    assert "    while left < right:\n" in shown
    coloured = terminal.screen(escapes=True).split("── 1 python")[1]
    assert re.search(r"\x1b\[[0-9;]*(3|9)[1-7]m(def|while)", coloured)
    # The same from a file.
    terminal.saved()
    terminal.type(f"/load {tmp_path / 'a.chat'}", lambda s: s.count("── 1 python ──") == 2)


def test_commands_that_change_the_chat(open_chat: Open, tmp_path: Path, tiny: TinyFiles) -> None:
    """Those that an engine has a say in; the others are tested over a script."""
    terminal, draft = open_chat(), tiny.pair.draft
    terminal.ready()
    terminal.answered("first question", 1)
    terminal.saved()
    terminal.answered("/retry", 2)
    both = "Guessing by copying from the text and pair-draft."
    for line, said in (
        ("/draft ngram", "Guessing by copying from the text."),
        (f"/draft {draft} ngram", both),
        (f"/draft {draft} only", "\nGuessing by pair-draft.\n"),
        (f"/draft {draft}", lambda s: s.count(both) == 2),
        ("/draft none", "Guessing is off."),
        ("/set max_tokens 3", "max_tokens 3"),
        ("third", "[cut short: max_tokens is 3;"),
    ):
        screen = terminal.type(line, said)
        assert "loading" not in screen
    terminal.type(f"/load {tmp_path / 'a.chat'}", lambda s: "> first question" in s.partition("loaded 1 turn")[2])
    terminal.type("/quit", "EXIT 0")


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(open_chat: Open, tmp_path: Path) -> None:
    model = write_endless(tmp_path / "endless.gguf", tmp_path / "endless-draft.gguf")
    terminal = open_chat("--max-tokens", "100000", "--ctx", "4000", model=model, draft=tmp_path / "endless-draft.gguf")
    terminal.ready()
    terminal.keys("C-c")  # at an empty prompt it hints
    terminal.wait(lambda s: "Ctrl-D or /quit leaves" in s and is_at_empty_prompt(s))
    terminal.type("go on", "guesses right")
    terminal.keys("-l", "typed ahead")
    terminal.keys("C-c")
    screen = terminal.wait("[stopped; what was said is kept")
    terminal.wait("> typed ahead")
    assert "^C" not in screen
    terminal.keys("C-c")  # throws the line away
    terminal.type("/set max_tokens 5")
    terminal.answered("another question", 1)
    first, second = terminal.saved()
    assert (first["user"], first["finish_reason"], second["user"]) == ("go on", "cancelled", "another question")
    assert first["assistant"]
    assert second["stats"]["prompt_tokens"] > first["stats"]["completion_tokens"]


WAITING = """
import os, sys, time
from localspec import llm
from localspec.__main__ import main
load = llm.Pair
def wait(path, draft, options, report, *more):
    report("loading", 0.0)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    return load(path, draft, options, report, *more)
llm.Pair = wait
main(sys.argv[2:])
"""


@pytest.mark.parametrize("interrupts", [False, True])
def test_while_the_model_loads(open_chat: Open, tmp_path: Path, tiny: TinyFiles, interrupts: bool) -> None:
    """What is pasted is unseen, and then one message; Ctrl-C ends it."""
    arguments = ["chat", str(tiny.pair.target), "--draft", "none", "--backend", "reference", "--max-tokens", "3"]
    command = [sys.executable, "-c", WAITING, str(tmp_path / "gate"), *arguments]
    terminal = open_chat(command=command, columns=200, lines=60)
    terminal.wait("loading 0%")
    if interrupts:
        terminal.keys("C-c")
        screen = terminal.wait("EXIT 130")
        assert screen.split("EXIT")[0].strip().splitlines()[-1] == "localspec: interrupted"
        return
    terminal.paste("one\n/quit\nthree" + " words" * 1000)  # more than a line may have where the terminal edits lines
    terminal.keys("-l", "!")
    assert "three" not in terminal.screen()
    (tmp_path / "gate").touch()
    screen = terminal.wait(lambda s: s.replace("\n", "").count("words") == 1000 and "words!" in s.replace("\n", ""))
    assert "> one\n. /quit\n. three words" in screen
    assert (screen.count("three"), "cut short" in screen) == (1, False)


def test_words_stay_whole_while_the_window_changes(open_chat: Open) -> None:
    terminal = open_chat(scripted=0.1)
    terminal.ready()
    terminal.type("hello")
    for columns in (50, 80, 43):
        before = len(terminal.screen().split())
        terminal.wait(lambda s, n=before: len(s.split()) > n + 5)
        terminal.resize(columns)
    screen = terminal.wait("\n```python")
    assert screen.split("> hello")[1].split("```")[0].split() == DEMO.split("```")[0].split()


def test_nothing_runs_over_the_edge_and_no_colour_is_where_none_is_wanted(open_chat: Open) -> None:
    """Questions, answers and errors are broken between words."""
    terminal = open_chat(scripted=0.0, columns=30, env={"NO_COLOR": "1"})
    terminal.wait("/help lists")
    question = "a question of many words that takes several lines of this narrow window"
    screen = terminal.type(question, lambda s: "too." in s and s.count("tok/s") == 1)
    asked, said = screen.split("> a question")[1].split("Here is", 1)
    assert asked.split() == question.split()[2:]
    prose = said.split("```")[0]
    assert not re.search(r"\n ", prose)
    assert " ".join(prose.split()).startswith("a function that reverses a list. It walks from both ends towards")
    assert "宽字符也必须保持可读，不能在行尾被切成两半" in "".join(screen.split())
    screen = terminal.type("/nonsense", "as text)")
    error = " ".join(screen[screen.rindex("localspec:") :].split())
    assert error.startswith("localspec: no command /nonsense: /help lists the commands (start the line with a space to")
    assert not re.search(COLOUR, terminal.screen(escapes=True))


def test_several_lines_history_and_completion(open_chat: Open, isolated_home: Path) -> None:
    terminal = open_chat(scripted=0.0, lines=120)
    terminal.ready()
    terminal.type("one \\", "\n.\n")
    terminal.keys("-l", "two")
    terminal.keys("M-Enter")
    terminal.type("three", "> one\n. two\n. three\nHere is")
    terminal.at_empty_prompt()
    terminal.type('"""')
    terminal.type("/help is")
    terminal.type("")
    terminal.type('a word"""', lambda s: s.count("too.") == 2 and is_at_empty_prompt(s))
    assert [turn["user"] for turn in terminal.saved()] == ["one \ntwo\nthree", "/help is\n\na word"]
    terminal.keys("-l", "/view ro")
    terminal.keys("Tab")
    terminal.wait("> /view rounds")
    terminal.keys("C-c")
    terminal.at_empty_prompt()
    terminal.keys("C-r")
    terminal.keys("-l", "three")
    terminal.wait("I-search backward: three")
    terminal.keys("Enter")
    terminal.wait(lambda s: s.count("> one") == 2)
    terminal.keys("Enter")
    terminal.wait(lambda s: s.count("too.") == 3)
    terminal.leave()
    history = isolated_home / "history"
    assert (history.stat().st_mode & 0o077, "/help is" in history.read_text()) == (0, True)


def test_a_dumb_terminal(open_chat: Open, tmp_path: Path) -> None:
    scripted = shlex.join([sys.executable, "-m", "tests.support.scripted_llm", "0"])
    terminal = open_chat(command=["script", "-qc", scripted, str(tmp_path / "log")], env={"TERM": "dumb"})
    terminal.wait("\n>")
    terminal.type("hello", "guesses right)")
    terminal.type("/view rounds")
    terminal.type("hello", "✗WRONG")
    terminal.keys("C-d")
    terminal.wait("EXIT 0")
    assert "\x1b" not in (tmp_path / "log").read_text()


def test_piped_each_line_is_a_turn(tiny: TinyFiles) -> None:
    options = ["--draft", tiny.pair.draft, "--backend", "reference", "--temperature", "0", "--max-tokens", "12"]
    result = localspec("chat", tiny.pair.target, *options, stdin="hello there\n\n/nonsense é\n".encode())
    first = localspec("generate", tiny.pair.target, *options, "-p", "hello there").stdout
    assert result.returncode == 0
    assert result.stdout.startswith(first)
    assert len(result.stdout) > len(first)
    assert not any(part in result.stdout.replace(first, b"") for part in (b"> ", b"\x1b[", b"cut short"))


def test_piped_what_goes_wrong_is_a_line(tiny: TinyFiles) -> None:
    """And the chat goes on: of two lines the second is answered."""
    fixed = ["chat", tiny.pair.target, "--draft", "none", "--backend", "reference", "--temperature", "0"]
    for options, lines, status, said in (
        ("--ctx 64 --max-tokens 4", b"word " * 60 + b"\nhi", 1, "localspec: the prompt has"),
        ("--ctx 40 --max-tokens 1000", b"hi", 0, "[cut short: the context of 40 tokens is full"),
        ("", b"", 0, ""),
    ):
        result = localspec(*fixed, *options.split(), stdin=lines)
        errors = [line for line in result.stderr.decode().splitlines() if line.startswith(("localspec", "["))]
        assert (result.returncode, bool(result.stdout)) == (status, bool(lines))
        assert [line.startswith(said) for line in errors].count(True) == bool(said)


def test_standard_error_is_free_of_engine_noise(tiny: TinyFiles) -> None:
    command = [*PROGRAM, "chat", str(tiny.pair.target), "--draft", "none", "--max-tokens", "2"]
    result = subprocess.run(command, input=b"hi\n", capture_output=True, check=True, timeout=PATIENCE)
    for line in result.stderr.decode().splitlines():
        assert re.match(r"checking|measuring|\[cut short|note:", line), line


def test_a_line_that_the_history_cannot_keep_is_no_error(tmp_path: Path) -> None:
    history = open_history(tmp_path / "home" / "history")
    history.append_string("half a surrogate \udcff")
    shutil.rmtree(tmp_path / "home")
    history.append_string("no folder")
    assert len(history.get_strings()) == 2
