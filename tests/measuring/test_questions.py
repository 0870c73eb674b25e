"""Questions: the formats of files, and our own, which are well-formed, balanced, and tuning kept apart from report."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.errors import UsageError
from localspec.prompts.questions import Question, digest, in_turns, own_questions, read_questions

SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Describe a lake.", "Shorter."], "reference": ["x"]}
SPEED_BENCH = {
    "question_id": "8f3a", "category": "coding", "sub_category": "python", "turns": ["Sort a list."],
    "source": "somewhere", "src_id": "12", "difficulty": "easy", "multiturn": False,
}  # fmt: skip
OURS = {"id": "code-1", "set": "report", "category": "code", "turns": ["Write a loop."]}


def lines(folder: Path, *rows: object, end: str = "\n") -> Path:
    path = folder / "questions.jsonl"
    path.write_bytes(end.join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode())
    return path


def test_every_format_is_read_whatever_the_line_ends(tmp_path: Path) -> None:
    path = lines(tmp_path, "", SPEC_BENCH, "", SPEED_BENCH, OURS, "", end="\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    for question, row in zip(read_questions(path), (SPEC_BENCH, SPEED_BENCH, OURS), strict=True):
        assert question.id == str(row.get("question_id", row.get("id")))
        assert (question.category, list(question.turns)) == (row["category"], row["turns"])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([SPEC_BENCH, "{"], "line 2: not JSON"),
        ([SPEC_BENCH, "", [1]], "line 3: not an object"),
        ([SPEC_BENCH | {"question_id": None}], "no question_id"),
        ([SPEC_BENCH | {"question_id": True}], "no question_id"),
        ([SPEC_BENCH | {"category": " "}], "question 81 has no category"),
        ([SPEC_BENCH | {"turns": "one"}], "question 81 has no turns"),
        ([SPEC_BENCH | {"turns": ["a", " "]}], "question 81 has no turns"),
        ([SPEC_BENCH, SPEC_BENCH], "line 2: question 81 is there twice"),
        ([SPEED_BENCH | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM…"]}], "prepare_data.py"),
        (['{"question_id": 1, "category": "a", "turns": ["\\ud800"]}'], "surrogate"),
        (["[" * 100_000], "nested too deeply"),
        ([], "has no questions"),
    ],
)
def test_a_bad_file_is_refused_by_line(rows: list, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"questions\.jsonl") as refused:
        read_questions(lines(tmp_path, *rows))
    assert said in str(refused.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.parquet"
    for data, said in ((None, "No such file"), (b"PAR1\x00\x00", "Parquet"), (b"\xff\xfe{", "not UTF-8")):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(UsageError, match=said):
            read_questions(path)


def test_categories_take_turns_and_short_questions_may_come_first() -> None:
    questions = [Question(f"{c}{i}", c, ("x" * (9 - i),) * (1 + (i == 2))) for c in "ab" for i in range(3)]
    assert [q.id for q in in_turns(questions)] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    # The third of each has two turns: whatever its length, it comes last.
    assert [q.id for q in in_turns(questions, short_first=True)] == ["a1", "b1", "a0", "b0", "a2", "b2"]


CATEGORIES = {"code", "edit", "chat", "summarise", "extract", "translate", "maths", "creative", "repeat"}
RUN = 12
"""So many words in a row may not occur in two questions."""


def test_our_own_questions_are_balanced_as_long_as_what_people_ask_and_unlike_each_other() -> None:
    """And enough for an interval over all."""
    names, seen = set[str](), dict[tuple[str, ...], str]()
    for which, n_repeat in (("tuning", 1), ("report", 2)):
        own = in_turns(own_questions(which), short_first=True)
        counts = Counter(question.category for question in own)
        assert (set(counts), counts.pop("repeat")) == (CATEGORIES, n_repeat)
        assert (min(counts.values()) >= 3, len(own) >= 24) == (True, True)
        firsts = own[: len(CATEGORIES)]
        assert {question.category for question in firsts} == CATEGORIES
        assert all(len(question.turns) == 1 for question in firsts)
        for question in own:
            assert question.id not in names
            names.add(question.id)
            assert re.fullmatch(rf"{question.category}-\d+", question.id)
            assert all(turn == turn.strip() for turn in question.turns)
            words = re.findall(r"\w+", " ".join(question.turns).lower())
            assert 15 <= len(words) <= 500, question.id
            for run in {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}:
                assert seen.setdefault(run, question.id) == question.id, " ".join(run)


def test_a_digest_is_of_every_text_and_of_the_order() -> None:
    questions = [Question("a", "c", ("x", "y")), Question("b", "c", ("z",))]
    others = [
        questions[::-1], questions[:1], [replace(questions[0], turns=("xy",)), questions[1]],
        [replace(questions[0], category="d"), questions[1]], [replace(questions[0], id="aa"), questions[1]],
    ]  # fmt: skip
    assert len({digest(each) for each in [questions, *others]}) == 1 + len(others)
    assert digest(questions) == digest(list(questions))
