"""What a run leaves: heads of other kinds, what their cards say, and which of them are kept."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.head_data_curve import read_examples
from localspec import LLM, SamplingParams, UsageError
from localspec.heads.card import Kind
from localspec.heads.file import find_heads, read_card, write_head
from localspec.heads.listing import inspect
from localspec.heads.trained import MAX_STATES
from localspec.heads.training.distill import Distilled, Worth, card_command, gain_of
from localspec.heads.training.lessons import EAGLE3_MEMORY, Stretch, first_lesson, memory_of
from localspec.heads.training.run_folder import Effort, Recipe, Run, token_map
from localspec.heads.training.start import new_card
from localspec.heads.training.trainer import evenly
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import USER_DEFINED, Vocab
from tests.support.lessons import made_up
from tests.training import test_distill

pytest.importorskip("jax", reason="heads are trained with JAX")

pytestmark = pytest.mark.usefixtures("four_at_once")

EFFORT = Effort(1e4, n_places=200, n_steps=1, n_tests=3, n_questions=1, max_tokens=8, longest_answer=40)
RECIPE = Recipe(kind="medusa", steps=2, n_out=200, d_ff=64, seed=3)


def run(target: Path, **options: Any) -> Distilled:
    return test_distill.run(target, **{"recipe": RECIPE, "effort": EFFORT} | options)


@pytest.mark.parametrize("kind", ["parallel", "medusa"])  # test_distill.py has the chained one
def test_a_run_makes_a_head_that_drafts(target: Path, isolated_home: Path, kind: Kind) -> None:
    made = run(target, recipe=replace(RECIPE, kind=kind), effort=replace(EFFORT, n_places=300))
    card = read_card(made.path)
    assert (card.kind, card.steps, card.n_out) == (kind, 2, 200)
    assert set(card.training.acceptance) > {"all"}
    assert card.training.tokens_seen > 0
    assert made.worth is not None
    with LLM(target, f"head:{made.path}", backend="reference", draft_length=2, n_ctx=128, remember=False) as llm:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        drafted = llm.generate("la la la", params)
        assert drafted.token_ids == llm.generate("la la la", params, speculate=False).token_ids
        assert drafted.stats["num_draft_tokens"] > 0


@pytest.mark.parametrize("pays", [True, False])
def test_a_head_is_kept_only_if_it_pays(
    target: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    measured = Worth(1.0, 1.0, 1.1, 1.1, 6, ("ngram",), (1.01 if pays else 0.99, 1.2))
    monkeypatch.setattr("localspec.heads.training.distill.measure_worth", lambda *given, **options: measured)
    made = run(target)
    assert (made.kept in find_heads()) == pays
    assert made.path.exists()


def test_a_gain_is_more_than_noise_or_none() -> None:
    """Its interval needs six questions."""
    intervals = {(1.01, 1.2): (True, False), (0.99, 1.2): (False, True), (0.8, 0.9): (False, False)}
    for interval, found in {**intervals, None: (False, True)}.items():
        worth = Worth(1.0, 1.0, 1.1, 1.1, 6, ("ngram",), interval)
        assert (worth.pays, worth.is_unclear) == found
    gains = [1.2, 0.9, 1.1, 1.3, 1.05, 1.0]
    assert gain_of({str(i): [gain] for i, gain in enumerate(gains)}) == (pytest.approx(1.075), (0.9, 1.3))
    assert gain_of({str(i): [gain] for i, gain in enumerate(gains[:5])}) == (1.1, None)


# What makes them again.


def test_the_card_says_what_the_whole_run_used(target: Path, isolated_home: Path, tmp_path: Path) -> None:
    """Also what was asked for in an earlier sitting only; and the seed cannot be changed between two."""
    (tmp_path / "my questions.jsonl").write_text('{"id": "1", "category": "x", "turns": ["la la la"]}\n')
    (tmp_path / "more.jsonl").write_text('{"id": "1", "category": "x", "turns": ["la la"]}\n')
    (tmp_path / "rivers.txt").write_text("A sentence about rivers, and then another one. " * 20)
    first: Any = {"recipe": RECIPE, "effort": EFFORT, "texts": [tmp_path / "rivers.txt"]}
    test_distill.stopped(target, lambda each: each.n_places > 50, **first, prompts=tmp_path / "my questions.jsonl")
    later: Any = {"recipe": None, "kind": "medusa", "effort": replace(EFFORT, minutes=9e3), "resume": True}
    with pytest.raises(UsageError, match="begun with the seed 3: leave --seed out"):
        run(target, **later, seed=4)
    with pytest.raises(UsageError, match="begun with another recipe"):
        run(target, recipe=replace(RECIPE, n_out=100), resume=True)
    made = run(target, **later, seed=3, prompts=[tmp_path / "more.jsonl"], command="localspec distill")
    expected = "--kind medusa --seed 3 --minutes 9000 --prompts 'my questions.jsonl' --prompts more.jsonl"
    expected = f"localspec distill {shlex.quote(str(target))} {expected} --text rivers.txt --begin-with none"
    assert made.card.training.command == expected


def test_a_call_in_a_card_can_be_made() -> None:
    def made(command: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        called = SimpleNamespace(distill=lambda *given, **options: (given, options))
        return eval(command, {"localspec": called, "Recipe": Recipe})  # type: ignore[no-any-return]

    of_run = Run("f", Recipe(kind="parallel", seed=5), 12.5, prompts=["/a/b.jsonl"], texts=["/c/d", "/e"], chats=True)
    of_run.begins_with, of_run.begins_with_sha256 = "other.gguf", "0123456789abcdef"
    command = card_command(of_run, "a model")
    wanted = {"kind": "parallel", "seed": 5, "minutes": 12.5, "prompts": ["b.jsonl"], "texts": ["d", "e"]}
    assert made(command) == (("a model",), wanted | {"chats": True, "begin_with": "other.gguf"})
    assert command.endswith("# other.gguf: sha256 0123456789abcdef")
    assert "--text d --text e --chats --begin-with other.gguf" in card_command(of_run, "a", "localspec distill")
    recipe = replace(of_run.recipe, n_out=500)
    assert made(card_command(replace(of_run, recipe=recipe), "a"))[1]["recipe"] == recipe


def test_a_head_has_the_licence_of_its_target(target: Path, tmp_path: Path) -> None:
    ids = np.arange(200, dtype=np.int32)
    with GGUFFile(target) as file:
        file.metadata["general.license"] = "apache-2.0"
        card = new_card(file, "f", RECIPE, ids)
        del file.metadata["general.license"]
        assert new_card(file, "f", RECIPE, ids).license == ""
    path = write_head(tmp_path / "head.gguf", card, {name: np.zeros(shape) for name, shape in card.shapes().items()})
    assert inspect(path)["license"] == "apache-2.0"


# What they guess, and what they are tested on.


def vocabulary(tokens: list[int], n_marks: int, n_out: int) -> list[int]:
    """Of a model of 1,000 tokens, the last ones special, that says these; what is held out does not count."""
    vocab = SimpleNamespace(n_tokens=1000, marks=list(range(1000 - n_marks, 1000)), eog=frozenset({999}))
    said, held_out = made_up("a", len(tokens) - 1, start=0), made_up("b", 40, held_out=True)
    said.tokens[:], held_out.tokens[:] = tokens, 600
    model: Any = SimpleNamespace(vocab=vocab, n_vocab=1000)
    return token_map([said, held_out], model, n_out).tolist()


def test_the_vocabulary_is_what_is_said_most_often_and_special_tokens() -> None:
    """Where there are very many of those, they take an eighth, and what ends a turn is always there."""
    often = np.repeat([200, 100, 150], [20, 10, 7]).tolist()
    assert vocabulary(often, 1, 4) == [100, 150, 200, 999]
    assert vocabulary(often, 1, 6) == [0, 1, 100, 150, 200, 999]
    assert vocabulary(list(range(300)), 5, 100) == [*range(95), *range(995, 1000)]
    assert vocabulary(list(range(300)), 600, 100) == [*range(87), *range(400, 412), 999]
    assert vocabulary(list(range(300)), 600, 2000) == list(range(1000))


def test_marks_are_special_tokens_and_no_padding(target: Path) -> None:
    with GGUFFile(target) as file:
        vocab = Vocab.from_gguf(file)
    assert [vocab.token_text(token) for token in vocab.marks] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab.types[7] = USER_DEFINED
    assert vocab.marks[0] == 7


@pytest.mark.parametrize(("kind", "memory"), [("chained", MAX_STATES), ("eagle3", EAGLE3_MEMORY)])
def test_a_lesson_sees_as_much_of_the_prompt_as_the_drafter_reads(kind: Kind, memory: int) -> None:
    answer = made_up("a", 300, start=200)
    begin = first_lesson(answer)
    piece = Stretch(answer, begin, begin + 20, memory=memory_of(kind))
    assert begin + 1 - piece.first_row == memory


def test_several_passages_of_every_category_are_tested() -> None:
    passages = [
        replace(made_up(f"{category}{i}", 20), category=category)
        for category, n in (("own", 100), ("chat", 6), ("code", 2))
        for i in range(n)
    ]
    chosen = [each.category for each in evenly(passages, 32)]
    assert {name: chosen.count(name) for name in dict.fromkeys(chosen)} == {"own": 32, "chat": 4, "code": 2}


def test_the_data_curve_of_no_examples_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no examples; localspec distill writes them"):
        read_examples(tmp_path, ("norm",), 8)
