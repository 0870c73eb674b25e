"""The questions that pairs are measured and audited on: our own, or a file in the format of Spec-Bench or SPEED-Bench.

All formats are JSON lines with ``category``, ``turns`` (a list of what the user says) and an id: ``question_id`` (a
number in Spec-Bench, a string in SPEED-Bench), ``id`` in ours. Other fields are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from localspec.errors import UsageError
from localspec.system.files import decoded

SETS = ("report", "tuning")  # Our own questions: those that are reported on, and those that the policy was tuned on

_MOST_BYTES = 512 << 20
# The beginning of a turn in SPEED-Bench's files as distributed whose text has to be fetched from elsewhere.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation, its id unique in a run; the answer to its last turn is measured."""

    id: str
    category: str
    turns: tuple[str, ...]


def own_questions(which: str = "report") -> list[Question]:
    text = resources.files("localspec.measuring").joinpath("questions.jsonl").read_text(encoding="utf-8")
    return [_question(row) for row in map(json.loads, text.splitlines()) if row["set"] == which]


def read_questions(path: Path) -> list[Question]:
    """Questions from a file. Raises ``UsageError``: it cannot be read, or is none of the formats; names the line."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MB")
    if data[:4] == b"PAR1":
        raise UsageError(
            f"{path} is a Parquet file; write it as JSON lines first: "
            "pandas.read_parquet(FILE).to_json(OUT, orient='records', lines=True)"
        )
    try:
        lines = decoded(data).split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from None
    found: dict[str, Question] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = _question(json.loads(line))
            if question.id in found:
                raise ValueError(f"question {question.id} is there twice")
        except RecursionError:
            raise UsageError(f"{path}, line {number}: nested too deeply") from None
        except ValueError as error:
            what = "not JSON: one object a line is wanted" if isinstance(error, json.JSONDecodeError) else str(error)
            raise UsageError(f"{path}, line {number}: {what}") from None
        found[question.id] = question
    if not found:
        raise UsageError(f"{path} has no questions")
    return list(found.values())


def _question(row: Any) -> Question:
    if not isinstance(row, dict):
        raise ValueError("not an object with question_id, category and turns")
    name = row.get("question_id", row.get("id"))
    if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
        raise ValueError("no question_id (a number or a text)")
    category, turns = row.get("category"), row.get("turns")
    if not isinstance(category, str) or not category.strip():
        raise ValueError(f"question {name} has no category")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"question {name} has no turns (a list of texts, none empty)")
    if any(turn.startswith(_PLACEHOLDER) for turn in turns):
        raise ValueError(
            f"question {name} has only a placeholder for its text; SPEED-Bench's prepare_data.py fetches the texts"
        )
    if any("\ud800" <= char <= "\udfff" for text in (str(name), category, *turns) for char in text):
        raise ValueError(f"question {name} has half of a surrogate pair in it")
    return Question(str(name), category.strip(), tuple(turns))


def of_categories(questions: Sequence[Question], wanted: Sequence[str]) -> list[Question]:
    known = list(dict.fromkeys(question.category for question in questions))
    for category in wanted:
        if category not in known:
            raise UsageError(f"no category {category!r} here: {', '.join(known)}")
    return [question for question in questions if not wanted or question.category in wanted]


def in_turns(questions: Iterable[Question], *, short_first: bool = False) -> list[Question]:
    """One of each category, then the next of each, so that any beginning of a run is balanced; with ``short_first``
    those of one turn and the shorter ones first within a category."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    if short_first:
        for group in by_category.values():
            group.sort(key=lambda question: (len(question.turns), sum(map(len, question.turns))))
    rows = zip_longest(*by_category.values())
    return [question for row in rows for question in row if question is not None]


def digest(questions: Iterable[Question]) -> str:
    rows = [[question.id, question.category, list(question.turns)] for question in questions]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()
