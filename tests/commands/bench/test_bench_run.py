"""``localspec bench`` as people and scripts run it, on tiny models: samples, outputs, Ctrl-C, resuming, bad files."""

from __future__ import annotations

import json
import re
import shutil
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from localspec.commands.bench import runner
from localspec.commands.bench.record import Record, read_record, to_json
from localspec.commands.bench.results import Results, analyse
from localspec.measuring.last_bench import last_bench
from localspec.system import machine
from tests.conftest import TinyFiles, open_backend
from tests.support.interrupting import interrupted
from tests.support.program import localspec

ARMS = ("plain", "auto", "model:3", "ngram:4")
N_QUESTIONS, N_REPEATS, N_TOKENS = 9, 2, 20
QUICKLY = ("--repeats", 1, "--max-tokens", 6)


@pytest.fixture(autouse=True)
def _briefly(measured_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others do is measured in less time."""
    busy = machine.busy_share
    monkeypatch.setattr(machine, "busy_share", lambda: busy(0.02))


def bench(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    done = localspec("bench", *map(str, arguments))
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def measure(*arguments: object) -> Any:
    """The record that a run writes."""
    status, out, errors = bench(*arguments, "--json", "-")
    assert status == 0, errors
    return json.loads(out)


def refused(*arguments: object) -> str:
    """The one line that says why."""
    status, out, errors = bench(*arguments)
    (line,) = [line for line in errors.splitlines() if line.startswith("localspec: ")]
    assert (status in (1, 2), out) == (True, ""), errors
    return f"{status}: {line}"


def write_questions(path: Path, n: int = N_QUESTIONS, turns: Sequence[str] = ()) -> Path:
    rows = [
        {"question_id": i, "category": ("code", "chat")[i % 2], "turns": [f"a b c d {i} a b c", *turns]}
        for i in range(n)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pair(tiny: TinyFiles) -> list[str]:
    return [str(tiny.quick.target), "--draft", "ngram", "--draft", str(tiny.quick.draft), "--backend", "reference"]


@pytest.fixture(scope="module")
def made(pair: list[str], tmp_path_factory: pytest.TempPathFactory, module_home: Path) -> Path:
    """A folder with everything that one run writes."""
    folder = tmp_path_factory.mktemp("run")
    questions = write_questions(folder / "questions.jsonl")
    out = [f"--{kind}={folder / f'run.{kind}'}" for kind in ("json", "markdown", "html", "svg")]
    asked = ["--prompts", questions, "--arm", ",".join(ARMS[1:]), "--repeats", N_REPEATS, "--max-tokens", N_TOKENS]
    assert bench(*pair, *asked, "--slice", 4, "--minutes", 60, *out)[0] == 0
    return folder


@pytest.fixture(scope="module")
def measured(made: Path) -> Record:
    return read_record(made / "run.json")


def test_every_arm_answers_every_question_in_every_repeat_once(measured: Record) -> None:
    wanted = {(str(q), "reference", arm, r) for q in range(N_QUESTIONS) for arm in ARMS for r in range(N_REPEATS)}
    assert Counter(sample.key for sample in measured.samples) == Counter(wanted)
    assert (measured.ended, measured.skipped) == ("complete", [])
    firsts = {sample.arm for sample in measured.samples if sample.order == 0}
    assert firsts == set(ARMS), "in an order that changes"


def test_tokens_are_those_of_the_rounds_and_all_arms_say_the_same(measured: Record) -> None:
    for sample in measured.samples:
        assert sum(row[5] for row in sample.rounds) == sample.tokens <= N_TOKENS
        assert len(sample.rounds) == sample.num_rounds
        assert sum(row[3] for row in sample.rounds) == sample.num_draft_tokens
        branches = sample.num_draft_tokens - sum(sample.drafted_per_position)  # they share positions
        assert (branches >= 0) if sample.arm == "auto" else (branches == 0)
        # Accepted guesses were all judged, and at most one more a round.
        right = sum(judged[3] for judged in sample.judged)
        assert sum(row[4] for row in sample.rounds) == sample.num_accepted_tokens == right
        assert right <= len(sample.judged) <= right + sample.num_rounds
        assert sample.seconds == pytest.approx(sum(sum(row[:3]) for row in sample.rounds) / 1e3, rel=1e-3, abs=1e-4)
        assert sample.time_to_first_token >= sample.seconds_prompt > 0
    # The reference engine is exact: greedy answers do not depend on who guesses.
    assert all(row.n_same == row.n_compared == row.n_samples for row in analyse(measured).rows)


def test_doctor_can_say_afterwards_how_much_faster_auto_was(
    measured: Record, pair: list[str], module_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(module_home))
    found = last_bench(Path(pair[0]), measured.engines[0].version)
    rows = [row for row in analyse(measured).rows if row.arm == "auto"]
    assert found.speedups == {row.category: round(row.speedup.median, 3) for row in rows if row.speedup}
    assert set(found.speedups) == {"all", "code", "chat"}
    assert (found.n_questions, found.drafters) == (N_QUESTIONS, ["ngram", "model"])
    assert found.n_guesses == sum(s.num_draft_tokens for s in measured.samples if s.arm == "auto")
    assert last_bench(Path(pair[0]), "another engine") is None


def test_only_an_arm_s_own_drafters_guess_and_every_repeat_starts_anew(measured: Record) -> None:
    of = {arm: [sample for sample in measured.samples if sample.arm == arm] for arm in ARMS}
    sources = {arm: {source for each in of[arm] for source in each.by_source} for arm in ARMS}
    assert (sources["plain"], sources["model:3"], sources["ngram:4"]) == (set(), {"model"}, {"ngram"})
    longest = {arm: max(len(each.drafted_per_position) for each in of[arm]) for arm in ARMS}
    assert (longest["plain"], longest["model:3"], longest["ngram:4"]) == (0, 3, 4)
    # What an arm predicts comes of what it has seen in this repeat alone.
    judged = {(each.question, each.repeat): each.judged for each in of["ngram:4"]}
    assert all(judged[str(q), 0] == judged[str(q), 1] for q in range(N_QUESTIONS))
    assert len({row[2] for q in range(N_QUESTIONS) for row in judged[str(q), 0]}) > 1, "it learned in between"


def test_an_arm_is_the_same_alone_among_others_and_in_slices(measured: Record, made: Path, pair: list[str]) -> None:
    """Neither other arms nor whose contexts they are change the drafts of a fixed arm, token for token."""
    usual = ["--prompts", made / "questions.jsonl", "--max-tokens", N_TOKENS, "--minutes", 60]
    before = {sample.key: sample for sample in measured.samples}
    for arguments, slices in (
        (["--arm", "ngram:4", "--repeats", N_REPEATS], 4),
        (["--arm", "ngram:4,model:3", "--repeats", 1, "--slice", 0], 0),
    ):
        found = measure(*pair, *usual, *arguments)
        assert (measured.settings.slice_tokens, found["settings"]["slice_tokens"]) == (4, slices)
        for sample in found["samples"]:
            other = before[sample["question"], sample["backend"], sample["arm"], sample["repeat"]]
            assert sample["token_sha256"] == other.token_sha256
            assert [row[3:] for row in sample["rounds"]] == [row[3:] for row in other.rounds]


def test_the_file_is_what_the_documentation_says_and_is_read_as_it_was_written(made: Path, measured: Record) -> None:
    text = files("localspec.commands.bench").joinpath("SCHEMA.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)(?:\[[\w\]]*)?`", text)) | set(re.findall(r'"(\w+)"', text))

    def names(kind: Any) -> set[str]:
        found = set()
        for field in fields(kind):
            found.add(field.name)
            for inner in (hint := typing.get_type_hints(kind)[field.name], *typing.get_args(hint)):
                found |= names(inner) if is_dataclass(inner) else set()
        return found

    stored = json.loads((made / "run.json").read_text(encoding="utf-8"))
    assert {*names(Record), *names(Results), *stored, *stored["machine"]} - documented == set()
    assert stored["results"] == asdict(analyse(measured))
    (made / "again.json").write_text(to_json(measured), encoding="utf-8")
    assert read_record(made / "again.json") == measured
    digests = {model.sha256 for model in measured.engines[0].models}
    assert (len(digests), {len(each) for each in digests}) == (2, {64})


def test_a_run_is_shown_again_in_every_form(made: Path) -> None:
    status, out, errors = bench("show", made / "run.json")
    assert (status, errors, max(map(len, out.splitlines())) <= 80) == (0, "", True)
    for part in ("auto against plain", "model:3 against plain", "Break-even", "by position", "first token", "slower"):
        assert part in out
    assert not {"…", "\x1b"} & set(out.replace("qwen", ""))
    _, out, _ = bench("show", made / "run.json", "--markdown", "-")
    assert out == (made / "run.markdown").read_text(encoding="utf-8")
    assert measure("show", made / "run.json") == json.loads((made / "run.json").read_text(encoding="utf-8"))
    root = ElementTree.fromstring((made / "run.svg").read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join("".join(each.itertext()) for each in root.iter() if each.tag.endswith("text"))
    for part in ("all", "code", "chat", "plain", "auto", "ngram:4", "×"):
        assert part in words


def test_a_run_does_not_differ_from_itself(made: Path, tmp_path: Path) -> None:
    same = ("compare", made / "run.json", made / "run.json")
    status, out, _ = bench(*same)
    assert (status, max(map(len, out.splitlines())) <= 80, "B is" in out) == (0, True, False)
    status, out, _ = bench(*same, "--json", tmp_path / "c.json", "--markdown", "-")
    assert (status, out[:2]) == (0, "# ")
    found = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert found["differences"] == []
    assert all(line["paired"] for line in found["lines"])
    assert {line["verdict"] for line in found["lines"]} == {"no difference can be told", "too few questions"}


def test_the_budget_ends_a_run(pair: list[str], made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.measuring.subject.read_memory", lambda: machine.SystemMemory(1 << 30, 1 << 10))
    asked = ["--prompts", made / "questions.jsonl", "--category", "chat", "--max-tokens", 4]
    stored = measure(*pair, "--quick", "--minutes", 0.0001, *asked)
    assert (stored["ended"], [sample["category"] for sample in stored["samples"]]) == ("time", ["chat"] * 2)
    assert stored["engines"][0]["passes_measured"] == "before"
    assert stored["settings"]["slice_tokens"] == 0  # without memory for more caches, whole answers take turns


def test_narrow_intervals_end_a_run(pair: list[str], made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tolerance that any interval meets: as soon as there is one, at the end of a cycle of categories."""
    monkeypatch.setattr(runner, "DEFAULT", replace(runner.DEFAULT, tolerance=1e9))
    stored = measure(*pair, "--prompts", write_questions(made / "many.jsonl", 26), "--max-tokens", 2)
    # Of 99.9 %, which takes 11 questions, and half of the questions are for that.
    assert (stored["ended"], len(stored["samples"])) == ("tight", 2 * 22)


def test_earlier_turns_are_answered_before_the_last_is_timed(pair: list[str], tmp_path: Path) -> None:
    single, double = (
        {sample["prompt_tokens"] for sample in measure(*pair, "--prompts", path, *QUICKLY)["samples"]}
        for path in (write_questions(tmp_path / "1.jsonl", 2), write_questions(tmp_path / "2.jsonl", 2, ["and a b?"]))
    )
    assert min(double) > max(single)


def test_with_a_seed_all_arms_draw_the_same(pair: list[str], made: Path) -> None:
    drawn = ["--temperature", 1.0, "--seed", 3, "--arm", "auto,2", "--max-tokens", 8, "--repeats", 2]
    stored = measure(*pair, "--prompts", made / "questions.jsonl", *drawn)
    assert stored["settings"]["sampling"] == {"temperature": 1.0, "seed": 3, "top_k": 40}
    texts: dict[tuple[str, int], set[str]] = {}
    for sample in stored["samples"]:
        texts.setdefault((sample["question"], sample["repeat"]), set()).add(sample["token_sha256"])
    assert all(len(each) == 1 for each in texts.values())
    assert texts["0", 0] != texts["0", 1], "each repeat draws anew"


def test_questions_that_do_not_fit_are_left_out_and_said(pair: list[str], tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "q.jsonl", 3)
    questions.write_text(questions.read_text("utf-8").replace("d 0", "d 0" * 400), encoding="utf-8")
    stored = measure(*pair, "--prompts", questions, *QUICKLY, "--ctx", 128)
    assert stored["skipped"] == ["0"]
    assert {sample["question"] for sample in stored["samples"]} == {"1", "2"}
    assert "no question fits" in refused(*pair, "--prompts", questions, *QUICKLY, "--ctx", 16)


def test_engines_run_side_by_side(tiny: TinyFiles, tmp_path: Path) -> None:
    open_backend("ik-llama")
    asked = ["--prompts", write_questions(tmp_path / "q.jsonl", 2), *QUICKLY, "--json", tmp_path / "run.json"]
    status, out, _ = bench(tiny.pair.target, "--draft", "ngram", "--backend", "reference,ik-llama", *asked)
    assert (status, "ik-llama auto against plain" in out) == (0, True)
    found = read_record(tmp_path / "run.json")
    assert found.settings.backends == ["reference", "ik-llama"]
    assert Counter((s.backend, s.arm) for s in found.samples) == Counter(
        {(backend, arm): 2 for backend in found.settings.backends for arm in ("plain", "auto")}
    )
    duels = [duel for duel in analyse(found).duels if duel.what == "engines" and duel.category == "all"]
    assert [(duel.first, duel.second) for duel in duels] == [
        (f"ik-llama {arm}", f"reference {arm}") for arm in ("plain", "auto")
    ]


def test_ctrl_c_prints_and_keeps_what_is_done_and_it_can_be_resumed(pair: list[str], tmp_path: Path) -> None:
    questions, stored = write_questions(tmp_path / "q.jsonl", 40), tmp_path / "run.json"
    arguments = ["bench", *pair, "--prompts", questions, "--max-tokens", "300", "--ignore-eos", "--repeats", "1",
                 "--minutes", "60", "--json", stored]  # fmt: skip
    out, errors = interrupted("call localspec.measuring.subject:TimedAnswer.sample", arguments, count=9)
    assert (b"auto against plain" in out, "--resume" in errors[-1]) == (True, True)
    before = read_record(stored)
    assert (before.ended, before.settings.ignore_eos, len(before.samples) >= 4) == ("interrupted", True, True)
    counts = Counter(sample.question for sample in before.samples)
    assert set(counts.values()) == {2}, "a question counts as a whole or not at all"

    # Going on takes everything from the file, and measures only what it lacks.
    assert bench("--resume", stored, "--minutes", 0.0001)[0] == 0
    after = read_record(stored)
    assert after.samples[: len(before.samples)] == before.samples
    assert len({sample.key for sample in after.samples}) == len(after.samples) == len(before.samples) + 2
    assert (len(after.sessions), after.ended) == (2, "time")
    assert any("in 2 parts" in remark for remark in analyse(after).remarks)


def test_ctrl_c_before_anything_is_measured_leaves_nothing(pair: list[str], tmp_path: Path) -> None:
    stored = tmp_path / "record" / "run.json"
    stored.parent.mkdir()
    interrupted("call localspec.engine.loading:Loader.load", ["bench", *pair, "--json", stored])
    assert list(stored.parent.iterdir()) == []


def test_a_complete_run_and_another_one_are_not_resumed(made: Path, tmp_path: Path) -> None:
    again, before = shutil.copy(made / "run.json", tmp_path / "run.json"), read_record(made / "run.json")
    for arguments, said in (
        ("--max-tokens 5", "max tokens 20, now 5"),
        ("--arm auto,2", "arms"),
        ("--draft ngram", "no drafter 'model'"),
        ("--set report", "questions"),
        ("--ctx 64", "now [64]"),
    ):
        assert said in refused("--resume", again, *arguments.split())
        assert again.read_bytes() == (made / "run.json").read_bytes()
    assert bench("--resume", again, "--repeats", N_REPEATS)[0] == 0
    assert (read_record(again).samples, read_record(again).ended) == (before.samples, "complete")


def test_a_damaged_file_is_one_line(made: Path, tmp_path: Path) -> None:
    text = (made / "run.json").read_text(encoding="utf-8")
    stored, path = json.loads(text), tmp_path / "damaged.json"
    good = stored["samples"][0]
    bad_samples = [
        good | {"seconds_verify": 0, "seconds_draft": 0, "seconds_other": 0},
        good | {"tokens": "20"},
        good | {"parted_by": float("nan")},
        good | {"seconds_verify": 10**400},
        good | {"rounds": [[1, 2, 3]]},
        good | {"arm": "7"},
    ]
    for content, said in (
        *((stored | {"samples": [sample]}, "is damaged: ") for sample in bad_samples),
        (text[:-200], "cut short"),
        ({"a": 1}, "is not a run"),
        ([1], "is not a run"),
        (stored | {"schema_version": 99}, "schema version 99"),
        ("[" * 200_000, "nested too deeply"),
        (stored | {"samples": []}, "nothing was measured"),
        (stored | {"engines": []}, "is damaged: "),
        (stored | {"machine": {"features": [1]}}, "is damaged: "),
        (stored | {"machine": {"cores": "2"}}, "is damaged: "),
        (stored | {"engines": [stored["engines"][0] | {"pass_ms": {"1": 0.0}}]}, "is damaged: "),
    ):
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        assert said in refused("show", path)
    assert "No such file" in refused("show", tmp_path / "missing.json")
    assert "Is a directory" in refused("show", tmp_path)
    assert "damaged.json" in refused("compare", made / "run.json", path)


def test_bad_usage_is_one_line_before_anything_takes_time(tiny: TinyFiles) -> None:
    for arguments, said in {
        "--arm automatic": "no arm 'automatic'",
        "--arm model:99": "1..64",
        "--category cooking": "no category 'cooking'",
        "--set all": "--set must be report or tuning",
        "--prompts nothing.jsonl": "cannot read nothing.jsonl",
        "--prompts x.jsonl --set report": "cannot be combined with --prompts",
        "--quick --full": "--quick and --full cannot be combined",
        "--minutes nan": "--minutes",
        "--repeats 0": "--repeats",
        "--html -": "--html needs a file",
        "--json - --markdown -": "two outputs",
        "--json no/such/folder.json": "no folder",
        "--backend fast": "unknown backend 'fast'",
        "second-model": "one model at a time",
    }.items():
        line = refused(tiny.quick.target, "--draft", "none", *arguments.split())
        assert (line[0], said in line) == ("2", True), line
    assert "unknown backend 'fast'" in refused("no/such.gguf", "--backend", "reference,fast")


def test_what_is_not_there_is_named_and_files_that_are_there_stay(made: Path, pair: list[str]) -> None:
    for words in (["show"], ["show", "a", "b"], ["compare", "a"], ["compare"]):
        assert f"2: localspec: bench {words[0]} takes" in refused(*words)
    common = [pair[0], "--backend", "reference", "--prompts", made / "questions.jsonl"]
    assert "no drafter 'model' is loaded (ngram)" in refused(*common, "--draft", "ngram", "--arm", "model:2")
    assert "--arm auto needs a drafter" in refused(*common, "--draft", "none")
    before, html = (made / "run.json").read_bytes(), ("show", made / "run.json", "--html", made / "run.html")
    assert "--resume goes on with it" in refused(*pair, "--json", made / "run.json")
    assert "use --force to overwrite it" in refused(*html)
    assert (made / "run.json").read_bytes() == before
    assert bench(*html, "--force")[0] == 0
