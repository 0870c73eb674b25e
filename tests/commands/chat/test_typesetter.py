"""What streaming leaves on a screen, as a terminal emulator sees it."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.commands.chat.screen import TokensView
from localspec.commands.chat.typesetter import Style, Typesetter
from localspec.spec_decode.rounds import SpecStats
from localspec.system.terminal import clip, on_one_line, visible, width
from tests.support.emulator import Emulator
from tests.support.scripted_llm import make_round, think_round
from tests.support.tmux import Tmux
from tests.support.trees import draft_tree

GHOST = "GHOST"


class Paper(Emulator):
    """A typesetter on an emulated screen."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        super().__init__(columns, rows)
        self.setter = Typesetter(self.chat_screen())


def stream(setter: Typesetter, text: str, seed: int) -> None:
    """Write a text in random pieces, a tail after each."""
    rng = random.Random(seed)
    at = 0
    while at < len(text):
        step = rng.randint(1, 12)
        setter.write(text[at : at + step], rng.choice([Style.TARGET, Style.MODEL, Style.NGRAM]))
        setter.tail([(GHOST * rng.randint(0, 30), Style.REJECTED)], "STATUS " * rng.randint(1, 20))
        at += step
    setter.finish()


def code(columns: int, seed: int, alphabet: str) -> str:
    """A code block with lines of up to three times the width of the screen."""
    rng = random.Random(seed)
    lines = (
        "    " * rng.randint(0, 3) + "".join(rng.choices(alphabet, k=rng.randint(0, 3 * columns))) for _ in range(15)
    )
    return "\n".join(["```", *lines, "```"])


@pytest.mark.parametrize("columns", [20, 37, 80])
def test_code_is_left_as_a_terminal_would_print_it(columns: int) -> None:
    text = code(columns, 0, "abc_()= ")
    paper, plain = Paper(columns), Emulator(columns)
    stream(paper.setter, text, 0)
    plain.feed(text.replace("\n", "\r\n"))
    assert paper.text() == plain.text()


def test_wide_characters_in_code_on_a_real_terminal(tmp_path: Path) -> None:
    """A real one leaves the last cell as it was before a wide character."""
    (tmp_path / "text").write_text(code(37, 3, "ab= 你好") + "\n")
    script = (
        "import sys; from tests.commands.chat import test_typesetter as t\n"
        "from localspec.commands.chat.screen import ChatScreen\n"
        "t.stream(t.Typesetter(ChatScreen()), open(sys.argv[1]).read().rstrip('\\n'), 3)"
    )
    screens = []
    for i, program in enumerate(([sys.executable, "-c", script], ["cat"])):
        folder = tmp_path / str(i)
        folder.mkdir()
        environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
        terminal = Tmux([*program, str(tmp_path / "text")], folder, environment, columns=37)
        screens.append(terminal.wait("EXIT 0"))
        terminal.close()
    assert screens[0] == screens[1]


@pytest.mark.parametrize("columns", [20, 37, 80])
@pytest.mark.parametrize("seed", range(3))
def test_prose_keeps_its_words_whole_and_in_order(columns: int, seed: int) -> None:
    """A word longer than a row is the terminal's to break, so that an address can be copied: no line ends in it."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefgéß") for _ in range(rng.randint(1, 14))) for _ in range(100)]
    paper = Paper(columns)
    stream(paper.setter, " ".join(words), seed)
    text = paper.text()
    assert text.split() == words
    assert all(width(line) <= columns and not line.startswith(" ") for line in text.split("\n"))
    address = "http://example.com/" + "x" * columns
    paper = Paper(columns)
    paper.setter.write(f"see {address} there")
    paper.setter.finish()
    assert address in paper.file.getvalue()
    assert "".join(paper.text().split()) == f"see{address}there"


@pytest.mark.parametrize(
    ("size", "pieces", "shown", "left"),
    [
        # On the last line it scrolls and is erased.
        ((20, 6), ["a\nb\nc\nd\ne\n0123456789012345", "6"], f"{GHOST}\nstatus", "a\nb\nc\nd\ne\n01234567890123456"),
        # A line that ends at the edge is followed by no empty one.
        ((10, 24), ["```\n", "0123456789", "\nx\n```"], f"{GHOST}\nstatus", "```\n0123456789\nx\n```"),
        ((10, 24), ["one word45", " next\n\n", "end"], f"{GHOST}\nstatus", "one word45\nnext\n\nend"),
        # Prose after code is wrapped again.
        ((10, 24), ["```\nx\n```\n", "one two three"], f"{GHOST}\nstatus", "```\nx\n```\none two\nthree"),
        # A window too low shows none.
        ((80, 3), ["text ", "that"], "text that", "text that"),
    ],
)
def test_edges(size: tuple[int, int], pieces: list[str], shown: str, left: str) -> None:
    paper = Paper(*size)
    for piece in pieces:
        paper.setter.write(piece)
        paper.setter.tail([(GHOST, Style.REJECTED)], "status")
        assert max(map(len, paper.update())) <= size[0]
    assert "".join(paper.text().split()).endswith("".join(shown.split()))
    paper.setter.finish()
    assert paper.text() == left


def test_control_characters_never_reach_the_terminal() -> None:
    paper = Paper()
    paper.setter.write("a\x1b]0;owned\x07b\x9b31mc\r\x08\x7f\u202ed")
    paper.setter.tail([("\x1b[2J\n", Style.REJECTED)], "\x1b[H")
    text = paper.file.getvalue()
    assert not re.search("\x1b\\]|\x1b\\[2J|[\x07\x9b\x08\x7f\u202e]", text)
    assert "a␛]0;owned␇b\ufffd31mc␍␈␡\ufffdd" in text


def test_every_source_has_its_own_colour_and_its_own_attribute() -> None:
    kinds = (Style.TARGET, Style.MODEL, Style.NGRAM, Style.REJECTED)
    for colour in (True, False):
        paint = Emulator().chat_screen(colour=colour).paint
        assert len({paint("x", style) for style in kinds}) == len(kinds)


def test_the_rejected_guess_is_seen_in_place_of_what_replaced_it_and_branches_apart() -> None:
    terminal = Emulator()
    view, cells = TokensView(terminal.chat_screen(), SpecStats()), terminal.screen.buffer[0]
    view.round(make_round(0, [("one ", "model", True), ("two ", "model", False)], "three "))
    assert terminal.text().startswith("one two three")
    assert (cells[4].strikethrough, cells[0].bold) == (True, True)
    view.round(make_round(1, [("four ", "ngram", True)], "five"))
    assert terminal.text().startswith("one three four five")
    assert cells[10].underscore
    view.round(make_round(2, [("six", "ngram", False)], "!", finish="stop"))
    view.finish()
    assert terminal.text() == "one three four five!"
    terminal = Emulator()
    view = TokensView(terminal.chat_screen(), SpecStats())
    round_ = make_round(0, [("one ", "model", True), ("two", "model", False), ("2", "model", False)], "three ")
    round_.draft = draft_tree(round_.draft, [-1, 0, 0])
    view.round(round_)
    assert terminal.text().startswith("one two | 2three")


@pytest.mark.parametrize("folded", [False, True])
def test_thinking_is_dim_or_folded_away_and_its_marks_are_left_out(folded: bool) -> None:
    terminal = Emulator()
    view, mark = TokensView(terminal.chat_screen(folded=folded), SpecStats()), think_round("</think>")
    view.round(think_round("musing"))
    view.round(replace(mark, spans=[replace(mark.spans[0], part="mark")]))
    view.round(make_round(1, [], "said"))
    view.finish()
    shown = terminal.file.getvalue()
    assert ("\x1b[2;3mmusing" in shown, "thinking, " in shown) == (not folded, folded)
    assert ("</think>" in shown, "said" in shown) == (False, True)


def test_text_in_cells() -> None:
    for text, cells, clipped in (("abc", 3, "abc"), ("abcd", 3, "ab…"), ("你好吗", 4, "你…"), ("abc", 0, "")):
        assert (clip(text, cells), width(clipped) <= cells) == (clipped, True)
    assert visible("a\tb\nc\r\nd é 你 🙂") == "a\tb\nc\nd é 你 🙂"
    assert on_one_line("a\tb\n") == "a⇥b↵"
