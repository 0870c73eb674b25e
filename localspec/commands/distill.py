"""``localspec distill``: train a head, show its progress and its worth."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from localspec.backends.llama.ggml import engine_log
from localspec.commands.files import left_text
from localspec.commands.options import ensure_model
from localspec.errors import Cancelled, UsageError, check_text
from localspec.heads.card import ALL_TEXTS, CurvePoint, Rates
from localspec.heads.file import heads_folder
from localspec.heads.training.distill import Distilled, distill
from localspec.heads.training.run_folder import Effort, Recipe, RunProgress
from localspec.model_files.sources.base import size_text
from localspec.report.model import Facts, Figure, KeyFigure, KeyFigures, Part, Report, Table, Text
from localspec.report.renderers import STREAM, Screen, checked_output, html, write_output
from localspec.report.svg import Axis, Drawing, Point, Series, chart
from localspec.system.machine import lower_priority
from localspec.system.process import on_interrupt
from localspec.system.terminal import Progress, on_one_line

# What came of a run, as a report: what the head is worth, how it learned, how it was made.

_SHOWN_STEPS = 5


def unfinished_report(model: str, standing: RunProgress) -> Report:
    facts = {
        "now": standing.text or standing.phase,
        "texts": f"{standing.n_answers:,}, {standing.n_places:,} tokens",
        "learned from": f"{standing.tokens_seen:,} tokens, repetitions counted",
    }
    return Report("distill", f"a head for {model}: not finished", [Facts(facts), *curve_parts(standing.curve)])


def finished_report(model: str, made: Distilled) -> Report:
    training = made.card.training
    parts: list[Part] = [*_worth_parts(made), *curve_parts(training.curve)]
    if training.acceptance:
        parts.append(_acceptance_table(training.acceptance))
    facts = {
        "file": str(made.kept or made.path),
        "made by": training.command,
        **({"went on from": "; ".join(training.earlier)} if training.earlier else {}),
        "examples": f"{training.data_tokens:,} tokens",
        "learned from": f"{training.tokens_seen:,} tokens, repetitions counted",
        "time": f"{training.minutes:.0f} minutes",
        "machine": training.machine,
        "seed": str(training.seed),
        "versions": ", ".join(f"{name} {text}" for name, text in training.versions.items()),
        "reads": ", ".join(made.card.taps),
        "guesses": f"{made.card.steps} tokens ahead, of {made.card.n_out:,} of {made.card.target.n_vocab:,} tokens",
    }
    parts.append(Facts(facts, "How it was made"))
    return Report("distill", f"a head for {model}", parts)


def _worth_parts(made: Distilled) -> list[Part]:
    worth = made.worth
    if worth is None:
        return [Text(f"What it is worth could not be measured; it lies in {made.path}.", "note")]
    interval = "" if worth.interval is None else f" (95 %: {worth.interval[0]:.2f} to {worth.interval[1]:.2f})"
    verdict, more = "kept: --draft auto uses it", list[Part]()
    if made.kept is None:
        why = "the difference is within the noise" if worth.is_unclear else "it does not pay here"
        verdict = f"not kept, as {why}; more --minutes may change that"
        where = f"It lies in {made.path}. --draft head:{made.path} uses it all the same, and"
        more = [Text(f"{where} --draft auto finds it if it is copied to {heads_folder()}.", "note")]
    speeds = (
        f"{worth.head:.1f} tokens per second with the head, {worth.without:.1f} without it, {worth.plain:.1f} plain"
    )
    text = f"{speeds}: ×{worth.gain:.2f} in the median{interval}; {verdict}"
    figure = KeyFigure("with the head", f"×{worth.gain:.2f}", text, "ok" if made.kept else "note")
    how = f"{worth.n_questions} questions that nothing was trained on, greedy, in turns; without the head: "
    return [KeyFigures([figure]), *more, Text(how + ", ".join(worth.drafters), "muted")]


def curve_parts(curve: Sequence[CurvePoint]) -> list[Part]:
    if len(curve) < 2:
        return []
    caption = "Share of places in texts kept for testing at which this many guesses in a row were what the model says."
    return [Figure("Learning curve", partial(_curve, curve), caption, wide=True)]


def _curve(curve: Sequence[CurvePoint]) -> Drawing:
    tests = [(point.tokens_seen, point.acceptance.get(ALL_TEXTS, ())) for point in curve]
    n_steps = min(_SHOWN_STEPS, max(len(rates) for _, rates in tests))
    series = []
    for step in range(n_steps):
        at = [(seen, rates[step]) for seen, rates in tests if step < len(rates)]
        series.append(Series(f"{step + 1} right", [Point(seen, y, f"{seen:,} tokens: {y:.3f}") for seen, y in at]))
    most = max(0.1, *(point.y for each in series for point in each.points))
    return chart(
        "Acceptance against tokens learned from",
        Axis("tokens learned from", 0.0, float(max(1, curve[-1].tokens_seen))),
        Axis("right", 0.0, min(1.0, 1.1 * most), percent=True),
        series,
    )


def _acceptance_table(acceptance: Rates) -> Table:
    n_steps = min(_SHOWN_STEPS, max(map(len, acceptance.values())))
    names = [ALL_TEXTS, *(name for name in acceptance if name != ALL_TEXTS)]
    rows = [[name, *(f"{rate:.2f}" for rate in acceptance[name][:n_steps])] for name in names if name in acceptance]
    return Table(
        "Right, by how many tokens ahead",
        ["texts kept for testing", *(f"{step + 1}" for step in range(n_steps))],
        rows,
        "The finished head, in full precision.",
    )


# How a run comes along: a line that is redrawn on a terminal, else one a minute; each test's figures stay.

LINE_SECONDS = 60.0  # between two lines where the output is no terminal


class RunDisplay(Progress):
    """Shows a run's progress."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file)
        self._phase, self._n_points, self._said_at = "", 0, 0.0

    def say(self, line: str) -> None:
        """Print a remark that stays."""
        self.clear()
        print(on_one_line(line), file=self._file, flush=True)

    def show(self, standing: RunProgress) -> None:
        new, tested = standing.phase != self._phase, len(standing.curve) > self._n_points
        self._phase, self._n_points = standing.phase, len(standing.curve)
        left = "" if standing.seconds_left is None else left_text(standing.seconds_left)
        parts = [_doing(standing), left, _counts(standing)]
        if tested:
            rates = standing.curve[-1].acceptance.get(ALL_TEXTS, ())
            parts.append("right at " + " ".join(f"{rate:.2f}" for rate in rates))
        line = "; ".join(filter(None, parts))
        due = standing.phase != "loading" and time.monotonic() - self._said_at > LINE_SECONDS
        if tested or (not self.live and (new or due)):
            self._said_at = time.monotonic()
            self.say(line)
        elif self.live:
            self.report(line, standing.fraction or 0.0)


def _doing(standing: RunProgress) -> str:
    if standing.phase == "waiting":
        return "waiting: a chat or server answers on this machine"
    rate = f", {standing.rate:,.0f} tokens a second" if standing.rate else ""
    return (standing.text or standing.phase) + rate


def _counts(standing: RunProgress) -> str:
    if not standing.n_places:
        return ""
    seen = f", {standing.tokens_seen:,} learned from" if standing.tokens_seen else ""
    size = f" ({size_text(standing.n_bytes)})" if standing.n_bytes else ""
    return f"{standing.n_answers:,} texts of {standing.n_places:,} tokens{size}{seen}"


INTERRUPTED = 130
COMMAND = "localspec distill"


def distill_command(model: str | None, html_file: str | None, *, verbose: bool, **training: Any) -> int:
    """Train, print, write. Ctrl-C, or a request to end, stops it; it can be resumed. The exit status is also 0 where
    the head turned out not to pay here. ``training``: arguments of ``localspec.distill``."""
    _check(model, html_file, training)
    may_replace = training["force"] or training["resume"]
    page = None if html_file is None else checked_output(html_file, force=may_replace)
    engine_log.verbose = engine_log.verbose or verbose
    target = ensure_model(model, [])
    lower_priority()
    stop, n_points = threading.Event(), 0
    with RunDisplay() as watch, on_interrupt(stop.set, ended_too=True):

        def report(standing: RunProgress) -> None:
            nonlocal n_points
            watch.show(standing)
            if page is not None and len(standing.curve) > n_points:
                n_points = len(standing.curve)
                write_output(page, html(unfinished_report(target, standing)))

        try:
            made = distill(target, **training, report=report, say=watch.say, cancel=stop)
        except Cancelled:
            watch.clear()
            named = [] if model is None else [target]
            print(f"localspec: stopped; resume with: {_resume(named, html_file, training)}", file=sys.stderr)
            return INTERRUPTED
    found = finished_report(target, made)
    if page is not None:
        write_output(page, html(found))
    Screen().report(found)
    return 0


def _check(model: str | None, html_file: str | None, training: Mapping[str, Any]) -> None:
    """Refuse what makes no sense before a model is fetched."""
    for name, text in (("MODEL", model), ("--begin-with", training["begin_with"]), ("--html", html_file)):
        check_text(text, name)
    for prompts in training["prompts"]:
        check_text(prompts, "--prompts")
        if not Path(prompts).is_file():
            raise UsageError(f"--prompts {prompts}: there is no such file")
    for text in training["texts"]:
        check_text(text, "--text")
        if not Path(text).exists():
            raise UsageError(f"--text {text}: there is no such file or folder")
    if html_file == STREAM:
        raise UsageError("--html needs a file")
    Recipe(seed=training["seed"] or 0)
    if training["minutes"] is not None:
        Effort(training["minutes"])


def _resume(named: list[str], html_file: str | None, training: Mapping[str, Any]) -> str:
    """The command line that goes on with a run."""
    minutes = training["minutes"]
    options = (
        ("--minutes", None if minutes is None else f"{minutes:g}", None),
        ("--html", html_file, None),
        ("--backend", training["backend"], "auto"),
        ("--threads", training["n_threads"], None),
    )
    words = [word for name, value, usual in options if value != usual for word in (name, str(value))]
    return shlex.join([*COMMAND.split(), *named, *words, "--resume"])
