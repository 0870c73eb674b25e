"""Which models would answer well here, by made-up numbers; and what a first chat offers."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from localspec.commands import files, options, recommend
from localspec.commands.files import fetch_minutes
from localspec.commands.options import ensure_model
from localspec.commands.recommend import ENOUGH, LARGE_GAIN, REACHED, SMALL_GAIN, Candidate, candidates
from localspec.controllers.calibration import curves
from localspec.controllers.cost_model import PassTimes
from localspec.measuring import last_bench
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import fingerprint
from localspec.system import machine
from localspec.system.machine import SystemMemory, cpu_name
from tests.commands.test_cli import sit_down
from tests.model_files.test_catalog import put
from tests.support import ggufs
from tests.support.program import localspec

GB = 1_000_000_000
CATALOG = Catalog.load()
DEFAULT = CATALOG.default_pair()[0]


def set_machine(monkeypatch: pytest.MonkeyPatch, free: float, bandwidth: float | None) -> None:
    """Set the memory that is free and its bandwidth [GB, GB/s]."""
    monkeypatch.setattr(machine, "read_memory", lambda: SystemMemory(64 * GB, round(free * GB)))
    found = None if bandwidth is None else bandwidth * GB
    monkeypatch.setattr(machine, "measure_bandwidth", lambda *args, **rest: found)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue in which qwen3-4b and qwen3-8b were fetched and run."""
    for name in ("qwen3-4b", "qwen3-8b"):
        monkeypatch.setitem(CATALOG, name, dataclasses.replace(CATALOG[name], sha256="0" * 64))


def found(memory: float, bandwidth: float | None) -> dict[str, Candidate]:
    return {each.name: each for each in candidates(round(memory * GB), None if bandwidth is None else bandwidth * GB)}


def test_what_fits_and_how_fast_it_would_be() -> None:
    rows = found(24, 60)
    assert [each.bytes for each in rows.values()] == sorted((each.bytes for each in rows.values()), reverse=True)
    assert not {"gemma3-270m", "qwen3-8b-dflash"} & set(rows)  # one is no chat model, the other no model
    large, small, experts = rows["qwen3-8b"], rows["qwen3-1.7b"], rows["qwen3-30b-a3b"]
    assert large.tokens_per_second == pytest.approx(LARGE_GAIN * REACHED * 60 * GB / large.bytes, abs=0.06)
    assert small.tokens_per_second == pytest.approx(SMALL_GAIN * REACHED * 60 * GB / small.bytes, abs=0.06)
    assert experts.tokens_per_second == pytest.approx(SMALL_GAIN * REACHED * 60 * GB / (0.11 * experts.bytes), abs=0.06)
    assert (large.fits, experts.fits, found(32, 60)["qwen3-30b-a3b"].answers) == (True, False, True)
    for row in rows.values():
        assert row.answers == (row.fits and (row.tokens_per_second or 0) >= ENOUGH)
    assert not any(each.answers for each in found(64, None).values())
    named = {entry.name for entry in CATALOG.values() if entry.note.startswith("mixture of experts")}
    assert named == {entry.name for entry in CATALOG.values() if 0 < entry.active < 1}


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16, 60)
    rows, everything = (
        json.loads(localspec("recommend", "--json", *more).stdout)["models"] for more in ((), ("--all",))
    )
    assert all(each["fits"] and each["tokens_per_second"] >= ENOUGH for each in rows)
    assert len(everything) > len(rows) > 0
    lines = localspec("recommend", "--all").stdout.decode().splitlines()
    assert any(re.match("qwen3-32b .* unchecked +too big$", line) for line in lines)
    set_machine(monkeypatch, 16, 0.001)
    assert b"no model of the catalogue" in localspec("recommend").stdout
    set_machine(monkeypatch, 16, None)
    assert b"not known" in localspec("recommend", "--all").stdout


def test_minutes_go_by_how_fast_the_last_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch_minutes(600_000_000) == pytest.approx(1)
    seconds = iter((100.0, 120.0))
    entry = CATALOG["smollm2-135m"]

    monkeypatch.setattr("localspec.model_files.sources.pull", lambda *args, **rest: put(entry))
    monkeypatch.setattr(files.time, "monotonic", lambda: next(seconds, 120.0))
    files.pull(entry.name)
    assert fetch_minutes(entry.bytes) == pytest.approx(20 / 60)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("free", "bandwidth", "typed", "model", "offered"),
    [
        (24, 100, "what?\nL\n", "qwen3-8b", True),
        (24, 30, "l\n", "qwen3-4b", True),  # the other would make 5 tokens a second
        (6, 100, "l\n", "qwen3-4b", True),  # the other would not fit
        (24, 100, "\n", DEFAULT.name, True),
        (24, 10, "l\n\n", DEFAULT.name, False),  # nothing larger is fast enough: l is no answer, and it is asked again
    ],
)
def test_a_first_chat_offers_the_largest_checked_model_that_is_fast_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, free: float, bandwidth: float, typed: str, model: str, offered: bool
) -> None:
    set_machine(monkeypatch, free, bandwidth)
    monkeypatch.delenv("LOCALSPEC_OFFLINE", raising=False)
    pulled: list[str] = []
    monkeypatch.setattr("localspec.commands.files.pull", pulled.append)
    sit_down(monkeypatch, typed)
    assert ensure_model(None, ["ngram"], late=True) == model
    said = capsys.readouterr().err
    assert pulled == [model]
    assert ("[Y/n/l]" in said) == offered
    for name in {model} - {DEFAULT.name}:
        assert re.search(rf"l takes {name} instead \(\S+ GB, about \d+ min, some \d+ tok/s\)", said)
        assert f"from now on: localspec chat {name}" in said


def test_what_was_never_run_is_offered_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the catalogue as it is: no checked model is larger than the default."""
    set_machine(monkeypatch, 24, 100)
    entry, line = options.larger_choice(DEFAULT) or pytest.fail("nothing was offered")
    assert entry.bytes > DEFAULT.bytes
    assert entry.name in line
    assert "never run by us, its size and digest are the hub's" in line
    set_machine(monkeypatch, 24, 1)
    assert options.larger_choice(DEFAULT) is None


def test_what_was_measured_here_goes_before_what_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    DEFAULT.path.parent.mkdir(parents=True)
    ggufs.write_llama(DEFAULT.path, ggufs.Shape(n_layer=1), ggufs.bpe_vocab(300))
    with DEFAULT.path.open("r+b") as file:
        file.truncate(DEFAULT.bytes)
    set_machine(monkeypatch, 24, 40)
    key = {"machine": cpu_name(), "engine": "an engine", "device": "cpu", "file": fingerprint(DEFAULT.path)}
    key |= {"threads": "2", "kv": "f16"}

    def rows() -> tuple[dict[str, Candidate], recommend.Reached]:
        listed, reached = recommend.look()
        return {each.name: each for each in listed}, reached

    other = "qwen2.5-coder-3b"
    assumed, reached = rows()
    curves().put(key, PassTimes({1: 31.0, 2: 34.0}, noisy=True))
    assert rows() == (assumed, reached)  # a provisional time counts for nothing
    ms = 1e3 * DEFAULT.bytes / (0.8 * 40 * GB)
    curves().put(key, PassTimes({1: ms, 2: 1.1 * ms}))
    listed, reached = rows()
    assert (reached.share, reached.measured_with) == (pytest.approx(0.8, rel=1e-4), DEFAULT.name)
    assert listed[other].tokens_per_second / assumed[other].tokens_per_second == pytest.approx(0.8 / REACHED, rel=0.02)
    assert not listed[DEFAULT.name].measured  # its gain is assumed
    said = localspec("recommend", "--all").stdout.decode()
    assert f"80% of the memory's bandwidth (measured here with {DEFAULT.name})" in said
    measured = {"drafters": [], "speedups": {"all": 1.5}, "n_questions": 9, "n_guesses": 9}
    last_bench.remember(DEFAULT.path, "an engine", measured)
    own = rows()[0][DEFAULT.name]
    assert own.measured
    assert own.tokens_per_second == pytest.approx(1.5 * 0.8 * 40 * GB / DEFAULT.bytes, abs=0.06)
