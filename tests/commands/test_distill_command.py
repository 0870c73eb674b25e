"""``localspec distill`` as it is typed: a terminal, a pipe, a page, Ctrl-C, bad input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from localspec.commands import distill as command
from localspec.commands.distill import RunDisplay, finished_report, unfinished_report
from localspec.heads.card import CurvePoint, HeadCard, TargetFacts, Training
from localspec.heads.file import heads_folder
from localspec.heads.training.distill import Distilled, Worth
from localspec.heads.training.run_folder import RunProgress
from localspec.report.renderers import html, markdown
from tests.conftest import TinyFiles
from tests.support.interrupting import interrupted
from tests.support.program import PROGRAM, assert_one_line, localspec
from tests.support.tmux import Tmux

pytest.importorskip("jax", reason="heads are trained with JAX")

RIGHT = [(0.1 * i, 0.05 * i, 0.01 * i) for i in range(7)]
CURVE = tuple(CurvePoint(1000 * i, float(i), {"all": right, "own": right}) for i, right in enumerate(RIGHT))


@pytest.fixture(autouse=True)
def _usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "lower_priority", lambda: None)


def made(gain: float | None, folder: Path) -> Distilled:
    target = TargetFacts("f" * 32, "a <b> target", "llama", 64, 3, 300, "v")
    said = "localspec distill 'a <b>'"
    training = Training(said, 7, 5000, 6000, 12.5, "a CPU", {"numpy": "2"}, CURVE, CURVE[-1].acceptance)
    card = HeadCard("chained", ("norm",), np.arange(100, dtype=np.int32), 3, target, 4, 2, 16, 96, training=training)
    worth = None
    if gain is not None:
        worth = Worth(20.0, 10.0, 20.0 * gain, gain, 6, ("ngram",), (gain - 0.05, gain + 0.05))
    return Distilled(folder / "head.gguf", folder / "kept.gguf" if worth and worth.pays else None, card, worth)


def plain(text: str) -> str:
    return text.replace("\\", "").replace("&lt;", "<").replace("&gt;", ">")


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (1.25, "×1.25 in the median (95 %: 1.20 to 1.30); kept: --draft auto uses it"),
        (1.02, "×1.02 in the median (95 %: 0.97 to 1.07); not kept, as the difference is within the noise"),
        (0.9, "not kept, as it does not pay here"),
        (None, "could not be measured"),
    ],
)
def test_the_report_says_what_the_head_is_worth(tmp_path: Path, gain: float | None, said: str) -> None:
    report = finished_report("<model>", made(gain, tmp_path))
    text, page = markdown(report), html(report)
    assert said in text
    assert (f"--draft head:{tmp_path / 'head.gguf'} uses it all the same" in plain(text)) == (gain in (0.9, 1.02))
    assert (f"copied to {heads_folder()}" in plain(text)) == (gain in (0.9, 1.02))
    assert ("×1.25" in page) == (gain == 1.25)
    assert "25.0 tokens per second with the head, 10.0 without it, 20.0 plain" in text or gain != 1.25
    assert "localspec distill 'a <b>'" in plain(text)
    assert "<model>" not in page
    goes_on = html(unfinished_report("m", RunProgress("training", "the head learns", curve=CURVE, tokens_seen=6000)))
    assert "not finished" in goes_on
    assert all("6,000 tokens: 0.600" in each for each in (page, goes_on))  # a point of the curve


def test_where_nobody_watches_there_are_plain_lines() -> None:
    out = io.StringIO()
    with RunDisplay(out) as watch:
        watch.say("a remark\x1b[2J")
        for n in range(100):
            watch.show(RunProgress("examples", "the model writes examples", 0.1, 120.0, 3, 500 + n, 1_000_000, 40.0))
        watch.show(RunProgress("training", "the head learns", 0.2, 60.0, 3, 600, 1_000_000, 160.0, 1000, CURVE[:2]))
        watch.show(RunProgress("waiting"))
    lines = out.getvalue().splitlines()
    assert (len(lines), "\x1b" in out.getvalue()) == (4, False)
    assert lines[1] == "the model writes examples, 40 tokens a second; 2 min left; 3 texts of 500 tokens (1 MB)"
    assert lines[2].startswith("the head learns, 160 tokens a second; 60 s left; 3 texts of 600 tokens")
    assert lines[2].endswith("1,000 learned from; right at 0.10 0.05 0.01")
    assert lines[3].startswith("waiting: a chat or server answers")


def test_bad_input_is_one_line(tiny: TinyFiles, tmp_path: Path) -> None:
    """What tests/training/test_distill.py has of the function is not repeated here."""
    for name, value, *parts in (
        ("--minutes", "0", "minutes must be over 0"),
        ("--prompts", "/nowhere", "--prompts /nowhere", "no such file"),
        ("--begin-with", "/nowhere", "cannot begin with the head /nowhere"),
        ("--text", "/nowhere", "--text /nowhere", "no such file or folder"),
        ("--html", "-", "--html needs a file"),
        ("--html", "/nowhere/page.html", "there is no folder"),
    ):
        assert_one_line(localspec("distill", tiny.quick.target, name, value), 2, *parts)
    (tmp_path / "no.gguf").write_bytes(b"GGUF" + bytes(100))
    for model, status in ((tmp_path / "no.gguf", 1), (Path("nothing-by-this-name"), 2)):
        assert_one_line(localspec("distill", model), status, model.name)


LOADING, MAKING = "localspec.engine.loading:Loader.load", "localspec.heads.training.examples:ExampleMaker.step"


@pytest.mark.parametrize(("at", "by"), [(LOADING, "INT"), (MAKING, "INT"), (MAKING, "TERM"), (MAKING, "HUP")])
def test_a_run_that_is_told_to_end_says_how_to_go_on(tiny: TinyFiles, at: str, by: str) -> None:
    """By Ctrl-C, by a system that ends its jobs, or by a terminal that is closed."""
    if sys.platform == "win32" and by != "INT":
        pytest.skip("no program can be told to end there")
    arguments = ["distill", str(tiny.quick.target), "--minutes", "500", "--backend", "reference"]
    out, errors = interrupted(f"call {at}", arguments, by=f"SIG{by}")
    assert (out, errors[-1]) == (b"", f"localspec: stopped; resume with: localspec {' '.join(arguments)} --resume")
    if (at, by) == (MAKING, "INT"):
        assert interrupted(f"call {at}", [*arguments, "--resume"])[1][-1].endswith("--resume")


def test_without_a_terminal_the_end_says_what_came_of_it(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill = Mock(return_value=made(0.9, tmp_path))
    monkeypatch.setattr(command, "distill", distill)
    done = localspec("distill", tiny.quick.target, "--backend", "reference")
    assert done.returncode == 0
    said = "".join(done.stdout.decode().split())  # lines are broken anywhere
    for part in ("tokenspersecondwiththehead", "notkept,asitdoesnotpayhere", "head.gguf"):
        assert part in said


def test_a_terminal_shows_progress_and_ctrl_c_leaves_it_clean(
    tiny: TinyFiles, tmp_path: Path, isolated_home: Path
) -> None:
    command = [*PROGRAM, "distill", str(tiny.quick.target), "--backend", "reference", "--minutes", "500"]
    terminal = Tmux(command, tmp_path, {"LOCALSPEC_HOME": str(isolated_home)}, columns=100)
    try:
        terminal.wait("the model writes examples")
        assert "min left" in terminal.wait("texts of")
        terminal.keys("C-c")
        screen = terminal.wait("EXIT 130")
    finally:
        terminal.close()
    assert "\nlocalspec: stopped; resume with: localspec distill" in f"\n{screen}"
    assert "the model writes examples" not in screen


def test_without_jax_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    said = "training a head needs JAX: pip install 'localspec[distill]'"
    assert_one_line(localspec("distill", "smollm2-135m"), 1, said)
