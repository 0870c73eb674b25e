"""The results as one HTML page that needs, and reaches, nothing else: no script, no font, no picture but its own plots.

Everything is in the markup already, so the page also works where scripts are forbidden; hovering over a mark tells its
figures. Its policy lets the browser load nothing at all and apply no style but the one below, by digest. Names and
questions are not trusted: all text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from localspec.commands.bench import charts
from localspec.commands.bench.record import Record
from localspec.commands.bench.results import ALL, Results, Row
from localspec.commands.bench.svg import PALETTE, STYLE, Drawing
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
    verdict,
)
from localspec.terminal.text import on_one_line


def render(record: Record, results: Results) -> str:
    """The page."""
    style = PALETTE + STYLE + files("localspec.commands.bench").joinpath("style.css").read_text(encoding="utf-8")
    style = style.replace("\r\n", "\n")  # the digest is over what the browser sees
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{_text(record.title)}: localspec bench</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            f"<header>{''.join(_header(record, results))}</header>",
            f"<main>{''.join(_main(record, results))}</main>",
            f"<footer>{''.join(_footer(record))}</footer>",
            "</body>",
            "</html>",
            "",
        )
    )


def _text(text: str) -> str:
    return escape(on_one_line(text))


def _header(record: Record, results: Results) -> Iterator[str]:
    yield f"<h1>localspec <span>bench</span> · {_text(record.title)}</h1>"
    facts = {
        "machine": machine_text(record),
        "engine": engines_text(record),
        "measured": f"{record.settings.mode}: {scope(record, results)}; {ending(record)}",
        "memory": memory_text(record),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    yield f'<dl class="facts">{listed}</dl>'
    rows = [row for arm in results.arms if (row := results.row(ALL, *arm)) is not None]
    if rows:
        yield f'<ul class="verdicts">{"".join(_verdict(record, row) for row in rows)}</ul>'
    if results.remarks:
        yield f'<ul class="note">{"".join(f"<li>{_text(remark)}</li>" for remark in results.remarks)}</ul>'


def _verdict(record: Record, row: Row) -> str:
    found = row.speedup
    firm = found is not None and found.is_firm and found.low is not None and found.high is not None
    css = ""
    if firm and found is not None:
        css = "faster" if (found.low or 0) > 1 else "slower" if (found.high or 2) < 1 else ""
    return (
        f'<li class="{css}"><span>{_text(arm_name(record, row.backend, row.arm))}</span>'
        f"<b>{times_text(found.median if found else None)}</b>{_text(verdict(record, row))}</li>"
    )


def _main(record: Record, results: Results) -> Iterator[str]:
    if results.arms:
        yield "<h2>Speed over plain decoding</h2>"
        yield _figure(
            charts.speedup_plot(record, results),
            "Median over questions of tokens per second over plain's on the same question, with 95 % bootstrap "
            "intervals. Dashed, with a hollow mark: too few questions for one; their range, and how often such a range "
            "covers the true median. Left of the dashed line it is slower than plain.",
            wide=True,
        )
    yield _table(
        [
            "category",
            "arm",
            "tok/s",
            "speed",
            "95 %",
            "slower",
            "worst",
            "on",
            "tokens a pass",
            "accepted",
            "first token",
        ],
        [_cells(record, row) for row in results.rows],
        classes=["total" if row.category == ALL else "" for row in results.rows],
        worse=[row.speedup is not None and row.speedup.median < 1 for row in results.rows],
    )
    if results.duels:
        yield "<h2>Against each other</h2>"
        yield _table(
            ["category", "this", "against", "speed", "95 %"],
            [
                [each.category, each.first, each.second, times_text(each.ratio.median), interval_text(each.ratio)]
                for each in results.duels
            ],
            left=3,
        )
    yield "<h2>What passes cost, and what guesses must bring</h2>"
    for passes in results.passes:
        if len(results.passes) > 1:
            yield f"<h3>{_text(passes.backend)}</h3>"
        plots = [
            _figure(
                charts.pass_plot(passes),
                "t(w), the time in which the target checks w tokens at once. The dashed line is what as many single "
                "passes take: the further the curve stays under it, the more guesses pay.",
            )
        ]
        if passes.break_even:
            plots.append(
                _figure(
                    charts.break_even_plot(passes),
                    "The acceptance at which k guesses a round make no difference, by the theory of independent "
                    "guesses: over it drafting pays, under it it costs.",
                )
            )
        yield f'<div class="pair">{"".join(plots)}</div>'
    acceptance = [
        (charts.position_plot(record, results), "Share of the guesses sent at each position that were accepted, all "
         "before them included; lines are 95 % Wilson intervals."),
        (charts.reliability_plot(results), "What the controller predicted against what the target did. On the dashed "
         f"line predictions are right. Expected calibration error: {_errors(record, results)}."),
    ]  # fmt: skip
    drawn = [_figure(plot, caption) for plot, caption in acceptance if plot is not None]
    if drawn:
        yield f'<h2>Acceptance</h2><div class="pair">{"".join(drawn)}</div>'
        yield from _acceptance_tables(record, results)
    yield "<h2>Where the time went</h2>"
    yield _table(
        ["arm", "drafting", "verifying", "other", "same text as plain", "energy"],
        [_time(record, row) for row in results.rows if row.category == ALL],
        left=1,
    )
    yield '<p class="muted">Per token, all answers together. Energy is the whole processor package\'s.</p>'
    yield "<h2>Round by round</h2>"
    yield from _timelines(record)


def _errors(record: Record, results: Results) -> str:
    return "; ".join(
        f"{arm_name(record, each.backend, each.arm)}, {each.source} {each.reliability.expected_calibration_error:.3f} "
        f"({each.reliability.n} guesses)"
        for each in results.judgements
    )


def _cells(record: Record, row: Row) -> list[str]:
    return [
        row.category,
        arm_name(record, row.backend, row.arm),
        f"{row.tokens_per_second.median:.1f}",
        times_text(row.speedup.median if row.speedup else None),
        interval_text(row.speedup),
        slower_text(row),
        times_text(row.worst_speedup),
        row.worst_question or "–",
        f"{row.mean_acceptance_length:.2f}",
        share_text(row.acceptance_rate),
        seconds_text(row.time_to_first_token.median),
    ]


def _time(record: Record, row: Row) -> list[str]:
    return [
        arm_name(record, row.backend, row.arm),
        *(f"{row.seconds_per_token[part] * 1e3:.1f} ms" for part in ("draft", "verify", "other")),
        f"{row.n_same} of {row.n_compared}",
        "–" if row.joules_per_token is None else f"{row.joules_per_token:.2f} J",
    ]


def _acceptance_tables(record: Record, results: Results) -> Iterator[str]:
    rows = [
        [arm_name(record, row.backend, row.arm), source, str(each.drafted), str(each.accepted), share_text(each.rate)]
        for backend, arm in results.arms
        if (row := results.row(ALL, backend, arm)) is not None
        for source, each in row.by_source.items()
    ]
    yield "<h3>By drafter</h3>"
    yield _table(["arm", "drafter", "sent", "accepted", "share"], rows, left=2)
    if results.judgements:
        yield "<details><summary>Predicted and observed acceptance, in figures</summary>"
        yield _table(
            ["arm", "drafter", "bin", "guesses", "predicted", "observed", "95 %"],
            [
                [
                    arm_name(record, found.backend, found.arm),
                    found.source,
                    f"{each.low:.1f}–{each.high:.1f}",
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
        yield "</details>"


def _timelines(record: Record) -> Iterator[str]:
    """One question of each category, the last repeat of it; the first is open."""
    chosen: dict[str, tuple[str, int]] = {}
    for sample in record.samples:
        chosen.setdefault(sample.category, (sample.question, sample.repeat))
    for i, (category, (question, repeat)) in enumerate(chosen.items()):
        plot = charts.timelines(record, question, repeat)
        yield (
            f"<details{' open' if i == 0 else ''}><summary>{_text(category)}: {_text(question)}</summary>"
            f'<div class="scroll widest" tabindex="0" role="region" aria-label="{_text(plot.title)}">{plot.svg()}</div>'
            "</details>"
        )
    yield '<p class="muted">The arms start at the same moment here; the target had read the prompt already.</p>'


def _footer(record: Record) -> Iterator[str]:
    session, slice_tokens = record.sessions[-1], record.settings.slice_tokens
    turns = (
        f"the arms took turns after every {slice_tokens} tokens" if slice_tokens else "the order of the arms alternates"
    )
    yield (
        "<p>Speed is an answer's tokens, as the engine counted them, over the seconds spent drafting, verifying and in "
        "our own code; the target's reading of the prompt is measured apart and is in no arm, a draft model's is in "
        "the arm. A speed-up divides by the plain answer to the same question in the same repeat, next to which it was "
        f"measured; {turns}. A question counts with the median of its repeats, a row is the "
        "median of its questions.</p>"
    )
    models = "".join(
        f"<li>{_text(f'{engine.backend}, {model.source}: {model.file}')}, "
        f"sha256 <code>{_text(model.sha256)}</code></li>"
        for engine in record.engines
        for model in engine.models
    )
    yield f"<ul>{models}</ul>"
    made_by = f"localspec {session.localspec}, Python {session.python}"
    yield f"<p>{_text(made_by)}: <code>{_text(session.command)}</code></p>"


def _figure(plot: Drawing, caption: str, *, wide: bool = False) -> str:
    css = "scroll wide" if wide else "scroll"
    return (
        f'<figure><div class="{css}" tabindex="0" role="region" aria-label="{_text(plot.title)}">{plot.svg()}</div>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 2,
    classes: Sequence[str] = (),
    worse: Sequence[bool] = (),
) -> str:
    def row(cells: Sequence[str], tag: str, css: str = "", bad: bool = False) -> str:
        drawn = []
        for i, cell in enumerate(cells):
            names = " ".join(["left"] * (i < left) + ["worse"] * (bad and cell.startswith("×")))
            drawn.append(f"<{tag}{_class(names)}>{_text(cell)}</{tag}>")
        return f"<tr{_class(css)}>{''.join(drawn)}</tr>"

    body = [row(cells, "td", classes[i] if classes else "", bool(worse and worse[i])) for i, cells in enumerate(rows)]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(", ".join(head))}"><table>'
        f"<thead>{row(head, 'th')}</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""
