"""``localspec bench`` as people and scripts run it, on tiny models: samples, outputs, Ctrl-C, resuming, bad files."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
import sys
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from localspec.__main__ import run
from localspec.commands.bench import results as results_module
from localspec.commands.bench import runner as runner_module
from localspec.commands.bench.record import Record, read_record, to_json
from localspec.commands.bench.results import analyse
from localspec.measuring.last_bench import last_bench
from localspec.system import machine as machine_module
from localspec.system.machine import SystemMemory
from tests.conftest import TinyFiles, open_backend
from tests.support.interrupting import self_interrupting
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("in_warm_home")

ARMS = ("plain", "auto", "model:3", "ngram:4")
N_QUESTIONS, N_REPEATS, N_TOKENS = 9, 2, 20

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _brief_load(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = machine_module.busy_share
    monkeypatch.setattr(machine_module, "busy_share", lambda: busy(0.02))


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs the command in this process: exit status, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run(["bench", *map(str, arguments)])
        return status, *capsys.readouterr()

    return call


def write_questions(path: Path, n: int = N_QUESTIONS, turns: Sequence[str] = ()) -> Path:
    rows = [
        {"question_id": i, "category": ("code", "chat")[i % 2], "turns": [f"a b c d {i} a b c", *turns]}
        for i in range(n)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pair(tiny: TinyFiles) -> list[str]:
    """The command line's part that names the models."""
    return [str(tiny.quick.target), "--draft", "ngram", "--draft", str(tiny.quick.draft), "--backend", "reference"]


@pytest.fixture(scope="module")
def made(pair: list[str], tmp_path_factory: pytest.TempPathFactory, warm_home: Path) -> Path:
    """A folder with everything that one run writes."""
    folder = tmp_path_factory.mktemp("run")
    questions = write_questions(folder / "questions.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALSPEC_HOME", str(warm_home))
        out = [f"--{kind}={folder / f'run.{kind}'}" for kind in ("json", "markdown", "html", "svg")]
        status = run(
            ["bench", *pair, "--prompts", str(questions), "--arm", ",".join(ARMS[1:]), "--repeats", str(N_REPEATS),
             "--max-tokens", str(N_TOKENS), "--slice", "4", "--minutes", "60", *out]
        )  # fmt: skip
    assert status == 0
    return folder


@pytest.fixture(scope="module")
def measured(made: Path) -> Record:
    return read_record(made / "run.json")


# -- what is measured --------------------------------------------------------------------------------------------------


def test_every_arm_answers_every_question_in_every_repeat_once(measured: Record) -> None:
    wanted = {(str(q), "reference", arm, r) for q in range(N_QUESTIONS) for arm in ARMS for r in range(N_REPEATS)}
    assert Counter(sample.key for sample in measured.samples) == Counter(wanted)
    assert (measured.ended, measured.skipped) == ("complete", [])
    # In an order that changes: no arm is always the first.
    firsts = Counter(sample.arm for sample in measured.samples if sample.order == 0)
    assert set(firsts) == set(ARMS)


def test_tokens_are_those_of_the_rounds_and_all_arms_say_the_same(measured: Record) -> None:
    for sample in measured.samples:
        assert sum(row[5] for row in sample.rounds) == sample.tokens <= N_TOKENS
        assert len(sample.rounds) == sample.num_rounds
        assert sum(row[3] for row in sample.rounds) == sample.num_draft_tokens == sum(sample.drafted_per_position)
        assert sum(row[4] for row in sample.rounds) == sample.num_accepted_tokens
        # Accepted guesses were all judged, and at most one more a round.
        right = sum(judged[3] for judged in sample.judged)
        assert right == sample.num_accepted_tokens <= len(sample.judged) <= right + sample.num_rounds
        assert sample.seconds == pytest.approx(sum(sum(row[:3]) for row in sample.rounds) / 1e3, rel=1e-3, abs=1e-4)
        assert sample.time_to_first_token >= sample.seconds_prompt > 0
    # The reference engine is exact: greedy answers do not depend on who guesses.
    for row in analyse(measured).rows:
        assert row.n_same == row.n_compared == row.n_samples


def test_doctor_can_say_afterwards_how_much_faster_auto_was(
    measured: Record, pair: list[str], warm_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(warm_home))
    found = last_bench(Path(pair[0]), measured.engines[0].version)
    assert found is not None
    rows = [row for row in analyse(measured).rows if row.arm == "auto"]
    assert found.speedups == {row.category: round(row.speedup.median, 3) for row in rows if row.speedup}
    assert set(found.speedups) == {"all", "code", "chat"}
    assert (found.n_questions, found.drafters) == (N_QUESTIONS, ["ngram", "model"])
    assert found.n_guesses == sum(s.num_draft_tokens for s in measured.samples if s.arm == "auto")
    assert last_bench(Path(pair[0]), "another engine") is None


def test_only_an_arm_s_own_drafters_guess(measured: Record) -> None:
    sources = {arm: {s for each in measured.samples if each.arm == arm for s in each.by_source} for arm in ARMS}
    assert sources["plain"] == set()
    assert sources["model:3"] == {"model"}
    assert sources["ngram:4"] == {"ngram"}
    longest = {arm: max(len(s.drafted_per_position) for s in measured.samples if s.arm == arm) for arm in ARMS}
    assert (longest["plain"], longest["model:3"], longest["ngram:4"]) == (0, 3, 4)


def test_an_arm_is_the_same_alone_as_among_others(measured: Record, made: Path, pair: list[str], bench: Bench) -> None:
    """What another arm does changes nothing: not the drafts of a fixed arm, token for token."""
    alone = ["--arm", "ngram:4", "--prompts", made / "questions.jsonl", "--repeats", N_REPEATS, "--json", "-"]
    status, out, _ = bench(*pair, *alone, "--max-tokens", N_TOKENS, "--minutes", 60)
    assert status == 0
    mine = [sample for sample in json.loads(out)["samples"] if sample["arm"] == "ngram:4"]
    before = {sample.key: sample for sample in measured.samples if sample.arm == "ngram:4"}
    assert len(mine) == len(before) == N_QUESTIONS * N_REPEATS
    for sample in mine:
        other = before[sample["question"], sample["backend"], sample["arm"], sample["repeat"]]
        assert [row[3:] for row in sample["rounds"]] == [row[3:] for row in other.rounds]


def test_every_repeat_starts_anew(measured: Record) -> None:
    """What an arm predicts comes of what it has seen in this repeat alone."""
    judged = {sample.key: sample.judged for sample in measured.samples if sample.arm == "ngram:4"}
    first = [judged[str(q), "reference", "ngram:4", 0] for q in range(N_QUESTIONS)]
    assert first == [judged[str(q), "reference", "ngram:4", 1] for q in range(N_QUESTIONS)]
    predictions = [row[2] for rows in first for row in rows]
    assert len(set(predictions)) > 1, "it learned in between"


def test_slices_say_what_whole_answers_do(measured: Record, made: Path, pair: list[str], bench: Bench) -> None:
    """Contexts of its own for every arm, or the same ones after each other: the drafts of fixed arms are the same."""
    assert measured.settings.slice_tokens == 4
    whole = ["--arm", "ngram:4,model:3", "--prompts", made / "questions.jsonl", "--repeats", 1, "--slice", 0]
    status, out, _ = bench(*pair, *whole, "--max-tokens", N_TOKENS, "--minutes", 60, "--json", "-")
    assert status == 0
    found = json.loads(out)
    assert found["settings"]["slice_tokens"] == 0
    before = {sample.key: sample for sample in measured.samples}
    for sample in found["samples"]:
        other = before[sample["question"], sample["backend"], sample["arm"], sample["repeat"]]
        assert sample["token_sha256"] == other.token_sha256
        assert [row[3:] for row in sample["rounds"]] == [row[3:] for row in other.rounds]


def test_without_memory_for_more_caches_whole_answers_take_turns(
    pair: list[str], made: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.measuring.subject.read_memory", lambda: SystemMemory(1 << 30, 1 << 10))
    few = ["--prompts", made / "questions.jsonl", "--repeats", 1, "--max-tokens", 4, "--json", "-"]
    status, out, _ = bench(*pair, *few)
    assert status == 0
    assert json.loads(out)["settings"]["slice_tokens"] == 0


def test_the_conclusions_are_those_of_the_samples(made: Path) -> None:
    stored = json.loads((made / "run.json").read_text(encoding="utf-8"))
    speeds: dict[tuple[str, int, str], float] = {}
    for sample in stored["samples"]:
        seconds = sample["seconds_draft"] + sample["seconds_verify"] + sample["seconds_other"]
        speeds[sample["question"], sample["repeat"], sample["arm"]] = sample["tokens"] / seconds
    for arm in ARMS[1:]:
        ratios = [
            statistics.median(speeds[str(q), r, arm] / speeds[str(q), r, "plain"] for r in range(N_REPEATS))
            for q in range(N_QUESTIONS)
        ]  # fmt: skip
        (row,) = (row for row in stored["results"]["rows"] if (row["category"], row["arm"]) == ("all", arm))
        assert row["speedup"]["median"] == pytest.approx(statistics.median(ratios))
        assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
        assert (row["speedup"]["n"], row["speedup"]["level"]) == (N_QUESTIONS, 0.95)
        assert row["n_slower"] == sum(ratio < 1 for ratio in ratios)
        assert row["worst_speedup"] == pytest.approx(min(ratios))
    judged = [j for s in stored["samples"] if s["arm"] == "auto" for j in s["judged"]]
    found = [each["reliability"]["n"] for each in stored["results"]["judgements"] if each["source"] == "all"]
    assert found == ([len(judged)] if judged else [])


def test_the_file_is_what_the_documentation_says(made: Path) -> None:
    text = files("localspec.commands.bench").joinpath("SCHEMA.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)(?:\[[\w\]]*)?`", text)) | set(re.findall(r'"(\w+)"', text))

    def names(kind: Any) -> set[str]:
        found = set()
        for field in dataclasses.fields(kind):
            found.add(field.name)
            for inner in (hint := typing.get_type_hints(kind)[field.name], *typing.get_args(hint)):
                found |= names(inner) if dataclasses.is_dataclass(inner) else set()
        return found

    assert names(Record) - documented == set()
    assert names(results_module.Results) - documented == set()
    stored = json.loads((made / "run.json").read_text(encoding="utf-8"))
    assert set(stored) - documented == set()
    assert set(stored["machine"]) - documented == set()


def test_a_record_survives_being_written_and_read(measured: Record, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    path.write_text(to_json(measured), encoding="utf-8")
    assert read_record(path) == measured
    assert measured.engines[0].models[0].sha256 != measured.engines[0].models[1].sha256
    import hashlib

    for model in measured.engines[0].models:
        assert len(model.sha256) == hashlib.sha256().digest_size * 2


def test_a_file_of_before_still_loads(measured: Record, made: Path, tmp_path: Path, bench: Bench) -> None:
    """Fields that are no longer measured are left aside: it can be shown, compared and resumed."""
    stored = json.loads((made / "run.json").read_text(encoding="utf-8"))
    for sample in stored["samples"]:
        sample |= {"clock_mhz": 2000.0, "temperature_c": None, "throttled": False, "joules": 2.5}
    for sitting in stored["sessions"]:
        sitting |= {"load_before": 0.5, "others_before": 0.1}
    path = tmp_path / "before.json"
    path.write_text(json.dumps(stored | {"schema_version": 1}), encoding="utf-8")
    assert read_record(path) == measured
    assert bench("compare", path, made / "run.json")[0] == 0


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_the_terminal_gets_a_table_of_80_columns(made: Path, bench: Bench) -> None:
    status, out, errors = bench("show", made / "run.json")
    assert (status, errors) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    for part in ("auto against plain", "model:3 against plain", "Break-even", "by position", "first token", "slower"):
        assert part in out
    assert "…" not in out.replace("qwen", "")


def test_markdown_tables_have_rows_of_one_length(made: Path, bench: Bench) -> None:
    text = (made / "run.markdown").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE)
    assert len(tables) >= 4
    for each in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in each.splitlines()}) == 1
    status, out, _ = bench("show", made / "run.json", "--markdown", "-")
    assert (status, out) == (0, text)


def test_the_plot_is_an_svg_of_its_own(made: Path) -> None:
    path = made / "run.svg"
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join("".join(each.itertext()) for each in root.iter() if each.tag.endswith("text"))
    for part in ("all", "code", "chat", "plain", "auto", "ngram:4", "×"):
        assert part in words
    assert path.stat().st_size < 60_000


def test_json_on_standard_output_is_all_there_is(made: Path, bench: Bench) -> None:
    status, out, _ = bench("show", made / "run.json", "--json", "-")
    assert status == 0
    assert json.loads(out)["type"] == "localspec bench"


def test_a_run_does_not_differ_from_itself(made: Path, bench: Bench, tmp_path: Path) -> None:
    status, out, _ = bench("compare", made / "run.json", made / "run.json")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "B is" not in out
    assert "no difference can be told" in out
    status, out, _ = bench(
        "compare", made / "run.json", made / "run.json", "--json", tmp_path / "c.json", "--markdown", "-"
    )
    assert status == 0
    assert out.startswith("# ")
    found = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert found["differences"] == []
    assert all(line["paired"] for line in found["lines"])


# -- modes and settings ------------------------------------------------------------------------------------------------


def test_the_budget_ends_a_run_after_the_first_question(pair: list[str], made: Path, bench: Bench) -> None:
    arguments = [
        "--quick",
        "--minutes",
        0.0001,
        "--max-tokens",
        4,
        "--prompts",
        made / "questions.jsonl",
        "--json",
        "-",
    ]
    status, out, _ = bench(*pair, *arguments)
    stored = json.loads(out)
    assert (status, stored["ended"], len(stored["samples"])) == (0, "time", 2)
    assert stored["engines"][0]["passes_measured"] == "before"


def test_narrow_intervals_end_a_run(pair: list[str], made: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tolerance that any interval meets: as soon as there is one, at the end of a cycle of categories."""
    monkeypatch.setattr(runner_module, "DEFAULT", dataclasses.replace(runner_module.DEFAULT, tolerance=1e9))
    questions = write_questions(made / "many.jsonl", 26)
    status, out, _ = bench(*pair, "--prompts", questions, "--max-tokens", 2, "--json", "-")
    stored = json.loads(out)
    # Of 99.9 %, which takes 11 questions, and half of the questions are for that.
    assert (status, stored["ended"], len(stored["samples"])) == (0, "tight", 2 * 22)


def test_earlier_turns_are_answered_before_the_last_is_timed(pair: list[str], tmp_path: Path, bench: Bench) -> None:
    questions = write_questions(tmp_path / "q.jsonl", 2, ["and then a b?"])
    status, out, _ = bench(*pair, "--prompts", questions, "--max-tokens", 6, "--repeats", 1, "--json", "-")
    assert status == 0
    lengths = {sample["prompt_tokens"] for sample in json.loads(out)["samples"]}
    single = write_questions(tmp_path / "one.jsonl", 2)
    _, out, _ = bench(*pair, "--prompts", single, "--max-tokens", 6, "--repeats", 1, "--json", "-")
    assert min(lengths) > max(sample["prompt_tokens"] for sample in json.loads(out)["samples"])


def test_with_a_seed_all_arms_draw_the_same(pair: list[str], made: Path, bench: Bench) -> None:
    status, out, _ = bench(
        *pair, "--prompts", made / "questions.jsonl", "--max-tokens", 8, "--repeats", 2, "--json", "-",
        "--temperature", 1.0, "--seed", 3, "--arm", "auto,2",
    )  # fmt: skip
    assert status == 0
    stored = json.loads(out)
    assert stored["settings"]["sampling"] == {"temperature": 1.0, "seed": 3, "top_k": 40}
    texts: dict[tuple[str, int], set[str]] = {}
    for sample in stored["samples"]:
        texts.setdefault((sample["question"], sample["repeat"]), set()).add(sample["token_sha256"])
    assert all(len(each) == 1 for each in texts.values())
    assert texts["0", 0] != texts["0", 1], "each repeat draws anew"


def test_questions_that_do_not_fit_are_left_out_and_said(pair: list[str], tmp_path: Path, bench: Bench) -> None:
    rows = [{"question_id": i, "category": "c", "turns": ["a b " * (5 if i else 400)]} for i in range(3)]
    questions = tmp_path / "q.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    arguments = ["--prompts", questions, "--max-tokens", 8, "--repeats", 1, "--json", "-"]
    status, out, _ = bench(*pair, *arguments, "--ctx", 128)
    stored = json.loads(out)
    assert (status, stored["skipped"]) == (0, ["0"])
    assert {sample["question"] for sample in stored["samples"]} == {"1", "2"}
    status, out, errors = bench(*pair, *arguments, "--ctx", 16)
    assert (status, out) == (2, "")
    assert "no question fits" in errors


def test_engines_run_side_by_side(tiny: TinyFiles, tmp_path: Path, bench: Bench) -> None:
    open_backend("ik-llama")
    questions = write_questions(tmp_path / "q.jsonl", 2)
    status, out, _ = bench(
        tiny.pair.target, "--draft", "ngram", "--backend", "reference,ik-llama", "--prompts", questions,
        "--max-tokens", 6, "--repeats", 1, "--json", tmp_path / "run.json",
    )  # fmt: skip
    assert status == 0
    found = read_record(tmp_path / "run.json")
    assert found.settings.backends == ["reference", "ik-llama"]
    assert Counter((s.backend, s.arm) for s in found.samples) == Counter(
        {(backend, arm): 2 for backend in found.settings.backends for arm in ("plain", "auto")}
    )
    assert "ik-llama auto against plain" in out
    assert "engines" in out
    duels = [duel for duel in analyse(found).duels if duel.what == "engines" and duel.category == "all"]
    assert [(duel.first, duel.second) for duel in duels] == [
        ("ik-llama plain", "reference plain"), ("ik-llama auto", "reference auto"),
    ]  # fmt: skip


# -- Ctrl-C and resuming -----------------------------------------------------------------------------------------------


def test_ctrl_c_prints_and_keeps_what_is_done_and_it_can_be_resumed(
    pair: list[str], tmp_path: Path, bench: Bench
) -> None:
    pexpect = pytest.importorskip("pexpect")
    questions, stored = write_questions(tmp_path / "q.jsonl", 40), tmp_path / "run.json"
    arguments = ["bench", *pair, "--prompts", str(questions), "--max-tokens", "300", "--ignore-eos", "--repeats", "1",
                 "--minutes", "60", "--json", str(stored)]  # fmt: skip
    child = pexpect.spawn(
        sys.executable, ["-m", "localspec", *arguments], timeout=PATIENCE, encoding="utf-8", dimensions=(40, 100)
    )
    child.expect(r"3 of at most 40")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    out = child.before
    assert child.exitstatus == 130, out
    assert "auto against plain" in out
    assert "interrupted" in out
    assert "--resume" in out
    assert "Traceback" not in out
    before = read_record(stored)
    assert before.ended == "interrupted"
    assert len(before.samples) >= 4
    counts = Counter(sample.question for sample in before.samples)
    assert set(counts.values()) == {2}, "a question counts as a whole or not at all"

    # Going on takes everything from the file, and measures only what it lacks.
    shorter = json.loads(stored.read_text(encoding="utf-8"))
    assert shorter["settings"]["ignore_eos"] is True
    status, _, _ = bench("--resume", stored, "--minutes", 0.0001)
    assert status == 0
    after = read_record(stored)
    assert after.samples[: len(before.samples)] == before.samples
    assert len(after.samples) == len(before.samples) + 2
    assert max(Counter(sample.key for sample in after.samples).values()) == 1
    assert len(after.sessions) == 2
    assert after.ended == "time"
    assert any("in 2 parts" in remark for remark in analyse(after).remarks)


def test_ctrl_c_before_anything_is_measured_leaves_nothing(pair: list[str], tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    stored = tmp_path / "run.json"
    program, *arguments = self_interrupting("said loading", ["bench", *pair, "--json", stored])
    child = pexpect.spawn(program, arguments, timeout=PATIENCE)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130, child.before
    assert b"Traceback" not in child.before
    assert list(tmp_path.iterdir()) == []


def test_a_complete_run_has_nothing_to_resume(made: Path, tmp_path: Path, bench: Bench) -> None:
    again = shutil.copy(made / "run.json", tmp_path / "run.json")
    status, out, _ = bench("--resume", again, "--repeats", N_REPEATS)
    assert status == 0
    assert "everything was measured" in " ".join(out.split())
    assert read_record(Path(again)).samples == read_record(made / "run.json").samples


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens", "5"], "max tokens 20, now 5"),
        (["--arm", "auto,2"], "arms"),
        (["--draft", "ngram"], "no drafter 'model'"),
        (["--temperature", "1.0"], "sampling"),
        (["--category", "code"], "categories"),
        (["--set", "report"], "questions"),
        (["--ctx", "64"], "now [64]"),
    ],
)
def test_another_run_is_not_resumed(arguments: list[str], said: str, made: Path, tmp_path: Path, bench: Bench) -> None:
    stored = shutil.copy(made / "run.json", tmp_path / "run.json")
    status, out, errors = bench("--resume", stored, *arguments)
    line = [line for line in errors.splitlines() if line.startswith("localspec: ")]
    assert (status in (1, 2), out, len(line)) == (True, "", 1)
    assert said in line[0]
    assert (tmp_path / "run.json").read_bytes() == (made / "run.json").read_bytes()


# -- bad input ---------------------------------------------------------------------------------------------------------


def damaged(folder: Path, source: Path) -> dict[str, tuple[Path, str]]:
    stored = json.loads(source.read_text(encoding="utf-8"))
    good = stored["samples"][0]

    def write(name: str, value: object) -> Path:
        path = folder / f"{name}.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return path

    bad = {
        "no-seconds": good | {"seconds_verify": 0, "seconds_draft": 0, "seconds_other": 0},
        "text-for-number": good | {"tokens": "20"},
        "number-for-text": good | {"finish_reason": 5},
        "nan": good | {"seconds_verify": float("nan")},
        "huge": good | {"seconds_verify": 10**400},
        "rounds": good | {"rounds": [[1, 2, 3]]},
        "stranger": good | {"arm": "7"},
        "short": {key: value for key, value in good.items() if key != "arm"},
    }
    found = {name: (write(name, stored | {"samples": [sample]}), "damaged") for name, sample in bad.items()}
    return found | {
        "cut": (write("cut", source.read_text(encoding="utf-8")[:-200]), "cut short"),
        "other": (write("other", {"a": 1}), "is not a run"),
        "list": (write("list", [1]), "is not a run"),
        "version": (write("version", stored | {"schema_version": 99}), "schema version 99"),
        "deep": (write("deep", "[" * 200_000), "nested too deeply"),
        "empty": (write("empty", stored | {"samples": []}), "nothing was measured"),
        "engines": (write("engines", stored | {"engines": []}), "damaged"),
        "missing": (folder / "missing.json", "No such file"),
        "folder": (folder, "Is a directory"),
    }


def test_a_damaged_file_is_one_line(made: Path, tmp_path: Path, bench: Bench) -> None:
    for name, (path, said) in damaged(tmp_path, made / "run.json").items():
        status, out, errors = bench("show", path)
        assert (status, out, errors.count("\n")) == (1, "", 1), (name, errors)
        assert said in errors, (name, errors)
        assert "internal error" not in errors
    status, _, errors = bench("compare", made / "run.json", tmp_path / "cut.json")
    assert status == 1
    assert "cut.json" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arm", "automatic"], "no arm 'automatic'"),
        (["--arm", "model:99"], "1..64"),
        (["--category", "cooking"], "no category 'cooking'"),
        (["--set", "all"], "--set must be report or tuning"),
        (["--prompts", "nothing.jsonl"], "cannot read nothing.jsonl"),
        (["--prompts", "x.jsonl", "--set", "report"], "cannot be combined with --prompts"),
        (["--quick", "--full"], "--quick and --full cannot be combined"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--repeats", "0"], "--repeats"),
        (["--html", "-"], "--html needs a file"),
        (["--json", "-", "--markdown", "-"], "two outputs"),
        (["--json", "no/such/folder.json"], "no folder"),
        (["--backend", "fast"], "unknown backend 'fast'"),
        (["second-model"], "one model at a time"),
    ],
)
def test_bad_usage_is_one_line_before_anything_takes_time(
    arguments: list[str], said: str, tiny: TinyFiles, bench: Bench
) -> None:
    status, out, errors = bench(tiny.quick.target, "--draft", "none", *arguments)
    lines = [line for line in errors.splitlines() if line.startswith("localspec: ")]
    assert (status, out, len(lines)) == (2, "", 1), errors
    assert said in lines[0]


def test_a_drafter_that_is_not_there_is_named(tiny: TinyFiles, made: Path, bench: Bench) -> None:
    common = [tiny.quick.target, "--backend", "reference", "--prompts", made / "questions.jsonl"]
    status, _, errors = bench(*common, "--draft", "ngram", "--arm", "model:2")
    assert status == 2
    assert "no drafter 'model' is loaded (ngram)" in errors
    status, _, errors = bench(*common, "--draft", "none")
    assert status == 2
    assert "--arm auto needs a drafter" in errors


def test_files_that_are_there_stay(made: Path, pair: list[str], bench: Bench) -> None:
    before = (made / "run.json").read_bytes()
    status, _, errors = bench(*pair, "--json", made / "run.json")
    assert status == 2
    assert "--resume goes on with it" in errors
    status, _, errors = bench("show", made / "run.json", "--html", made / "run.html")
    assert status == 2
    assert "use --force to overwrite it" in errors
    assert (made / "run.json").read_bytes() == before
    assert bench("show", made / "run.json", "--html", made / "run.html", "--force")[0] == 0


@pytest.mark.parametrize("words", [["show"], ["show", "a", "b"], ["compare", "a"], ["compare"]])
def test_show_and_compare_say_how_many_files_they_take(words: list[str], bench: Bench) -> None:
    status, out, errors = bench(*words)
    assert (status, out) == (2, "")
    assert f"bench {words[0]} takes" in errors


def test_a_disk_that_refuses_is_one_line(
    made: Path, tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    status, _, errors = bench("show", made / "run.json", "--svg", tmp_path / "plot.svg")
    assert status == 1
    assert "No space left" in errors
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays"


@pytest.mark.real
@pytest.mark.slow
def test_a_real_pair(real_model: Callable[[str], Path], tmp_path: Path, bench: Bench) -> None:
    target = real_model("smollm2-135m")
    status, out, _ = bench(
        target, "--draft", "ngram", "--quick", "--minutes", 0.5, "--category", "edit", "--category", "code",
        "--json", tmp_path / "run.json", "--html", tmp_path / "run.html",
    )  # fmt: skip
    assert status == 0
    assert "auto against plain" in out
    found = read_record(tmp_path / "run.json")
    assert {sample.category for sample in found.samples} == {"edit", "code"}
    assert all(sample.seconds_prompt > 0 for sample in found.samples)
