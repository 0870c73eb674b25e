"""The chat, its file, and its commands. The screen here is a pipe and the LLM a script."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from localspec.commands.chat.chat import AnswerRecord, Chat
from localspec.commands.chat.commands import COMMANDS, GROUPS, NOISE, is_command, named, run_command, verdict
from localspec.commands.chat.prompt import CommandCompleter
from localspec.commands.chat.screen import INDENT, ChatScreen, TextView, guessing, plain_parts, round_parts
from localspec.commands.chat.typesetter import Style, token_style
from localspec.errors import PromptTooLong
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.rounds import PromptProgress, Round
from localspec.system.terminal import width
from tests.support.emulator import Emulator
from tests.support.saved_chats import write_chat
from tests.support.scripted_llm import ScriptedLLM, make_round, speak, think_round
from tests.support.trees import draft_tree


class Scripted:
    """A chat over a script; ``out`` and ``errors`` are what it printed since they were last read."""

    def __init__(self, *answers: str) -> None:
        self.llm = ScriptedLLM([speak(answer) for answer in answers or ("one two three four five",)])
        self._out, self._errors = io.StringIO(), io.StringIO()
        llm: Any = self.llm
        self.chat = Chat(llm, ChatScreen(self._out, self._errors, plain=True), params=SamplingParams())

    def do(self, *lines: str) -> str:
        """Run commands that work; what the last one printed, and its remarks."""
        for line in lines:
            self._read()
            assert run_command(self.chat, line), (line, self.errors)
        return self._read()

    def fail(self, line: str) -> str:
        """Run a command that fails; its error, which is one line."""
        self._read()
        assert not run_command(self.chat, line)
        said = self._read()
        assert said.count("\n") == 1
        return said

    def _read(self) -> str:
        return self.out + self.errors

    out = property(lambda self: _drain(self._out))
    errors = property(lambda self: _drain(self._errors))

    def said(self, role: str) -> list[str]:
        return [message["content"] for message in self.chat.session.messages if message["role"] == role]

    def asked(self, n: int = -1) -> list[str]:
        """The messages that the model saw the nth time."""
        return [message["content"] for message in self.llm.asked[n]]


def _drain(file: io.StringIO) -> str:
    text = file.getvalue()
    file.seek(0)
    file.truncate()
    return text


RECORD = AnswerRecord("cancelled", [{"type": "round"}], {"num_rounds": 1})


def test_a_session_that_a_program_saved_is_loaded(tmp_path: Path) -> None:
    it = Scripted()
    session = it.llm.session("be brief", SamplingParams(top_k=7))
    session.rounds("q").reply  # noqa: B018
    session.save(tmp_path / "a.session", memory=False)
    it.do(f"/load {tmp_path / 'a.session'}")
    assert (it.said("user"), it.chat.records, it.chat.params.top_k) == (["q"], [AnswerRecord()], 7)


DAMAGED: list[bytes | dict[str, Any]] = [
    b"{",
    {"answers": []}, {"answers": 5}, {"answers": [5]}, {"answers": [{"finish_reason": "odd"}]},
    {"answers": [{"rounds": [1]}]}, {"answers": [{"stats": []}]},
    {"draft_length": True}, {"draft_length": 9999}, {"view": "odd"},
]  # fmt: skip
"""Files, and the notes of sessions that are sound but for them."""


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_foreign_file_is_one_line_and_the_chat_stays(
    tmp_path: Path, damage: bytes | dict[str, Any]
) -> None:
    path = tmp_path / "a.chat"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        write_chat(path, ("q", "a", RECORD), **damage)
    it = Scripted()
    assert it.chat.ask("question")

    def state() -> Any:
        chat = it.chat
        return chat.session, list(chat.session.messages), chat.params, chat.view, chat.records, it.llm.draft_length

    before = state()
    it.fail(f"/load {path}")
    assert state() == before


def test_load_restores_what_was_said_and_how(tmp_path: Path) -> None:
    path = tmp_path / "a chat.session"
    it = Scripted("hello there")
    it.do("/system be brief", "/set temperature 0.5", "/length 3", "/view plain")
    assert it.chat.ask("first")
    it.do(f"/save {path}")
    fresh = Scripted("again")
    fresh.do(f"/load {path}")
    assert (fresh.chat.params.temperature, fresh.llm.draft_length, fresh.chat.view) == (0.5, 3, "plain")
    assert fresh.chat.records == it.chat.records
    fresh.chat.ask("second")
    assert fresh.asked() == ["be brief", "first", "hello there", "second"]


def test_a_file_is_not_silently_written_over(tmp_path: Path) -> None:
    path, foreign = tmp_path / "a.chat", tmp_path / "main.py"
    foreign.write_text("print()")
    it = Scripted()
    it.chat.ask("about rivers")
    assert "in place of" not in it.do(f"/save {path}")
    it.chat.ask("and lakes")
    assert "in place of what was saved there before (1 turn)" in it.do(f"/save {path}")
    before = path.read_bytes()
    it.do("/new")
    it.chat.ask("about hills")
    assert "holds another conversation (about rivers)" in it.fail(f"/save {path}")
    it.do("/new")
    assert "holds another conversation (about rivers)" in it.fail(f"/save {path}")
    it.chat.ask("about rivers")
    it.chat.ask("and seas")
    assert "holds another conversation (and lakes)" in it.fail(f"/save {path}")
    assert "not a saved session" in it.fail(f"/save {foreign}")
    assert (path.read_bytes(), foreign.read_text()) == (before, "print()")
    parts: Any = [{"type": "text", "text": "about seas"}]  # as a program may have asked
    write_chat(path, (parts, "an answer", AnswerRecord()))
    assert "about seas" in it.fail(f"/save {path}")


def test_the_model_sees_the_conversation_so_far(isolated_home: Path) -> None:
    it = Scripted("a1", "a2", "a3", "a4", "a\x1b[31mb")
    it.chat.keep_in = isolated_home / "chats" / "a.chat"
    it.chat.ask("q1")
    it.chat.ask("q2")
    assert it.asked() == ["q1", "a1", "q2"]
    assert it.out == "a1\na2\n"
    it.do("/retry")  # asks the same again and replaces the answer
    assert (it.asked(), it.said("assistant")) == (["q1", "a1", "q2"], ["a1", "a3"])
    it.do("/undo", "/system be brief", "/set top_k 7")
    it.chat.ask("q3")
    assert it.asked() == ["be brief", "q1", "a1", "q3"]
    assert "/sessions lists the one before" in it.do("/new")
    it.fail("/undo")
    it.chat.ask("q4")
    assert (it.asked(), it.chat.params.top_k) == (["be brief", "q4"], 7)
    assert it.out == "a\x1b[31mb\n"  # a pipe gets what the model says
    assert len(list((isolated_home / "chats").iterdir())) == 2


def test_a_second_ctrl_c_keeps_what_was_shown_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted("one two three four five six seven", "again")
    shown: list[str] = []

    def interrupt_twice(view: TextView, round_: Round) -> None:
        shown.append(round_.text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextView, "round", interrupt_twice)
        with pytest.raises(KeyboardInterrupt):
            it.chat.ask("q1")
    assert (it.said("user"), it.said("assistant"), len(it.chat.records)) == (["q1"], ["".join(shown)], 1)
    assert it.chat.ask("q2")
    assert it.said("user") == ["q1", "q2"]


def test_an_error_is_one_line_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is a defect of ours, too."""
    it = Scripted("a1")
    it.chat.ask("q1")
    it.do("/retry")
    with monkeypatch.context() as patch:
        for name in ("job", "explain"):
            patch.setattr(it.llm, name, Mock(side_effect=ZeroDivisionError("oops\nagain")))
        said = "localspec: internal error, please report it: ZeroDivisionError: oops again"
        assert not it.chat.ask("q2")
        run_command(it.chat, "/retry")
        assert it.errors.count(said) == 2
        assert said in it.fail("/why")
    assert (it.said("user"), len(it.chat.records)) == (["q1"], 1)
    it.do("/retry")  # the question that failed
    assert it.said("user") == ["q1", "q2"]


@pytest.mark.parametrize("folded", [False, True])
def test_the_chat_says_that_nothing_but_thoughts_came(folded: bool) -> None:
    it = Scripted()
    end = replace(make_round(1, [], ""), finish_reason="stop")
    it.llm.answers = [[think_round("musing"), end], [think_round("musing"), *speak("said")]]
    it.chat.screen.terminal, it.chat.screen.folded = True, folded
    it.chat.ask("why?")
    said = it.out
    assert "no answer came after 1 token of thinking" in said
    assert ("; /think show prints it" in said) is folded
    it.chat.ask("why?")
    assert "no answer came" not in it.out


def test_how_far_a_long_prompt_is_read_is_shown_until_the_answer_comes(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Emulator()
    progress = PromptProgress(4000, 0, 1280, 10.0)
    llm: Any = ScriptedLLM([[progress], [progress, *speak("said")]])
    chat = Chat(llm, terminal.chat_screen(), params=SamplingParams())
    chat.ask("q")
    assert "reading 1,280 of 4,000 tokens · 128 tok/s · 22 s left" in terminal.file.getvalue()
    assert (terminal.text(), "[stopped; nothing was said yet; /" in capsys.readouterr().err) == ("", True)
    chat.ask("q")
    assert terminal.text() == "said"


def broken(text: str) -> list[Round]:
    """An answer that ends before it is whole."""
    return [replace(round_, finish_reason=None) for round_ in speak(text)]


def test_an_answer_that_is_stopped_takes_the_place_of_no_whole_one() -> None:
    it = Scripted("the whole answer", "again")
    it.chat.screen.interactive = True
    it.chat.ask("q")
    it.llm.answers = [broken("a part")]
    assert "[stopped; the answer before stays; /retry asks again]" in it.do("/retry")
    assert (it.said("assistant"), it.chat.records[-1].finish_reason) == (["the whole answer"], "stop")
    it.do("/undo")
    it.chat.ask("q")
    it.llm.answers = [broken("another part")]
    it.do("/retry")  # of two parts the later one
    assert (it.said("assistant"), len(it.chat.records)) == (["another part"], 1)


def test_an_answer_that_fails_in_the_middle_is_kept_and_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted("one two three four five six seven eight", "whole")

    def fail(view: TextView, round_: Round) -> None:
        if round_.index == 1:
            raise PromptTooLong("the engine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(TextView, "round", fail)
        assert not it.chat.ask("q")
    note = "[broken off; what was said is kept; /retry asks again]"
    assert it.errors.splitlines() == ["localspec: the engine is gone", note]
    assert it.said("assistant") == ["one two three four five six "]
    it.do(f"/save {tmp_path / 'a.chat'}")
    again = Scripted()
    again.chat.screen.terminal = True
    assert "[broken off; /retry asks again]" in again.do(f"/load {tmp_path / 'a.chat'}")
    it.do("/retry")
    assert it.said("assistant") == ["whole"]


def test_both_sides_of_a_race_are_asked_alike_and_take_turns() -> None:
    it = Scripted("same words here")
    it.chat.asked = {"think": "off", "thinking_budget": 9}
    it.do("/set temperature 1")
    it.chat.ask("q")
    said = it.do("/race")
    assert [options["speculate"] for options in it.llm.options[1:]] == [False, True, True, False]
    assert {(options["think"], options["thinking_budget"]) for options in it.llm.options} == {("off", 9)}
    assert all(asked == it.llm.asked[0] for asked in it.llm.asked)
    first, *seeds = (params.seed for params in it.llm.params)
    assert (first, len({*seeds}), None in seeds) == (None, 1, False)  # the same dice
    assert (said.count("same words here"), "same text: all" in said, len(it.chat.records)) == (2, True, 1)


def test_a_race_says_where_the_answers_part() -> None:
    for plain, guessed, said in (
        ("a b c d e f", "a b c X e f", "first difference at token 4: plain '<"),
        ("a b c d e f ", "a b c ", "equal for 3 tokens, then one of them ended"),
    ):
        it = Scripted("a b c d e f")
        it.chat.ask("q")
        it.llm.answers = [speak(plain), speak(guessed)]
        assert said in it.do("/race")
    it.llm.answers = [[make_round(0, [], "a "), make_round(1, [], "b", "stop")]]
    it.chat.ask("another")
    n_before = len(it.llm.options)
    assert f"\n{NOISE}\n" in it.do("/race")  # nothing was guessed: run once, and the difference is noise
    assert len(it.llm.options) == n_before + 2


def test_the_verdict_of_a_race() -> None:
    stats = {"completion_tokens": 90, "num_accepted_tokens": 70, "num_draft_tokens": 88}
    for ratios, others, said in (
        ([None], 0.9, NOISE),
        ([1.42, 1.31], 0.01, "With guesses: ×1.31 to ×1.42 of plain; 70 of 88 guesses right."),
        ([0.9, 1.2], 0.0, "No verdict: two races, in both orders, gave ×0.90 to ×1.20 of plain with guesses; 70 of 88"),
        ([1.3, 1.4], 0.34, "Other programs used 34 % of the CPUs meanwhile"),
        ([1.3, None], 0.0, "With guesses: ×1.30 of plain, once;"),
    ):
        assert said in verdict(ratios, stats, others)
        assert "no tokens" in verdict(ratios, stats | {"completion_tokens": 0}, others)


def test_settings() -> None:
    for line in ("/undo", "/retry", "/race", "/stats", "/view oops"):  # there is nothing to do it with
        Scripted().fail(line)
    it = Scripted()
    shown = it.do("/set top_k 40", "/set seed none", r"/set stop \n\n", "/set")
    assert {"seed none", r"stop '\n\n'"} <= set(shown.splitlines())
    assert not set("()") & set(shown)
    assert (it.chat.params.top_k, it.chat.params.seed, it.chat.params.stop) == (40, None, ("\n\n",))
    for line in ("top_k many", "temperature nan", "top_k 1.5", "logit_bias 1", "__class__ 1"):
        it.fail(f"/set {line}")
    it.fail("/length -1")
    assert "did you mean temperature?" in it.fail("/set temprature 1")
    assert it.chat.params.top_k == 40


def test_names_and_completion_of_commands(tmp_path: Path) -> None:
    it = Scripted()
    for name, others in {"new": "clear reset cl", "quit": "exit bye q by", "help": "? h", "view": "vi"}.items():
        assert {named(typed) for typed in others.split()} == {name}
    for typed in ("s", "", "viewer"):  # none, or several
        it.fail(f"/{typed}")
    assert "did you mean /retry or /reset?" in it.fail("/re")
    assert "did you mean /view?" in it.fail("/veiw rounds")
    assert (is_command("/usr/bin/env is a path"), is_command("/view rounds")) == (False, True)
    for line in ("exit", "/bye"):
        it = Scripted()
        it.do(line)
        assert (it.chat.leaving, is_command(line), is_command(f" {line}")) == (True, True, False)
    (tmp_path / "my notes.txt").touch()
    completer, event = CommandCompleter(), CompleteEvent()
    for typed, completed in {
        "/rac": "/race",
        "/clear x": "",
        "/view r": "reading rounds",
        "/draft x ng": "ngram",
        f"/file {tmp_path}/my": " notes.txt",
        "/nonsense ": "",
        "/view\nr": "",
        "view r": "",
    }.items():
        assert " ".join(each.text for each in completer.get_completions(Document(typed), event)) == completed


def test_help_is_in_groups_that_fit_a_small_screen() -> None:
    it = Scripted()
    shown = {group: it.do(f"/help {group}").splitlines() for group in GROUPS}
    assert all(len(lines) <= 20 and max(map(width, lines)) <= 80 for lines in shown.values())
    assert all(any(f"/{name} " in line for line in chain(*shown.values())) for name in COMMANDS)
    assert shown[""][0].startswith("  /new ")
    assert it.do("/help race").count("\n") == 1


def text_of(parts: list[tuple[str, Style]]) -> str:
    return "".join(text for text, _ in parts)


def rows_of(parts: list[tuple[str, Style]], columns: int) -> list[str]:
    """As they are printed where the cursor cannot be moved."""
    shown_on = ChatScreen(plain=True)
    shown_on.size = lambda: (columns + 1, 24)
    return shown_on.rows(parts, INDENT)


def test_round_line_shows_every_guess_and_its_fate() -> None:
    round_ = make_round(4, [("def", "model", True), (" f", "ngram", True), ("(x", "ngram", False)], "(a")
    (line,) = rows_of(round_parts(round_), 80)
    assert all(part in line for part in ("2/3", "model+ngram", "✓def✓ f✗(x →(a"))
    assert "+def+ f-(x >(a" in text_of(round_parts(round_, unicode=False))
    assert "plain" in text_of(round_parts(make_round(0, [], "x")))
    for columns in range(20, 80):
        rows = rows_of(round_parts(round_), columns)
        assert max(map(width, rows)) <= columns
        assert "".join("".join(rows).split()) == "".join(line.split())  # nothing is left out
    assert ("(x", Style.REJECTED) in round_parts(round_)
    branched = make_round(0, [("a", "model", True), ("b", "model", False), ("c", "model", True)], "d")
    branched.draft = draft_tree(branched.draft, [-1, 0, 0])
    branched.verdict = replace(branched.verdict, n_accepted=2, path=(0, 2))
    assert "✓a✗b |✓c" in text_of(round_parts(branched))


def test_plain_rounds_in_a_row_share_a_line_with_all_of_their_text() -> None:
    words = [f"word{i} " for i in range(34)]
    words[9] = "end\n"
    rounds = [make_round(51 + i, [], word) for i, word in enumerate(words)]
    rows = rows_of(plain_parts(rounds), 60)
    assert rows[0].startswith("  52-85 plain, 34 tokens  word0 word1 ")
    assert any(row.endswith("end↵") for row in rows)
    assert " ".join(rows).replace("↵", "").split()[4:] == "".join(words).split()
    assert max(map(width, rows)) <= 60
    it = Scripted()
    it.llm.answers = [[*(make_round(i, [], f"plain{i} ") for i in range(40)), *speak("a b c d e f")]]
    it.do("/view rounds")
    it.chat.ask("q")
    out = it.out
    assert out.startswith("   1-40 plain, 40 tokens  plain0 plain1")
    assert (out.count("plain39"), out.count("WRONG"), out.count("\n") < 12) == (1, 1, True)


def test_who_guesses_is_one_sentence() -> None:
    names = ["ngram", "corpus:~/src", "head", "SmolLM2-135M-Instruct.Q4_1", "Item-Editor"]
    who = "Guessing by copying from the text, copying from ~/src, head, SmolLM2-135M and Item-Editor"
    assert (guessing(names), guessing(names, "loading")) == (f"{who}.", f"{who}; loading.")


@pytest.mark.parametrize("columns", [24, 50, 80])
def test_the_legend_has_the_kinds_in_use_and_is_broken_between_them(columns: int) -> None:
    def legend(drafters: list[str], follows: str) -> str:
        terminal = Emulator(columns)
        terminal.chat_screen().legend(drafters, follows)
        return re.sub("\x1b\\[[0-9;]*m", "", terminal.file.getvalue())

    assert legend([], "") == ""
    for drafters, follows, shown in (
        (["ngram", "early-exit:2"], "", {"by head", "copied"}),
        (["ngram", "head-of-state"], "", {"guessed by draft model", "copied"}),
        (["ngram"], "loading the draft model", {"guessed by draft model", "copied"}),
        (["corpus:x", "head", "m"], "", {"guessed by draft model", "by head", "from your files"}),
    ):
        rows = legend(drafters, follows).splitlines()
        assert max(map(width, rows)) <= columns
        kinds = [kind.strip() for row in rows for kind in row.split("·") if kind.strip()]
        assert ({*kinds[:-2]}, kinds[-2:]) == (shown, ["wrong guess", "the model's own"])
    styles = [token_style("accepted", source) for source in ("model", "ngram", "head", "early-exit")]
    assert (len({*styles}), token_style("bonus", "head")) == (3, Style.TARGET)
