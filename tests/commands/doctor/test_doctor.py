"""``localspec doctor`` as a person and as a script see it: rows, exit statuses, JSON, plots, Ctrl-C."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localspec import backends
from localspec.__main__ import run
from localspec.backends.llama import ggml as ggml_module
from localspec.backends.llama.ggml import Device
from localspec.commands.doctor import facts, fit, ranking
from localspec.commands.doctor.command import bars, ranking_parts, recommend_ranked
from localspec.engine import loading as loading_module
from localspec.heads.file import heads_folder
from localspec.measuring.last_bench import remember
from localspec.model_files.catalog import Catalog, Entry
from localspec.model_files.fingerprint import fingerprint
from localspec.report.model import Finding, Findings, Lines, Table
from localspec.report.renderers import Screen
from localspec.system import machine as machine_module
from localspec.system.files import home, models_dir
from localspec.system.machine import SystemMemory
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.heads import write_random_head
from tests.support.interrupting import interrupted
from tests.support.published_heads import write_eagle3

PROGRAM = [sys.executable, "-m", "localspec", "doctor"]
GB = 10**9


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurements in a fraction of the time."""
    measure, busy = machine_module.measure_bandwidth, machine_module.busy_share
    monkeypatch.setattr(
        machine_module, "measure_bandwidth", lambda *args, **options: measure(*args, **options, seconds=0.02)
    )
    monkeypatch.setattr(machine_module, "MOST", 16 << 20)
    monkeypatch.setattr(machine_module, "busy_share", lambda: busy(0.02))


class Doctor:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        self._capsys.readouterr()
        status = run(["doctor", *map(str, arguments)])
        return status, *self._capsys.readouterr()

    def json(self, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
        """Exit status and the report."""
        status, out, _ = self.text(*arguments, "--json")
        return status, json.loads(out)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(capsys)


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what the system says is free, in bytes."""

    def set_free(n_bytes: int) -> None:
        monkeypatch.setattr(machine_module, "read_memory", lambda: SystemMemory(16 * GB, n_bytes))

    return set_free


def row(found: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    """The one row of this name."""
    (check,) = [check for check in found["checks"] if (check["section"], check["name"]) == (section, name)]
    return check


def squeezed(text: str) -> str:
    """Without line breaks and runs of spaces."""
    return " ".join(text.split())


# -- no model ----------------------------------------------------------------------------------------------------------


def test_without_any_model(doctor: Doctor) -> None:
    status, found = doctor.json()
    assert (status, found["holds"], found["models"], found["pair"]) == (0, True, [], None)
    assert found["recommendation"]["command"] == "localspec pull"
    machine = found["machine"]
    assert machine["cores"] >= machine["threads"] >= 1
    assert 0.1 < machine["bandwidth_gb_per_s"] < 10_000
    assert {engine["name"] for engine in found["engines"]} == set(backends.backend_names())
    _, out, _ = doctor.text()
    assert "is not on this disk" in out
    assert "localspec pull" in out
    assert "none yet in" in doctor.text("--details")[1]


def test_a_model_that_is_not_on_this_disk(doctor: Doctor, free_memory: Callable[[int], None]) -> None:
    free_memory(64 * GB)
    status, found = doctor.json("qwen2.5-coder-7b")
    pair = found["pair"]
    assert status == 0
    assert (pair["target"]["present"], pair["fit"]["fits"], pair["cost"]) == (False, None, None)
    assert pair["fit"]["models"][0]["weights_bytes"] == Catalog.load()["qwen2.5-coder-7b"].bytes
    assert pair["fit"]["models"][1]["weights_bytes"] == Catalog.load()["qwen2.5-coder-0.5b"].bytes
    assert found["recommendation"]["command"] == "localspec pull qwen2.5-coder-7b qwen2.5-coder-0.5b"
    free_memory(4 * GB)
    status, found = doctor.json("qwen2.5-coder-7b")
    assert (status, found["pair"]["fit"]["fits"]) == (1, False)
    assert row(found, "pair", "memory")["advice"]


def test_a_disk_that_cannot_hold_the_download(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.commands.doctor.fit.free_bytes", lambda folder: 1000)
    status, out, _ = doctor.text("smollm2-135m")
    assert status == 1
    assert "1 kB of disk free" in squeezed(out)
    assert "make room on the disk" in squeezed(out)


# -- the first screen --------------------------------------------------------------------------------------------------


def answers(out: str) -> dict[str, str]:
    """The three lines by name, mark included."""
    text = squeezed(out)
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


def test_it_begins_with_the_answer_and_keeps_to_one_screen(
    doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch)
    _, out, _ = doctor.text(tiny.quick.target, "--draft", "ngram", "--backend", "reference")
    lines = out.splitlines()
    assert lines[0] == tiny.quick.target.stem
    assert lines[1].lstrip().startswith("✓ fits")
    found = answers(out)
    assert "yes: it needs" in found["fits"]
    assert re.search("yes, by copying from the text|no: |not known", found["guesses"])
    assert "not measured yet; localspec bench" in found["faster"]
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 23, out
    assert "Break-even" not in out
    assert "--details" in out


def test_the_answer_says_what_bench_measured_and_nothing_else(
    doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (tiny.quick.target, "--draft", "ngram", "--backend", "reference")
    _, found = doctor.json(*arguments)
    engine = found["pair"]["cost"]["engine"]
    assert found["pair"]["bench"] is None
    measured = {"drafters": ["ngram"], "speedups": {"all": 1.2, "edit": 1.9, "chat": 1.04}, "n_questions": 12}
    remember(tiny.quick.target, engine, measured | {"n_guesses": 40})
    assert (
        "edit ×1.90, chat ×1.04; not measured: code (localspec bench" in answers(doctor.text(*arguments)[1])["faster"]
    )
    assert doctor.json(*arguments)[1]["pair"]["bench"]["speedups"] == measured["speedups"]
    remember(tiny.quick.target, engine, measured | {"n_guesses": 0})
    assert "no: nothing was guessed" in answers(doctor.text(*arguments)[1])["faster"]
    remember(tiny.quick.target, "another engine", measured | {"n_guesses": 40})
    assert "nothing was guessed" in answers(doctor.text(*arguments)[1])["faster"]


def test_beside_other_programs_nothing_measured_is_ticked(
    doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch, busy=0.45)
    arguments = (tiny.quick.target, "--draft", "ngram", "--backend", "reference", "--calibrate")
    _, out, _ = doctor.text(*arguments)
    assert answers(out)["guesses"].startswith("! guesses not known: what was timed is in doubt, see load")
    _, found = doctor.json(*arguments)
    for section, name in (("cost", "one token"), ("machine", "bandwidth"), ("machine", "load")):
        assert row(found, section, name)["status"] != "ok", name
    assert "others used 45% of the CPU" in row(found, "cost", "one token")["text"]
    assert (found["pair"]["cost"]["provisional"], found["pair"]["cost"]["others_share"]) == (True, 0.45)


@pytest.mark.parametrize("busy", [0.0, 0.45])
def test_the_engine_that_auto_takes(
    doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, busy: float
) -> None:
    """It is ticked only on a quiet machine, and ``--calibrate`` measures it again, with the usual engine loaded."""
    open_backend("ik-llama")
    quiet(monkeypatch, busy=busy)
    monkeypatch.setattr(loading_module, "_versions", lambda: ["ik-llama 1", "llama-cpp 1"])
    with loading_module.engine_module("ik-llama").load(tiny.bpe) as model:
        threads = model.n_threads
    known = loading_module.EngineTimes(
        "25 Nov", {"ik-llama": 4000.0, "llama-cpp": 2000.0}, {"ik-llama": [4000.0] * 3, "llama-cpp": [2000.0] * 3}, 0.0
    )
    key = loading_module._key(fingerprint(tiny.bpe), threads, "f16")
    loading_module._store().put(key, dataclasses.asdict(known))
    _, found = doctor.json(tiny.bpe, "--draft", "none")
    facts = row(found, "cost", "engines")
    assert facts["status"] == ("info" if busy else "ok")
    assert "auto takes llama-cpp" in facts["text"]
    once = dataclasses.replace(known, rounds={"ik-llama": [4000.0], "llama-cpp": []}, others_share=0.45)
    loading_module._store().put(key, dataclasses.asdict(once))
    monkeypatch.setattr(
        "localspec.commands.doctor.ranking.second_opinion", lambda *args: types.SimpleNamespace(waits=False)
    )
    _, found = doctor.json(tiny.bpe, "--draft", "none")
    facts = row(found, "cost", "engines")
    assert facts["status"] == "note"
    assert "others used 45% of the CPU: nothing is chosen by that, auto keeps ik-llama and" in facts["text"]
    doctor.json(tiny.bpe, "--draft", "none", "--calibrate")
    assert loading_module.compared(tiny.bpe, threads, "f16") is None


def test_a_copy_that_an_engine_needs_is_said_here_and_nowhere_else(
    doctor: Doctor, tiny: TinyFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    open_backend("ik-llama")
    arguments = [str(tiny.trap), "--backend", "ik-llama", "--draft", "none"]
    _, out, _ = doctor.text(*arguments)
    expected = f"{tiny.trap.name} is run from an 8-bit copy: ik-llama has a bug with Q4_1 files."
    assert squeezed(out).count(expected) == 1
    assert run(["generate", *arguments, "-p", "x", "--max-tokens", "2"]) == 0
    assert "copy" not in capsys.readouterr().err


# -- a pair ------------------------------------------------------------------------------------------------------------


def test_a_pair_that_works(doctor: Doctor, tiny: TinyFiles) -> None:
    pair = tiny.quick
    arguments = (pair.target, "--draft", pair.draft, "--draft", "ngram", "--backend", "reference", "--details")
    status, out, err = doctor.text(*arguments)
    assert status == 0, out
    for title in ("Machine", "Engines", "Models", "Cost of a target pass", "Break-even", "Predicted", "Recommendation"):
        assert any(line.startswith(title) for line in out.splitlines()), title
    assert "✓ vocabulary" in out
    assert "✓ rollback" in out
    assert "measuring what a pass" in err
    assert "measuring" not in out


def test_the_figures_follow_from_the_measured_passes(doctor: Doctor, tiny: TinyFiles) -> None:
    pair = tiny.quick
    arguments = (pair.target, "--draft", pair.draft, "--draft", "ngram", "--backend", "reference")
    status, found = doctor.json(*arguments)
    cost, payoffs = found["pair"]["cost"], found["pair"]["payoff"]
    assert (status, cost["engine"].split()[0], cost["device"]) == (0, "reference", "cpu")
    assert [each["drafter"] for each in payoffs] == ["ngram", pair.draft.stem]
    times = {int(width): ms for width, ms in cost["target"]["ms"].items()}
    assert all(ms > 0 for ms in times.values())
    assert payoffs[0]["step_ms"] == 0
    assert payoffs[1]["step_ms"] == cost["drafts"][0]["ms"]["1"]
    for each in payoffs:
        for k, share in each["break_even"].items():
            length = int(k)
            if share is not None and length + 1 in times:
                tokens = sum(share**i for i in range(length + 1))
                ms = times[length + 1] + length * each["step_ms"]
                assert tokens * times[1] / ms == pytest.approx(1.0, abs=5e-3)
        assert all(gain >= 1.0 for gain in each["speedup"].values())


def test_a_head_is_measured_beside_the_others(doctor: Doctor, tiny: TinyFiles) -> None:
    pair = tiny.quick
    heads_folder().mkdir(parents=True)
    write_random_head(pair.target, heads_folder() / "a-head.gguf")
    drafts = [part for name in ("ngram", pair.draft, "head", "early-exit:1") for part in ("--draft", name)]
    status, found = doctor.json(pair.target, *drafts, "--backend", "reference")
    assert status == 0
    costs = {each["name"]: each["ms"]["1"] for each in found["pair"]["cost"]["drafts"]}
    payoffs = {each["drafter"]: each["step_ms"] for each in found["pair"]["payoff"]}
    assert payoffs == {"ngram": 0.0} | costs
    assert list(costs) == ["head", "early-exit:1", pair.draft.stem]
    status, found = doctor.json(pair.target, "--backend", "reference")  # auto takes it
    assert [each["drafter"] for each in found["pair"]["payoff"]] == ["ngram", "head"]


# -- published heads ---------------------------------------------------------------------------------------------------


def published(found: dict[str, Any]) -> list[str]:
    """The drafters whose costs were measured."""
    return [each["drafter"] for each in found["pair"]["payoff"]]


@pytest.mark.parametrize("rank", [False, True])
def test_heads_that_are_published_are_found_by_themselves(
    doctor: Doctor, tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: bool
) -> None:
    """Beside a target, beside a trained one, and inside a target."""
    few = ranking.tuning_questions()[:1]
    monkeypatch.setattr(ranking, "tuning_questions", lambda: few)
    monkeypatch.setattr(ranking, "SECONDS", 3600.0)
    monkeypatch.setattr(ranking, "MOST_TOKENS", ranking.LEAST_TOKENS)
    open_backend("llama-cpp")
    target = Path(shutil.copy(tiny.pair.target, tmp_path / "target.gguf"))
    beside = write_eagle3(target, tmp_path / "eagle.gguf")
    glm = ggufs.write_glm(tmp_path / "glm.gguf")
    heads_folder().mkdir(parents=True)
    write_random_head(target, heads_folder() / "trained.gguf")
    cases: list[tuple[Path, list[str]]] = [(target, ["head", f"head:{beside}"]), (glm, ["mtp"])]
    for model, heads in cases:
        status, found = doctor.json(model, "--backend", "llama-cpp", *(["--rank"] * rank))
        assert status == 0
        if rank:
            tried = {name for each in found["rank"]["candidates"] for name in each["drafters"]}
            assert tried == {"ngram", *heads}
        else:
            assert published(found) == ["ngram", *(["head", "head2"] if model == target else heads)]


def test_a_published_head_is_named_as_elsewhere(doctor: Doctor, tiny: TinyFiles) -> None:
    """By its address or its file; and by itself it is no damaged model."""
    open_backend("llama-cpp")
    folder = models_dir() / "hf/someone/heads"
    folder.mkdir(parents=True)
    address, head = "hf:someone/heads/eagle.gguf", write_eagle3(tiny.pair.target, folder / "eagle.gguf")
    for name in (address, head):
        status, found = doctor.json(tiny.pair.target, "--draft", name, "--draft-only", "--backend", "llama-cpp")
        assert status == 0
        assert published(found) == ["head"]
        assert address in row(found, "models", "on disk")["text"]
    assert doctor.text(head)[0] == 1  # nothing answers with a head


def test_a_head_from_the_catalogue_is_named_by_its_name(
    doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_backend("llama-cpp")
    name = next(head for entry in Catalog.load().values() for head in entry.heads)
    path = Catalog.load()[name].path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_eagle3(tiny.pair.target, path)
    monkeypatch.setattr(Entry, "present", property(lambda entry: entry.path.exists()))
    arguments = (tiny.pair.target, "--draft", name, "--draft-only", "--backend", "llama-cpp")
    status, found = doctor.json(*arguments)
    assert (status, published(found)) == (0, ["head"])
    assert name in row(found, "models", "on disk")["text"]


def test_a_head_that_is_damaged_or_of_no_use_is_told_apart(doctor: Doctor, tiny: TinyFiles) -> None:
    folder = models_dir() / "hf/someone/heads"
    folder.mkdir(parents=True)
    write_eagle3(tiny.pair.target, folder / "deep.gguf", extra={"eagle3.block_count": 2})
    status, found = doctor.json(tiny.quick.target, "--draft", "none", "--backend", "reference")
    assert (status, row(found, "models", "hf:someone/heads/deep.gguf")["status"]) == (0, "note")
    write_eagle3(tiny.pair.target, folder / "broken.gguf", drop=("fc.weight",))
    status, found = doctor.json(tiny.quick.target, "--draft", "none", "--backend", "reference")
    assert (status, row(found, "models", "hf:someone/heads/broken.gguf")["status"]) == (1, "fail")


# -- a pair that does not fit ------------------------------------------------------------------------------------------


def test_a_vocabulary_that_does_not_match(doctor: Doctor, tiny: TinyFiles) -> None:
    status, found = doctor.json(tiny.bpe, "--draft", tiny.spm, "--backend", "reference")
    check = row(found, "pair", "vocabulary")
    assert (status, check["status"]) == (1, "fail")
    assert tiny.spm.stem in check["text"]
    assert found["pair"]["vocabulary"][tiny.spm.stem] in check["text"]
    assert check["advice"]
    assert found["pair"]["cost"] is None


def test_a_draft_larger_than_its_target(doctor: Doctor, tiny: TinyFiles) -> None:
    pair = tiny.quick
    status, found = doctor.json(pair.draft, "--draft", pair.target, "--backend", "reference")
    check = row(found, "pair", "draft")
    assert (status, check["status"]) == (0, "note")
    assert "swap" in check["advice"]


def test_a_memory_that_cannot_be_rewound(doctor: Doctor, tiny: TinyFiles, free_memory: Callable[[int], None]) -> None:
    free_memory(1)  # what the header says is enough: nothing needs to be loaded
    _, found = doctor.json(tiny.recurrent, "--draft", "ngram")
    assert found["pair"]["target"]["rollback"] == "replay"
    check = row(found, "pair", "rollback")
    assert check["status"] == "note"
    assert check["advice"]
    _, found = doctor.json(tiny.sliding, "--draft", "ngram")
    assert row(found, "pair", "rollback")["status"] == "ok"


def test_a_model_that_does_not_fit(doctor: Doctor, tiny: TinyFiles, free_memory: Callable[[int], None]) -> None:
    status, found = doctor.json(tiny.bpe, "--draft", "none", "--backend", "reference")
    needed = found["pair"]["fit"]["ram_needed_bytes"]
    assert (status, found["pair"]["fit"]["fits"]) == (0, True)
    free_memory(needed - 1)
    status, found = doctor.json(tiny.bpe, "--draft", "none", "--backend", "reference")
    check = row(found, "pair", "memory")
    assert (status, check["status"], found["pair"]["fit"]["fits"]) == (1, "fail", False)
    assert check["advice"]
    assert found["pair"]["cost"] is None  # it was not even tried
    free_memory(needed + 1)
    status, found = doctor.json(tiny.bpe, "--draft", "none", "--backend", "reference")
    assert (status, row(found, "pair", "memory")["status"]) == (0, "note")


def test_advice_for_short_memory_holds(doctor: Doctor, tmp_path: Path, free_memory: Callable[[int], None]) -> None:
    """A context as large as its weights: a smaller one, or a smaller cache, is the way out, and then it does fit."""
    shape = ggufs.Shape(n_layer=2, n_embd=128, n_head=2, n_head_kv=2, n_ff=64, n_ctx=1 << 17)
    model = ggufs.write_llama(tmp_path / "long.gguf", shape, ggufs.bpe_vocab())
    arguments = (model, "--draft", "none", "--ctx", "131072")
    free_memory(190_000_000)
    status, found = doctor.json(*arguments)
    assert (status, found["pair"]["fit"]["fits"]) == (1, False)
    advice = row(found, "pair", "memory")["advice"]
    assert "--kv-cache q8_0" in advice
    n_ctx = re.search(r"--ctx (\d+)", advice)
    assert n_ctx is not None
    for change in (("--kv-cache", "q8_0"), ("--ctx", n_ctx[1])):
        _, found = doctor.json(*arguments, *change)
        assert found["pair"]["fit"]["fits"], change


def test_damaged_files(doctor: Doctor, tiny: TinyFiles, tmp_path: Path) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(tiny.bpe.read_bytes()[:50_000])
    status, found = doctor.json(half, "--draft", "none")
    assert (status, row(found, "pair", "file")["status"]) == (1, "fail")
    assert "cut short" in found["pair"]["target"]["error"]
    entry = Catalog.load()["smollm2-135m"]
    entry.path.parent.mkdir(parents=True)
    shutil.copy(tiny.bpe, entry.path)
    status, found = doctor.json()
    check = row(found, "models", "smollm2-135m")
    assert (status, check["status"]) == (1, "fail")
    assert f"instead of {entry.bytes:,}" in check["text"]
    assert "localspec rm smollm2-135m; localspec pull smollm2-135m" in check["advice"]
    status, found = doctor.json(tiny.bpe, "--draft", "none", "--backend", "reference")
    assert (status, found["pair"]["cost"] is None) == (1, False)  # one bad file does not hinder another


def test_an_embedding_model(doctor: Doctor, tiny: TinyFiles) -> None:
    status, out, _ = doctor.text(tiny.embedding, "--draft", "none")
    assert status == 1
    assert "cannot generate text" in squeezed(out)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["no-such-model"], "no model"),
        (["/no/such.gguf"], "does not exist"),
        (["--draft", "/no/such.gguf"], "does not exist"),
        (["--ctx", "0"], "--ctx"),
        (["--backend", "lama"], "unknown backend"),
        (["--draft", "none", "--draft", "ngram"], "stand alone"),
        (["--frob"], "--frob"),
    ],
)
def test_bad_usage(doctor: Doctor, arguments: list[str], part: str) -> None:
    status, out, err = doctor.text(*arguments)
    assert (status, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("localspec: ")]
    assert part in line


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


# -- calibration -------------------------------------------------------------------------------------------------------


def test_calibrate_remakes_the_calibration(doctor: Doctor, tiny: TinyFiles) -> None:
    pair = tiny.quick
    arguments = (pair.target, "--draft", pair.draft, "--backend", "reference")
    _, first = doctor.json(*arguments)
    assert rewrite_curves(lambda width, ms: 1000 * ms) == 2  # of target and draft
    _, wrong = doctor.json(*arguments)
    assert wrong["pair"]["cost"]["target"]["ms"]["1"] == pytest.approx(
        1000 * first["pair"]["cost"]["target"]["ms"]["1"], rel=0.01
    )
    check = row(wrong, "cost", "one token")
    assert check["status"] == "note"
    assert "--calibrate" in check["advice"]
    _, right = doctor.json(*arguments, "--calibrate")
    for model in ("target", "drafts"):
        old, new = (found["pair"]["cost"][model] for found in (wrong, right))
        old, new = (each[0] if isinstance(each, list) else each for each in (old, new))
        assert new["ms"]["1"] < old["ms"]["1"] / 20
    rewrite_curves(lambda width, ms: ms)
    _, kept = doctor.json(*arguments)
    assert kept["pair"]["cost"]["target"]["ms"] == right["pair"]["cost"]["target"]["ms"]


def test_ctrl_c_during_calibration(doctor: Doctor, tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "tiny.gguf", vocab=ggufs.bpe_vocab())
    arguments = [str(model), "--backend", "reference", "--draft", "none"]
    assert doctor.json(*arguments)[0] == 0
    rewrite_curves(lambda width, ms: ms)
    found, errors = interrupted("said measuring what a pass", ["doctor", *arguments, "--calibrate"])
    out = found.decode()
    assert errors[-1] == "localspec: interrupted"
    assert "Machine" in out  # what was found until then stands
    (path,) = (home() / "calibration").glob("*")
    assert json.loads(path.read_text())["value"] == {}  # nothing half-measured: the next load measures
    status, _, err = doctor.text(*arguments)
    assert status == 0
    assert "measuring what a pass" in err


# -- the ranking -------------------------------------------------------------------------------------------------------


def test_rank(doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ranking.tuning_questions()[:2]
    monkeypatch.setattr(ranking, "tuning_questions", lambda: few)
    monkeypatch.setattr(ranking, "SECONDS", 3600.0)  # it ends before its time does, on a busy machine too
    monkeypatch.setattr(ranking, "MOST_TOKENS", ranking.LEAST_TOKENS)
    heads_folder().mkdir(parents=True)
    write_random_head(tiny.quick.target, heads_folder() / "a-head.gguf")
    folder = models_dir() / "hf/someone/models"
    folder.mkdir(parents=True)
    for path in (tiny.quick.draft, tiny.micro, tiny.pair.target):  # the draft; another vocabulary; too large
        shutil.copy(path, folder / path.name)
    arguments = (tiny.quick.target, "--backend", "reference", "--rank")
    status, found = doctor.json(*arguments)
    rank = found["rank"]
    assert status == 0
    draft = f"hf:someone/models/{tiny.quick.draft.name}"
    tried = {tuple(each["drafters"]) for each in rank["candidates"]}
    with_head = {("head",), ("ngram", "head"), ("ngram", "head", draft)}
    assert tried == {(), ("ngram",), (draft,), ("ngram", draft)} | with_head
    speeds = [each["speedup"] for each in rank["candidates"]]
    assert speeds == sorted(speeds, reverse=True)
    assert rank["prompts"] == [prompt.id for prompt in few]
    assert rank["noise"] > 0
    for each in rank["candidates"]:
        assert each["n_prompts"] == len(rank["prompts"])
        if each["drafters"]:
            assert each["lowest"] <= each["speedup"] <= each["highest"]
    assert rank["seconds"] > 0
    status, out, _ = doctor.text(*arguments)
    assert "Ranking" in out
    assert "plain itself varied by" in squeezed(out)


def test_a_ranking_that_has_no_time(doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "SECONDS", 0.0)
    monkeypatch.setattr(machine_module, "busy_share", lambda: 1.0)
    status, found = doctor.json(tiny.quick.target, "--backend", "reference", "--rank")
    assert status == 0
    assert all(each["n_prompts"] == 0 for each in found["rank"]["candidates"])
    assert found["recommendation"]["text"].startswith("Nothing could be measured")
    assert "in doubt" not in found["recommendation"]["text"]
    candidates = [facts.RankedFacts(**each) for each in found["rank"]["candidates"]]
    (table,) = ranking_parts(facts.RankFacts(**found["rank"] | {"candidates": candidates}))
    assert isinstance(table, Table)
    assert not table.note


@pytest.mark.parametrize(
    ("speedup", "noise", "speculate", "part"),
    [
        (1.30, 0.05, True, "ngram was the fastest, ×1.30 of plain; x cannot be told apart from it."),
        (1.30, 0.40, None, "noise of this measurement"),
        (1.01, 0.01, False, "Do not speculate here"),
        (1.30, None, True, "was the fastest"),
    ],
)
def test_what_a_ranking_means(speedup: float, noise: float | None, speculate: bool | None, part: str) -> None:
    """With 4 prompts, two standard errors of a ratio are noise · 2 · √2 / √4."""
    rows = [
        facts.RankedFacts(["ngram"], 4, speedup, speedup, speedup, 20.0, 0.5),
        facts.RankedFacts(["x"], 4, speedup - 0.05, 1.0, 2.0, 20.0, 0.5),
        facts.RankedFacts([], 4, 1.0, None, None, 20.0, None),
    ]
    found = recommend_ranked(facts.RankFacts(50.0, 48, ["a", "b", "c", "d"], noise, rows), "big", {"x": "small"})
    assert found.speculate is speculate
    assert part in found.text
    commands = {True: " --draft ngram", False: " --draft none", None: ""}
    assert found.command == "localspec chat big" + commands[speculate]


def test_a_command_for_a_draft_model_alone_says_so() -> None:
    rows = [facts.RankedFacts(["x"], 4, 1.5, 1.4, 1.6, 20.0, 0.5)]
    found = recommend_ranked(facts.RankFacts(50.0, 48, ["a", "b"], 0.01, rows), "big", {"x": "small"})
    assert found.command == "localspec chat big --draft small --draft-only"


def test_ranking_prompts_are_those_to_tune_on() -> None:
    prompts = ranking.tuning_questions()
    kinds = [prompt.id.partition("-")[0] for prompt in prompts]
    assert len(set(kinds[:8])) == 8  # a few prompts are of different kinds
    assert len({prompt.id for prompt in prompts}) == len(prompts)


# -- the JSON ----------------------------------------------------------------------------------------------------------


def conforms(value: Any, kind: Any, where: str = "report") -> None:
    """Assert that a JSON value has a type, field by field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            assert type(None) in arguments, where
            return
        (kind,) = [each for each in arguments if each is not type(None)]
        conforms(value, kind, where)
    elif origin is list:
        assert isinstance(value, list), where
        for i, each in enumerate(value):
            conforms(each, arguments[0], f"{where}[{i}]")
    elif origin is dict:
        for key, each in value.items():
            arguments[0](key)  # an int or a float as a string
            conforms(each, arguments[1], f"{where}[{key}]")
    elif origin is typing.Literal:
        assert value in arguments, where
    elif dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        extra = {"schema_version", "holds"} if kind is facts.Examination else set()
        assert set(value) == set(hints) | extra, where
        for name, hint in hints.items():
            conforms(value[name], hint, f"{where}.{name}")
    elif kind is float:
        assert isinstance(value, int | float), where
        assert not isinstance(value, bool), where
        assert math.isfinite(value), where
    else:
        assert type(value) is kind, (where, value)


def test_the_json_has_its_schema(doctor: Doctor, tiny: TinyFiles) -> None:
    pair = tiny.quick
    for arguments in ((), (pair.target, "--draft", pair.draft, "--draft", "ngram", "--backend", "reference")):
        _, found = doctor.json(*arguments)
        conforms(found, facts.Examination)
        assert found["schema_version"] == facts.SCHEMA_VERSION == 1
        for check in found["checks"]:
            assert check["status"] != "fail" or check["advice"]


def test_every_field_of_the_json_is_documented() -> None:
    """In a comment on its line."""
    for kind in vars(facts).values():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == facts.__name__:
            documented = inspect.getsource(kind) + inspect.getsource(Finding)
            for field in dataclasses.fields(kind):
                assert re.search(rf"^    {field.name}: .*  # \w", documented, re.M), field


def test_every_failure_says_what_to_do(doctor: Doctor, tiny: TinyFiles, tmp_path: Path) -> None:
    if any(engine.devices for engine in facts.look_at_engines()):
        pytest.skip("layers can go to a GPU here")
    status, found = doctor.json(tiny.bpe, "--draft", tiny.spm, "--gpu-layers", "3")
    failed = [check for check in found["checks"] if check["status"] == "fail"]
    assert (status, [check["name"] for check in failed]) == (1, ["GPU", "vocabulary"])
    assert all(check["advice"] for check in failed)
    assert found["recommendation"]["text"] == "It would not work like this: see GPU and vocabulary."


def test_more_threads_than_cpus_are_not_measured(doctor: Doctor, tiny: TinyFiles) -> None:
    status, found = doctor.json(tiny.bpe, "--draft", "none", "--threads", "4000")
    assert (status, found["pair"]["cost"]) == (0, None)
    assert row(found, "machine", "CPU")["advice"] == f"use --threads {found['machine']['cores']}"


# -- the screen --------------------------------------------------------------------------------------------------------


def test_piped_output(tiny: TinyFiles) -> None:
    pair = tiny.quick
    arguments = [str(pair.target), "--draft", str(pair.draft), "--draft", "ngram", "--backend", "reference"]
    result = subprocess.run(
        [*PROGRAM, *arguments, "--details"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200", "FORCE_COLOR": "1"},
        capture_output=True,
        check=True,
    )
    out = result.stdout.decode("ascii")
    assert "ok vocabulary" in out
    assert "###" in out
    assert_plain_lines(out)


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "cp437", "latin-1"])
def test_characters_that_an_encoding_lacks(encoding: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding=encoding))
    screen = Screen()
    screen.show(Findings("A · B", [Finding("fail", "x", "3 × 4 → ₀ …", "do – it")]))
    screen.show(Lines("", bars([1, 2], height=4, width=3, gap=2, unicode=screen.unicode)))
    out = buffer.getvalue().decode(encoding)
    assert ("✗" in out, "█" in out) == (encoding == "utf-8", encoding == "utf-8")
    assert_plain_lines(out)


def assert_plain_lines(out: str) -> None:
    """At most 80 columns, without escape sequences, and no character lost."""
    assert not set(out) & {"\x1b", "?", "\ufffd"}
    for line in out.splitlines():
        assert len(line) <= 80, line
        assert line == line.rstrip()


def test_names_cannot_steer_the_terminal(doctor: Doctor, tiny: TinyFiles, tmp_path: Path) -> None:
    path = tmp_path / "evil\x1b[2J\x9b2J.gguf"
    shutil.copy(tiny.bpe, path)
    status, out, _ = doctor.text(path, "--backend", "reference", "--draft", "none")
    assert status == 0
    assert "evil" in out
    assert not set(out) & {"\x1b", "\x9b"}


def test_bars() -> None:
    assert bars([1, 2, 4], height=2, width=1, gap=1) == ["    █", "▄ █ █"]
    assert bars([1, 2, 4], height=2, width=1, gap=1, unicode=False) == ["    #", "# # #"]
    assert bars([0.001, 8], height=1, width=2, gap=0) == ["▁▁██"]
    assert bars([0, 0], height=1, width=1, gap=0) == ["  "]


# -- what measured passes mean -----------------------------------------------------------------------------------------


def test_where_nothing_pays_there_is_no_break_even() -> None:
    found = facts.payoff("x", lambda width: 50.0 * width, 1.0)
    assert found.lowest_break_even is None
    assert set(found.speedup.values()) == {1.0}
    assert set(found.best_length.values()) == {0}


def test_guesses_that_cost_nothing_are_recommended(doctor: Doctor, tiny: TinyFiles) -> None:
    """Where a wider pass takes no longer, any acceptance pays: the break-even is 0, which is not the same as never."""
    arguments = (tiny.quick.target, "--draft", "ngram", "--backend", "reference")
    doctor.json(*arguments)
    rewrite_curves(lambda width, ms: 50.0)
    _, found = doctor.json(*arguments)
    assert set(found["pair"]["payoff"][0]["break_even"].values()) == {0.0}
    assert found["recommendation"]["speculate"] is True
    assert found["recommendation"]["command"].endswith("--draft ngram")


def test_it_says_do_not_speculate_where_passes_are_linear(
    doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration on disk that says so decides, as it would for the runtime."""
    arguments = (tiny.quick.target, "--draft", "ngram", "--backend", "reference")
    doctor.json(*arguments)
    rewrite_curves(lambda width, ms: 50.0 * width)
    status, found = doctor.json(*arguments)
    assert status == 0
    assert found["recommendation"]["speculate"] is False
    assert "Do not speculate here" in found["recommendation"]["text"]
    assert found["recommendation"]["command"].endswith("--draft none")


# -- engines and GPUs --------------------------------------------------------------------------------------------------


def test_without_any_engine(doctor: Doctor, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str | None:
        return None if name == "reference" else f"{name} is not installed; install it with: pip install {name}"

    monkeypatch.setattr(backends, "unavailable_reason", missing)
    monkeypatch.setattr(facts, "unavailable_reason", missing)
    status, found = doctor.json(tiny.bpe, "--draft", "none")
    check = row(found, "engines", "ik-llama")
    assert (status, check["status"], check["advice"]) == (1, "fail", "pip install ik-llama")
    assert found["pair"]["cost"] is None
    status, found = doctor.json(tiny.bpe, "--draft", "none", "--backend", "reference")
    assert status == 0
    assert row(found, "engines", "ik-llama")["status"] == "info"


def test_what_an_engine_was_built_for() -> None:
    old = "AVX = 1 | AVX_VNNI = 0 | AVX2 = 1 | AVX512 = 0 | FMA = 1 | NEON = 0 | SSE3 = 1 | MATMUL_INT8 = 0 | "
    assert facts.built_for(old) == ["AVX", "AVX2", "FMA"]
    new = "CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512_VNNI = 1 | REPACK = 1 | "
    assert facts.built_for(new) == ["CUDA", "AVX2", "AVX512-VNNI"]
    assert facts.built_for("Metal : EMBED_LIBRARY = 1 | CPU : NEON = 1 | DOTPROD = 1 | ") == [
        "Metal", "NEON", "DOTPROD",
    ]  # fmt: skip


AVX2 = ["AVX", "AVX2", "FMA", "F16C"]
AVX512 = [*AVX2, "AVX-512", "AVX512-VNNI", "AVX512-BF16"]


@pytest.mark.parametrize(
    ("built", "cpu", "feature"),
    [
        (AVX2, AVX512, "AVX512-VNNI"),
        (AVX2, [*AVX2, "AVX-VNNI"], "AVX-VNNI"),
        (AVX2, [*AVX2, "AVX-512"], None),  # its kernels for quantised weights need VNNI too
        (AVX2, AVX2, None),
        (AVX512, AVX512, None),
        ([*AVX2, "AVX-512"], AVX512, None),  # compiled here, by a compiler that knows no better
        (["NEON", "FP16", "DOTPROD"], ["NEON", "FP16", "DOTPROD", "I8MM", "SVE"], None),  # it has no kernels for those
        (AVX2, [], None),
    ],
)
def test_what_a_build_for_this_cpu_would_bring(built: list[str], cpu: list[str], feature: str | None) -> None:
    ik = facts.EngineFacts("ik-llama", True, "0.1.5", built, [])
    rows = list(facts.engine_findings([ik], [], "auto", cpu))
    if feature is None:
        assert [each.name for each in rows] == ["ik-llama"]
        return
    _, check = rows
    assert (check.name, check.status, check.advice) == ("this CPU", "note", ggml_module.NATIVE_COMMAND)
    assert feature in check.text
    assert "t(2)" in check.text or "not measured" in check.text
    (llama_cpp, *_) = facts.engine_findings([dataclasses.replace(ik, name="llama-cpp")], [], "auto", cpu)
    assert llama_cpp.name == "llama-cpp"
    assert [each.status for each in facts.engine_findings([ik], [], "mlx", cpu)][1] == "info"


@pytest.mark.parametrize("cpu", [AVX512, [*AVX2, "AVX-VNNI"]])
def test_what_a_build_would_bring_and_its_command_take_three_lines(cpu: list[str]) -> None:
    file = io.StringIO()
    ik = facts.EngineFacts("ik-llama", True, "0.1.5", AVX2, [])
    rows = [each for each in facts.engine_findings([ik], [], "auto", cpu) if each.name == "this CPU"]
    Screen(file).show(Findings("", rows))
    assert len(file.getvalue().splitlines()) <= 3
    assert squeezed(file.getvalue()).endswith(f" {ggml_module.NATIVE_COMMAND}")


def test_the_doctor_knows_what_its_engine_uses_of_this_cpu(doctor: Doctor) -> None:
    """Whatever is installed here, and whatever runs this: the row is there if, and only if, it would gain."""
    if backends.unavailable_reason("ik-llama") is not None:
        pytest.skip("ik-llama-cpp-python is not installed")
    _, found = doctor.json()
    (ik,) = (engine for engine in found["engines"] if engine["name"] == "ik-llama")
    told = [check for check in found["checks"] if check["name"] == "this CPU"]
    assert bool(told) == (ggml_module.native_gain(ik["built_for"], found["machine"]["features"]) is not None)


def gpu_engine(free: int, *, shared: bool = False) -> facts.EngineFacts:
    """llama.cpp as it would be with one GPU."""
    device = Device("CUDA0", "A GPU", free, 24 * GB, shared)
    return facts.EngineFacts("llama-cpp", True, "0.3.36", ["CUDA"], [device])


def test_a_gpu_that_no_engine_is_built_for() -> None:
    cpu = facts.EngineFacts("llama-cpp", True, "0.3.36", ["AVX2"], [])
    (check,) = [each for each in facts.engine_findings([cpu], ["NVIDIA"], "auto") if each.name == "CUDA"]
    assert check.status == "note"
    assert "-DGGML_CUDA=on" in (check.advice or "")
    assert "--force-reinstall" in (check.advice or "")
    assert not [each for each in facts.engine_findings([gpu_engine(GB)], ["NVIDIA"], "auto") if each.name == "CUDA"]


def test_mlx_counts_where_it_has_a_gpu(tiny: TinyFiles) -> None:
    """On Linux it is there for tests; on a Mac it is one way to the GPU, and its memory is the machine's."""
    ik = facts.EngineFacts("ik-llama", True, "0.1.5", ["NEON"], [])
    to_test = facts.EngineFacts("mlx", True, "0.32.4", ["CPU"], [])
    checks = {check.name: check for check in facts.engine_findings([ik, to_test], ["Apple"], "auto")}
    assert (checks["mlx"].status, checks["Metal"].status) == ("info", "note")
    missing = facts.EngineFacts("mlx", False, reason="it is not installed; install it with: pip install mlx")
    assert [check.name for check in facts.engine_findings([ik, missing], ["NVIDIA"], "auto")] == [
        "ik-llama",
        "CUDA",
    ]
    checks = {check.name: check for check in facts.engine_findings([ik, missing], ["Apple"], "auto")}
    assert checks["mlx"].advice == "pip install mlx"
    gpu = Device("Metal", "Apple M4", 12 << 30, 16 << 30, True)
    on_gpu = facts.EngineFacts("mlx", True, "0.32.4", ["Metal"], [gpu])
    checks = {check.name: check for check in facts.engine_findings([ik, on_gpu], ["Apple"], "auto")}
    assert "Metal" not in checks
    assert "Apple M4" in checks["mlx"].text
    room = fit.Room(on_gpu, None, 14 << 30, 16 << 30)
    assert (room.on_gpu, room.gpu_is_ram, room.gpu_free) == (True, True, 12 << 30)


def test_fit_in_gpu_memory(tiny: TinyFiles) -> None:
    from localspec.commands.doctor.fit import PROGRAM_BYTES, Room, find_model, fit, fit_findings

    models = [find_model(str(tiny.pair.target)), find_model(str(tiny.pair.draft))]
    everything = sum(need.total for need in fit(models, 2048, "f16", Room(None, None, GB, GB)).models)
    for free, fits in ((everything, True), (everything - 1, False)):
        room = Room(gpu_engine(free), None, GB, GB)
        found = fit(models, 2048, "f16", room)
        assert (found.gpu_needed_bytes, found.gpu_available_bytes, found.fits) == (everything, free, fits)
        assert found.ram_needed_bytes < GB / 10
        (check,) = [check for check in fit_findings(models, found, room) if check.name == "GPU memory"]
        assert (check.status == "ok") == fits
        if not fits:
            layers = re.search(r"--gpu-layers (\d+)", check.advice or "")
            assert layers is not None
            assert fit(models, 2048, "f16", Room(gpu_engine(free), int(layers[1]), GB, GB)).fits
    shared = fit(models, 2048, "f16", Room(gpu_engine(GB, shared=True), None, GB, GB))
    assert shared.ram_needed_bytes == PROGRAM_BYTES + everything  # what the GPU takes is the machine's own memory
    on_cpu = fit(models, 2048, "f16", Room(gpu_engine(0), 0, GB, GB))
    assert (on_cpu.gpu_needed_bytes, on_cpu.fits) == (None, True)
    silent = dataclasses.replace(gpu_engine(0), devices=None)
    unknown = fit(models, 2048, "f16", Room(silent, None, GB, GB))
    assert (unknown.gpu_needed_bytes, unknown.gpu_available_bytes, unknown.fits) == (everything, None, None)
