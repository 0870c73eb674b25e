"""The results as Markdown, aligned so that it reads well as plain text too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from localspec.commands.bench.record import Record
from localspec.commands.bench.results import ALL, Position, Results
from localspec.commands.bench.words import (
    arm_name,
    ending,
    engines_text,
    interval_text,
    machine_text,
    memory_text,
    scope,
    seconds_text,
    share_text,
    slower_text,
    times_text,
    verdicts,
)
from localspec.terminal.text import on_one_line, width


def markdown(record: Record, results: Results) -> str:
    """A report."""
    return "\n\n".join(_parts(record, results)) + "\n"


def _parts(record: Record, results: Results) -> Iterator[str]:
    session = record.sessions[-1]
    yield f"# Speed of {_text(record.title)} against plain decoding"
    yield " ".join(verdicts(record, results))
    if results.remarks:
        yield "\n".join(f"- {_text(remark)}" for remark in results.remarks)
    yield (
        f"{_text(machine_text(record))}; Python {session.python}, localspec {session.localspec}, "
        f"{_text(engines_text(record))}. {scope(record, results)}; {ending(record)}. `{session.command}`"
    )
    yield table(
        ["category", "arm", "tok/s", "speed", "95 %", "slower", "worst", "on", "length", "accepted", "first token"],
        [
            [
                row.category,
                arm_name(record, row.backend, row.arm),
                f"{row.tokens_per_second.median:.1f}",
                times_text(row.speedup.median) if row.speedup else "–",
                interval_text(row.speedup),
                slower_text(row),
                times_text(row.worst_speedup),
                row.worst_question or "–",
                f"{row.mean_acceptance_length:.2f}",
                share_text(row.acceptance_rate),
                seconds_text(row.time_to_first_token.median),
            ]
            for row in results.rows
        ],
    )
    yield (
        "Medians over questions; *speed*: times plain's on the same question. *Slower*: questions on which it was. "
        "*Length*: tokens a pass. *Accepted*: of the guesses sent."
    )
    if results.duels:
        yield "## Against each other"
        yield table(
            ["category", "this", "against", "speed", "95 %"],
            [
                [each.category, each.first, each.second, times_text(each.ratio.median), interval_text(each.ratio)]
                for each in results.duels
            ],
        )
    yield from _acceptance(record, results)
    yield "## Time"
    yield table(
        ["arm", "drafting", "verifying", "other", "same text", "energy"],
        [
            [
                arm_name(record, row.backend, row.arm),
                *(f"{row.seconds_per_token[part] * 1e3:.1f} ms" for part in ("draft", "verify", "other")),
                f"{row.n_same} of {row.n_compared}",
                "–" if row.joules_per_token is None else f"{row.joules_per_token:.2f} J",
            ]
            for row in results.rows
            if row.category == ALL
        ],
    )
    yield f"Per token, all answers together. Memory: {memory_text(record)}."
    yield from _passes(record, results)


def _acceptance(record: Record, results: Results) -> Iterator[str]:
    rows = [row for backend, arm in results.arms if (row := results.row(ALL, backend, arm)) and row.by_position]
    if rows:
        n = max(len(row.by_position) for row in rows)
        yield "## Acceptance"
        yield table(
            [
                "arm",
                *map(str, range(1, n + 1)),
                *(sources := list(dict.fromkeys(s for row in rows for s in row.by_source))),
            ],
            [
                [
                    arm_name(record, row.backend, row.arm),
                    *("–" if i >= len(row.by_position) else share_text(row.by_position[i].rate) for i in range(n)),
                    *(_source(row.by_source.get(source)) for source in sources),
                ]
                for row in rows
            ],
        )
        yield "By position in the draft, from 1, and by drafter: accepted of sent."
    if results.judgements:
        errors = [
            f"{arm_name(record, each.backend, each.arm)}, {each.source}: "
            f"{each.reliability.expected_calibration_error:.3f} ({each.reliability.n} guesses)"
            for each in results.judgements
        ]
        yield "## Predicted against observed acceptance"
        yield f"Expected calibration error over ten bins: {'; '.join(errors)}."
        yield table(
            ["arm", "drafter", "bin from", "guesses", "predicted", "observed", "95 %"],
            [
                [
                    arm_name(record, found.backend, found.arm),
                    found.source,
                    f"{each.low:.1f}",
                    str(each.n),
                    f"{each.predicted:.3f}",
                    f"{each.observed:.3f}",
                    f"{each.observed_low:.2f}–{each.observed_high:.2f}",
                ]
                for found in results.judgements
                for each in found.reliability.bins
            ],
            left=2,
        )


def _source(found: Position | None) -> str:
    return f"{found.accepted} of {found.drafted}" if found is not None else "–"


def _passes(record: Record, results: Results) -> Iterator[str]:
    for passes in results.passes:
        name = f", {passes.backend}" if len(results.passes) > 1 else ""
        yield f"## Cost of a pass over w tokens{name}"
        yield table(
            ["w", "calibrated ms", "in this run ms", "passes"],
            [
                [str(each.width), _ms(each.calibrated_ms), _ms(each.observed_ms), str(each.n_observed)]
                for each in passes.widths
            ],
            left=1,
        )
        if passes.break_even:
            lengths = list(next(iter(passes.break_even.values())))
            yield table(
                ["break-even at k guesses", "a guess", *lengths],
                [
                    [source, f"{passes.step_ms[source]:.1f} ms" if passes.step_ms[source] else "free"]
                    + ["never" if share is None else share_text(share) for share in even.values()]
                    for source, even in passes.break_even.items()
                ],
                left=1,
            )


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _text(text: str) -> str:
    return on_one_line(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """A table, aligned as plain text too; the first columns to the left, the others to the right."""
    cells = [[on_one_line(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(width, column)) for column in zip_longest(*cells, fillvalue="")]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell + " " * (wide - width(cell)) if i < left else " " * (wide - width(cell)) + cell
            for i, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (wide - 1) + (":" if i >= left else "-") for i, wide in enumerate(widths)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])
