"""The prompts that speed is measured on: well-formed, balanced, and tuning kept apart from report."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import resources

import pytest

CATEGORIES = {"code", "edit", "chat", "summarise", "extract", "translate", "maths", "creative"}
RUN = 12
"""So many words in a row may not occur in two prompts."""


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    text = resources.files("localspec.commands").joinpath("questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def words(prompt: dict) -> list[str]:
    return re.findall(r"\w+", " ".join(prompt["turns"]).lower())


def test_every_line_has_the_four_fields(prompts: list[dict]) -> None:
    for prompt in prompts:
        assert list(prompt) == ["id", "set", "category", "turns"]
        assert prompt["set"] in ("tuning", "report")
        assert re.fullmatch(rf"{prompt['category']}-\d+", prompt["id"])
        assert prompt["turns"]
        assert all(isinstance(turn, str) and turn == turn.strip() and turn for turn in prompt["turns"])


def test_ids_are_unique(prompts: list[dict]) -> None:
    assert not [name for name, n in Counter(prompt["id"] for prompt in prompts).items() if n > 1]


def test_every_category_has_prompts_to_tune_on_and_to_report(prompts: list[dict]) -> None:
    counts = Counter((prompt["category"], prompt["set"]) for prompt in prompts)
    assert {category for category, _ in counts} == CATEGORIES | {"repeat"}
    for category in CATEGORIES:
        assert counts[category, "tuning"] >= 3, category
        assert counts[category, "report"] >= 3, category
    assert (counts["repeat", "tuning"], counts["repeat", "report"]) == (1, 2)


def test_prompts_are_as_long_as_what_people_ask(prompts: list[dict]) -> None:
    for prompt in prompts:
        assert 15 <= len(words(prompt)) <= 500, (prompt["id"], len(words(prompt)))


def test_no_two_prompts_share_a_run_of_words(prompts: list[dict]) -> None:
    seen: dict[tuple[str, ...], str] = {}
    for prompt in prompts:
        found = words(prompt)
        for run in {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}:
            assert run not in seen, (prompt["id"], seen[run], " ".join(run))
            seen[run] = prompt["id"]
