"""Two runs compared.

If both asked the same questions, the median over questions of B/A is estimated, else the quotient of the medians.
Intervals shown are 95 %; a verdict takes one at the level that keeps the probability of any false verdict under 5 %
(Bonferroni), among the rows over all categories and among those of single ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from localspec.commands.bench.record import Record, differences
from localspec.commands.bench.report import interval_text, times_text
from localspec.commands.bench.results import ALL, Ratios, by_question, doubts, of_arm, ratios
from localspec.errors import UsageError
from localspec.measuring.statistics import LEVEL, Estimate, estimate, estimate_quotient, middle, range_level
from localspec.report.model import Facts, Part, Report, Table, Text

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
    """Compare B with A. ``UsageError``: they have nothing in common that could be compared."""
    for name, record in zip(names, (a, b), strict=True):
        if not record.samples:
            raise UsageError(f"{name}: nothing was measured in this run")
    measured = list(_measured(a, b))
    if not measured:
        raise UsageError(f"{names[0]} and {names[1]} have no arm and no category in common")
    n_overall = sum(category == ALL for _, category, *_ in measured)
    levels = tuple(1.0 - (1.0 - LEVEL) / max(1, n) for n in (n_overall, len(measured) - n_overall))
    lines = [_line(*each, levels[each[1] != ALL]) for each in measured]
    why = [f"{letter}: {remark}" for letter, record in zip("AB", (a, b), strict=True) for remark in doubts(record)]
    changes = [f"{name}: {_short(was)} / {_short(is_now)}" for name, was, is_now in differences(a, b)]
    return Comparison(names, (a.title, b.title), changes, why, (levels[0], levels[1]), lines)


def _measured(a: Record, b: Record) -> Iterator[tuple[str, str, str, Ratios, Ratios]]:
    """Figure, category and arm, and what both runs measured of it by question."""
    of_a, of_b = a.settings.backends, b.settings.backends
    engines = [(name, name) for name in of_a if name in of_b] or [(of_a[0], of_b[0])]
    kinds, others = (dict.fromkeys(sample.category for sample in record.samples) for record in (a, b))
    # "All" of two runs over different kinds of work would compare the work.
    categories = [ALL] if kinds.keys() == others.keys() else []
    categories += [kind for kind in kinds if kind in others and (len(kinds) > 1 or not categories)]
    arms = [arm for arm in a.settings.arms if arm in b.settings.arms]
    for arm, engine, category in product(arms, engines, categories):
        alone = engine[0] == engine[1] and len(of_a) == 1
        name = arm if alone else f"{arm} ({' / '.join(dict.fromkeys(engine))})"
        gains, speeds = [], []
        for record, which in zip((a, b), engine, strict=True):
            samples = [sample for sample in record.samples if category in (ALL, sample.category)]
            gains.append(ratios(samples, (which, arm), (which, "plain")))
            speeds.append(by_question(of_arm(samples, which, arm), lambda sample: sample.speed))
        if arm != "plain" and all(gains):
            yield "speed-up", category, name, gains[0], gains[1]
        if all(speeds):
            yield "tok/s", category, name, speeds[0], speeds[1]


_VERDICTS = {None: "too few questions", 0: "no difference can be told", 1: "B is higher", -1: "B is lower"}


def _line(figure: str, category: str, arm: str, a: Ratios, b: Ratios, level: float) -> ComparedFigure:
    shared = [question for question in a if question in b]
    paired = len(shared) == len(a) == len(b) or range_level(len(shared)) >= level
    if paired:
        a, b = {q: a[q] for q in shared}, {q: b[q] for q in shared}

    def found(level: float) -> Estimate | None:
        if not paired:
            return estimate_quotient(b, a, level)
        # By question, every repeat of B over every repeat of A: their median estimates the quotient.
        return estimate({question: [y / x for x in a[question] for y in b[question]] for question in a}, level)

    ratio, strict = found(LEVEL), found(level)
    assert ratio is not None
    assert strict is not None
    verdict = _VERDICTS[strict.against_one(level)]
    return ComparedFigure(figure, category, arm, round(middle(a), 4), round(middle(b), 4), ratio, paired, verdict)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "greedy"
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)


def comparison_report(found: Comparison) -> Report:
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
    head = {"type": "localspec bench compare", "schema_version": SCHEMA_VERSION}
    return json.dumps(head | asdict(found), ensure_ascii=False, allow_nan=False, indent=1) + "\n"
