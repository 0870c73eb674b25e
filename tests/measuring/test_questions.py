"""Questions: the formats of files, and our own, which are well-formed, balanced, and tuning kept apart from report."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from localspec.errors import UsageError
from localspec.prompts.questions import SETS, Question, digest, in_turns, own_questions, read_questions

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
        ([SPEC_BENCH | {"turns": []}], "question 81 has no turns"),
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


CATEGORIES = {"code", "edit", "chat", "summarise", "extract", "translate", "maths", "creative"}
RUN = 12
"""So many words in a row may not occur in two prompts."""


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    text = resources.files("localspec.measuring").joinpath("questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def words(prompt: dict) -> list[str]:
    return re.findall(r"\w+", " ".join(prompt["turns"]).lower())


def test_every_line_has_the_four_fields_and_a_length_of_what_people_ask(prompts: list[dict]) -> None:
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert 15 <= len(words(prompt)) <= 500, (prompt["id"], len(words(prompt)))
        assert list(prompt) == ["id", "set", "category", "turns"]
        assert prompt["set"] in ("tuning", "report")
        assert re.fullmatch(rf"{prompt['category']}-\d+", prompt["id"])
        assert prompt["turns"]
        assert all(isinstance(turn, str) and turn == turn.strip() and turn for turn in prompt["turns"])


def test_every_category_has_prompts_to_tune_on_and_to_report(prompts: list[dict]) -> None:
    counts = Counter((prompt["category"], prompt["set"]) for prompt in prompts)
    assert {category for category, _ in counts} == CATEGORIES | {"repeat"}
    assert min(counts[category, which] for category in CATEGORIES for which in SETS) >= 3
    assert (counts["repeat", "tuning"], counts["repeat", "report"]) == (1, 2)


def test_no_two_prompts_share_a_run_of_words(prompts: list[dict]) -> None:
    seen: dict[tuple[str, ...], str] = {}
    for prompt in prompts:
        found = words(prompt)
        for run in {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}:
            assert run not in seen, (prompt["id"], seen[run], " ".join(run))
            seen[run] = prompt["id"]


def test_our_own_questions_are_enough_for_an_interval_over_all_and_begin_with_every_category() -> None:
    for which in SETS:
        own = in_turns(own_questions(which), short_first=True)
        assert len(own) >= 24
        categories = {question.category for question in own}
        assert {question.category for question in own[: len(categories)]} == categories
        assert all(len(question.turns) == 1 for question in own[: len(categories)])


def test_a_digest_is_of_every_text_and_of_the_order() -> None:
    questions = [Question("a", "c", ("x", "y")), Question("b", "c", ("z",))]
    others = [
        questions[::-1], questions[:1], [replace(questions[0], turns=("xy",)), questions[1]],
        [replace(questions[0], category="d"), questions[1]], [replace(questions[0], id="aa"), questions[1]],
    ]  # fmt: skip
    assert len({digest(each) for each in [questions, *others]}) == 1 + len(others)
    assert digest(questions) == digest(list(questions))
