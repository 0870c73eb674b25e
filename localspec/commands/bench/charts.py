"""The plots of a run."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.commands.bench.record import Record
from localspec.commands.bench.reliability import wilson
from localspec.commands.bench.results import ALL, Passes, PredictionQuality, Results, Row
from localspec.commands.bench.words import arm_name, interval_text, seconds_text, times_text, title
from localspec.commands.report.svg import N_COLOURS, Axis, Drawing, Point, Scale, Series, chart, label, ticks
from localspec.measuring.answer import Sample
from localspec.measuring.statistics import Estimate

_LABELS = 96
"""Width of the column with the categories' names."""

_LEAST_REACH = 2.0
"""The axis of speed-ups reaches to twice and half of plain's speed at least, so that noise does not look like more."""

_CEILING = 4.0
"""Range of the axis of speed-ups, in multiples of the largest median: an interval of few questions can be enormous."""


def speedup_plot(record: Record, results: Results, *, heading: bool = False) -> Drawing:
    """Speed over plain by category, each arm with its interval.

    Args:
        record: what was measured.
        results: what it says.
        heading: with the models' names, for a file of its own.
    """
    arms = results.arms
    rows = [row for row in results.rows if row.speedup is not None]
    categories = list(dict.fromkeys(row.category for row in rows))
    top, height = 44.0 if heading else 24.0, 15.0 * max(1, len(arms)) + 10.0
    bottom = top + height * len(categories)
    drawing = Drawing(720, bottom + 34, "Speed over plain decoding, by category")
    if heading:
        drawing.text(0, 14, f"{title(record)}: speed over plain decoding", "strong")
    drawing.legend([arm_name(record, *arm) for arm in arms], _LABELS, top - 10)
    if ALL in categories:
        drawing.boxes([(0, top, 720, height)], "band")
    x = Scale(*_range([row.speedup for row in rows if row.speedup is not None]), _LABELS, 544)
    for tick in ticks(x.low, x.high):
        drawing.line(x(tick), top, x(tick), bottom, "grid")
        drawing.text(x(tick), bottom + 16, f"×{label(tick)}", "mid muted")
    drawing.line(x(1), top, x(1), bottom, "even")
    drawing.text(x(1), bottom + 30, "plain", "mid muted")
    for i, category in enumerate(categories):
        drawing.text(4, top + (i + 0.5) * height + 4, category, "strong" if category == ALL else "")
    for row in rows:
        y, arm = top + categories.index(row.category) * height, arms.index((row.backend, row.arm))
        _draw_speedup(drawing, record, row, x, y + 5 + 15 * (arm + 0.5), arm)
    return drawing


def _range(found: Sequence[Estimate]) -> tuple[float, float]:
    medians = [1.0, *(each.median for each in found)]
    ends = [end for each in found for end in (each.low, each.high) if end is not None]
    low = max(min([*medians, *ends, 1 / _LEAST_REACH]), 0.0)
    high = max(_LEAST_REACH, min(max([*medians, *ends]), _CEILING * max(medians)))
    room = 0.04 * (high - low) + 0.02
    return max(0.0, low - room), high + room


def _draw_speedup(drawing: Drawing, record: Record, row: Row, x: Scale, y: float, arm: int) -> None:
    found, colour = row.speedup, arm % N_COLOURS
    assert found is not None
    if found.low is not None and found.high is not None:
        drawing.line(x(found.low), y, x(found.high), y, f"c{colour} {'bar' if found.is_firm else 'thin'}")
        for end in (found.low, found.high):
            drawing.line(x(end), y - 4, x(end), y + 4, f"c{colour} bar")
    tip = (
        f"{row.category}, {arm_name(record, row.backend, row.arm)}: {times_text(found.median)}, "
        f"{interval_text(found)}; {row.n_questions} questions, slower on {row.n_slower}, "
        f"worst {times_text(row.worst_speedup)} on {row.worst_question}"
    )
    drawing.mark(arm, x(found.median), y, f"f{colour}" if found.is_firm else f"c{colour} hollow", tip)
    drawing.text(556, y + 4, times_text(found.median), "strong" if row.verdict in ("faster", "slower") else "muted")
    drawing.text(604, y + 4, interval_text(found), "muted")


def pass_plot(passes: Passes) -> Drawing:
    """t(w): as calibrated, as observed in the run, and what as many single passes would take."""
    widths = [each for each in passes.widths if each.width <= 17]
    known = [(each.width, each.calibrated_ms) for each in widths if each.calibrated_ms is not None]
    seen = [(each.width, each.observed_ms, each.n_observed) for each in widths if each.observed_ms is not None]
    # A median of one or two passes may be an outlier; the axis does not follow it.
    most = 1.05 * max([ms for _, ms in known] + [ms for _, ms, n in seen if n > 2] + [1e-9])
    widest = max([each.width for each in widths] + [2])
    one = known[0][1] if known else most
    reach = min(widest, most / one)
    series = [
        Series(
            "calibrated",
            [Point(w, ms, f"calibrated: {w} tokens, {ms:.1f} ms, ×{ms / one:.2f} of one") for w, ms in known],
        ),
        Series(
            "median in this run",
            [Point(w, ms, f"in this run: {w} tokens, {ms:.1f} ms, median of {n} passes") for w, ms, n in seen],
            line=False,
            hollow=True,
        ),
    ]
    x = Axis("tokens in a pass, w", 1, widest, {w: str(w) for w in (1, 2, 4, 6, 8, 10, 12, 14, 16) if w <= widest})
    return chart("Time of a pass over w tokens", x, Axis("ms", 0, most), series,
                 reference=("w single passes", [(1, one), (reach, reach * one)]))  # fmt: skip


def break_even_plot(passes: Passes) -> Drawing:
    """The acceptance that a draft of each length needs, by drafter."""
    lengths = list(next(iter(passes.break_even.values())))
    series = []
    for source, even in passes.break_even.items():
        ms = passes.step_ms[source]
        points = [
            Point(i, share, f"{source}, k = {length}: {share:.0%} of guesses must be right")
            for i, (length, share) in enumerate(even.items())
            if share is not None
        ]
        series.append(Series(f"{source} ({f'{ms:.1f} ms' if ms else 'free'})", points))
    x = Axis("guesses a round, k", -0.3, len(lengths) - 0.7, dict(enumerate(lengths)))
    y = Axis("share that must be right", 0, 1, percent=True)
    return chart("Break-even acceptance by draft length", x, y, series)


def position_plot(record: Record, rows: Sequence[Row]) -> Drawing:
    """Acceptance by position in the draft of arms that drafted, with 95 % intervals."""
    longest = min(16, max(len(row.by_position) for row in rows))
    series = []
    for k, row in enumerate(rows):
        shift = (k - (len(rows) - 1) / 2) * min(0.15, 0.6 / len(rows))
        name = arm_name(record, row.backend, row.arm)
        points = [
            Point(i + shift, each.rate, f"{name}, position {i}: {each.accepted} of {each.drafted}",
                  *wilson(each.accepted, each.drafted))
            for i, each in enumerate(row.by_position[:longest], 1)
        ]  # fmt: skip
        series.append(Series(name, points))
    x = Axis("position in the draft", 0.5, longest + 0.5, {i: str(i) for i in range(1, longest + 1)})
    return chart("Acceptance by position in the draft", x, Axis("accepted of sent", 0, 1, percent=True), series)


def reliability_plot(judgements: Sequence[PredictionQuality]) -> Drawing:
    """Predicted against observed acceptance of the first arm that predicts: all its drafters together, and each."""
    found = [each for each in judgements if (each.backend, each.arm) == (judgements[0].backend, judgements[0].arm)]
    bins = found[0].reliability.bins
    series = []
    for each in found:
        whole = each.source == ALL
        points = [
            Point(
                one.predicted,
                one.observed,
                f"{each.source}: {one.n} guesses, predicted {one.predicted:.1%}, observed {one.observed:.1%}",
                one.observed_low if whole else None,
                one.observed_high if whole else None,
            )
            for one in each.reliability.bins
        ]
        series.append(Series(each.source, points, line=False, hollow=not whole))
    most = max(each.n for each in bins)
    axes = (
        Axis("predicted acceptance (bars: guesses)", 0, 1, percent=True),
        Axis("observed", 0, 1, percent=True),
    )
    return chart("Reliability of the predicted acceptance", *axes, series, reference=("as predicted", [(0, 0), (1, 1)]),
                 bars=[(each.low, each.high, each.n / most) for each in bins])  # fmt: skip


def timelines(record: Record, question: str, repeat: int) -> Drawing:
    """All arms on one question, round by round: where the time went, and how many tokens came of each round."""
    samples = [s for s in record.samples if (s.question, s.repeat) == (question, repeat)]
    order = [(backend, arm) for backend in record.settings.backends for arm in record.settings.arms]
    samples.sort(key=lambda sample: order.index((sample.backend, sample.arm)))
    row, top = 62.0, 24.0
    bottom = top + row * len(samples)
    drawing = Drawing(1000, bottom + 26, f"Rounds of the answers to {question}")
    x = Scale(0, max(sample.seconds for sample in samples), 110, 990)
    most = max((figures[5] for sample in samples for figures in sample.rounds), default=1)
    for tick in ticks(0, x.high, most=9):
        drawing.line(x(tick), top - 4, x(tick), bottom, "grid")
        drawing.text(x(tick), bottom + 16, f"{label(tick)} s", "mid muted")
    place = 110.0
    for name, what in (("draft", "drafting"), ("verify", "verifying"), ("other", "other"), ("count", "tokens a round")):
        drawing.boxes([(place, 4, 10, 10)], name)
        drawing.text(place + 15, 13, what, "muted")
        place += 40 + 6.4 * len(what)
    for i, sample in enumerate(samples):
        y = top + i * row
        _draw_rounds(drawing, sample, x, y, most)
        drawing.text(0, y + 30, arm_name(record, sample.backend, sample.arm), "strong")
        drawing.text(0, y + 46, f"{sample.tokens} in {seconds_text(sample.seconds)}", "muted")
    return drawing


def _draw_rounds(drawing: Drawing, sample: Sample, x: Scale, y: float, most: float) -> None:
    parts: dict[str, list[tuple[float, float, float, float]]] = {"draft": [], "verify": [], "other": [], "count": []}
    at = 0.0
    for draft, verify, other, _, _, emitted in sample.rounds:
        began = at
        for name, ms in (("draft", draft), ("verify", verify), ("other", other)):
            parts[name].append((x(at), y + 34, x(at + ms / 1e3) - x(at), 14))
            at += ms / 1e3
        gap = 0.25 if x(at) - x(began) > 1 else 0.0
        high = 28 * emitted / most
        parts["count"].append((x(began), y + 32 - high, x(at) - x(began) - gap, high))
    for name, boxes in parts.items():
        drawing.boxes(boxes, name)
