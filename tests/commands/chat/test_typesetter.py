"""What streaming leaves on a screen, as a terminal emulator sees it."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pyte
import pytest

from localspec.commands.chat.screen import TokensView
from localspec.commands.chat.typesetter import Style, Typesetter
from localspec.spec_decode.rounds import Draft, SpecStats
from localspec.system.terminal import clip, on_one_line, visible, width
from tests.support.scripted_llm import make_round
from tests.support.tmux import Tmux

GHOST = "GHOST"


class Paper:
    """A typesetter on an emulated screen."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=1000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.file = io.StringIO()
        self.setter = Typesetter(self.file, size=lambda: (columns, lines))

    def update(self) -> list[str]:
        """Feed what was written to the screen; all lines, scrolled ones too."""
        self._stream.feed(self.file.getvalue())
        self.file.seek(0)
        self.file.truncate()
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        return [line.rstrip() for line in above + self.screen.display]

    def text(self) -> str:
        return "\n".join(self.update()).rstrip()


def stream(paper: Paper, text: str, seed: int) -> None:
    """Write a text in random pieces, a tail after each."""
    rng = random.Random(seed)
    at = 0
    while at < len(text):
        step = rng.randint(1, 12)
        paper.setter.write(text[at : at + step], rng.choice([Style.TARGET, Style.MODEL, Style.NGRAM]))
        paper.setter.tail([(GHOST * rng.randint(0, 30), Style.REJECTED)], "STATUS " * rng.randint(1, 20))
        at += step
    paper.setter.finish()


def code(columns: int, seed: int, alphabet: str) -> str:
    """A code block with lines of up to three times the width of the screen."""
    rng = random.Random(seed)
    lines = (
        "    " * rng.randint(0, 3) + "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 3 * columns)))
        for _ in range(15)
    )
    return "```\n" + "\n".join(lines) + "\n```"


@pytest.mark.parametrize("columns", [20, 37, 80])
@pytest.mark.parametrize("seed", range(3))
def test_code_is_left_as_a_terminal_would_print_it(columns: int, seed: int) -> None:
    text = code(columns, seed, "abc_()= ")
    paper = Paper(columns)
    stream(paper, text, seed)
    plain = Paper(columns)
    plain._stream.feed(text.replace("\n", "\r\n"))
    assert paper.text() == plain.text()


def test_wide_characters_in_code_on_a_real_terminal(tmp_path: Path) -> None:
    # The emulator above puts half of a wide character into the last cell; real terminals take the next line.
    text = code(37, 3, "ab= 你好")
    (tmp_path / "text").write_text(text + "\n")
    script = (
        "import sys; from tests.commands.chat import test_typesetter as t\n"
        "from localspec.commands.chat.typesetter import Typesetter\n"
        "paper = t.Paper(37); paper.setter = Typesetter(sys.stdout)\n"
        "t.stream(paper, open(sys.argv[1]).read().rstrip('\\n'), 3)"
    )
    screens = []
    for name, command in {
        "ours": [sys.executable, "-c", script, str(tmp_path / "text")],
        "cat": ["cat", str(tmp_path / "text")],
    }.items():
        (tmp_path / name).mkdir()
        terminal = Tmux(command, tmp_path / name, {"PYTHONPATH": str(Path(__file__).parents[3])}, columns=37)
        screens.append(terminal.wait("EXIT 0"))
        terminal.close()
    assert screens[0] == screens[1]


@pytest.mark.parametrize("columns", [20, 37, 80])
@pytest.mark.parametrize("seed", range(3))
def test_prose_keeps_its_words_whole_and_in_order(columns: int, seed: int) -> None:
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefgéß") for _ in range(rng.randint(1, 14))) for _ in range(100)]
    paper = Paper(columns)
    stream(paper, " ".join(words), seed)
    text = paper.text()
    assert text.split() == words
    assert all(width(line) <= columns for line in text.split("\n"))
    assert all(not line.startswith(" ") for line in text.split("\n"))


def test_a_tail_is_seen_and_then_gone() -> None:
    paper = Paper()
    paper.setter.write("kept ")
    paper.setter.tail([("wrong guess", Style.REJECTED), (" right", Style.TARGET)], "the status")
    lines = paper.update()
    assert lines[0] == "kept wrong guess right"
    assert lines[1] == "the status"
    row = paper.screen.buffer[0]
    assert row[5].strikethrough
    assert row[15].strikethrough
    assert not row[4].strikethrough
    assert not row[17].strikethrough
    assert (paper.screen.cursor.x, paper.screen.cursor.y) == (0, 0)
    paper.setter.write("right")
    paper.setter.finish()
    assert paper.text() == "kept right"


def test_a_tail_on_the_last_line_scrolls_and_is_erased() -> None:
    paper = Paper(columns=20, lines=6)
    paper.setter.write("a\nb\nc\nd\ne\n0123456789012345")
    paper.setter.tail([(GHOST * 4, Style.REJECTED)], "status")
    assert "GHOST" in paper.text()
    assert paper.update()[-1] == "status"
    paper.setter.write("6")
    paper.setter.finish()
    assert paper.text() == "a\nb\nc\nd\ne\n01234567890123456"


def test_a_line_that_ends_at_the_edge_is_followed_by_no_empty_one() -> None:
    paper = Paper(columns=10)
    for piece in ("```\n", "0123456789", "\nx\n```"):
        paper.setter.write(piece)
        paper.setter.tail([], "s")
    paper.setter.finish()
    assert paper.text() == "```\n0123456789\nx\n```"


def test_a_window_too_low_for_a_tail_shows_none() -> None:
    paper = Paper(lines=3)
    paper.setter.write("text that")
    paper.setter.tail([(GHOST, Style.REJECTED)], "status")
    assert paper.text() == "text that"


def test_control_characters_never_reach_the_terminal() -> None:
    file = io.StringIO()
    setter = Typesetter(file, size=lambda: (80, 24))
    setter.write("a\x1b]0;owned\x07b\x9b31mc\r\x08\x7f\u202ed")
    setter.tail([("\x1b[2J\n", Style.REJECTED)], "\x1b[H")
    text = file.getvalue()
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert not set("\x07\x9b\x08\x7f\u202e") & set(text)
    assert "a␛]0;owned␇b\ufffd31mc␍␈␡\ufffdd" in text


def test_every_source_has_its_own_colour_and_its_own_attribute() -> None:
    kinds = (Style.TARGET, Style.MODEL, Style.NGRAM, Style.REJECTED)
    assert len({style.sgr(colour=True) for style in kinds}) == len(kinds)
    assert len({style.sgr(colour=False) for style in kinds}) == len(kinds)
    assert not any(code in style.sgr(colour=False) for style in Style for code in ("31", "32", "34", "36"))


def test_view_shows_the_rejected_guess_in_place_of_what_replaced_it() -> None:
    screen = pyte.Screen(80, 24)
    terminal = pyte.Stream(screen)
    file = io.StringIO()
    view = TokensView(file, SpecStats(), colour=True)

    def show() -> str:
        terminal.feed(file.getvalue())
        file.seek(0)
        file.truncate()
        return "\n".join(line.rstrip() for line in screen.display).rstrip()

    view.round(make_round(0, [("one ", "model", True), ("two ", "model", False)], "three "))
    assert show().startswith("one two three")
    assert screen.buffer[0][4].strikethrough
    assert screen.buffer[0][0].bold
    view.round(make_round(1, [("four ", "ngram", True)], "five"))
    assert show().startswith("one three four five")
    assert screen.buffer[0][10].underscore
    view.round(make_round(2, [("six", "ngram", False)], "!", finish="stop"))
    view.finish()
    assert show() == "one three four five!"


def test_view_shows_rejected_branches_apart() -> None:
    screen, file = pyte.Screen(80, 24), io.StringIO()
    view = TokensView(file, SpecStats(), colour=True)
    round_ = make_round(0, [("one ", "model", True), ("two", "model", False), ("2", "model", False)], "three ")
    round_.draft = Draft(list(round_.draft), [-1, 0, 0])
    view.round(round_)
    pyte.Stream(screen).feed(file.getvalue())
    assert screen.display[0].startswith("one two | 2three")


@pytest.mark.parametrize(
    ("text", "cells", "clipped"), [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("你好吗", 4, "你…"), ("abc", 0, "")]
)
def test_clip(text: str, cells: int, clipped: str) -> None:
    assert clip(text, cells) == clipped
    assert width(clipped) <= max(cells, 0)


def test_visible_keeps_ordinary_text() -> None:
    assert visible("a\tb\nc\r\nd é 你 🙂") == "a\tb\nc\nd é 你 🙂"
    assert on_one_line("a\tb\n") == "a⇥b↵"
