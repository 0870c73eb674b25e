"""A run as a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from localspec.commands.bench.record import Record
from localspec.commands.bench.results import ALL, Passes, PredictionQuality, Results, Row, of_arm, time_text, wilson
from localspec.measuring.passes import break_even_table, pass_table
from localspec.measuring.statistics import Estimate
from localspec.measuring.subject import NEAR_TIE
from localspec.model_files.sources.base import size_text
from localspec.report.model import Facts, Figure, KeyFigure, KeyFigures, Part, Report, RowStyle, Status, Table, Text
from localspec.report.svg import N_COLOURS, Axis, Drawing, Point, Scale, Series, chart, label, ticks

# Figures as text, the same in every rendering.


def times_text(value: float | None) -> str:
    return "–" if value is None else f"×{value:.2f}"


def interval_text(found: Estimate | None) -> str:
    """``1.07–1.42``, with its level if under 95 %."""
    if found is None or found.level is None:
        return "–"
    text = f"{found.low:.2f}–{found.high:.2f}"
    return text if found.is_firm else f"{text} ({int(found.level * 100)} %)"


def speed_text(row: Row | None) -> str:
    """``12.3 ±0.4``: tokens a second."""
    spread = "" if row is None or row.spread is None else f" ±{row.spread:.1f}"
    return "–" if row is None else f"{row.tokens_per_second.median:.1f}{spread}"


def share_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def seconds_text(value: float) -> str:
    """``85 ms`` or ``2.4 s``."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


# The plots of a run.

_LABELS = 96  # width of the column of categories
_LEAST_REACH = 2.0
"""The axis of speed-ups reaches at least to this multiple and fraction of plain, so that noise looks small."""

_CEILING = 4.0  # upper end of that axis in multiples of the largest median: intervals of few questions can be huge


def speedup_plot(record: Record, results: Results, *, heading: bool = False) -> Drawing:
    """Speed over plain by category, each arm with its interval; ``heading`` for a file of its own."""
    arms = [(row.backend, row.arm) for row in results.overall]
    rows = [(row, row.speedup) for row in results.rows if row.speedup is not None]
    categories = list(dict.fromkeys(row.category for row, _ in rows))
    drawing = Drawing(720, 0, "Speed over plain decoding, by category")
    if heading:
        drawing.text(0, 14, f"{record.title}: speed over plain decoding", "strong")
    names = [(record.arm_name(*arm), f"f{i % N_COLOURS}") for i, arm in enumerate(arms)]
    top = drawing.legend(names, _LABELS, 34.0 if heading else 14.0) + 10
    height = 15.0 * max(1, len(arms)) + 10.0
    bottom = top + height * len(categories)
    drawing.height = bottom + 34
    if ALL in categories:
        drawing.boxes([(0, top, 720, height)], "band")
    x = Scale(*_range([found for _, found in rows]), _LABELS, 544)
    for tick in ticks(x.low, x.high):
        drawing.line(x(tick), top, x(tick), bottom, "grid")
        drawing.text(x(tick), bottom + 16, f"×{label(tick)}", "mid muted")
    drawing.line(x(1), top, x(1), bottom, "even")
    drawing.text(x(1), bottom + 30, "plain", "mid muted")
    for i, category in enumerate(categories):
        drawing.text(4, top + (i + 0.5) * height + 4, category, "strong" if category == ALL else "")
    for row, found in rows:
        y, arm = top + categories.index(row.category) * height, arms.index((row.backend, row.arm))
        _draw_speedup(drawing, record, row, found, x, y + 5 + 15 * (arm + 0.5), arm)
    return drawing


def _range(found: Sequence[Estimate]) -> tuple[float, float]:
    medians = [1.0, *(each.median for each in found)]
    ends = [end for each in found for end in (each.low, each.high) if end is not None]
    low = max(min([*medians, *ends, 1 / _LEAST_REACH]), 0.0)
    high = max(_LEAST_REACH, min(max([*medians, *ends]), _CEILING * max(medians)))
    room = 0.04 * (high - low) + 0.02
    return max(0.0, low - room), high + room


def _draw_speedup(drawing: Drawing, record: Record, row: Row, found: Estimate, x: Scale, y: float, arm: int) -> None:
    colour = arm % N_COLOURS
    if found.low is not None and found.high is not None:
        drawing.line(x(found.low), y, x(found.high), y, f"c{colour} {'bar' if found.is_firm else 'thin'}")
        for end in (found.low, found.high):
            drawing.line(x(end), y - 4, x(end), y + 4, f"c{colour} bar")
    tip = (
        f"{row.category}, {record.arm_name(row.backend, row.arm)}: {times_text(found.median)}, "
        f"{interval_text(found)}; {row.n_questions} questions, slower on {row.n_slower}, "
        f"worst {times_text(row.worst_speedup)} on {row.worst_question}"
    )
    drawing.mark(arm, x(found.median), y, f"f{colour}" if found.is_firm else f"c{colour} hollow", tip)
    drawing.text(556, y + 4, times_text(found.median), "strong" if row.verdict in ("faster", "slower") else "muted")
    drawing.text(604, y + 4, interval_text(found), "muted")


def pass_plot(passes: Passes) -> Drawing:
    """t(w): calibrated, observed, and as many single passes."""
    widths = [each for each in passes.widths if each.width <= 17]
    known = [(each.width, each.calibrated_ms) for each in widths if each.calibrated_ms is not None]
    seen = [(each.width, each.observed_ms, each.n_observed) for each in widths if each.observed_ms is not None]
    # A median of one or two passes may be an outlier; the axis does not follow it.
    most = 1.05 * max([ms for _, ms in known] + [ms for _, ms, n in seen if n > 2])
    widest, one = max(2, widths[-1].width), known[0][1]
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


def position_plot(rows: Mapping[str, Row]) -> Drawing:
    """Acceptance by position of each arm."""
    longest = min(16, max(len(row.by_position) for row in rows.values()))
    series = []
    for k, (name, row) in enumerate(rows.items()):
        shift = (k - (len(rows) - 1) / 2) * min(0.15, 0.6 / len(rows))
        points = [
            Point(i + shift, each.rate, f"{name}, position {i}: {each.accepted} of {each.drafted}",
                  *wilson(each.accepted, each.drafted))
            for i, each in enumerate(row.by_position[:longest], 1)
        ]  # fmt: skip
        series.append(Series(name, points))
    x = Axis("position in the draft", 0.5, longest + 0.5, {i: str(i) for i in range(1, longest + 1)})
    return chart("Acceptance by position in the draft", x, Axis("accepted of sent", 0, 1, percent=True), series)


def reliability_plot(judgements: Sequence[PredictionQuality]) -> Drawing:
    """Predicted against observed acceptance of the first arm that predicts, for all its drafters and each."""
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
    axes = (Axis("predicted acceptance (bars: guesses)", 0, 1, percent=True), Axis("observed", 0, 1, percent=True))
    return chart("Reliability of the predicted acceptance", *axes, series, reference=("as predicted", [(0, 0), (1, 1)]),
                 bars=[(each.low, each.high, each.n / most) for each in bins])  # fmt: skip


def timelines(record: Record, question: str, repeat: int) -> Drawing:
    """All arms on one question, round by round: time, and tokens of each round."""
    asked = [sample for sample in record.samples if (sample.question, sample.repeat) == (question, repeat)]
    arms = [(backend, arm) for backend in record.settings.backends for arm in record.settings.arms]
    samples = [sample for arm in arms for sample in of_arm(asked, *arm)]
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
        y, at, boxes = top + i * row, 0.0, dict[str, list[tuple[float, float, float, float]]]()
        for *times, _, _, emitted in sample.rounds:
            began, high = at, 28 * emitted / most
            for name, ms in zip(("draft", "verify", "other"), times, strict=True):
                boxes.setdefault(name, []).append((x(at), y + 34, x(at + ms / 1e3) - x(at), 14))
                at += ms / 1e3
            gap = 0.25 if x(at) - x(began) > 1 else 0.0
            boxes.setdefault("count", []).append((x(began), y + 32 - high, x(at) - x(began) - gap, high))
        for name, drawn in boxes.items():
            drawing.boxes(drawn, name)
        drawing.text(0, y + 30, record.arm_name(sample.backend, sample.arm), "strong")
        drawing.text(0, y + 46, f"{sample.tokens} in {seconds_text(sample.seconds)}", "muted")
    return drawing


_ENDINGS = {
    "complete": "everything was measured",
    "tight": "the intervals were narrow enough",
    "time": "time was up",
    "interrupted": "it was interrupted",
    "running": "it was cut off",
}


def bench_report(record: Record, results: Results) -> Report:
    machine, engines = record.machine, record.engines
    models = [model for engine in engines for model in engine.models]
    weights, kv = sum(model.bytes for model in models), sum(model.kv_bytes for model in models)
    memory = f"weights {size_text(weights)}, attention caches {size_text(kv)}"
    if peak := max(session.peak_memory_bytes or 0 for session in record.sessions):
        memory += f", peak of the process {size_text(peak)}"
    features = " ".join(machine.get("features") or []) or machine.get("platform")
    threads = [f"{each.threads} thread{'s' * (each.threads != 1)}" for each in engines]
    named = (f"{each.version} on {each.device}, {count}" for each, count in zip(engines, threads, strict=True))
    parts: list[Part] = [
        Facts(
            {
                "engine": "; ".join(named),
                "machine": f"{machine.get('cpu')}, {machine.get('cores')} CPUs, {features}",
                "measured": f"{record.settings.mode}: {_scope(record, results)}; {_ENDINGS[record.ended]}",
                "memory": memory,
            }
        ),
        KeyFigures([_verdict(record, results, row) for row in results.overall]),
        *(Text(remark, "note") for remark in results.remarks),
        *_speed(record, results),
        *_duels(results),
        *(part for passes in results.passes for part in _passes(record, passes)),
        *_acceptance(record, results),
        *_predictions(record, results),
        _time(record, results),
        *_rounds(record),
        *_methods(record),
    ]
    return Report("bench", record.title, parts)


def _scope(record: Record, results: Results) -> str:
    settings = record.settings
    questions = len({sample.question for sample in record.samples})
    repeats = max(sample.repeat for sample in record.samples) + 1
    kinds = len({row.category for row in results.rows}) - 1
    given = settings.sampling if settings.sampling.get("temperature") else {}
    return ", ".join(
        [
            f"{questions} question{'s' * (questions != 1)}" + (f" of {kinds} categories" if kinds else ""),
            f"{len(record.samples)} answers" + (f" in up to {repeats} repeats" if repeats > 1 else ""),
            f"of at most {settings.max_tokens} tokens",
            ", ".join(f"{name.replace('_', '-')} {value}" for name, value in given.items()) or "greedy",
            f"in turns of {settings.slice_tokens} tokens" if settings.slice_tokens else "in turns",
            f"{time_text(record.seconds)} in all",
        ]
    )


def _methods(record: Record) -> Iterator[Part]:
    session, slice_tokens = record.sessions[-1], record.settings.slice_tokens
    turns = f"the arms took turns after every {slice_tokens} tokens" if slice_tokens else "the order of arms alternates"
    yield Text(
        "Speed is an answer's tokens, as the engine counted them, over the seconds spent drafting, verifying and in "
        "our own code; the target's reading of the prompt is measured apart and is in no arm, a draft model's is in "
        "the arm. A speed-up divides by the plain answer to the same question in the same repeat, next to which it was "
        f"measured; {turns}. A question counts with the median of its repeats, a row is the median of its questions, "
        "and intervals are between order statistics, exact for any distribution.",
        "small",
    )
    for engine in record.engines:
        for model in engine.models:
            yield Text(f"{engine.backend}, {model.source}: {model.file}, sha256 {model.sha256}", "small")
    yield Text(f"localspec {session.localspec}, Python {session.python}: {session.command}", "small")


def _verdict(record: Record, results: Results, row: Row) -> KeyFigure:
    """Overall speed-up of an arm in words, with a figure only where the interval allows one."""
    name, found = record.arm_name(row.backend, row.arm), row.speedup
    status: Status = "ok" if row.verdict == "faster" else "fail" if row.verdict == "slower" else "info"
    if found is None:
        return KeyFigure(name, "–", f"{name}: there is no plain answer to compare with.")
    if not row.drafted:
        return KeyFigure(name, "nothing drafted", _nothing_drafted(results, row), status)
    if found.n == 1:
        return KeyFigure(name, "too few questions", f"{name}: one question is too few for a verdict.")
    if not found.is_firm:
        text = f"{name}: too few questions for a verdict; {_span(found)} of plain's speed on {found.n}."
        return KeyFigure(name, "too few questions", text)
    verdict, span = row.verdict, f"(95 %: {_span(found)})"
    if verdict == "same":
        return KeyFigure(name, "no difference", f"{name}: no difference from plain can be told {span}.")
    times = times_text(found.median)
    return KeyFigure(name, times, f"{name} is {verdict}: {times} of plain's speed {span}.", status)


def _nothing_drafted(results: Results, row: Row) -> str:
    """Why nothing was drafted, what that comes to, and an engine of this run that drafted and was faster."""
    backend, found = row.backend, row.speedup
    what = f"no guess pays on {backend} here" if row.arm.endswith("auto") else f"{row.arm} had no guess"
    text = f"Nothing was drafted: {what}, so {row.arm} did the same work as plain"
    if row.verdict == "slower" and found is not None:
        text += f", yet took longer: {times_text(found.median)} of its speed (95 %: {_span(found)})"
    text += "."
    better = [other for other in results.rows if other.category == ALL and other.verdict == "faster" and other.drafted]
    others = dict.fromkeys(other.backend for other in better if other.backend != backend)
    return text + "".join(f" Try --backend {other}." for other in others)


def _span(found: Estimate) -> str:
    return f"{times_text(found.low)} to {times_text(found.high)}"


def _speed(record: Record, results: Results) -> Iterator[Part]:
    if results.overall:
        yield Figure(
            "Speed over plain decoding",
            partial(speedup_plot, record, results),
            "Median over questions of tokens per second over plain's on the same question, with 95 % intervals. "
            "Dashed, with a hollow mark: too few questions for one; their range, and how often such a range covers the "
            "true median. Left of the dashed line it is slower than plain.",
            wide=True,
        )
    drafted = bool(results.overall)
    for backend, arm in dict.fromkeys((row.backend, row.arm) for row in results.overall or results.rows):
        rows = [row for row in results.rows if (row.backend, row.arm) == (backend, arm)]
        styles: dict[int, RowStyle] = {0: "strong"} if rows[0].verdict in ("faster", "slower") else {}
        styles |= {i: "bad" for i, row in enumerate(rows) if row.verdict == "slower"}
        yield Table(
            f"{record.arm_name(backend, arm)} against plain" if drafted else f"Plain decoding · {backend}",
            ["", "speed", "95 %", "tok/s", "plain", "prompt", "accepted", "length", "slower", "worst", "on"],
            [_speed_cells(row, results.row(row.category, backend, "plain")) for row in rows],
            styles=styles,
        )
    yield Text(
        "medians over questions · tok/s ±: from question to question (standard deviation) · prompt: tokens of it read "
        "in a second · accepted: of the guesses sent · length: tokens a pass · slower: questions where it was · worst, "
        "on: the lowest speed and its question",
        "muted",
    )


def _speed_cells(row: Row, plain: Row | None) -> list[str]:
    return [
        row.category,
        times_text(row.speedup.median if row.speedup else None),
        interval_text(row.speedup),
        speed_text(row),
        speed_text(plain),
        f"{row.prompt_tokens_per_second:.0f}",
        share_text(row.acceptance_rate),
        f"{row.mean_acceptance_length:.2f}",
        f"{row.n_slower} of {row.speedup.n}" if row.speedup else "–",
        times_text(row.worst_speedup),
        row.worst_question or "–",
    ]


def _duels(results: Results) -> Iterator[Part]:
    for what in dict.fromkeys(duel.what for duel in results.duels):
        rows = [
            [duel.category, duel.first, duel.second, times_text(duel.ratio.median), interval_text(duel.ratio)]
            for duel in results.duels
            if duel.what == what
        ]
        yield Table(f"Against each other: {what}", ["", "this", "against", "speed", "95 %"], rows, left=3)


def _time(record: Record, results: Results) -> Part:
    sampling = record.settings.sampling
    draws = sampling.get("temperature") and sampling.get("seed") is None  # each answer is one of its own

    def same(row: Row) -> str:
        """``3 of 5 ≈``: answers equal to plain's; ≈ if all others part at near ties."""
        others = row.n_compared - row.n_same
        text = f"{row.n_same} of {row.n_compared}" + (" ≈" if others and row.n_near_ties == others else "")
        return text if row.n_compared and not draws else "–"

    rows = [
        [
            record.arm_name(row.backend, row.arm),
            seconds_text(row.time_to_first_token.median),
            *(f"{row.seconds_per_token[part] * 1e3:.1f} ms" for part in ("draft", "verify", "other")),
            same(row),
        ]
        for row in results.rows
        if row.category == ALL
    ]
    head = ["per token", "first token", "drafting", "verifying", "other", "same text"]
    note = (
        "all answers together · same text: answers equal to plain's, which they are up to rounding; ≈: the others part "
        f"from it where two tokens are nearly tied (within {NEAR_TIE:g} logits). localspec verify tells rounding from "
        "errors"
    )
    return Table("Where the time went", head, rows, note)


def _passes(record: Record, passes: Passes) -> Iterator[Part]:
    name = f" · {passes.backend}" if len(record.settings.backends) > 1 else ""
    widths = [each for each in passes.widths if each.width <= 9 or each.width in (10, 12, 16)]
    calibrated = [each.calibrated_ms for each in widths]
    times = {"calibrated ms": calibrated, "here ms": [each.observed_ms for each in widths]}
    table = pass_table(name, [each.width for each in widths], times)
    seen = ["here, passes", *(str(each.n_observed) for each in widths)]
    yield replace(table, rows=[*table.rows, seen])
    if passes.break_even:
        yield break_even_table({each: (passes.step_ms[each], even) for each, even in passes.break_even.items()}, name)
    yield Figure(
        "",
        partial(pass_plot, passes),
        "t(w), the time in which the target checks w tokens at once. The dashed line is what as many single passes "
        "take: the further the curve stays under it, the more guesses pay.",
    )
    if passes.break_even:
        yield Figure(
            "",
            partial(break_even_plot, passes),
            "The acceptance at which k guesses a round make no difference, by the theory of independent guesses: over "
            "it drafting pays, under it it costs. Where a line ends, not even perfect guesses would.",
        )


def _acceptance(record: Record, results: Results) -> Iterator[Part]:
    rows = {record.arm_name(row.backend, row.arm): row for row in results.overall if row.by_position}
    if not rows:
        return
    longest = max(len(row.by_position) for row in rows.values())
    shares = []
    for name, row in rows.items():
        sent = [share_text(each.rate) for each in row.by_position]
        shares.append([name, *sent, *["–"] * (longest - len(sent))])
    yield Table("Acceptance by position in the draft", ["position", *map(str, range(1, longest + 1))], shares)
    counts = [
        [name, source, str(each.drafted), str(each.accepted), share_text(each.rate)]
        for name, row in rows.items()
        for source, each in row.by_source.items()
    ]
    yield Table("Acceptance by drafter", ["arm", "drafter", "sent", "accepted", "share"], counts, left=2)
    yield Figure(
        "",
        partial(position_plot, rows),
        "Share of the guesses sent at each position that were accepted, all before them included; lines are 95 % "
        "Wilson intervals.",
    )


def _predictions(record: Record, results: Results) -> Iterator[Part]:
    """Predicted and observed acceptance, in ten bins."""
    for arm in dict.fromkeys((each.backend, each.arm) for each in results.judgements):
        found = [each for each in results.judgements if (each.backend, each.arm) == arm]
        lows = sorted({one.low for each in found for one in each.reliability.bins})
        rows = []
        for each in found:
            bins = {one.low: one for one in each.reliability.bins}
            there = [bins.get(low) for low in lows]
            rows += [
                [f"{each.source} predicted", *(f"{one.predicted:.2f}" if one else "–" for one in there)],
                ["observed", *(f"{one.observed:.2f}" if one else "–" for one in there)],
                ["guesses", *(str(one.n) if one else "–" for one in there)],
            ]
        errors = ", ".join(
            f"{each.source} {each.reliability.expected_calibration_error:.3f} ({each.reliability.n} guesses)"
            for each in found
        )
        yield Table(
            f"Predicted and observed acceptance · {record.arm_name(*arm)}",
            ["bin from", *(f"{low:.1f}" for low in lows)],
            rows,
            f"expected calibration error: {errors}",
        )
    if results.judgements:
        caption = "What the controller predicted against what the target did; lines are 95 % Wilson intervals."
        yield Figure("", partial(reliability_plot, results.judgements), caption)


def _rounds(record: Record) -> Iterator[Part]:
    """One question of each category, in its first repeat."""
    chosen: dict[str, tuple[str, int]] = {}
    for sample in record.samples:
        chosen.setdefault(sample.category, (sample.question, sample.repeat))
    for i, (category, (question, repeat)) in enumerate(chosen.items()):
        name, draw = f"{category}: {question}", partial(timelines, record, question, repeat)
        if i == 0:
            caption = f"{name}. The arms start at the same moment here; the target had read the prompt already."
            yield Figure("Round by round", draw, caption, wide=True)
        else:
            yield Figure("", draw, summary=name)
