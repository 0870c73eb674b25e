"""The plots of a run, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.commands.bench.record import Record, Sample
from localspec.commands.bench.results import ALL, Passes, Results, Row
from localspec.commands.bench.statistics import Estimate, wilson
from localspec.commands.bench.svg import N_COLOURS, PALETTE, STYLE, Drawing, Scale, label, ticks
from localspec.commands.bench.words import arm_name, interval_text, seconds_text, times_text, title
from localspec.terminal.text import on_one_line

_LABELS = 96
"""Width of the column with the categories' names."""

_CEILING = 4.0
"""Range of the axis of speed-ups, in multiples of the largest median: an interval of few questions can be enormous."""


def speedup_file(record: Record, results: Results) -> str:
    """The plot of speed-ups as a file of its own."""
    return speedup_plot(record, results, heading=True).svg(PALETTE + STYLE) + "\n"


def speedup_plot(record: Record, results: Results, *, heading: bool = False) -> Drawing:
    """Speed over plain by category, each arm with its interval.

    Args:
        record: what was measured.
        results: what it says.
        heading: with the models' names, for where nothing else tells them.
    """
    arms = results.arms
    rows = {
        (category, arm): row
        for category in [ALL, *results.categories]
        for arm in arms
        if (row := results.row(category, *arm)) is not None and row.speedup is not None
    }
    found = [row.speedup for row in rows.values() if row.speedup is not None]
    top = 44.0 if heading else 24.0
    height = 15.0 * max(1, len(arms)) + 10.0
    categories = list(dict.fromkeys(category for category, _ in rows))
    drawing = Drawing(720, top + height * len(categories) + 34, "Speed over plain decoding, by category")
    if heading:
        drawing.text(0, 14, f"{on_one_line(title(record))}: speed over plain decoding", "strong")
    x = Scale(*_range(found), _LABELS, 544)
    bottom = top + height * len(categories)
    _legend(drawing, [arm_name(record, *arm) for arm in arms], _LABELS, top - 10)
    if ALL in categories:
        drawing.boxes([(0, top, 720, height)], "band")
    for tick in ticks(x.low, x.high):
        drawing.line(x(tick), top, x(tick), bottom, "grid")
        drawing.text(x(tick), bottom + 16, f"×{label(tick)}", "mid muted")
    drawing.line(x(1), top, x(1), bottom, "even")
    drawing.text(x(1), bottom + 30, "plain", "mid muted")
    for i, category in enumerate(categories):
        y = top + i * height
        drawing.text(4, y + height / 2 + 4, category, "strong" if category == ALL else "")
        for j, arm in enumerate(arms):
            row = rows.get((category, arm))
            if row is not None and row.speedup is not None:
                _interval(drawing, row.speedup, x, y + 5 + 15 * (j + 0.5), j, _tip(record, row))
    return drawing


def _range(found: Sequence[Estimate]) -> tuple[float, float]:
    medians = [each.median for each in found] or [1.0]
    ends = [end for each in found for end in (each.low, each.high) if end is not None]
    low = max(min([1.0, *medians, *ends]), 0.0)
    high = min(max([1.0, *medians, *ends]), _CEILING * max(1.0, *medians))
    room = 0.04 * (high - low) + 0.02
    return max(0.0, low - room), high + room


def _interval(drawing: Drawing, found: Estimate, x: Scale, y: float, arm: int, tip: str) -> None:
    colour = arm % N_COLOURS
    firm = found.is_firm
    if found.low is not None and found.high is not None:
        drawing.line(x(found.low), y, x(found.high), y, f"c{colour} {'bar' if firm else 'thin'}")
        for end in (found.low, found.high):
            drawing.line(x(end), y - 4, x(end), y + 4, f"c{colour} bar")
    drawing.mark(arm, x(found.median), y, f"f{colour}" if firm else f"c{colour} hollow", tip)
    drawing.text(556, y + 4, times_text(found.median), "strong")
    drawing.text(604, y + 4, interval_text(found), "muted")


def _tip(record: Record, row: Row) -> str:
    speed = times_text(row.speedup.median if row.speedup else None)
    return (
        f"{row.category}, {arm_name(record, row.backend, row.arm)}: {speed}, "
        f"{interval_text(row.speedup)}; {row.n_questions} questions, slower on {row.n_slower}, "
        f"worst {times_text(row.worst_speedup)} on {row.worst_question}"
    )


def _legend(drawing: Drawing, names: Sequence[str], x: float, y: float, marks: bool = True) -> None:
    for i, name in enumerate(names):
        colour = i % N_COLOURS
        if marks:
            drawing.mark(i, x + 5, y - 4, f"f{colour}", size=4)
        else:
            drawing.line(x, y - 4, x + 12, y - 4, f"c{colour} bar")
        drawing.text(x + 16, y, name)
        x += 30 + 6.6 * len(name)


class _Plot:
    """A frame with two axes.

    Args:
        title: for those who cannot see it.
        x, y: the ranges.
        x_name, y_name: what they are.
    """

    left, top, right, bottom = 48.0, 30.0, 500.0, 236.0

    def __init__(
        self,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        x_name: str,
        y_name: str,
        *,
        percent: bool = True,
    ) -> None:
        self.drawing = Drawing(520, 276, title)
        self.x = Scale(*x, self.left, self.right)
        self.y = Scale(*y, self.bottom, self.top)
        for tick in ticks(*y, most=6):
            self.drawing.line(self.left, self.y(tick), self.right, self.y(tick), "grid")
            name = f"{tick:.0%}" if percent else label(tick)
            self.drawing.text(self.left - 6, self.y(tick) + 4, name, "end muted")
        self.drawing.line(self.left, self.bottom, self.right, self.bottom, "axis")
        self.drawing.text((self.left + self.right) / 2, self.bottom + 34, x_name, "mid muted")
        self.drawing.text(0, 12, y_name, "muted")

    def x_ticks(self, values: Sequence[float], names: Sequence[str] | None = None) -> None:
        """Numbers under the axis."""
        for value, name in zip(values, names or [label(value) for value in values], strict=True):
            self.drawing.text(self.x(value), self.bottom + 16, name, "mid muted")

    def points(self, values: Sequence[tuple[float, float]], index: int, css: str = "line") -> None:
        """A line through values."""
        self.drawing.path([(self.x(x), self.y(y)) for x, y in values], f"c{index % N_COLOURS} {css}")


def pass_plot(passes: Passes) -> Drawing:
    """t(w): as calibrated, as observed in the run, and what as many single passes would take."""
    widths = [each for each in passes.widths if each.width <= 17]
    known = [(each.width, each.calibrated_ms) for each in widths if each.calibrated_ms is not None]
    seen = [(each.width, each.observed_ms, each.n_observed) for each in widths if each.observed_ms is not None]
    most = max([ms for _, ms in known] + [ms for _, ms, n in seen if n > 2] + [1e-9])
    widest = max([width for width, _ in known] + [width for width, _, _ in seen] + [2])
    plot = _Plot(
        "Time of a pass over w tokens", (1, widest), (0, most * 1.05), "tokens in a pass, w", "ms", percent=False
    )
    if known:
        one = known[0][1]
        reach = min(widest, most * 1.05 / one) if one else widest
        plot.drawing.path([(plot.x(1), plot.y(one)), (plot.x(reach), plot.y(reach * one))], "even")
        plot.points(known, 1)
        for width, ms in known:
            tip = f"calibrated: {width} tokens, {ms:.1f} ms, ×{ms / one:.2f} of one"
            plot.drawing.mark(1, plot.x(width), plot.y(ms), "f1", tip, size=3.5)
    for width, observed, n in seen:
        tip = f"in this run: {width} tokens, {observed:.1f} ms, median of {n} passes"
        plot.drawing.mark(0, plot.x(width), plot.y(observed), "c3 hollow", tip, size=4 if n > 2 else 2.5)
    plot.x_ticks([width for width in (1, 2, 4, 6, 8, 10, 12, 14, 16) if width <= widest])
    drawing = plot.drawing
    drawing.line(150, 8, 162, 8, "c1 bar")
    drawing.text(167, 12, "calibrated")
    drawing.mark(0, 240, 8, "c3 hollow")
    drawing.text(250, 12, "median in this run")
    drawing.line(372, 8, 388, 8, "even")
    drawing.text(393, 12, "w single passes")
    return drawing


def break_even_plot(passes: Passes) -> Drawing:
    """The acceptance that a draft of each length needs, by drafter."""
    lengths = [int(length) for length in next(iter(passes.break_even.values()), {})]
    spots = {length: float(i) for i, length in enumerate(lengths)}
    plot = _Plot("Break-even acceptance by draft length", (-0.3, max(1.0, len(lengths) - 0.7)), (0, 1),
                 "guesses a round, k", "share that must be right")  # fmt: skip
    plot.x_ticks(list(spots.values()), [str(length) for length in lengths])
    for i, (source, even) in enumerate(passes.break_even.items()):
        points = [(spots[int(length)], share) for length, share in even.items() if share is not None]
        plot.points(points, i)
        for spot, share in points:
            tip = f"{source}, k = {lengths[int(spot)]}: {share:.0%} of guesses must be right"
            plot.drawing.mark(i, plot.x(spot), plot.y(share), f"f{i % N_COLOURS}", tip, size=4)
        for length, wanted in even.items():
            if wanted is None:
                plot.drawing.text(plot.x(spots[int(length)]), plot.top + 10 + 12 * i, "never", f"mid t{i % N_COLOURS}")
    names = [f"{source} ({f'{ms:.1f} ms' if ms else 'free'})" for source, ms in passes.step_ms.items()]
    _legend(plot.drawing, names, 180, 12)
    return plot.drawing


def position_plot(record: Record, results: Results) -> Drawing | None:
    """Acceptance by position in the draft, with 95 % intervals; None where nothing was drafted."""
    rows = [(i, row) for i, arm in enumerate(results.arms) if (row := results.row(ALL, *arm)) and row.by_position]
    if not rows:
        return None
    longest = min(16, max(len(row.by_position) for _, row in rows))
    plot = _Plot("Acceptance by position in the draft", (0.5, longest + 0.5), (0, 1), "position in the draft",
                 "accepted of sent")  # fmt: skip
    plot.x_ticks([float(i) for i in range(1, longest + 1)])
    for k, (i, row) in enumerate(rows):
        shift = (k - (len(rows) - 1) / 2) * min(8.0, 22.0 / len(rows))
        points = []
        for position, each in enumerate(row.by_position[:longest], 1):
            low, high = wilson(each.accepted, each.drafted)
            x = plot.x(position) + shift
            plot.drawing.line(x, plot.y(low), x, plot.y(high), f"c{i % N_COLOURS} thin")
            tip = f"{arm_name(record, row.backend, row.arm)}, position {position}: {each.accepted} of {each.drafted}"
            plot.drawing.mark(i, x, plot.y(each.rate), f"f{i % N_COLOURS}", tip, size=4)
            points.append((x, plot.y(each.rate)))
        plot.drawing.path(points, f"c{i % N_COLOURS} line")
    x_legend = 130.0
    for i, row in rows:
        name = arm_name(record, row.backend, row.arm)
        plot.drawing.mark(i, x_legend + 5, 8, f"f{i % N_COLOURS}", size=4)
        plot.drawing.text(x_legend + 16, 12, name)
        x_legend += 30 + 6.6 * len(name)
    return plot.drawing


def reliability_plot(results: Results) -> Drawing | None:
    """Predicted against observed acceptance; None where nothing was predicted."""
    found = [each for each in results.judgements if each.source == ALL][:1]
    if not found:
        return None
    key = (found[0].backend, found[0].arm)
    found += [each for each in results.judgements if each.source != ALL and (each.backend, each.arm) == key]
    bins = found[0].reliability.bins
    plot = _Plot("Reliability of the predicted acceptance", (0, 1), (0, 1), "predicted acceptance (bars: guesses)",
                 "observed")  # fmt: skip
    most = max(each.n for each in bins)
    plot.drawing.boxes(
        (
            (
                plot.x(each.low) + 1,
                plot.bottom - 50 * each.n / most,
                plot.x(each.high) - plot.x(each.low) - 2,
                50 * each.n / most,
            )
            for each in bins
        ),
        "count",
    )
    plot.drawing.line(plot.x(0), plot.y(0), plot.x(1), plot.y(1), "even")
    plot.x_ticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0%", "20%", "40%", "60%", "80%", "100%"])
    for i, each in reversed(list(enumerate(found))):
        for one in each.reliability.bins:
            x = plot.x(one.predicted)
            if i == 0:
                plot.drawing.line(x, plot.y(one.observed_low), x, plot.y(one.observed_high), "c0 bar")
            tip = f"{each.source}: {one.n} guesses, predicted {one.predicted:.1%}, observed {one.observed:.1%}"
            css = "f0" if i == 0 else f"c{i % N_COLOURS} hollow"
            plot.drawing.mark(i, x, plot.y(one.observed), css, tip, size=5 if i == 0 else 3.5)
    _legend(plot.drawing, [each.source for each in found], 130, 12)
    return plot.drawing


def timelines(record: Record, question: str, repeat: int) -> Drawing:
    """All arms on one question, round by round: where the time went, and how many tokens came of each round."""
    samples = [s for s in record.samples if (s.question, s.repeat) == (question, repeat)]
    order = [(backend, arm) for backend in record.settings.backends for arm in record.settings.arms]
    samples.sort(key=lambda sample: order.index((sample.backend, sample.arm)))
    row, top = 62.0, 24.0
    drawing = Drawing(1000, top + row * len(samples) + 26, f"Rounds of the answers to {question}")
    longest = max(sample.seconds for sample in samples)
    x = Scale(0, longest, 110, 990)
    most = max((figures[5] for sample in samples for figures in sample.rounds), default=1)
    for tick in ticks(0, longest, most=9):
        drawing.line(x(tick), top - 4, x(tick), top + row * len(samples), "grid")
        drawing.text(x(tick), top + row * len(samples) + 16, f"{label(tick)} s", "mid muted")
    place = 110.0
    for name, what in (("draft", "drafting"), ("verify", "verifying"), ("other", "other"), ("count", "tokens a round")):
        drawing.boxes([(place, 4, 10, 10)], name)
        drawing.text(place + 15, 13, what, "muted")
        place += 40 + 6.4 * len(what)
    for i, sample in enumerate(samples):
        _strip(drawing, record, sample, x, top + i * row, most)
    return drawing


def _strip(drawing: Drawing, record: Record, sample: Sample, x: Scale, y: float, most: float) -> None:
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
    drawing.text(0, y + 30, arm_name(record, sample.backend, sample.arm), "strong")
    drawing.text(0, y + 46, f"{sample.tokens} in {seconds_text(sample.seconds)}", "muted")
