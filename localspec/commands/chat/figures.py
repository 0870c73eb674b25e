"""``/stats``: figures of an answer and of the conversation, and how often draft tokens were accepted, by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localspec.commands.report.model import Lines
from localspec.commands.report.model import Table as Grid
from localspec.spec_decode.rounds import SpecStats

BAR = 30
_PHASES = ("prompt", "draft", "verify", "other")

Stats = Mapping[str, Any]


def stats_parts(answers: Sequence[Stats], *, unicode: bool = True) -> list[Grid | Lines]:
    """What ``/stats`` shows of the figures of some answers, the last answer apart."""
    everything = SpecStats.total(answers)
    rows: list[tuple[str, Callable[[Stats], str]]] = [
        ("tokens per second", lambda s: f"{s['tokens_per_second']:.1f}"),
        ("estimated plain tokens per second", lambda s: _number("{:.1f}", s["estimated_plain_tokens_per_second"])),
        ("estimated speed-up", lambda s: _number("×{:.2f}", s["estimated_speedup"])),
        ("answer tokens", lambda s: str(s["completion_tokens"])),
        ("rounds (passes of the model)", lambda s: str(s["num_rounds"])),
        ("tokens per round (plain is 1)", lambda s: f"{s['mean_acceptance_length']:.2f}"),
        ("guesses right", _right),
        *((f"  {name}", lambda s, name=name: _right(s["by_source"].get(name))) for name in everything["by_source"]),
        *((f"seconds: {name}", lambda s, name=name: f"{s[f'seconds_{name}']:.2f}") for name in _PHASES),
    ]
    last = SpecStats.total(answers[-1:])
    cells = [(name, show(last), show(everything)) for name, show in rows]
    bars = histogram(everything["drafted_per_position"], everything["accepted_per_position"], unicode=unicode)
    table = Grid("", ("", "last answer", "conversation"), cells)
    return [table, Lines("right, by place in a round", bars)] if bars else [table]


def histogram(drafted: Sequence[int], accepted: Sequence[int], *, unicode: bool = True) -> list[str]:
    """One bar per position of the draft: the share of the tokens drafted there that was accepted."""
    full, empty = ("█", "░") if unicode else ("#", ".")
    lines = []
    for i, (n_drafted, n_accepted) in enumerate(zip(drafted, accepted, strict=True), 1):
        if n_drafted:
            filled = round(BAR * n_accepted / n_drafted)
            bar = full * filled + empty * (BAR - filled)
            lines.append(f"  guess {i:2d}  {bar}  {n_accepted / n_drafted:4.0%}  {n_accepted}/{n_drafted}")
    return lines


def _number(form: str, value: float | None) -> str:
    return form.format(value) if value else "-"


def _right(counts: Stats | None) -> str:
    if counts is None:
        return "-"
    part, whole = counts["num_accepted_tokens"], counts["num_draft_tokens"]
    return f"{part / whole:.0%} ({part}/{whole})" if whole else "none made"
