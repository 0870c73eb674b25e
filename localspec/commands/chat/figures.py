"""``/stats``: figures of an answer and of the conversation, and how often draft tokens were accepted, by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

BAR = 30


def stats_table(last: Mapping[str, Any], everything: Mapping[str, Any]) -> Table:
    """Two columns of figures: the last answer, and the whole conversation."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("last answer", justify="right")
    table.add_column("conversation", justify="right")

    def row(name: str, show: Any) -> None:
        table.add_row(name, show(last), show(everything))

    row("tokens per second", lambda s: f"{s['tokens_per_second']:.1f}")
    row("estimated plain tokens per second", _plain)
    row("estimated speed-up", _speedup)
    row("answer tokens", lambda s: str(s["completion_tokens"]))
    row("rounds (target passes)", lambda s: str(s["num_rounds"]))
    row("tokens per round (plain is 1)", lambda s: f"{s['mean_acceptance_length']:.2f}")
    row("guesses accepted", lambda s: _share(s["num_accepted_tokens"], s["num_draft_tokens"]))
    for source in everything["by_source"]:
        row(f"  {source}", lambda s, source=source: _source(s, source))
    row("seconds: prompt", lambda s: f"{s['seconds_prompt']:.2f}")
    row("seconds: draft", lambda s: f"{s['seconds_draft']:.2f}")
    row("seconds: verify", lambda s: f"{s['seconds_verify']:.2f}")
    row("seconds: other", lambda s: f"{s['seconds_other']:.2f}")
    return table


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


def _plain(stats: Mapping[str, Any]) -> str:
    plain = stats.get("estimated_plain_tokens_per_second")
    return f"{plain:.1f}" if plain else "-"


def _speedup(stats: Mapping[str, Any]) -> str:
    plain = stats.get("estimated_plain_tokens_per_second")
    return f"×{stats['tokens_per_second'] / plain:.2f}" if plain else "-"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%} ({part}/{whole})" if whole else "none made"


def _source(stats: Mapping[str, Any], source: str) -> str:
    counts = stats["by_source"].get(source)
    return _share(counts["num_accepted_tokens"], counts["num_draft_tokens"]) if counts else "-"
