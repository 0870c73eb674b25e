"""The doctor's findings as parts of a report, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localspec.commands.doctor.advice import doubtful, pays
from localspec.commands.doctor.facts import (
    CostFacts,
    Examination,
    FitFacts,
    PairFacts,
    PayoffFacts,
    RankFacts,
    Recommendation,
)
from localspec.commands.report.model import Finding, Findings, Lines, Part, Table, Text
from localspec.model_files.catalog import short_name
from localspec.model_files.sources.base import size_text
from localspec.spec_decode.drafters.names import NGRAM

_LABEL, _HEIGHT = 11, 4
_KINDS = ("edit", "code", "chat")
"""Kinds of question for which the answer says how much faster they were."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def pages(found: Examination, details: Sequence[Part] | None) -> Iterator[Part]:
    """What a person sees: the answer in three lines, then what is not as it should be, or everything.

    Args:
        found: what was found.
        details: everything, where it was asked for.
    """
    yield Findings("" if found.pair is None else found.pair.target.name, list(_answer(found)))
    if details is not None:
        yield from details
        return
    if found.rank is not None:
        yield from ranking_parts(found.rank)
    odd = [check for check in found.checks if check.status in ("fail", "note") or check.name == "copy"]
    if odd:
        yield Findings("To know", odd)
    advice = found.recommendation
    if advice is not None and advice.command is not None:
        yield Text(advice.command, "strong")
    yield Text("localspec doctor --details shows everything that was looked at and measured", "muted")


def _answer(found: Examination) -> Iterator[Finding]:
    """Does it fit, does guessing pay and with what, how much faster is it."""
    pair, advice = found.pair, found.recommendation
    if pair is None:
        yield Finding("info", "model", advice.text if advice is not None else "none was named")
        return
    yield _fits(found, pair.fit)
    yield _guesses(found, pair)
    if pair.target.present:
        yield _faster(found, pair)


def _fits(found: Examination, fit: FitFacts) -> Finding:
    need, free = size_text(fit.ram_needed_bytes), size_text(fit.ram_available_bytes)
    context = f"with {fit.n_ctx:,} tokens of context"
    where = " of RAM" if fit.gpu_needed_bytes is not None else ""
    text = f"it needs {need}{where} of the {free} that are free, {context}"
    if fit.gpu_needed_bytes is not None:
        text += f", and {size_text(fit.gpu_needed_bytes)} on the GPU"
    broken = [check.name for check in found.checks if check.status == "fail" and check.section == "pair"]
    if fit.fits is None:
        return Finding("info", "fits", f"known once the file is here; at least {need}, and {free} are free")
    if not fit.fits or broken:
        return Finding("fail", "fits", f"no: {text}" if not fit.fits else f"it fits, but see {' and '.join(broken)}")
    return Finding("ok", "fits", f"yes: {text}")


def _guesses(found: Examination, pair: PairFacts) -> Finding:
    """Whether to draft, and with what."""
    advice = found.recommendation
    if advice is None or (pair.cost is None and found.rank is None):
        return Finding("info", "guesses", "not known" if advice is None else advice.text)
    if doubts := doubtful(found):
        text = f"not known: what was timed is in doubt, see {doubts[0]}; --draft auto guesses only while it pays"
        return Finding("note", "guesses", text)
    if found.rank is not None or not pair.payoff:
        return Finding("ok" if advice.speculate else "info", "guesses", advice.text)
    useful = [_called(each.drafter) for each in pair.payoff if pays(each)]
    useless = [_called(each.drafter) for each in pair.payoff if not pays(each)]
    if not useful:
        return Finding("info", "guesses", f"no: {advice.text.removeprefix('Do not speculate here: ')}")
    text = f"yes, by {_joined(useful)}"
    return Finding("ok", "guesses", text + (f"; not by {_joined(useless)}" if useless else ""))


def _faster(found: Examination, pair: PairFacts) -> Finding:
    """What answers gained, where that was measured."""
    bench = pair.bench
    if bench is None:
        return Finding("info", "faster", f"not measured yet; localspec bench {pair.target.name} measures it")
    run = f"localspec bench, {bench.day}, {bench.n_questions} questions"
    if not bench.n_guesses:
        return Finding("info", "faster", f"no: nothing was guessed ({run})")
    gains = [f"{kind} ×{bench.speedups[kind]:.2f}" for kind in _KINDS if kind in bench.speedups]
    missing = [kind for kind in _KINDS if kind not in bench.speedups]
    if "all" in bench.speedups and not gains:
        gains, missing = [f"×{bench.speedups['all']:.2f} over all"], []
    text = ", ".join(gains) + (f"; not measured: {', '.join(missing)}" if missing else "")
    return Finding("info", "faster", f"{text} ({run})")


def _called(drafter: str) -> str:
    return "copying from the text" if drafter == NGRAM else short_name(drafter)


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def cost_parts(cost: CostFacts, findings: Sequence[Finding], columns: int, unicode: bool) -> Iterator[Part]:
    """t(w) as bars with its figures, and the price of a draft token.

    Args:
        cost: the passes.
        findings: what they say.
        columns: how wide the bars may get.
        unicode: whether there are block characters to draw with.
    """
    times = list(cost.target.ms.values())
    width = max(3, min(5, (columns - _LABEL - 2) // len(times) - 1))
    figures = {
        "w": [str(w) for w in cost.target.ms],
        "ms": [_three(ms, width) for ms in times],
        "× t(1)": [_three(ms / times[0], width) for ms in times],
    }
    lines = [" " * _LABEL + line for line in bars(times, height=_HEIGHT, width=width, gap=1, unicode=unicode)]
    for name, values in figures.items():
        lines.append(f"  {name:<{_LABEL - 2}}" + " ".join(f"{value:>{width}}" for value in values))
    yield Lines(f"Cost of a target pass over w tokens, t(w) · {cost.engine}, {cost.device}", lines)
    guesses = []
    for draft in cost.drafts:
        price = f"{draft.ms[1]:.3g} ms = {draft.ms[1] / times[0]:.2f} of a target token"
        text = f"{price}, by {short_name(draft.name)} ({draft.file})"
        guesses.append(Finding("info", "a guess", text))
    yield Findings("", [*findings, *guesses])


def break_even_table(drafters: Mapping[str, tuple[float, Mapping[Any, float | None]]], where: str = "") -> Table:
    """Break-even acceptance.

    Args:
        drafters: by name, the time of a draft token [ms], and the acceptance that each draft length needs.
        where: added to the title.
    """
    return Table(
        f"Break-even: share of guesses that must be right, by draft length k{where}",
        ["k", "a guess", *map(str, next(iter(drafters.values()))[1])],
        [
            [name, f"{ms:.1f} ms" if ms else "free"]
            + ["never" if share is None else f"{share:.0%}" for share in shares.values()]
            for name, (ms, shares) in drafters.items()
        ],
    )


def payoff_parts(payoffs: Sequence[PayoffFacts]) -> Iterator[Part]:
    """Break-even acceptance by length, and predicted speed-up by acceptance."""
    if not payoffs:
        return
    names = [short_name(found.drafter) for found in payoffs]
    yield break_even_table({n: (found.step_ms, found.break_even) for n, found in zip(names, payoffs, strict=True)})
    rows = []
    for name, found in zip(names, payoffs, strict=True):
        gains = found.speedup.items()
        rows.append([name, *(f"×{gain:.2f}" if found.best_length[a] else "plain" for a, gain in gains)])
        rows.append(["  with k =", *(str(k or "") for k in found.best_length.values())])
    yield Table(
        "Predicted speed-up, by the share of guesses that are right",
        ["right", *(f"{share:.0%}" for share in payoffs[0].speedup)],
        rows,
        note="n-grams: at the places where they have a guess; elsewhere it is plain decoding" if NGRAM in names else "",
    )


def ranking_parts(rank: RankFacts) -> Iterator[Part]:
    """Candidates, the fastest first."""
    rows = []
    for each in rank.candidates:
        name = " + ".join(map(short_name, each.drafters)) or "plain"
        if each.speedup is None:
            rows.append([name, "not reached", "", "", ""])
            continue
        spread = "" if each.lowest is None else f"{each.lowest:.2f}–{each.highest:.2f}"
        rate = "no guesses" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}"
        rows.append([name, f"×{each.speedup:.2f}", spread, f"{each.tokens_per_second:.1f}", rate if spread else ""])
    head = ["", "speed", "extremes", "tok/s", "accepted"]
    n, note = len(rank.prompts), ""
    if n:
        note = (
            f"{n} prompt{'s' * (n != 1)}, up to {rank.max_tokens} tokens each, {rank.seconds:.0f} s in all; × is speed "
            "over plain on the same prompt, the geometric mean and the extremes"
        )
    yield Table("Ranking: measured against plain decoding of the same prompts", head, rows, note)
    if rank.noise is not None:
        yield Text(f"plain itself varied by {rank.noise:.1%} from run to run of the same prompt", "muted")


def recommendation_parts(found: Recommendation) -> Iterator[Part]:
    """The last word."""
    yield Text(found.text, title="Recommendation")
    if found.command is not None:
        yield Text(found.command, "strong")


def bars(values: Sequence[float], *, height: int, width: int, gap: int, unicode: bool = True) -> list[str]:
    """Vertical bars from zero up.

    Args:
        values: none negative.
        height: lines.
        width: columns of a bar.
        gap: columns between bars.
        unicode: eighths of a line with block characters; else ``_`` and ``#``.

    Returns:
        The lines, the top one first, each ``len(values) * (width + gap) - gap`` columns wide.
    """
    most = max(values, default=0.0) or 1.0
    lines = []
    for line in range(height - 1, -1, -1):
        cells = []
        for value in values:
            eighths = min(8, max(0, round((value / most * height - line) * 8)))
            if line == 0 and value > 0:
                eighths = max(1, eighths)  # little is not nothing
            cells.append((_EIGHTHS[eighths] if unicode else " _##"[-(-eighths // 3)]) * width)
        lines.append((" " * gap).join(cells))
    return lines


def _three(value: float, width: int) -> str:
    """Three significant digits, in as many columns."""
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return text if len(text) <= width else f"{value:.1f}" if value < 10 else f"{value:.0f}"
