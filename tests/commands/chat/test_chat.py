"""The chat, its file, and its commands. The screen here is a pipe and the LLM a script."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from localspec.commands.chat.chat import AnswerRecord, Chat
from localspec.commands.chat.commands import (
    COMMANDS,
    GROUPS,
    NOISE,
    complete,
    histogram,
    is_command,
    named,
    run_command,
    set_parameter,
    verdict,
)
from localspec.commands.chat.screen import (
    ChatScreen,
    TextView,
    guessing,
    plain_parts,
    round_parts,
    rows_of,
    status_line,
)
from localspec.commands.chat.typesetter import Style, token_style
from localspec.errors import PromptTooLong, UsageError
from localspec.model_files.catalog import short_name
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.rounds import Draft, Round, SpecStats
from localspec.system.terminal import width
from tests.support.saved_chats import write_chat
from tests.support.scripted_llm import ScriptedLLM, make_round, speak


class Scripted:
    """A chat over a script; ``out`` and ``errors`` are what it printed since they were last read."""

    def __init__(self, *answers: str) -> None:
        self.llm = ScriptedLLM([speak(answer) for answer in answers or ("one two three four five",)])
        self._out, self._errors = io.StringIO(), io.StringIO()
        llm: Any = self.llm
        self.chat = Chat(llm, ChatScreen(self._out, self._errors, plain=True), params=SamplingParams())

    def run(self, line: str) -> bool:
        return run_command(self.chat, line)

    @property
    def out(self) -> str:
        return _drain(self._out)

    @property
    def errors(self) -> str:
        return _drain(self._errors)


def _drain(file: io.StringIO) -> str:
    text = file.getvalue()
    file.seek(0)
    file.truncate()
    return text


def answers(it: Scripted) -> list[str]:
    return [message["content"] for message in it.chat.session.messages if message["role"] == "assistant"]


def questions(it: Scripted) -> list[str]:
    return [message["content"] for message in it.chat.session.messages if message["role"] == "user"]


def former(**changes: Any) -> bytes:
    """A chat as it was saved before chats were sessions."""
    document: dict[str, Any] = {
        "format": "localspec-chat",
        "version": 1,
        "model": "m",
        "draft": [],
        "backend": "b",
        "settings": {"sampling": {}, "draft_length": "auto", "view": "tokens"},
        "system": None,
        "turns": [],
    }
    return json.dumps(document | changes).encode()


TURN = {"user": "q é\x1b", "assistant": "a\n```\nb```", "finish_reason": "stop", "rounds": [], "stats": {}}
RECORD = AnswerRecord("cancelled", [{"type": "round"}], {"num_rounds": 1})


def test_a_chat_of_before_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    settings = {"sampling": {"temperature": 0.5, "stop": ["\n\n"]}, "draft_length": 4, "view": "lane"}
    path.write_bytes(former(settings=settings, system="be brief", turns=[TURN | {"rounds": [{"type": "round"}]}]))
    it = Scripted()
    assert it.run(f"/load {path}"), it.errors
    assert [m["content"] for m in it.chat.session.messages] == ["be brief", TURN["user"], TURN["assistant"]]
    assert it.chat.records == [AnswerRecord("stop", [{"type": "round"}], {})]
    assert (it.chat.params, it.chat.view) == (SamplingParams(temperature=0.5, stop=("\n\n",)), "rounds")
    assert it.llm.draft_length == 4


def test_a_session_that_a_program_saved_is_loaded(tmp_path: Path) -> None:
    it = Scripted()
    session = it.llm.session("be brief", SamplingParams(top_k=7))
    session.rounds("q").reply  # noqa: B018
    session.save(tmp_path / "a.session", memory=False)
    assert it.run(f"/load {tmp_path / 'a.session'}"), it.errors
    assert questions(it) == ["q"]
    assert (it.chat.records, it.chat.params.top_k) == ([AnswerRecord()], 7)
    assert it.run("/undo")
    assert it.chat.records == []


def test_save_spares_files_that_are_no_sessions(tmp_path: Path) -> None:
    path = tmp_path / "main.py"
    path.write_text("print()")
    it = Scripted()
    assert not it.run(f"/save {path}")
    assert "not a saved session" in it.errors
    assert path.read_text() == "print()"


DAMAGED: list[bytes | dict[str, Any]] = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b"[]",
    b'{"format": "other"}',
    former(version=2),
    former(turns=5),
    former(turns=[5]),
    former(turns=[TURN | {"user": 1}]),
    former(turns=[{"user": "u"}]),
    former(system=7),
    former(settings={"sampling": {"temperature": -1}, "draft_length": "auto", "view": "tokens"}),
    former(settings={"sampling": {"magic": 1}, "draft_length": "auto", "view": "tokens"}),
    former(settings={"sampling": {}, "draft_length": 9999, "view": "tokens"}),
    {"answers": []},
    {"answers": 5},
    {"answers": [5]},
    {"answers": [{"finish_reason": "odd"}]},
    {"answers": [{"rounds": [1]}]},
    {"answers": [{"stats": []}]},
    {"draft_length": True},
    {"draft_length": 9999},
    {"view": "odd"},
]
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
    assert not it.run(f"/load {path}")
    assert it.errors.count("\n") == 1
    assert state() == before


def test_load_restores_what_was_said_and_how(tmp_path: Path) -> None:
    path = tmp_path / "a chat.session"
    it = Scripted("hello there")
    it.run("/system be brief")
    it.run("/set temperature 0.5")
    it.run("/length 3")
    it.run("/view plain")
    assert it.chat.ask("first")
    assert it.run(f"/save {path}")
    fresh = Scripted("again")
    assert fresh.run(f"/load {path}")
    assert (fresh.chat.params.temperature, fresh.llm.draft_length, fresh.chat.view) == (0.5, 3, "plain")
    fresh.chat.ask("second")
    assert [m["content"] for m in fresh.llm.asked[-1]] == ["be brief", "first", "hello there", "second"]
    assert fresh.chat.records[0].rounds[0]["type"] == "round"
    assert fresh.chat.records[0].stats["num_rounds"] == 1


def test_the_model_sees_the_conversation_so_far() -> None:
    it = Scripted("a1", "a2", "a3")
    for question in ("q1", "q2"):
        it.chat.ask(question)
    assert [m["content"] for m in it.llm.asked[-1]] == ["q1", "a1", "q2"]
    it.run("/undo")
    it.chat.ask("q3")
    assert [m["content"] for m in it.llm.asked[-1]] == ["q1", "a1", "q3"]
    assert it.out == "a1\na2\na3\n"


def test_retry_asks_the_same_again_and_replaces_the_answer() -> None:
    it = Scripted("a1", "a2", "a3")
    it.chat.ask("q1")
    it.chat.ask("q2")
    it.run("/retry")
    assert it.llm.asked[-1] == it.llm.asked[-2]
    assert answers(it) == ["a1", "a3"]


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
    assert (questions(it), answers(it), len(it.chat.records)) == (["q1"], ["".join(shown)], 1)
    assert it.chat.ask("q2")
    assert questions(it) == ["q1", "q2"]


def test_an_error_in_a_turn_is_one_line_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted("a1")
    it.chat.ask("q1")
    it.run("/retry")
    it.out  # noqa: B018

    def fail(*args: Any, **options: Any) -> Any:
        raise PromptTooLong("the prompt has 9 tokens\nand the context holds 8")

    with monkeypatch.context() as patch:
        patch.setattr(it.llm, "submitter", fail)
        assert not it.chat.ask("q2")
        it.run("/retry")
    assert it.errors == "localspec: the prompt has 9 tokens and the context holds 8\n" * 2
    assert questions(it) == ["q1"]
    it.run("/retry")  # the question that failed
    assert questions(it) == ["q1", "q2"]


def test_a_defect_of_ours_in_a_turn_costs_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted("a1")
    it.chat.ask("q1")

    def fail(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(it.llm, "submitter", fail)
    monkeypatch.setattr(it.llm, "explain", fail)
    assert not it.chat.ask("q2")
    assert not it.run("/why")
    assert it.errors.count("internal error, please report it: ZeroDivisionError: oops") == 2
    assert len(it.chat.records) == 1


def test_nothing_to_undo_retry_race_or_count() -> None:
    for line in ("/undo", "/retry", "/race", "/stats"):
        it = Scripted()
        assert not it.run(line), line
        assert it.errors.count("\n") == 1


def test_race_names_who_ran_first_and_takes_turns() -> None:
    it = Scripted("same words here")
    it.chat.ask("q")
    it.out  # noqa: B018
    it.run("/race")
    first = it.out
    it.run("/race")
    second = it.out
    order = [False, True, True, False, True, False, False, True]  # each twice, the second time in the other order
    assert [options["speculate"] for options in it.llm.options[1:]] == order
    assert "plain (ran first)" in first
    assert "with guesses (ran first)" in second
    assert "same text: all" in first
    assert first.count("same words here") == 2
    assert len(it.chat.records) == 1


def test_both_sides_of_a_race_think_as_the_answers_do() -> None:
    it = Scripted()
    it.chat.asked = {"think": "off", "thinking_budget": 9}
    it.chat.ask("q")
    it.run("/race")
    assert [(options["think"], options["thinking_budget"]) for options in it.llm.options] == [("off", 9)] * 5


def test_both_sides_of_a_race_get_the_same_dice() -> None:
    it = Scripted()
    it.run("/set temperature 1")
    it.chat.ask("q")
    it.run("/race")
    assert it.llm.params[0] is not None
    assert it.llm.params[0].seed is None
    assert it.llm.params[1] == it.llm.params[2]
    assert it.llm.params[1] is not None
    assert it.llm.params[1].seed is not None
    assert it.llm.asked[0] == it.llm.asked[1] == it.llm.asked[2]


def test_race_shows_the_first_difference() -> None:
    it = Scripted("a b c d e f")
    it.chat.ask("q")
    it.llm.answers = [speak("a b c d e f"), speak("a b c X e f")]
    it.out  # noqa: B018
    it.run("/race")
    assert "first difference at token 4: plain '<" in it.out


def test_a_race_that_ends_early_on_one_side_says_so() -> None:
    it = Scripted("a b c d e f")
    it.chat.ask("q")
    it.llm.answers = [speak("a b c d e f "), speak("a b c ")]
    it.run("/race")
    assert "equal for 3 tokens, then one of them ended" in it.out


def test_settings() -> None:
    it = Scripted()
    assert it.run("/set top_k 40")
    assert it.run("/set seed none")
    assert it.run(r"/set stop \n\n")
    it.out  # noqa: B018
    assert it.run("/set")
    shown = it.errors
    assert "seed none\n" in shown
    assert r"stop '\n\n'" in shown
    assert not set("()") & set(shown)
    assert (it.chat.params.top_k, it.chat.params.seed, it.chat.params.stop) == (40, None, ("\n\n",))
    for line in ("/set temprature 1", "/set top_k many", "/set temperature nan", "/set top_k 1.5", "/length -1"):
        assert not it.run(line), line
    assert "did you mean temperature?" in it.errors
    assert it.chat.params.top_k == 40


@pytest.mark.parametrize("name", ["logit_bias", "__class__", "x"])
def test_only_known_parameters_can_be_set(name: str) -> None:
    with pytest.raises(UsageError):
        set_parameter(SamplingParams(), name, "1")


def test_an_unknown_command_names_the_nearest() -> None:
    it = Scripted()
    assert not it.run("/veiw rounds")
    assert "did you mean /view?" in it.errors
    assert not is_command("/usr/bin/env is a path")
    assert is_command("/view rounds")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("clear", "new"), ("reset", "new"), ("exit", "quit"), ("bye", "quit"), ("q", "quit"), ("?", "help")),
        *(("vi", "view"), ("h", "help"), ("un", "undo"), ("by", "quit"), ("cl", "new")),
    ],
)
def test_other_names_and_beginnings_of_commands(typed: str, meant: str) -> None:
    assert named(typed) == meant


@pytest.mark.parametrize("typed", ["s", "re", "e", "", "nonsense", "viewer"])
def test_what_is_no_command_or_several_is_not_run(typed: str) -> None:
    it = Scripted()
    assert not it.run(f"/{typed}")
    assert it.errors.count("\n") == 1


def test_what_a_beginning_could_mean_is_named() -> None:
    it = Scripted()
    it.run("/re")
    assert "did you mean /retry or /reset?" in it.errors


@pytest.mark.parametrize("line", ["exit", "quit", "/exit", "/bye", "/q", "/quit"])
def test_a_word_that_leaves_is_no_question(line: str) -> None:
    it = Scripted()
    assert is_command(line)
    assert it.run(line)
    assert it.chat.leaving
    assert not is_command(f" {line}")


def test_a_new_conversation_is_asked_in_the_same_way(isolated_home: Path) -> None:
    it = Scripted("a1", "a2")
    it.chat.keep_in = isolated_home / "chats" / "a.chat"
    it.run("/system be brief")
    it.run("/set top_k 7")
    it.chat.ask("q1")
    it.errors  # noqa: B018
    assert it.run("/new")
    assert "/sessions lists the one before" in it.errors
    assert not it.run("/undo")
    it.chat.ask("q2")
    assert [m["content"] for m in it.llm.asked[-1]] == ["be brief", "q2"]
    assert it.chat.params.top_k == 7
    assert len(list((isolated_home / "chats").iterdir())) == 2


def test_completion() -> None:
    assert "/race" in complete([])
    assert list(complete(["/view"])) == ["tokens", "reading", "rounds", "plain"]
    assert "temperature" in complete(["/set"])
    assert "ngram" in complete(["/draft"])
    assert list(complete(["/nonsense"])) == []


def test_help_is_in_groups_that_fit_a_small_screen() -> None:
    it = Scripted()
    shown = {}
    for group in GROUPS:
        it.run(f"/help {group}")
        shown[group] = it.out.splitlines()
        assert len(shown[group]) <= 20
        assert all(width(line) <= 80 for line in shown[group])
    assert all(any(f"/{name} " in line for line in chain(*shown.values())) for name in COMMANDS)
    assert shown[""][0].startswith("  /new ")
    it.run("/help race")
    assert it.out.count("\n") == 1


def test_text_with_escapes_from_a_model_is_not_altered_in_a_pipe() -> None:
    it = Scripted("a\x1b[31mb")
    it.chat.ask("q")
    assert it.out == "a\x1b[31mb\n"


def text_of(rows: list[list[tuple[str, Style]]]) -> list[str]:
    return ["".join(text for text, _ in row) for row in rows]


def test_round_line_shows_every_guess_and_its_fate() -> None:
    round_ = make_round(4, [("def", "model", True), (" f", "ngram", True), ("(x", "ngram", False)], "(a")
    (line,) = text_of(rows_of(round_parts(round_), 80))
    assert "2/3" in line
    assert "model+ngram" in line
    assert "✓def✓ f✗(x →(a" in line
    assert "+def+ f-(x >(a" in text_of([round_parts(round_, unicode=False)])[0]
    assert "plain" in text_of([round_parts(make_round(0, [], "x"))])[0]
    for columns in range(20, 80):
        rows = text_of(rows_of(round_parts(round_), columns))
        assert max(map(width, rows)) <= columns
        assert "".join("".join(rows).split()) == "".join(line.split())  # nothing is left out
    assert ("(x", Style.REJECTED) in round_parts(round_)


def test_round_line_shows_branches() -> None:
    round_ = make_round(0, [("a", "model", True), ("b", "model", False), ("c", "model", True)], "d")
    round_.draft = Draft(list(round_.draft), [-1, 0, 0])
    round_.verdict = replace(round_.verdict, n_accepted=2, path=(0, 2))
    assert "✓a✗b |✓c" in text_of([round_parts(round_)])[0]


def test_plain_rounds_in_a_row_share_a_line_with_all_of_their_text() -> None:
    words = [f"word{i} " for i in range(34)]
    words[9] = "end\n"
    rounds = [make_round(51 + i, [], word) for i, word in enumerate(words)]
    rows = text_of(rows_of(plain_parts(rounds), 60))
    assert rows[0].startswith("  52-85 plain, 34 tokens  word0 word1 ")
    assert any(row.endswith("end↵") for row in rows)
    assert " ".join(rows).replace("↵", "").split()[4:] == "".join(words).split()
    assert max(map(width, rows)) <= 60


def test_the_rounds_view_has_an_answer_once() -> None:
    it = Scripted()
    it.llm.answers = [[*(make_round(i, [], f"plain{i} ") for i in range(40)), *speak("a b c d e f")]]
    it.run("/view rounds")
    it.out  # noqa: B018
    it.chat.ask("q")
    lines = it.out.splitlines()
    assert lines[0].startswith("   1-40 plain, 40 tokens  plain0 plain1")
    assert sum(line.count("plain39") for line in lines) == 1
    assert len(lines) < 12
    assert sum(line.count("WRONG") for line in lines) == 1


def test_the_status_is_plain_until_something_was_guessed() -> None:
    stats = SpecStats()
    assert status_line(stats.as_dict()) == ""
    for i in range(4):
        stats.add(make_round(i, [], "x", ms=100.0))
    assert status_line(stats.as_dict()) == "10.0 tok/s · nothing guessed (plain decoding)"
    stats.add(make_round(4, [("a", "ngram", True), ("b", "ngram", True), ("c", "ngram", False)], "d", ms=85.0))
    assert status_line(stats.as_dict()) == "14.0 tok/s · ×1.4 · 2 of 3 guesses right"


def test_without_a_basis_the_status_has_no_speed_up() -> None:
    stats = SpecStats()
    for i in range(4):
        stats.add(make_round(i, [("a", "model", True)], "x"))
    assert "×" not in status_line(stats.as_dict())
    assert stats["estimated_speedup"] is None
    assert "4 of 4 guesses right" in status_line(stats.as_dict())


@pytest.mark.parametrize(
    ("names", "follows", "said"),
    [
        ([], "", "Guessing is off."),
        (["ngram"], "loading the draft model", "Guessing by copying from the text; loading the draft model."),
        (["ngram", "corpus:~/src"], "", "Guessing by copying from the text and copying from ~/src."),
        (["head", "qwen2.5-coder-0.5b-instruct-q4_k_m"], "", "Guessing by head and qwen2.5-coder-0.5b."),
    ],
)
def test_who_guesses_is_one_sentence(names: list[str], follows: str, said: str) -> None:
    assert guessing(names, follows) == said


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M"),
        ("gemma-3-270m-q4_k_m", "gemma-3-270m"),
        ("ngram", "ngram"),
        ("Item-Editor", "Item-Editor"),
    ],
)
def test_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_totals_use_the_same_denominators() -> None:
    it = Scripted("one two three four five six seven")
    it.chat.ask("a")
    it.chat.ask("b")
    single, both = it.chat.records[0].stats, SpecStats.total(record.stats for record in it.chat.records)
    assert both["completion_tokens"] == 2 * single["completion_tokens"]
    assert both["acceptance_rate"] == single["acceptance_rate"]
    assert both["accepted_per_position"] == [2 * n for n in single["accepted_per_position"]]
    assert both["tokens_per_second"] == pytest.approx(single["tokens_per_second"])
    assert both["estimated_plain_tokens_per_second"] == pytest.approx(single["estimated_plain_tokens_per_second"])
    bars = histogram(both["drafted_per_position"], both["accepted_per_position"])
    assert len(bars) == len(both["drafted_per_position"])
    assert "100%" in bars[0]


def test_tokens_of_heads_have_a_style_and_where_there_is_one_a_place_in_the_legend() -> None:
    assert len({token_style("accepted", source) for source in ("model", "ngram", "head", "early-exit")}) == 3
    assert token_style("bonus", "head") is Style.TARGET
    screen = ChatScreen(plain=True)
    screen.ansi = True
    assert "by head" in screen.legend(["ngram", "early-exit:2"])
    assert "by head" not in screen.legend(["ngram", "head-of-state"])
    assert "by draft model" in screen.legend(["ngram", "head-of-state"])
    assert "by draft model" not in screen.legend(["ngram"])
    assert "by draft model" in screen.legend(["ngram"], "loading the draft model")
    assert screen.legend([]) == ""


@pytest.mark.parametrize("columns", [24, 34, 50, 80])
def test_the_legend_is_broken_between_kinds_only(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = ChatScreen(plain=True)
    screen.ansi = True
    rows = re.sub("\x1b\\[[0-9;]*m", "", screen.legend(["ngram", "corpus:x", "head", "m"])).split("\n")
    assert all(width(row) <= columns for row in rows)
    kinds = [kind.strip() for row in rows for kind in row.split("·") if kind.strip()]
    assert kinds == ["guessed by draft model", "by head", "copied", "from your files", "wrong guess", "the model's own"]


# -- nothing is lost, and nothing is said that is not so ---------------------------------------------------------------


def broken(text: str) -> list[Round]:
    """An answer that ends before it is whole."""
    return [replace(round_, finish_reason=None) for round_ in speak(text)]


def test_an_answer_that_is_stopped_takes_the_place_of_no_whole_one() -> None:
    it = Scripted("the whole answer", "again")
    it.chat.screen.interactive = True
    it.chat.ask("q")
    it.llm.answers = [broken("a part")]
    it.run("/retry")
    assert answers(it) == ["the whole answer"]
    assert it.chat.records[-1].finish_reason == "stop"
    assert "[stopped; the answer before stays; /retry asks again]" in it.errors
    it.run("/undo")
    it.chat.ask("q")
    it.llm.answers = [broken("another part")]
    it.run("/retry")  # of two parts the later one
    assert answers(it) == ["another part"]
    assert len(it.chat.records) == 1


def test_an_answer_that_fails_in_the_middle_is_kept_and_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scripted("one two three four five six seven eight", "whole")

    def fail(view: TextView, round_: Round) -> None:
        if round_.index == 1:
            raise PromptTooLong("the engine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(TextView, "round", fail)
        assert not it.chat.ask("q")
    errors = it.errors
    assert errors.splitlines() == [
        "localspec: the engine is gone",
        "[broken off; what was said is kept; /retry asks again]",
    ]
    assert answers(it) == ["one two three four five six "]
    assert it.run(f"/save {tmp_path / 'a.chat'}")
    again = Scripted()
    again.chat.screen.terminal = True
    again.run(f"/load {tmp_path / 'a.chat'}")
    assert "[broken off; /retry asks again]" in again.out
    it.run("/retry")
    assert answers(it) == ["whole"]


def test_a_file_is_not_silently_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.chat"
    it = Scripted()
    it.chat.ask("about rivers")
    assert it.run(f"/save {path}")
    assert "in place of" not in it.errors
    it.chat.ask("and lakes")
    assert it.run(f"/save {path}")
    assert "in place of what was saved there before (1 turn)" in it.errors
    before = path.read_bytes()
    it.run("/new")
    it.chat.ask("about hills")
    assert not it.run(f"/save {path}")
    assert "holds another conversation (about rivers)" in it.errors
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("ratios", "others", "said"),
    [
        ([None], 0.0, NOISE),
        ([None], 0.9, NOISE),
        ([1.42, 1.31], 0.01, "With guesses: ×1.31 to ×1.42 of plain; 70 of 88 guesses right."),
        ([0.8, 0.9], 0.0, "With guesses: ×0.80 to ×0.90 of plain; 70 of 88 guesses right."),
        ([0.9, 1.2], 0.0, "No verdict: two races, in both orders, gave ×0.90 to ×1.20 of plain with guesses; 70 of 88"),
        ([1.3, 1.4], 0.34, "Other programs used 34 % of the CPUs meanwhile"),
        ([1.3, None], 0.0, "With guesses: ×1.30 of plain, once;"),
    ],
)
def test_the_verdict_of_a_race(ratios: list[float | None], others: float, said: str) -> None:
    stats = {"completion_tokens": 90, "num_accepted_tokens": 70, "num_draft_tokens": 88}
    assert said in verdict(ratios, stats, others)
    assert "no tokens" in verdict(ratios, stats | {"completion_tokens": 0}, others)


def test_a_race_without_guesses_is_run_once_and_is_noise() -> None:
    it = Scripted()
    it.llm.answers = [[make_round(0, [], "a "), make_round(1, [], "b", "stop")]]
    it.chat.ask("q")
    it.out  # noqa: B018
    it.run("/race")
    assert f"\n{NOISE}\n" in it.out
    assert len(it.llm.options) == 3
