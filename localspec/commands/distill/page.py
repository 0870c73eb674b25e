"""What came of a run, as a report: what the head is worth, how it learned, how it was made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from localspec.commands.report.model import Facts, Figure, KeyFigure, KeyFigures, Part, Report, Table
from localspec.commands.report.model import Text as Paragraph
from localspec.commands.report.svg import Axis, Drawing, Point, Series, chart
from localspec.model_files.head_card import CurvePoint, Rates
from localspec.model_files.head_folders import heads_folder
from localspec.training.standing import Distilled, Standing
from localspec.training.worth import Worth


_SHOWN_STEPS = 5


def unfinished_report(model: str, standing: Standing) -> Report:
    """A run that goes on: its learning curve so far."""
    facts = {
        "now": standing.text or standing.phase,
        "texts": f"{standing.n_answers:,}, {standing.n_places:,} tokens",
        "learned from": f"{standing.tokens_seen:,} tokens, repetitions counted",
    }
    return Report("distill", f"a head for {model}: not finished", [Facts(facts), *curve_parts(standing.curve)])


def finished_report(model: str, made: Distilled) -> Report:
    """What came of a run."""
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
    return Report("distill", f"a {made.card.kind} head for {model}", parts)


def _worth_parts(made: Distilled) -> list[Part]:
    worth = made.worth
    if worth is None:
        return [Paragraph(f"What it is worth could not be measured; it lies in {made.path}.", "note")]
    parts: list[Part] = [KeyFigures([_key_figure(worth, kept=made.kept is not None)])]
    if made.kept is None:
        where = f"It lies in {made.path}. --draft head:{made.path} uses it all the same, and"
        parts.append(Paragraph(f"{where} --draft auto finds it if it is copied to {heads_folder()}.", "note"))
    return [*parts, Paragraph(_how_measured(worth), "muted")]


def _key_figure(worth: Worth, *, kept: bool) -> KeyFigure:
    speeds = (
        f"{worth.head:.1f} tokens per second with the head, {worth.without:.1f} without it, {worth.plain:.1f} plain"
    )
    if kept:
        verdict = "kept: --draft auto uses it"
    elif worth.is_unclear:
        verdict = "not kept, as the difference is within the noise; more --minutes may change that"
    else:
        verdict = "not kept, as it does not pay here; more --minutes may change that"
    interval = "" if worth.interval is None else f" (95 %: {worth.interval[0]:.2f} to {worth.interval[1]:.2f})"
    verdict = f"×{worth.gain:.2f} in the median{interval}; {verdict}"
    return KeyFigure("with the head", f"×{worth.gain:.2f}", f"{speeds}: {verdict}", "ok" if kept else "note")


def _how_measured(worth: Worth) -> str:
    return (
        f"{worth.n_questions} questions that nothing was trained on, greedy, in turns; without the head: "
        f"{', '.join(worth.drafters)}"
    )


def curve_parts(curve: Sequence[CurvePoint]) -> list[Part]:
    """The learning curve."""
    if len(curve) < 2:
        return []
    caption = "Share of places in texts kept for testing at which this many guesses in a row were what the model says."
    return [Figure("Learning curve", partial(_curve, curve), caption, wide=True)]


def _curve(curve: Sequence[CurvePoint]) -> Drawing:
    tests = [(point.tokens_seen, point.acceptance.get(_ALL, ())) for point in curve]
    n_steps = min(_SHOWN_STEPS, max(len(rates) for _, rates in tests))
    series = [
        Series(
            f"{step + 1} right",
            [
                Point(seen, rates[step], f"{seen:,} tokens: {rates[step]:.3f}")
                for seen, rates in tests
                if step < len(rates)
            ],
        )
        for step in range(n_steps)
    ]
    most = max(0.1, *(point.y for each in series for point in each.points))
    return chart(
        "Acceptance against tokens learned from",
        Axis("tokens learned from", 0.0, float(max(1, curve[-1].tokens_seen))),
        Axis("right", 0.0, min(1.0, 1.1 * most), percent=True),
        series,
    )


def _acceptance_table(acceptance: Rates) -> Table:
    n_steps = min(_SHOWN_STEPS, max(map(len, acceptance.values())))
    names = [_ALL, *(name for name in acceptance if name != _ALL)]
    rows = [[name, *(f"{rate:.2f}" for rate in acceptance[name][:n_steps])] for name in names if name in acceptance]
    return Table(
        "Right, by how many tokens ahead",
        ["texts kept for testing", *(f"{step + 1}" for step in range(n_steps))],
        rows,
        "The finished head, on the engine.",
    )
