"""Two runs against each other: a verdict only where the intervals allow one.

Where both runs have asked the same questions, each question is its own control: what is estimated is the median over
questions of B's figure over A's. Else the medians of the two runs are divided, each with its own uncertainty. The
interval shown is a 95 % one. A verdict takes more: an interval at the level that keeps the probability of any false
verdict under 5 % (Bonferroni), among the rows over all categories and among the rows of single ones, so that looking at
many figures finds nothing by chance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from localspec.commands.bench.record import Record, differences
from localspec.commands.bench.remarks import doubts
from localspec.commands.bench.results import ALL, Ratios, by_question, drifts, ratios
from localspec.commands.bench.words import interval_text, times_text, title
from localspec.commands.report.model import Facts, Part, Report, Table, Text
from localspec.errors import UsageError
from localspec.measuring.answer import Sample
from localspec.measuring.statistics import LEVEL, Estimate, estimate, estimate_quotient, middle, range_level

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure in both runs."""

    figure: str  # tok/s or speed-up
    category: str  # or all
    arm: str  # with the engines' names where they differ
    a: float
    b: float
    ratio: Estimate  # of B over A
    paired: bool  # whether the runs asked the same questions
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs."""

    names: tuple[str, str]  # the files
    titles: tuple[str, str]  # the models
    differences: list[str]  # what is not the same in both, in clauses
    doubts: list[str]  # why the verdicts may be wrong all the same
    levels: tuple[float, float]  # what a verdict takes: over all categories, in a single one
    lines: list[ComparedFigure]


def comparison(a: Record, b: Record, names: tuple[str, str]) -> Comparison:
    """Set B against A.

    Raises:
        UsageError: they have nothing in common that could be compared.
    """
    for name, record in zip(names, (a, b), strict=True):
        if not record.samples:
            raise UsageError(f"{name}: nothing was measured in this run")
    arms = [arm for arm in a.settings.arms if arm in b.settings.arms]
    engines = _engines(a, b)
    measured = [
        figures
        for arm in arms
        for engine in engines
        for category in _categories(a, b)
        for figures in _figures(a, b, arm, engine, category)
    ]
    if not measured:
        raise UsageError(f"{names[0]} and {names[1]} have no arm and no category in common")
    n_overall = sum(category == ALL for _, category, *_ in measured)
    levels = tuple(1.0 - (1.0 - LEVEL) / max(1, n) for n in (n_overall, len(measured) - n_overall))
    lines = [_line(*each, levels[each[1] != ALL]) for each in measured]
    why = [
        f"{letter}: {remark}"
        for letter, record in zip("AB", (a, b), strict=True)
        for remark in doubts(record, drifts(record))
    ]
    return Comparison(
        names,
        (title(a), title(b)),
        [f"{name}: {_short(was)} / {_short(is_now)}" for name, was, is_now in differences(a, b)],
        why,
        (levels[0], levels[1]),
        lines,
    )


def _engines(a: Record, b: Record) -> list[tuple[str, str]]:
    """Engines to compare: those of the same name, else each run's only one."""
    both = [name for name in a.settings.backends if name in b.settings.backends]
    if both:
        return [(name, name) for name in both]
    return [(a.settings.backends[0], b.settings.backends[0])]


def _categories(a: Record, b: Record) -> list[str]:
    of_a, of_b = ({sample.category for sample in record.samples} for record in (a, b))
    ordered = list(dict.fromkeys(sample.category for sample in a.samples if sample.category in of_b))
    if of_a == of_b and len(ordered) == 1:
        return [ALL]
    # "All" of two runs over different kinds of work would compare the work.
    return [*([ALL] if of_a == of_b else []), *ordered]


_Measured = tuple[str, str, str, Ratios, Ratios]


def _figures(a: Record, b: Record, arm: str, engine: tuple[str, str], category: str) -> Iterator[_Measured]:
    """Speed-ups and speeds of an arm in a category, by question, in both runs."""
    chosen: list[list[Sample]] = [
        [sample for sample in record.samples if category in (ALL, sample.category)] for record in (a, b)
    ]
    alone = engine[0] == engine[1] and len(a.settings.backends) == 1
    name = arm if alone else f"{arm} ({' / '.join(dict.fromkeys(engine))})"
    if arm != "plain":
        first, second = (
            ratios(group, (which, arm), (which, "plain")) for group, which in zip(chosen, engine, strict=True)
        )
        if first and second:
            yield "speed-up", category, name, first, second
    first, second = (
        by_question((s for s in group if (s.backend, s.arm) == (which, arm)), lambda sample: sample.speed)
        for group, which in zip(chosen, engine, strict=True)
    )
    if first and second:
        yield "tok/s", category, name, first, second


def _line(figure: str, category: str, arm: str, a: Ratios, b: Ratios, level: float) -> ComparedFigure:
    shared = [question for question in a if question in b]
    paired = len(shared) == len(a) == len(b) or range_level(len(shared)) >= level
    if paired:
        a, b = {q: a[q] for q in shared}, {q: b[q] for q in shared}

    def found(level: float) -> Estimate | None:
        return estimate(quotients(a, b), level) if paired else estimate_quotient(b, a, level)

    ratio, strict = found(LEVEL), found(level)
    assert ratio is not None
    assert strict is not None
    return ComparedFigure(figure, category, arm, _median(a), _median(b), ratio, paired, _verdict(strict, level))


def _median(values: Ratios) -> float:
    return round(middle(values), 4)


def quotients(a: Ratios, b: Ratios) -> Ratios:
    """By question, every repeat of B over every repeat of A: their median is what repeats say of the quotient."""
    return {question: [y / x for x in a[question] for y in b[question]] for question in a}


def _verdict(strict: Estimate, level: float) -> str:
    if strict.low is None or strict.high is None or strict.level is None or strict.level < level:
        return "too few questions"
    if strict.low > 1:
        return "B is higher"
    if strict.high < 1:
        return "B is lower"
    return "no difference can be told"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "greedy"
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)


# -- showing ---------------------------------------------------------------------------------------------------------


def comparison_report(found: Comparison) -> Report:
    """Both runs, what differs between them, and the figures with their verdicts."""
    names = [f"{name} · {what}" for name, what in zip(found.names, found.titles, strict=True)]
    parts: list[Part] = [Facts(dict(zip("AB", names, strict=True)))]
    if found.differences:
        parts.append(Facts(dict(each.split(": ", 1) for each in found.differences), "What is not the same, A / B"))
    parts += [Text(doubt, "note") for doubt in found.doubts]
    for figure, arm in dict.fromkeys((line.figure, line.arm) for line in found.lines):
        lines = [line for line in found.lines if (line.figure, line.arm) == (figure, arm)]
        parts.append(Table(f"{figure} · {arm}", ["", "A", "B", "B/A", "95 %", "verdict"], list(map(_cells, lines))))
    notes = (
        "Intervals at 95 %. "
        f"A verdict takes one at {found.levels[0]:.1%} over all categories and at {found.levels[1]:.1%} in a "
        "single one, so that any of them is wrong with a probability under 5 %."
    )
    if any(not line.paired for line in found.lines):
        notes += " *: not the same questions, so medians are compared."
    return Report("bench compare", "B against A", [*parts, Text(notes, "muted")])


def _cells(line: ComparedFigure) -> list[str]:
    shown: Callable[[float], str] = times_text if line.figure == "speed-up" else lambda value: f"{value:.1f}"
    ratio = f"{line.ratio.median:.2f}" + ("" if line.paired else "*")
    return [line.category, shown(line.a), shown(line.b), ratio, interval_text(line.ratio), line.verdict]


def comparison_json(found: Comparison) -> str:
    """As JSON; see SCHEMA.md."""
    head = {"type": "localspec bench compare", "schema_version": SCHEMA_VERSION}
    return json.dumps(head | asdict(found), ensure_ascii=False, allow_nan=False, indent=1) + "\n"
