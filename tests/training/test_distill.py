"""A run from beginning to end on a tiny target, bounded by counts and not by time; stopped, killed; what it leaves."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localspec
from benchmarks.head_data_curve import read_examples
from localspec import LLM, Cancelled, EngineError, SamplingParams, UsageError
from localspec.backends import reference
from localspec.heads.card import Training
from localspec.heads.file import find_heads, head_weights, heads_folder, read_card, write_head
from localspec.heads.listing import inspect
from localspec.heads.trained import MAX_STATES
from localspec.heads.training.distill import Distilled, Worth, card_command, distill, gain_of
from localspec.heads.training.examples import is_held_out
from localspec.heads.training.lessons import Stretch, first_lesson, n_lessons
from localspec.heads.training.run_folder import Effort, Recipe, Run, RunError, RunProgress, taps_of, token_map
from localspec.heads.training.shards import Shards
from localspec.heads.training.start import new_card
from localspec.heads.training.trainer import places_tested
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import USER_DEFINED, Vocab
from tests.support.heads import write_random_head
from tests.support.lessons import made_up
from tests.support.waiting import PATIENCE

pytest.importorskip("jax", reason="heads are trained with JAX")

RECIPE = Recipe(steps=2, n_out=200, d_ff=64, seed=3)
EFFORT = Effort(1e4, n_places=800, n_steps=4, n_tests=3, n_questions=1, max_tokens=8, longest_answer=40)
TAPS = taps_of(5)


def run(target: Path, **options: Any) -> Distilled:
    return distill(str(target), **{"backend": "reference", "recipe": RECIPE, "effort": EFFORT} | options)


def stopped(target: Path, when: Callable[[RunProgress], bool], **options: Any) -> None:
    """A run that is cancelled once ``when`` is true of its progress."""
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        run(target, cancel=cancel, report=lambda progress: when(progress) and cancel.set(), **options)


def folder_of(home: Path) -> Path:
    (folder,) = (path for path in (home / "distill").iterdir() if path.is_dir())
    return folder


def shards_of(home: Path) -> Shards:
    return Shards(folder_of(home) / "shards", TAPS, 64)


def test_a_run_makes_a_head_and_says_what_it_is_worth(target: Path, isolated_home: Path) -> None:
    standings, lines = list[RunProgress](), list[str]()
    (isolated_home.parent / "text").mkdir()
    (isolated_home.parent / "text" / "rivers.txt").write_text("A sentence about rivers, and then another one. " * 20)
    made = run(target, report=standings.append, say=lines.append, texts=[isolated_home.parent / "text"])
    phases = list(dict.fromkeys(standing.phase for standing in standings))
    assert phases == ["loading", "examples", "training", "testing", "measuring"]
    assert any("of memory, and" in line for line in lines)
    card, passages = read_card(made.path), shards_of(isolated_home).passages
    assert card.training == made.card.training
    assert card.training.seed == 3
    # Those that were still being written at the end as well.
    assert 600 <= card.training.data_tokens == sum(len(each) for each in passages if not each.held_out)
    assert card.training.tokens_seen > 0
    # Answers to questions of each kind of work are what it is tested on, and never learned from.
    tested = {each.category for each in passages if each.held_out and n_lessons(each) > 0}  # some answers end at once
    assert set(card.training.acceptance) == {"all"} | tested
    assert {each.category for each in passages} == {"own", "text", "chat", "code"}
    assert all(each.held_out for each in passages if each.category in ("chat", "code"))
    assert all(each.held_out == is_held_out(each.name) for each in passages)
    assert (card.taps, card.steps, card.kind, card.n_out) == (TAPS, 2, "chained", 200)
    assert made.worth is not None
    assert made.worth.n_questions == 1
    assert min(made.worth.plain, made.worth.without, made.worth.head) > 0
    assert made.kept is None, "one question cannot tell a gain from none"
    assert [path for path in find_heads() if path.parent == heads_folder()] == []
    assert made.worth.drafters == ("ngram",)
    for options, why in (({}, r"was made.*--force begins anew"), ({"resume": True}, "--minutes over 10000")):
        with pytest.raises(UsageError, match=why):
            run(target, **options)


KILLED = """
import os, signal, sys
from localspec.heads.training import examples, head_maker
from localspec.heads.training.distill import distill
from localspec.heads.training.run_folder import Effort, Recipe

head_maker.SECONDS_BETWEEN_WRITES = 0.0
step, left = examples.ExampleMaker.step, iter(range(40))


def counting(*given):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*given)


examples.ExampleMaker.step = counting
effort = Effort(1e4, n_places=800, n_steps=4, n_tests=3, n_questions=1, max_tokens=8, longest_answer=40)
distill(sys.argv[1], backend="reference", recipe=Recipe(steps=2, n_out=200, d_ff=64, seed=3), effort=effort)
"""


def test_killed_it_loses_only_what_came_after_the_last_writing(target: Path, isolated_home: Path) -> None:
    """While examples are written; of a head in training see ``test_trainer``."""
    command = [sys.executable, "-c", KILLED, str(target)]
    died = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    before = {each.name: np.array(each.tokens) for each in shards_of(isolated_home).passages}
    # Every pass was written, those texts included that were under way: a row at least. How many texts are side by side
    # depends on the machine.
    assert sum(len(tokens) - 1 for tokens in before.values()) >= 39
    assert run(target, resume=True).card.training.tokens_seen > 0
    passages = shards_of(isolated_home).passages
    after = {each.name: np.array(each.tokens) for each in passages}
    assert len(after) == len(passages)
    for name, tokens in before.items():
        np.testing.assert_array_equal(after[name], tokens)


FULL = """
import resource, signal, sys
from localspec.heads.training import head_maker

# What is written beyond is refused, as by a full disk.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
head_maker.SECONDS_BETWEEN_WRITES = 0.5
from localspec.__main__ import main
main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the system limits no files")
def test_a_full_disk_is_one_line_and_what_was_written_is_whole(target: Path, isolated_home: Path) -> None:
    command = [sys.executable, "-c", FULL, "distill", str(target), "--backend", "reference", "--minutes", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert last.startswith(f"localspec: the disk of {folder_of(isolated_home)} is full")
    assert "--resume goes on" in last
    assert "Traceback" not in done.stderr
    assert shards_of(isolated_home).remarks == []


def test_a_run_is_alone_and_force_begins_anew(target: Path, isolated_home: Path) -> None:
    def refuses_another(progress: RunProgress) -> bool:
        if progress.n_places > 100:
            with pytest.raises(RunError, match="another localspec distill trains this head now"):
                run(target, resume=True)
        return progress.n_places > 100

    stopped(target, refuses_another)
    with pytest.raises(UsageError, match=r"was begun.*--resume goes on"):
        run(target)
    old = shards_of(isolated_home).names
    (folder_of(isolated_home) / "run.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        run(target, resume=True)
    stopped(target, lambda progress: progress.phase == "examples", force=True)
    assert old - shards_of(isolated_home).names


def test_a_run_that_goes_on_says_what_it_learns_from(target: Path, isolated_home: Path) -> None:
    """Where there are examples enough it writes none."""
    stopped(target, lambda progress: progress.phase == "training", effort=BRIEF)
    standings = list[RunProgress]()

    def learns(progress: RunProgress) -> bool:
        standings.append(progress)
        return progress.phase == "training"

    stopped(target, learns, effort=BRIEF, resume=True)
    passages = shards_of(isolated_home).passages
    assert "examples" not in [standing.phase for standing in standings]
    assert (standings[-1].n_answers, standings[-1].n_places) == (len(passages), sum(map(len, passages)))


def test_it_steps_aside_while_another_process_answers(
    target: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it waits, and nothing else until the other is done."""
    monkeypatch.setattr("localspec.system.process.QUIET_SECONDS", 0.5)
    mark, phases = isolated_home / "answering" / str(os.getppid()), list[str]()

    def goes_on(progress: RunProgress) -> bool:
        phases.append(progress.phase)
        if progress.phase == "examples" and progress.n_places > 50 and "waiting" not in phases:
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
        elif progress.phase == "waiting":
            mark.unlink()
        return "waiting" in phases and progress.phase != "waiting"

    stopped(target, goes_on)
    assert phases[phases.index("waiting") + 1] == "examples"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0.0}, "minutes must be over 0"),
        ({"minutes": float("nan")}, "minutes must be over 0"),
        ({"seed": -1}, "the seed must be"),
        ({"resume": True}, "no head of this model to go on with"),
        ({"texts": ["/nowhere"]}, "there is no file or folder /nowhere"),
        ({"prompts": "/nowhere.jsonl"}, "cannot read /nowhere.jsonl"),
        ({"prompts": Path(localspec.__file__).parent / "measuring" / "questions.jsonl"}, "all of these"),
        ({"chats": True}, "no chat was saved in"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    target: Path, isolated_home: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        distill(str(target), backend="reference", **options)


def test_an_engine_without_hidden_states_is_refused(
    target: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = reference.load

    def blind(*given: Any, **options: Any) -> Any:
        model = load(*given, **options)
        model.capabilities = replace(model.capabilities, hidden=False)
        return model

    monkeypatch.setattr(reference, "load", blind)
    with pytest.raises(EngineError, match="returns no hidden states"):
        run(target)


def test_it_goes_on_from_the_head_there_is_and_is_compared_with_it(target: Path, isolated_home: Path) -> None:
    # Two steps of the optimiser change little, so what a head begins with shows in its weights.
    def weights(path: Path) -> np.ndarray[Any, Any]:
        with GGUFFile(path) as file:
            return head_weights(file, "blk.0.ffn_gate.weight").ravel()

    def alike(path: Path, other: Path) -> float:
        return float(np.corrcoef(weights(path), weights(other))[0, 1])

    short: Any = {"recipe": None, "effort": replace(EFFORT, n_places=200, n_steps=2)}
    heads_folder().mkdir(parents=True)
    earlier = write_random_head(
        target, heads_folder() / "earlier.gguf", taps=TAPS, seed=7, training=Training("how", 0, 5, 6)
    )
    lines: list[str] = []
    made = run(target, **short, say=lines.append)
    assert any("goes on from earlier.gguf" in line for line in lines)
    assert alike(made.path, earlier) > 0.9
    assert made.worth is not None
    assert made.worth.drafters == ("ngram", "earlier")
    training = made.card.training
    assert training.seed == 1, "the examples of the earlier one would be written again"
    digest = hashlib.sha256(earlier.read_bytes()).hexdigest()[:16]
    assert training.command.endswith(f" --begin-with earlier.gguf  # earlier.gguf: sha256 {digest}")
    assert " --seed 1 " in training.command
    assert training.earlier == ("how (5 tokens of data, 6 seen)",)
    # Whoever wants to begins with a linear one, or names another; what does not fit is refused in a line.
    made = run(target, **short, force=True, begin_with="none")
    assert alike(made.path, earlier) < 0.5
    assert (made.card.training.seed, made.card.training.earlier) == (0, ())
    other = write_random_head(target, isolated_home / "other.gguf", "exit", ("layer:0",), steps=1)
    for named, reason in [(other, "its kind, its sizes"), (target, "cannot begin with the head"), ("x", "x")]:
        with pytest.raises(UsageError, match=reason):
            run(target, **short, force=True, begin_with=named)


# What it leaves: what cards say, and which heads are kept.

BRIEF = replace(EFFORT, n_places=200, n_steps=1)


def test_a_head_that_pays_drafts_and_is_kept(
    target: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Worth(1.0, 1.0, 1.1, 1.1, 6, ("ngram",), (1.01, 1.2))
    monkeypatch.setattr("localspec.heads.training.distill.measure_worth", lambda *given, **options: measured)
    made = run(target, effort=replace(BRIEF, n_places=300))
    assert made.kept in find_heads()
    with LLM(target, f"head:{made.path}", backend="reference", draft_length=2, n_ctx=128, remember=False) as llm:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        drafted = llm.generate("la la la", params)
        assert drafted.token_ids == llm.generate("la la la", params, speculate=False).token_ids
        assert drafted.stats["num_draft_tokens"] > 0


def test_a_gain_is_more_than_noise_or_none() -> None:
    """Its interval needs six questions."""
    intervals = {(1.01, 1.2): (True, False), (0.99, 1.2): (False, True), (0.8, 0.9): (False, False)}
    for interval, found in {**intervals, None: (False, True)}.items():
        worth = Worth(1.0, 1.0, 1.1, 1.1, 6, ("ngram",), interval)
        assert (worth.pays, worth.is_unclear) == found
    gains = [1.2, 0.9, 1.1, 1.3, 1.05, 1.0]
    assert gain_of({str(i): [gain] for i, gain in enumerate(gains)}) == (pytest.approx(1.075), (0.9, 1.3))
    assert gain_of({str(i): [gain] for i, gain in enumerate(gains[:5])}) == (1.1, None)


def test_the_card_says_what_the_whole_run_used(target: Path, isolated_home: Path, tmp_path: Path) -> None:
    """Also what was asked for in an earlier sitting only; and the seed cannot be changed between two."""
    (tmp_path / "my questions.jsonl").write_text('{"id": "1", "category": "x", "turns": ["la la la"]}\n')
    (tmp_path / "more.jsonl").write_text('{"id": "1", "category": "x", "turns": ["la la"]}\n')
    (tmp_path / "rivers.txt").write_text("A sentence about rivers, and then another one. " * 20)
    first: Any = {"effort": BRIEF, "texts": [tmp_path / "rivers.txt"]}
    stopped(target, lambda each: each.n_places > 50, **first, prompts=tmp_path / "my questions.jsonl")
    later: Any = {"recipe": None, "effort": replace(BRIEF, minutes=9e3), "resume": True}
    with pytest.raises(UsageError, match="begun with the seed 3: leave --seed out"):
        run(target, **later, seed=4)
    with pytest.raises(UsageError, match="begun with another recipe"):
        run(target, recipe=replace(RECIPE, n_out=100), effort=BRIEF, resume=True)
    made = run(target, **later, seed=3, prompts=[tmp_path / "more.jsonl"])
    expected = "--seed 3 --minutes 9000 --prompts 'my questions.jsonl' --prompts more.jsonl --text rivers.txt"
    expected = f"localspec distill {shlex.quote(str(target))} {expected} --begin-with none  # {RECIPE}"
    assert made.card.training.command == expected


def test_a_command_in_a_card_names_what_is_not_of_this_machine() -> None:
    of_run = Run(Recipe(seed=5), 12.5, prompts=["/a/b.jsonl"], texts=["/c/d", "/e"], chats=True)
    of_run.begins_with, of_run.begins_with_sha256 = "other.gguf", "0123456789abcdef"
    expected = "localspec distill 'a model' --seed 5 --minutes 12.5 --prompts b.jsonl --text d --text e --chats"
    expected += " --begin-with other.gguf  # other.gguf: sha256 0123456789abcdef"
    assert card_command(of_run, "a model") == expected


def test_a_head_has_the_licence_of_its_target(target: Path, tmp_path: Path) -> None:
    ids = np.arange(200, dtype=np.int32)
    with GGUFFile(target) as file:
        file.metadata["general.license"] = "apache-2.0"
        card = new_card(file, "f", RECIPE, ids)
        del file.metadata["general.license"]
        assert new_card(file, "f", RECIPE, ids).license == ""
    path = write_head(tmp_path / "head.gguf", card, {name: np.zeros(shape) for name, shape in card.shapes().items()})
    assert inspect(path)["license"] == "apache-2.0"


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


def test_a_lesson_sees_as_much_of_the_prompt_as_the_drafter_reads() -> None:
    answer = made_up("a", 300, start=200)
    begin = first_lesson(answer)
    assert begin + 1 - Stretch(answer, begin, begin + 20).first_row == MAX_STATES


def test_several_passages_of_every_category_are_tested() -> None:
    passages = [
        replace(made_up(f"{category}{i}", 20), category=category)
        for category, n in (("own", 100), ("chat", 6), ("code", 2))
        for i in range(n)
    ]
    chosen = [each.passage.category for each in places_tested(passages)]
    assert {name: chosen.count(name) for name in dict.fromkeys(chosen)} == {"own": 32, "chat": 4, "code": 2}


def test_the_data_curve_of_no_examples_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no examples; localspec distill writes them"):
        read_examples(tmp_path, ("norm",), 8)
