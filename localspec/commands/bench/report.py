"""What a run says, as a report: the verdict first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from localspec.commands.bench import charts
from localspec.commands.bench.record import Record
from localspec.commands.bench.results import ALL, Passes, Results, Row
from localspec.commands.bench.words import (
    arm_name,
    interval_text,
    ms_text,
    same_text,
    seconds_text,
    share_text,
    speed_text,
    time_text,
    times_text,
    title,
)
from localspec.commands.doctor.screen import break_even_table
from localspec.commands.report.model import (
    Facts,
    Figure,
    KeyFigure,
    KeyFigures,
    Part,
    Report,
    RowStyle,
    Status,
    Table,
    Text,
)
from localspec.measuring.answer import NEAR_TIE
from localspec.measuring.statistics import Estimate
from localspec.model_files.sources.base import size_text

_SPREAD = "tok/s ±: from question to question (standard deviation) · prompt: tokens of it read in a second"

_ENDINGS = {
    "complete": "everything was measured",
    "tight": "the intervals were narrow enough",
    "time": "time was up",
    "interrupted": "it was interrupted",
    "running": "it was cut off",
}


def bench_report(record: Record, results: Results) -> Report:
    """Everything that a run says."""
    parts: list[Part] = [
        Facts(
            {
                "engine": _engines(record),
                "machine": _machine(record),
                "measured": f"{record.settings.mode}: {_scope(record, results)}; {_ENDINGS[record.ended]}",
                "memory": _memory(record),
            }
        ),
        KeyFigures(
            [_verdict(record, results, row) for arm in results.arms if (row := results.row(ALL, *arm)) is not None]
        ),
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
    return Report("bench", title(record), parts)


# -- circumstances -----------------------------------------------------------------------------------------------------


def _machine(record: Record) -> str:
    machine = record.machine
    features = " ".join(machine.get("features") or [])
    return f"{machine.get('cpu')}, {machine.get('cores')} CPUs, {features or machine.get('platform')}"


def _engines(record: Record) -> str:
    return "; ".join(
        f"{each.version} on {each.device}, {each.threads} thread{'s' * (each.threads != 1)}" for each in record.engines
    )


def _scope(record: Record, results: Results) -> str:
    settings = record.settings
    questions = len({sample.question for sample in record.samples})
    repeats = max(sample.repeat for sample in record.samples) + 1
    given = settings.sampling if settings.sampling.get("temperature") else {}
    return ", ".join(
        [
            f"{questions} question{'s' * (questions != 1)}"
            + (f" of {len(results.categories)} categories" if results.categories else ""),
            f"{len(record.samples)} answers" + (f" in up to {repeats} repeats" if repeats > 1 else ""),
            f"of at most {settings.max_tokens} tokens",
            ", ".join(f"{name.replace('_', '-')} {value}" for name, value in given.items()) or "greedy",
            f"in turns of {settings.slice_tokens} tokens" if settings.slice_tokens else "in turns",
            f"{time_text(record.seconds)} in all",
        ]
    )


def _memory(record: Record) -> str:
    models = [model for engine in record.engines for model in engine.models]
    weights, kv = sum(model.bytes for model in models), sum(model.kv_bytes for model in models)
    peaks = [session.peak_memory_bytes for session in record.sessions if session.peak_memory_bytes]
    text = f"weights {size_text(weights)}, attention caches {size_text(kv)}"
    return f"{text}, peak of the process {size_text(max(peaks))}" if peaks else text


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


# -- speed -------------------------------------------------------------------------------------------------------------


def _verdict(record: Record, results: Results, row: Row) -> KeyFigure:
    """An arm's overall speed-up: first a verdict in words; a figure of its own only where the interval allows one."""
    name, found = arm_name(record, row.backend, row.arm), row.speedup
    if found is None:
        return KeyFigure(name, "–", f"{name}: there is no plain answer to compare with.")
    if not row.drafted:
        return KeyFigure(name, "nothing drafted", _nothing_drafted(record, results, row), _status(row))
    if found.low is None or found.high is None:
        return KeyFigure(name, "too few questions", f"{name}: one question is too few for a verdict.")
    if not found.is_firm:
        text = f"{name}: too few questions for a verdict; {_span(found)} of plain's speed on {found.n}."
        return KeyFigure(name, "too few questions", text)
    verdict, span = row.verdict, f"(95 %: {_span(found)})"
    if verdict == "same":
        return KeyFigure(name, "no difference", f"{name}: no difference from plain can be told {span}.")
    times = times_text(found.median)
    return KeyFigure(name, times, f"{name} is {verdict}: {times} of plain's speed {span}.", _status(row))


def _nothing_drafted(record: Record, results: Results, row: Row) -> str:
    """Why, what that comes to, and which engine to try, if one of this run drafted and was faster for it."""
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


def _status(row: Row) -> Status:
    """Good or bad only where the interval says so."""
    verdicts: dict[str | None, Status] = {"faster": "ok", "slower": "fail"}
    return verdicts.get(row.verdict, "info")


def _speed(record: Record, results: Results) -> Iterator[Part]:
    if not results.arms:
        head = ["", "tok/s", "prompt", "first token", "questions"]
        for backend in record.settings.backends:
            cells = [_plain_cells(row) for row in results.rows if row.backend == backend]
            yield Table(f"Plain decoding · {backend}", head, cells, _SPREAD)
        return
    yield Figure(
        "Speed over plain decoding",
        partial(charts.speedup_plot, record, results),
        "Median over questions of tokens per second over plain's on the same question, with 95 % intervals. Dashed, "
        "with a hollow mark: too few questions for one; their range, and how often such a range covers the true "
        "median. Left of the dashed line it is slower than plain.",
        wide=True,
    )
    for backend, arm in results.arms:
        rows = [row for category in [ALL, *results.categories] if (row := results.row(category, backend, arm))]
        styles: dict[int, RowStyle] = {0: "strong"} if rows[0].verdict in ("faster", "slower") else {}
        styles |= {i: "bad" for i, row in enumerate(rows) if row.verdict == "slower"}
        yield Table(
            f"{arm_name(record, backend, arm)} against plain",
            ["", "speed", "95 %", "tok/s", "plain", "prompt", "accepted", "length", "slower", "worst", "on"],
            [_speed_cells(row, results.row(row.category, backend, "plain")) for row in rows],
            styles=styles,
        )
    yield Text(
        f"medians over questions · {_SPREAD} · accepted: of the guesses sent · length: tokens a pass · slower: "
        "questions where it was · worst, on: the lowest speed and its question",
        "muted",
    )


def _plain_cells(row: Row) -> list[str]:
    first = seconds_text(row.time_to_first_token.median)
    return [row.category, speed_text(row), f"{row.prompt_tokens_per_second:.0f}", first, str(row.n_questions)]


def _speed_cells(row: Row, plain: Row | None) -> list[str]:
    return [
        row.category,
        times_text(row.speedup.median if row.speedup else None),
        interval_text(row.speedup),
        speed_text(row),
        speed_text(plain) if plain else "–",
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
    rows = [
        [
            arm_name(record, row.backend, row.arm),
            seconds_text(row.time_to_first_token.median),
            *(f"{row.seconds_per_token[part] * 1e3:.1f} ms" for part in ("draft", "verify", "other")),
            same_text(record, row),
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


# -- costs -------------------------------------------------------------------------------------------------------------


def _passes(record: Record, passes: Passes) -> Iterator[Part]:
    name = f" · {passes.backend}" if len(record.settings.backends) > 1 else ""
    widths = [each for each in passes.widths if each.width <= 9 or each.width in (10, 12, 16)]
    base = next((each.calibrated_ms for each in passes.widths if each.width == 1), None) or 1.0
    yield Table(
        f"Cost of a pass over w tokens, t(w){name}",
        ["w", *(str(each.width) for each in widths)],
        [
            ["calibrated ms", *(ms_text(each.calibrated_ms) for each in widths)],
            ["here ms", *(ms_text(each.observed_ms) for each in widths)],
            ["here, passes", *(str(each.n_observed) for each in widths)],
            ["× t(1)", *(ms_text(each.calibrated_ms / base if each.calibrated_ms else None) for each in widths)],
        ],
    )
    if passes.break_even:
        yield break_even_table({each: (passes.step_ms[each], even) for each, even in passes.break_even.items()}, name)
    yield Figure(
        "",
        partial(charts.pass_plot, passes),
        "t(w), the time in which the target checks w tokens at once. The dashed line is what as many single passes "
        "take: the further the curve stays under it, the more guesses pay.",
    )
    if passes.break_even:
        yield Figure(
            "",
            partial(charts.break_even_plot, passes),
            "The acceptance at which k guesses a round make no difference, by the theory of independent guesses: over "
            "it drafting pays, under it it costs. Where a line ends, not even perfect guesses would.",
        )


# -- acceptance --------------------------------------------------------------------------------------------------------


def _acceptance(record: Record, results: Results) -> Iterator[Part]:
    rows = [row for arm in results.arms if (row := results.row(ALL, *arm)) and row.by_position]
    if not rows:
        return
    names = [arm_name(record, row.backend, row.arm) for row in rows]
    longest = max(len(row.by_position) for row in rows)
    shares = [[share_text(each.rate) for each in row.by_position] for row in rows]
    yield Table(
        "Acceptance by position in the draft",
        ["position", *map(str, range(1, longest + 1))],
        [[name, *each, *["–"] * (longest - len(each))] for name, each in zip(names, shares, strict=True)],
    )
    counts = [
        [name, source, str(each.drafted), str(each.accepted), share_text(each.rate)]
        for name, row in zip(names, rows, strict=True)
        for source, each in row.by_source.items()
    ]
    yield Table("Acceptance by drafter", ["arm", "drafter", "sent", "accepted", "share"], counts, left=2)
    yield Figure(
        "",
        partial(charts.position_plot, record, rows),
        "Share of the guesses sent at each position that were accepted, all before them included; lines are 95 % "
        "Wilson intervals.",
    )


def _predictions(record: Record, results: Results) -> Iterator[Part]:
    """Predicted acceptance beside what the target did, in ten bins."""
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
            f"Predicted and observed acceptance · {arm_name(record, *arm)}",
            ["bin from", *(f"{low:.1f}" for low in lows)],
            rows,
            f"expected calibration error: {errors}",
        )
    if results.judgements:
        caption = "What the controller predicted against what the target did; lines are 95 % Wilson intervals."
        yield Figure("", partial(charts.reliability_plot, results.judgements), caption)


def _rounds(record: Record) -> Iterator[Part]:
    """One question of each category, in its first repeat."""
    chosen: dict[str, tuple[str, int]] = {}
    for sample in record.samples:
        chosen.setdefault(sample.category, (sample.question, sample.repeat))
    for i, (category, (question, repeat)) in enumerate(chosen.items()):
        name, draw = f"{category}: {question}", partial(charts.timelines, record, question, repeat)
        if i == 0:
            caption = f"{name}. The arms start at the same moment here; the target had read the prompt already."
            yield Figure("Round by round", draw, caption, wide=True)
        else:
            yield Figure("", draw, summary=name)
