"""What the reading view leaves on a screen, as a terminal emulator sees it."""

from __future__ import annotations

import random
import re

import pytest

from localspec.commands.chat import screen as screen_module
from localspec.commands.chat.screen import ReadingView
from localspec.commands.chat.typesetter import blocks, code_blocks
from localspec.spec_decode.rounds import Round, SpecStats
from localspec.system.terminal import visible
from tests.support.emulator import Emulator
from tests.support.scripted_llm import make_round, think_round

CODE = "\n".join(f'line_{i} = f"{{{i}}}" if {i} else None  # {"long " * (i % 7)}' for i in range(40))
ANSWER = f"""# A title

Some **bold words** and `code`, a [link](http://example.com/a) and \\(a_1 * b_2 * c\\) in a long paragraph that wraps.

2. second
3. third
   - nested *item*
   ```sh
   ls -l
   ```

| a | b |
|---|--:|
| one | 2 |
| three four five six | 40000 |

```python
def f():
    \"\"\"A docstring
    of two lines.\"\"\"
{CODE}
```

> quoted <b>html</b>
lazily

宽字符也必须保持可读，不能在行尾被切成两半。 🙂 done

[1]: http://example.com/definition

\x1b]0;title\x07 \x1b[2J [a](http://e.example "t") ![i](http://e.example/i.png)

```\x1b[31m
\x9b2J
```

| \x1b[H |
|---|
| \x07 |
"""
"""With what would act on the terminal."""

SIZES = [(80, 24), (33, 10), (12, 7), (40, 3)]


class Terminal(Emulator):
    """A reading view on an emulated screen; every round is drawn."""

    def __init__(self, columns: int, rows: int, monkeypatch: pytest.MonkeyPatch, **look: bool) -> None:
        monkeypatch.setattr(screen_module, "PAUSE", -1.0)
        super().__init__(columns, rows)
        self.stats = SpecStats()
        shown_on = self.chat_screen(**look)
        self.view = ReadingView(shown_on, self.stats)
        shown_on.wait("reading")
        self.update()

    def say(self, text: str) -> list[str]:
        return self.show(make_round(0, [], text))

    def show(self, round_: Round) -> list[str]:
        self.stats.add(round_)
        self.view.round(round_)
        return self.update()

    def finish(self) -> list[str]:
        self.view.finish()
        return self.update()

    @property
    def n_settled(self) -> int:
        """Lines above the cursor, which rests where the part that may change begins."""
        return len(self.screen.history.top) + self.screen.cursor.y


def wanted(text: str, columns: int) -> list[str]:
    """The text rendered at once, as the emulator shows it."""
    terminal = Emulator(columns, 4000)
    terminal.feed("\r\n".join(terminal.chat_screen().whole(visible(text))))
    return terminal.text().split("\n")


def pieces(text: str, seed: int, longest: int = 60) -> list[str]:
    rng, at, cut = random.Random(seed), 0, []
    while at < len(text):
        cut.append(text[at : at + rng.randint(1, longest)])
        at += len(cut[-1])
    return cut


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_what_is_printed_stays_and_the_end_is_the_text_rendered_at_once(
    columns: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, final = Terminal(columns, lines, monkeypatch), wanted(ANSWER, columns)
    for piece in pieces(ANSWER, seed=columns, longest=90):
        shown = terminal.say(piece)
        n = terminal.n_settled
        assert shown[:n] == final[:n]
        assert terminal.written.count("\x1b[J") == 1  # and what is below is erased after it was replaced
        sequences = set(re.findall(r"\x1b(?:\[[?0-9;]*[A-Za-z]|.)", terminal.written))
        assert all(re.fullmatch(r"\x1b\[(\?(25|7)[hl]|K|J|\d+A|[0-9;]*m)", each) for each in sequences), sequences
        assert not set("\x07\x9b") & set(terminal.written)
    shown = terminal.finish()
    assert "\n".join(shown).rstrip().split("\n") == final
    assert "tok/s" not in "\n".join(shown)
    assert not terminal.screen.cursor.hidden


def test_the_status_is_below_and_the_text_above_it_is_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(60, 20, monkeypatch)
    for piece, text in (("A **bo", "A **bo"), ("ld** word", "A bold word")):
        first, second = filter(None, terminal.say(piece))
        assert (first, "nothing guessed" in second) == (text, True)


def test_code_longer_than_the_screen_can_be_scrolled_back_to_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(100, 12, monkeypatch)
    shown: list[str] = []
    for piece in pieces("```python\n" + CODE + "\n", seed=1):
        shown = terminal.say(piece)
        assert terminal.screen.cursor.y <= 11
    numbers = re.findall(r"^line_(\d+)", "\n".join(shown), re.MULTILINE)
    assert (shown[0], numbers) == ("── 1 python ──", [*map(str, range(40))])


def test_a_window_that_is_resized_gets_whole_lines_of_the_new_width(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(60, 12, monkeypatch)
    cut = pieces(ANSWER, seed=3)
    for piece in cut[: len(cut) // 2]:
        terminal.say(piece)
    terminal.resize(34, 9)
    for piece in cut[len(cut) // 2 :]:
        terminal.say(piece)
    shown = terminal.finish()
    numbers = [int(n) for line in shown for n in re.findall(r"^line_(\d+) =", line)]
    assert numbers[-20:] == list(range(20, 40))


def test_without_colours_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(70, 20, monkeypatch, colour=False)
    terminal.say("`code` and **bold**\n\n```python\nif True: pass\n```\n")
    terminal.view.finish()
    written = terminal.written + terminal.file.getvalue()
    assert "\x1b[1m" in written
    assert not re.search(r"\x1b\[(?:[0-9;]*;)?(3[0-7]|4[0-7]|9[0-7])m", written)


def test_nothing_of_a_text_is_lost_between_blocks() -> None:
    assert "\n".join(blocks(ANSWER)) == ANSWER
    assert [code.split("\n")[0] for code in code_blocks(ANSWER)][:2] == ["ls -l", "def f():"]
    shown = "\n".join(wanted(ANSWER, 100))
    for words in (
        "\\(a_1 * b_2 * c\\)", "<b>html</b>", "[1]: http://example.com/definition", "── 2 python ──",
        "http://e.example", "␛]0;title␇",
    ):  # fmt: skip
        assert words in shown


THOUGHT = "\nFirst *this*, which is a line that a narrow window cannot hold.\n\n1. 宽字符也必须保持可读\n- that\n"


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_thinking_is_dim_text_above_the_answer(columns: int, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(columns, lines, monkeypatch)
    settled: list[str] = []
    written = ""
    for piece in pieces(THOUGHT, seed=4, longest=9):
        shown = terminal.show(think_round(piece))
        assert shown[: len(settled)] == settled
        settled = shown[: terminal.n_settled]
        written += terminal.written
    terminal.say("\n\nThe **ans")
    written += terminal.written
    assert "- that" in re.findall(r"\x1b\[2;3m(.*?)\x1b\[0m", written)
    terminal.say("wer**")
    shown = terminal.finish()
    thought, answer = "\n".join(shown).rstrip().rsplit("\n\n", 1)
    assert answer == "The answer"
    assert "".join(thought.split()) == "".join(THOUGHT.split())
    assert thought.count("\n\n") == 1


def test_folded_thinking_is_counted_and_goes_and_what_was_stopped_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(60, 10, monkeypatch, folded=True)
    for i in range(3):
        shown = terminal.show(think_round("secret\n\nthoughts "))
        assert shown[0] == f"thinking, {i + 1} tokens …"
    assert terminal.say("Said.")[0] == "Said."
    assert [line for line in terminal.finish() if line] == ["Said."]
    for round_, left in ((think_round("half a"), ["half a"]), (make_round(0, [], "\n \n"), [])):
        terminal = Terminal(60, 10, monkeypatch)
        terminal.show(round_)
        assert [line for line in terminal.finish() if line] == left


def test_nothing_is_cut_off_where_there_is_little_room() -> None:
    text = "| method | example |\n|---|---|\n| `list.sort(reverse=True)` | `items.sort(reverse=True)` and more |\n"
    cells = "".join(wanted(text, 30))
    assert sorted(filter(str.isalpha, cells)) == sorted(filter(str.isalpha, text))
    assert wanted("![alt](http://e.example/i.png) <http://e.example>", 80) == [
        "!alt (http://e.example/i.png) <http://e.example>"
    ]
