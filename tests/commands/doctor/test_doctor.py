"""``localspec doctor`` as a person and as a script see it: rows, exit statuses, JSON, plots, Ctrl-C."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from localspec import backends
from localspec.backends.llama import ggml as ggml_module
from localspec.backends.llama.ggml import Device
from localspec.commands.doctor import facts, fit, ranking
from localspec.commands.doctor.command import ranking_parts, recommend_ranked
from localspec.controllers.cost_model import PassTimes
from localspec.engine import loading
from localspec.engine.options import LoadOptions
from localspec.heads.file import heads_folder
from localspec.measuring.last_bench import remember
from localspec.model_files.catalog import Catalog, Entry
from localspec.report.model import Finding
from localspec.system import machine as machine_module
from localspec.system.files import home, models_dir
from localspec.system.machine import SystemMemory
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.heads import write_random_head
from tests.support.interrupting import interrupted
from tests.support.program import assert_one_line, localspec
from tests.support.published_heads import write_eagle3

GB = 10**9
SCHEMA = TypeAdapter(facts.Examination)
REFERENCE = ("--backend", "reference")
NGRAM = ("--draft", "ngram", *REFERENCE)
NONE = ("--draft", "none", *REFERENCE)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurements in a fraction of the time."""
    measure, busy = machine_module.measure_bandwidth, machine_module.busy_share
    monkeypatch.setattr(machine_module, "measure_bandwidth", partial(measure, seconds=0.02))
    monkeypatch.setattr(machine_module, "MOST", 16 << 20)
    monkeypatch.setattr(machine_module, "busy_share", lambda: busy(0.02))


def screen(*arguments: str | Path) -> tuple[int, str]:
    """Exit status, and what is printed for people."""
    result = localspec("doctor", *arguments)
    return result.returncode, result.stdout.decode()


def examine(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit status and the report, which has its schema."""
    result = localspec("doctor", *arguments, "--json")
    found = json.loads(result.stdout)
    assert json.loads(json.dumps(SCHEMA.validate_json(result.stdout, strict=True).as_dict())) == found
    return result.returncode, found


def row(found: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    (check,) = [check for check in found["checks"] if (check["section"], check["name"]) == (section, name)]
    return check


def set_free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Let the system say that so much memory is free."""
    monkeypatch.setattr(machine_module, "read_memory", lambda: SystemMemory(16 * GB, n_bytes))


@pytest.fixture
def head(tiny: TinyFiles) -> Path:
    heads_folder().mkdir(parents=True)
    return write_random_head(tiny.quick.target, heads_folder() / "a-head.gguf")


def test_without_any_model() -> None:
    status, found = examine()
    assert (status, found["holds"], found["models"], found["pair"]) == (0, True, [], None)
    assert found["schema_version"] == 1
    assert found["recommendation"]["command"] == "localspec pull"
    machine = found["machine"]
    assert machine["cores"] >= machine["threads"] >= 1
    assert 0.1 < machine["bandwidth_gb_per_s"] < 10_000
    assert {engine["name"] for engine in found["engines"]} == set(backends.backend_names())
    (ik,) = (engine for engine in found["engines"] if engine["name"] == "ik-llama")
    told = [check for check in found["checks"] if check["name"] == "this CPU"]  # where a build for it would gain
    gains = ik["usable"] and ggml_module.native_gain(ik["built_for"], machine["features"]) is not None
    assert bool(told) == gains
    assert "none yet in" in row(found, "models", "on disk")["text"]
    assert "localspec pull" in screen()[1]


def test_a_model_that_is_not_on_this_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["qwen2.5-coder-7b", "qwen2.5-coder-0.5b"]
    set_free(monkeypatch, 64 * GB)
    status, found = examine(names[0])
    pair = found["pair"]
    assert (status, pair["target"]["present"], pair["fit"]["fits"], pair["cost"]) == (0, False, None, None)
    assert [each["weights_bytes"] for each in pair["fit"]["models"]] == [Catalog.load()[name].bytes for name in names]
    assert found["recommendation"]["command"] == f"localspec pull {' '.join(names)}"
    set_free(monkeypatch, 4 * GB)
    status, found = examine(names[0])
    assert (status, found["pair"]["fit"]["fits"]) == (1, False)
    assert row(found, "pair", "memory")["advice"]
    monkeypatch.setattr("localspec.commands.doctor.fit.free_bytes", lambda folder: 1000)
    status, found = examine("smollm2-135m")
    assert (status, "1 kB of disk free" in row(found, "pair", "download")["text"]) == (1, True)


def answers(out: str) -> dict[str, str]:
    """The three lines by name, mark included."""
    text = " ".join(out.split())
    places = {name: re.search(rf"(✓|·|!|✗) {name} ", text) for name in ("fits", "guesses", "faster")}
    assert all(places.values()), out
    starts = {name: place.start() for name, place in places.items() if place}
    return {name: text[at : at + 200] for name, at in starts.items()}


def quiet(monkeypatch: pytest.MonkeyPatch, *, busy: float = 0.0) -> None:
    """What the doctor sees of other programs; a calibration sees the same."""
    monkeypatch.setattr(machine_module, "busy_share", lambda *args: busy)
    monkeypatch.setattr("localspec.controllers.calibration.busy_share", lambda *args: busy)
    monkeypatch.setattr("localspec.controllers.calibration.others_share", lambda spans: busy)
    monkeypatch.setattr("localspec.controllers.calibration.SPAN_S", 0.0)


def test_it_begins_with_the_answer_and_keeps_to_one_screen(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    _, out = screen(tiny.quick.target, *NGRAM)
    lines, found = out.splitlines(), answers(out)
    assert (lines[0], lines[1].split()[:2]) == (tiny.quick.target.stem, ["✓", "fits"])
    assert "yes: it needs" in found["fits"]
    assert re.search("yes, by copying from the text|no: |not known", found["guesses"])
    assert f"localspec bench {tiny.quick.target} measures it".replace(" ", "") in "".join(out.split())
    assert (max(map(len, lines)) <= 80, len(lines) <= 23) == (True, True), out
    assert ("Break-even" in out, "--details" in out) == (False, True)


def test_the_answer_says_what_bench_measured_and_nothing_else(tiny: TinyFiles) -> None:
    arguments = (tiny.quick.target, *NGRAM)
    _, found = examine(*arguments)
    engine = found["pair"]["cost"]["engine"]
    assert found["pair"]["bench"] is None
    measured = {"drafters": ["ngram"], "speedups": {"all": 1.2, "edit": 1.9, "chat": 1.04}, "n_questions": 12}
    for measured_with, n_guesses, said in (
        (engine, 40, "edit ×1.90, chat ×1.04; not measured: code (localspec bench"),
        (engine, 0, "no: nothing was guessed"),
        ("another engine", 40, "no: nothing was guessed"),
    ):
        remember(tiny.quick.target, measured_with, measured | {"n_guesses": n_guesses})
        assert said in answers(screen(*arguments)[1])["faster"]
    assert examine(*arguments)[1]["pair"]["bench"]["speedups"] == measured["speedups"]


def test_nothing_measured_on_a_busy_machine_is_ticked(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, busy=0.45)
    arguments = (tiny.quick.target, *NGRAM, "--calibrate")
    assert answers(screen(*arguments)[1])["guesses"].startswith("! guesses not known: what was timed is in doubt, see")
    _, found = examine(*arguments)
    for section, name in (("cost", "one token"), ("machine", "bandwidth"), ("machine", "load")):
        assert row(found, section, name)["status"] != "ok", name
    assert "others used 45% of the CPU" in row(found, "cost", "one token")["text"]
    assert (found["pair"]["cost"]["provisional"], found["pair"]["cost"]["others_share"]) == (True, 0.45)


def test_the_engine_that_auto_takes(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ticked only on a quiet machine, and ``--calibrate`` measures it again, with the usual engine loaded."""
    open_backend("ik-llama")
    models: list[Any] = [types.SimpleNamespace(backend=n, path=tiny.bpe, n_threads=None) for n in loading.ENGINES]

    def timed(ms: float, n_quiet: int) -> Any:
        times = PassTimes({1: ms, 64: 64 * ms})
        times.others_share = 0.0 if n_quiet else 0.45
        return types.SimpleNamespace(times=lambda: times, quiet_rounds=lambda: [times] * n_quiet)

    chosen, nothing = "auto takes llama-cpp", "nothing is chosen by that, auto keeps ik-llama and"
    done = types.SimpleNamespace(waits=False)
    for busy, n_quiet, status, said in (
        (0.0, 3, "ok", chosen),
        (0.45, 3, "info", chosen),
        (0.45, 0, "note", f"others used 45% of the CPU: {nothing}"),
    ):
        quiet(monkeypatch, busy=busy)
        loading.remember(models, [timed(20.0, n_quiet), timed(10.0, n_quiet)], LoadOptions())
        check = row(examine(tiny.bpe, "--draft", "none")[1], "cost", "engines")
        assert (check["status"], said in check["text"]) == (status, True)
        monkeypatch.setattr(ranking, "second_opinion", lambda *args: done)
    examine(tiny.bpe, "--draft", "none", "--calibrate")
    assert loading.compared(tiny.bpe, LoadOptions()) is None


@pytest.mark.usefixtures("measured_home")
def test_a_copy_that_an_engine_needs_is_said_here_and_nowhere_else(tiny: TinyFiles) -> None:
    open_backend("ik-llama")
    arguments = (tiny.trap, "--backend", "ik-llama", "--draft", "none")
    expected = f"{tiny.trap.name} is run from an 8-bit copy: ik-llama has a bug with Q4_1 files."
    assert " ".join(screen(*arguments)[1].split()).count(expected) == 1
    answer = localspec("generate", *arguments, "-p", "x", "--max-tokens", "2")
    assert (answer.returncode, b"copy" in answer.stderr) == (0, False)


def test_the_figures_follow_from_the_measured_passes(tiny: TinyFiles, head: Path) -> None:
    pair = tiny.quick
    drafts = [part for name in (pair.draft, "head", "early-exit:1") for part in ("--draft", name)]
    status, found = examine(pair.target, *drafts, *NGRAM)
    cost, payoffs = found["pair"]["cost"], found["pair"]["payoff"]
    assert (status, cost["engine"].split()[0], cost["device"]) == (0, "reference", "cpu")
    costs = {each["name"]: each["ms"]["1"] for each in cost["drafts"]}
    assert list(costs) == ["head", "early-exit:1", pair.draft.stem]
    assert {each["drafter"]: each["step_ms"] for each in payoffs} == {"ngram": 0.0} | costs
    times = {int(width): ms for width, ms in cost["target"]["ms"].items()}
    assert all(ms > 0 for ms in times.values())
    for each in payoffs:
        for length, share in ((int(k), share) for k, share in each["break_even"].items()):
            if share is not None and length + 1 in times:
                tokens = sum(share**i for i in range(length + 1))
                ms = times[length + 1] + length * each["step_ms"]
                assert tokens * times[1] / ms == pytest.approx(1.0, abs=5e-3)
        assert all(gain >= 1.0 for gain in each["speedup"].values())
    assert drafters(examine(pair.target, *REFERENCE)[1]) == ["ngram", "head"]  # auto takes it


def drafters(found: dict[str, Any]) -> list[str]:
    return [each["drafter"] for each in found["pair"]["payoff"]]


@pytest.fixture
def short_ranking(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A ranking with one question and short answers, that ends before its time does, on a busy machine too; the
    question."""
    few = ranking.tuning_questions()[:1]
    monkeypatch.setattr(ranking, "tuning_questions", lambda: few)
    monkeypatch.setattr(ranking, "SECONDS", 3600.0)
    monkeypatch.setattr(ranking, "MOST_TOKENS", ranking.LEAST_TOKENS)
    return [question.id for question in few]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.usefixtures("short_ranking", "measured_home")
def test_heads_that_are_published_are_found_by_themselves(tiny: TinyFiles, tmp_path: Path, kind: str) -> None:
    """Beside a target, beside a trained one, and inside a target."""
    open_backend("llama-cpp")
    if kind == "mtp":
        target, measured, ranked = ggufs.write_glm(tmp_path / "glm.gguf"), ["mtp"], ["mtp"]
    else:
        target = Path(shutil.copy(tiny.pair.target, tmp_path / "target.gguf"))
        beside = write_eagle3(target, tmp_path / "eagle.gguf")
        heads_folder().mkdir(parents=True)
        write_random_head(target, heads_folder() / "trained.gguf")
        measured, ranked = ["head", "head2"], ["head", f"head:{beside}"]
    assert drafters(examine(target, "--backend", "llama-cpp")[1]) == ["ngram", *measured]
    status, found = examine(target, "--backend", "llama-cpp", "--rank")
    assert status == 0
    assert {name for each in found["rank"]["candidates"] for name in each["drafters"]} == {"ngram", *ranked}


@pytest.mark.usefixtures("measured_home")
def test_a_published_head_is_named_as_elsewhere(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its address, its file or its name in the catalogue; and by itself it is no damaged model."""
    open_backend("llama-cpp")
    name = next(head for entry in Catalog.load().values() for head in entry.heads)
    address, files = "hf:someone/heads/eagle.gguf", [models_dir() / "hf/someone/heads/eagle.gguf"]
    files.append(Catalog.load()[name].path)
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_eagle3(tiny.pair.target, path)
    monkeypatch.setattr(Entry, "present", property(lambda entry: entry.path.exists()))
    for head in (address, files[0], name):
        status, found = examine(tiny.pair.target, "--draft", head, "--draft-only", "--backend", "llama-cpp")
        assert (status, drafters(found)) == (0, ["head"])
    assert {address, name} <= set(re.split(r"[ ,]+", row(found, "models", "on disk")["text"]))
    assert screen(files[0])[0] == 1  # nothing answers with a head


ROWS = {
    "{tiny.quick.draft} --draft {tiny.quick.target} --backend reference": (0, "pair", "draft", "note", "swap"),
    "{tiny.bpe} --draft {tiny.spm} --backend reference": (0, "pair", "vocabulary", "note", "--rank"),
    "{tiny.recurrent} --draft ngram": (1, "pair", "rollback", "note", "--backend llama-cpp"),
    "{tiny.sliding} --draft ngram": (1, "pair", "rollback", "ok", "at no cost"),
    "{tiny.embedding} --draft none": (1, "pair", "file", "fail", "cannot generate text"),
    "{tiny.bpe} --draft none --threads 4000": (0, "machine", "CPU", "note", "--threads"),
}


@pytest.mark.parametrize("line", ROWS)
def test_a_row(line: str, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    status, section, name, how, said = ROWS[line]
    if name == "rollback":
        set_free(monkeypatch, 1)  # what the header says is enough: nothing needs to be loaded
    got, found = examine(*line.format(tiny=tiny).split())
    check = row(found, section, name)
    assert (got, check["status"]) == (status, how)
    assert said in f"{check['text']} {check['advice']}"
    assert (found["pair"]["cost"] is None) == (name not in ("draft", "vocabulary"))


def test_a_model_that_does_not_fit(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (*NONE, "--ctx", "2048")
    needed = examine(tiny.bpe, *asked)[1]["pair"]["fit"]["ram_needed_bytes"]
    for free, status, how in ((needed - 1, 1, "fail"), (needed + 1, 0, "note"), (10 * needed, 0, "ok")):
        set_free(monkeypatch, free)
        got, found = examine(tiny.bpe, *asked)
        check = row(found, "pair", "memory")
        assert (got, check["status"], found["pair"]["fit"]["fits"]) == (status, how, how != "fail")
        assert bool(check["advice"]) == (how != "ok")
        assert (found["pair"]["cost"] is None) == (how == "fail")  # it was not even tried


def test_advice_for_short_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context as large as its weights: a smaller one, or a smaller cache, is the way out, and then it does fit."""
    shape = ggufs.Shape(n_layer=2, n_embd=128, n_head=2, n_head_kv=2, n_ff=64, n_ctx=1 << 17)
    model = ggufs.write_llama(tmp_path / "long.gguf", shape, ggufs.bpe_vocab())
    set_free(monkeypatch, 190_000_000)
    status, found = examine(model, *NONE[:2], "--ctx", "131072")
    assert (status, found["pair"]["fit"]["fits"]) == (1, False)
    advice = row(found, "pair", "memory")["advice"]
    n_ctx = re.search(r"--ctx (\d+)", advice)
    assert (n_ctx is not None, "--kv-cache q8_0" in advice) == (True, True)
    target, engine = fit.find_model(str(model)), facts.EngineFacts("ik-llama", True)
    room = fit.Room(engine, None, 190_000_000, 16 * GB)
    for context, kv_type in ((1 << 17, "q8_0"), (int(n_ctx[1]) if n_ctx else 0, "f16")):
        assert fit.fit([target], context, kv_type, room).fits


def test_damaged_files(tiny: TinyFiles, tmp_path: Path) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(tiny.bpe.read_bytes()[:50_000])
    status, found = examine(half, "--draft", "none")
    assert (status, row(found, "pair", "file")["status"]) == (1, "fail")
    assert "cut short" in found["pair"]["target"]["error"]
    entry, folder = Catalog.load()["smollm2-135m"], models_dir() / "hf/someone/heads"
    entry.path.parent.mkdir(parents=True)
    shutil.copy(tiny.bpe, entry.path)
    folder.mkdir(parents=True)
    write_eagle3(tiny.pair.target, folder / "deep.gguf", extra={"eagle3.block_count": 2})
    write_eagle3(tiny.pair.target, folder / "broken.gguf", drop=("fc.weight",))
    status, found = examine(tiny.quick.target, *NONE)
    assert (status, found["pair"]["cost"] is None) == (1, False)  # one bad file does not hinder another
    check = row(found, "models", "smollm2-135m")
    assert (check["status"], f"instead of {entry.bytes:,}" in check["text"]) == ("fail", True)
    assert "localspec rm smollm2-135m; localspec pull smollm2-135m" in check["advice"]
    heads = [row(found, "models", f"hf:someone/heads/{name}.gguf")["status"] for name in ("deep", "broken")]
    assert heads == ["note", "fail"]  # of no use here, and damaged


def test_bad_usage() -> None:
    for arguments, said in (
        ("no-such-model", "no model"),
        ("--draft /no/such.gguf", "does not exist"),
        ("--backend lama", "unknown backend"),
        ("--draft none --draft ngram", "stand alone"),
    ):
        assert_one_line(localspec("doctor", *arguments.split()), 2, said)


def rewrite_curves(change: Callable[[int, float], float]) -> int:
    """Change the calibrated curves on disk, by width and milliseconds; how many there were."""
    paths = list((home() / "calibration").glob("*.json"))
    for path in paths:
        stored = json.loads(path.read_text())
        curve = stored["value"]["ms"]
        stored["value"]["ms"] = {width: change(int(width), ms) for width, ms in curve.items()}
        stored["value"]["disturbed"] = 0  # what was disturbed is measured again at the next load
        path.write_text(json.dumps(stored))
    return len(paths)


def test_calibrate_remakes_the_calibration(tiny: TinyFiles) -> None:
    arguments = (tiny.quick.target, "--draft", tiny.quick.draft, *REFERENCE)

    def costs(*more: str) -> tuple[list[float], dict[str, Any]]:
        _, found = examine(*arguments, *more)
        cost = found["pair"]["cost"]
        return [cost["target"]["ms"]["1"], cost["drafts"][0]["ms"]["1"]], found

    first, _ = costs()
    assert rewrite_curves(lambda width, ms: 1000 * ms) == 2  # of target and draft
    wrong, found = costs()
    assert wrong[0] == pytest.approx(1000 * first[0], rel=0.01)
    check = row(found, "cost", "one token")
    assert (check["status"], "--calibrate" in check["advice"]) == ("note", True)
    right, _ = costs("--calibrate")
    assert all(new < old / 20 for new, old in zip(right, wrong, strict=True))
    rewrite_curves(lambda width, ms: ms)
    assert costs()[0] == right


def test_ctrl_c_during_calibration(tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "tiny.gguf", vocab=ggufs.bpe_vocab())
    arguments = [str(model), *NONE]
    assert examine(*arguments)[0] == 0
    rewrite_curves(lambda width, ms: ms)
    found, errors = interrupted("said measuring what a pass", ["doctor", *arguments, "--calibrate"])
    assert errors[-1] == "localspec: interrupted"
    assert b"Machine" in found  # what was found until then stands
    (path,) = (home() / "calibration").glob("*")
    assert json.loads(path.read_text())["value"] == {}  # nothing half-measured: the next load measures
    again = localspec("doctor", *arguments)
    assert (again.returncode, b"measuring what a pass" in again.stderr) == (0, True)


def test_rank(tiny: TinyFiles, head: Path, short_ranking: list[str]) -> None:
    folder = models_dir() / "hf/someone/models"
    folder.mkdir(parents=True)
    for path in (tiny.quick.draft, tiny.micro, tiny.pair.target):  # the draft; another vocabulary; too large
        shutil.copy(path, folder / path.name)
    status, found = examine(tiny.quick.target, *REFERENCE, "--rank")
    rank, draft = found["rank"], f"hf:someone/models/{tiny.quick.draft.name}"
    other = f"hf:someone/models/{tiny.micro.name}"
    tried = {tuple(each["drafters"]) for each in rank["candidates"]}
    with_head = {("head",), ("ngram", "head"), ("ngram", "head", draft)}
    assert (status, tried) == (0, {(), ("ngram",), (draft,), ("ngram", draft), (other,)} | with_head)
    speeds = [each["speedup"] for each in rank["candidates"]]
    assert speeds == sorted(speeds, reverse=True)
    assert rank["prompts"] == short_ranking
    assert rank["noise"] > 0
    assert {each["n_prompts"] for each in rank["candidates"]} == {len(rank["prompts"])}
    assert all(each["lowest"] <= each["speedup"] <= each["highest"] for each in rank["candidates"] if each["drafters"])
    assert rank["seconds"] > 0
    table, noise = ranking_parts(TypeAdapter(facts.RankFacts).validate_python(rank))
    assert (len(table.rows), "plain itself varied by" in str(noise)) == (len(tried), True)


def test_a_ranking_that_has_no_time(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "SECONDS", 0.0)
    monkeypatch.setattr(machine_module, "busy_share", lambda: 1.0)
    status, found = examine(tiny.quick.target, *REFERENCE, "--rank")
    assert status == 0
    assert all(each["n_prompts"] == 0 for each in found["rank"]["candidates"])
    assert found["recommendation"]["text"].startswith("Nothing could be measured")
    assert "in doubt" not in found["recommendation"]["text"]
    (table,) = ranking_parts(TypeAdapter(facts.RankFacts).validate_python(found["rank"]))
    assert not table.note


def test_what_a_ranking_means() -> None:
    """With 4 prompts, two standard errors of a ratio are noise · 2 · √2 / √4."""
    for drafter, speedup, noise, speculate, part, command in (
        ("ngram", 1.30, 0.05, True, "ngram was the fastest, ×1.30 of plain; x cannot be told", " --draft ngram"),
        ("ngram", 1.30, 0.40, None, "noise of this measurement", ""),
        ("ngram", 1.01, 0.01, False, "Do not speculate here", " --draft none"),
        ("ngram", 1.30, None, True, "was the fastest", " --draft ngram"),
        ("x", 1.50, 0.01, True, "x was the fastest", " --draft small --draft-only"),
    ):
        rows = [facts.RankedFacts([drafter], 4, speedup, speedup, speedup, 20.0, 0.5)]
        rows += [facts.RankedFacts(["x"], 4, speedup - 0.05, 1.0, 2.0, 20.0, 0.5)]
        rows += [facts.RankedFacts([], 4, 1.0, None, None, 20.0, None)]
        found = recommend_ranked(facts.RankFacts(50.0, 48, ["a", "b", "c", "d"], noise, rows), "big", {"x": "small"})
        assert (found.speculate, found.command) == (speculate, f"localspec chat big{command}")
        assert part in found.text


def test_every_field_of_the_json_is_documented() -> None:
    """In a comment on its line."""
    for kind in vars(facts).values():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == facts.__name__:
            documented = inspect.getsource(kind) + inspect.getsource(Finding)
            for field in dataclasses.fields(kind):
                assert re.search(rf"^    {field.name}: .*  # \w", documented, re.M), field


def test_every_failure_says_what_to_do(tiny: TinyFiles) -> None:
    if any(facts.look_at_engine(name).devices for name in backends.backend_names()):
        pytest.skip("layers can go to a GPU here")
    status, found = examine(tiny.bpe, "--draft", tiny.embedding, "--gpu-layers", "3")
    failed = [check for check in found["checks"] if check["status"] == "fail"]
    assert (status, [check["name"] for check in failed]) == (1, ["GPU", "file"])
    assert all(check["advice"] for check in failed)
    assert found["recommendation"]["text"] == "It would not work like this: see GPU and file."


def test_piped_output_has_everything_in_plain_lines(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shutil.copy(tiny.quick.target, tmp_path / "evil\x1b[2J\x9b2J.gguf")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = localspec("doctor", target, "--draft", tiny.quick.draft, *NGRAM, "--details", encoding="ascii")
    out = done.stdout.decode("ascii")
    lines = out.splitlines()
    for title in ("Machine", "Engines", "Models", "Cost of a target pass", "Break-even", "Predicted", "Recommendation"):
        assert any(line.startswith(title) for line in lines), title
    parts = ("ok vocabulary", "ok rollback", "x t(1)", "evil", "\x1b")
    assert [part in out for part in parts] == [True, True, True, True, False]
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    assert (b"measuring what a pass" in done.stderr, "measuring" in out) == (True, False)


@pytest.mark.parametrize("linear", [False, True])
def test_a_calibration_on_disk_decides_as_it_would_for_the_runtime(tiny: TinyFiles, linear: bool) -> None:
    """Where passes are linear nothing pays. Where a wider pass takes no longer, any acceptance does: the break-even is
    0, which is not the same as never."""
    arguments = (tiny.quick.target, *NGRAM)
    examine(*arguments)
    rewrite_curves(lambda width, ms: 50.0 * width if linear else 50.0)
    status, found = examine(*arguments)
    advice, (payoff,) = found["recommendation"], found["pair"]["payoff"]
    shares = set(payoff["break_even"].values())
    assert (status, advice["speculate"], 0.0 in shares) == (0, not linear, not linear)
    assert advice["command"].endswith(" --draft none" if linear else " --draft ngram")
    assert ("Do not speculate here" in advice["text"]) == linear
    if linear:
        assert (shares, set(payoff["speedup"].values()), set(payoff["best_length"].values())) == ({None}, {1.0}, {0})


def test_without_any_engine(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str | None:
        return None if name == "reference" else f"{name} is not installed; install it with: pip install {name}"

    monkeypatch.setattr(backends, "unavailable_reason", missing)
    monkeypatch.setattr(facts, "unavailable_reason", missing)
    for arguments, status, how in (((), 1, "fail"), (REFERENCE, 0, "info")):
        got, found = examine(tiny.quick.target, "--draft", "none", *arguments)
        check = row(found, "engines", "ik-llama")
        assert (got, check["status"], check["advice"]) == (status, how, "pip install ik-llama")
        assert (found["pair"]["cost"] is None) == (how == "fail")


def test_what_an_engine_was_built_for_and_what_a_build_for_this_cpu_would_bring() -> None:
    """Kernels for AVX-512 need VNNI as well, and there are none for what newer Arms have."""
    x86 = "AVX = 1 | AVX_VNNI = 0 | AVX2 = 1 | AVX512 = 0 | FMA = 1 | NEON = 0 | MATMUL_INT8 = 0 | "
    compiled_here = "CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | REPACK = 1 | "
    arm = "Metal : EMBED_LIBRARY = 1 | CPU : NEON = 1 | DOTPROD = 1 | "
    for said, built, more, gain in (
        (x86, "AVX AVX2 FMA", "AVX-512 AVX512-VNNI AVX512-BF16", "AVX512-VNNI"),
        (x86, "AVX AVX2 FMA", "AVX-VNNI", "AVX2"),
        (x86, "AVX AVX2 FMA", "AVX-512", "AVX2"),
        (compiled_here, "CUDA AVX2 AVX-512", "AVX-512 AVX512-VNNI", None),  # by a compiler that knows no better
        (arm, "Metal NEON DOTPROD", "I8MM SVE", None),
    ):
        features = ggml_module.built_for(said)
        assert features == built.split()
        ik = facts.EngineFacts("ik-llama", True, "0.1.5", features, [])
        _, *rows = facts.engine_findings([ik], [], "auto", [*features, *more.split()])
        told = [] if gain is None else [("this CPU", "note", ggml_module.NATIVE_COMMAND)]
        assert [(each.name, each.status, each.advice) for each in rows] == told
        assert all(gain in each.text for each in rows)
        _, *unused = facts.engine_findings([ik], [], "mlx", [*features, *more.split()])
        assert [each.status for each in unused] == ["info"] * len(rows)


def gpu_engine(free: int, *, shared: bool = False, name: str = "llama-cpp") -> facts.EngineFacts:
    return facts.EngineFacts(name, True, "0.3.36", ["CUDA"], [Device("GPU0", "A GPU", free, 24 * GB, shared)])


def test_what_is_said_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux mlx is there for tests; on a Mac it is one way to the GPU, and its memory is the machine's."""
    monkeypatch.setattr(machine_module, "cuda_version", lambda: (12, 4))
    monkeypatch.setattr(facts, "WHEEL_PYTHONS", (sys.version_info[:2],) * 2)
    cpu, ik = (facts.EngineFacts(name, True, "1", ["AVX2"], []) for name in ("llama-cpp", "ik-llama"))
    to_test = facts.EngineFacts("mlx", True, "0.32.4", ["CPU"], [])
    missing = facts.EngineFacts("mlx", False, reason="it is not installed; install it with: pip install mlx")
    for engines, gpu, rows in (
        ([cpu], "NVIDIA", {"llama-cpp": "ok", "CUDA": "note"}),
        ([gpu_engine(GB)], "NVIDIA", {"llama-cpp": "ok"}),
        ([ik, to_test], "Apple", {"ik-llama": "ok", "mlx": "info", "Metal": "note"}),
        ([ik, missing], "NVIDIA", {"ik-llama": "ok", "CUDA": "note"}),
        ([ik, missing], "Apple", {"ik-llama": "ok", "mlx": "info", "Metal": "note"}),
        ([ik, gpu_engine(GB, name="mlx")], "Apple", {"ik-llama": "ok", "mlx": "ok"}),
    ):
        found = {check.name: check for check in facts.engine_findings(engines, [gpu], "auto")}
        assert {name: check.status for name, check in found.items()} == rows
        if "CUDA" in rows:  # without --only-binary, pip would compile one without CUDA
            assert all(part in str(found["CUDA"].advice) for part in ("whl/cu124", "--only-binary"))
        if engines[0] is cpu:
            assert "--force-reinstall" in str(found["CUDA"].advice)
        if engines[-1] is missing and gpu == "Apple":
            assert found["mlx"].advice == "pip install mlx"
        if engines[-1].devices:
            assert "A GPU" in found[engines[-1].name].text
    room = fit.Room(gpu_engine(GB, shared=True, name="mlx"), None, GB, 2 * GB)
    assert (room.on_gpu, room.gpu_is_ram, room.gpu_free) == (True, True, GB)


def test_wheels_for_a_gpu_or_how_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "WHEEL_PYTHONS", (sys.version_info[:2],) * 2)
    cuda = {(12, 4): "cu124", (12, 9): "cu125", (13, 1): "cu130", None: "cu132", (11, 4): None, (14, 0): None}
    assert {version: facts.wheel_folder("CUDA", version) for version in cuda} == cuda
    assert (facts.wheel_folder("Metal", None), facts.wheel_folder("Vulkan", None)) == ("metal", "vulkan")
    monkeypatch.setattr(facts, "WHEEL_PYTHONS", ((3, 1), (3, 2)))
    assert facts.wheel_folder("Metal", None) is None
    ik = facts.EngineFacts("ik-llama", True, "1", ["AVX2"], [])
    _, row = facts.engine_findings([ik], ["NVIDIA"], "auto")
    assert "-DGGML_CUDA=on" in str(row.advice)


def test_fit_in_gpu_memory(tiny: TinyFiles) -> None:
    models = [fit.find_model(str(tiny.pair.target)), fit.find_model(str(tiny.pair.draft))]

    def fitted(engine: facts.EngineFacts | None, layers: int | None = None) -> tuple[facts.FitFacts, list[Finding]]:
        room = fit.Room(engine, layers, GB, GB)
        found = fit.fit(models, 2048, "f16", room)
        return found, [each for each in fit.fit_findings(models, found, room) if each.name == "GPU memory"]

    everything = sum(need.total for need in fitted(None)[0].models)
    for free, fits in ((everything, True), (everything - 1, False)):
        found, (check,) = fitted(gpu_engine(free))
        assert (found.gpu_needed_bytes, found.gpu_available_bytes, found.fits) == (everything, free, fits)
        assert (found.ram_needed_bytes < GB / 10, check.status == "ok") == (True, fits)
    layers = re.search(r"--gpu-layers (\d+)", str(check.advice))
    assert fitted(gpu_engine(free), int(layers[1]))[0].fits
    shared, _ = fitted(gpu_engine(GB, shared=True))
    assert shared.ram_needed_bytes == fit.memory.PROGRAM_BYTES + everything  # the GPU takes of the machine's own memory
    on_cpu, _ = fitted(gpu_engine(0), 0)
    assert (on_cpu.gpu_needed_bytes, on_cpu.fits) == (None, True)
    unknown, _ = fitted(dataclasses.replace(gpu_engine(0), devices=None))
    assert (unknown.gpu_needed_bytes, unknown.gpu_available_bytes, unknown.fits) == (everything, None, None)
