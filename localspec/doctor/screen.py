"""The doctor's findings on a terminal or in a pipe, 80 columns wide or more."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from localspec.doctor.plot import bars
from localspec.doctor.ranking import remarks
from localspec.doctor.report import (
    Check,
    CostFacts,
    PayoffFacts,
    RankFacts,
    Recommendation,
    Status,
)
from localspec.repl.status import short_name
from localspec.repl.text import clip, on_one_line

NARROWEST, WIDEST = 40, 110
PIPED = 80
"""Columns where there is no terminal."""

_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "info": ("·", "-", "dim"),
    "note": ("!", "!", "yellow"),
    "fail": ("✗", "XX", "bold red"),
}
"""Status -> mark, the same in ASCII, style."""

# What a character becomes where it cannot be shown.
_PLAIN = {
    "✓": "ok", "✗": "XX", "·": "-", "→": "->", "×": "x", "…": "...", "−": "-", "–": "-", "±": "+-", "₀": "0",
    "│": "|", "⁹": "9", "≤": "<=", "≥": ">=",
}  # fmt: skip

_LABEL = 11


class DoctorScreen:
    """Prints section by section, as they become known.

    Args:
        file: standard output by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        terminal = self._file.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._encoding = self._file.encoding or "utf-8"
        self.unicode = self._shows("▁█")
        self._console = Console(
            file=self._file,
            width=None if self._file.isatty() else PIPED,
            force_terminal=terminal,
            no_color=not terminal or bool(os.environ.get("NO_COLOR")),
            color_system="standard" if terminal else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._console.width = max(NARROWEST, min(WIDEST, self._console.width))
        self._sections = 0

    # -- sections ------------------------------------------------------------------------------------------------

    def section(self, title: str, checks: Sequence[Check] = ()) -> None:
        """A heading and its rows."""
        if self._sections:
            self._console.print()
        self._sections += 1
        self._console.print(self._text(title, "bold"))
        if checks:
            self.rows(checks)

    def rows(self, checks: Sequence[Check]) -> None:
        """Rows: mark, name, what was found, and under it what to do."""
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2, no_wrap=True)
        table.add_column(width=_LABEL, no_wrap=True)
        table.add_column(overflow="fold")
        for check in checks:
            mark, plain, style = _MARKS[check.status]
            table.add_row(
                Text(mark if self._shows(mark) else plain, style=style, justify="right"),
                self._text(check.name),
                self._text(check.text),
            )
            if check.advice is not None:
                table.add_row("", "", self._text(f"→ {check.advice}", "" if check.status == "info" else style))
        self._print(table)

    def cost(self, cost: CostFacts, checks: Sequence[Check]) -> None:
        """t(w) as bars with its figures, and the price of a guess."""
        self.section(f"Cost of a target pass over w tokens, t(w) · {cost.engine}, {cost.device}")
        widths, gap = list(cost.target.ms), 1
        width = max(3, min(5, (self._console.width - _LABEL - 2) // len(widths) - gap))
        times = list(cost.target.ms.values())
        indent = " " * _LABEL
        for line in bars(times, height=4, width=width, gap=gap, unicode=self.unicode):
            self._line(indent + line)

        def figures(label: str, values: list[str]) -> None:
            self._line(f"  {label:<{_LABEL - 2}}" + (" " * gap).join(f"{value:>{width}}" for value in values))

        figures("w", [str(w) for w in widths])
        figures("ms", [_three(ms, width) for ms in times])
        figures("× t(1)", [_three(ms / times[0], width) for ms in times])
        rows = list(checks)
        for draft in cost.drafts:
            share = draft.ms[1] / times[0]
            text = f"{draft.ms[1]:.3g} ms = {share:.2f} of a target token, by {draft.file}"
            rows.append(Check("cost", "a guess", "info", text))
        self.rows(rows)

    def payoff(self, payoffs: Sequence[PayoffFacts]) -> None:
        """Break-even acceptance by length, and predicted speed-up by acceptance."""
        if not payoffs:
            return
        self.section("Break-even: share of guesses that must be right, by draft length k")
        self._table(
            ["k", *map(str, payoffs[0].break_even)],
            [[_label(p), *(_percent(share) for share in p.break_even.values())] for p in payoffs],
        )
        self.section("Predicted speed-up, by the share of guesses that are right")
        rows = []
        for found in payoffs:
            gains = found.speedup.items()
            rows.append([_label(found), *(f"×{gain:.2f}" if found.best_length[a] else "plain" for a, gain in gains)])
            rows.append(["  with k =", *(str(k) if k else "" for k in found.best_length.values())])
        self._table(["right", *(f"{share:.0%}" for share in payoffs[0].speedup)], rows)
        if any(found.drafter == "ngram" for found in payoffs):
            self.prose("n-grams: at the places where they have a guess; elsewhere it is plain decoding", "dim")

    def ranking(self, rank: RankFacts) -> None:
        """Candidates, the fastest first."""
        self.section("Ranking: measured against plain decoding of the same prompts")
        rows = []
        for each in rank.candidates:
            name = " + ".join(map(short_name, each.drafters)) or "plain"
            if each.speedup is None:
                rows.append([name, "not reached", "", "", ""])
                continue
            spread = "" if each.lowest is None else f"{each.lowest:.2f}–{each.highest:.2f}"
            rate = "no guesses" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}"
            rows.append([name, f"×{each.speedup:.2f}", spread, f"{each.tokens_per_second:.1f}", rate if spread else ""])
        self._table(["", "speed", "extremes", "tok/s", "accepted"], rows, names=36)
        for line in remarks(rank):
            self.prose(line, "dim")

    def recommendation(self, found: Recommendation) -> None:
        """The last word."""
        self.section("Recommendation")
        self.prose(found.text)
        if found.command is not None:
            self._print(Padding(self._text(found.command, "bold"), (0, 0, 0, 4)))

    def prose(self, text: str, style: str = "") -> None:
        """Sentences, wrapped between words."""
        self._print(Padding(self._text(text, style), (0, 0, 0, 2)))

    # -- printing ------------------------------------------------------------------------------------------------

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 20) -> None:
        table = Table.grid(padding=(0, 1))
        cells = [list(head), *(list(row) for row in rows)]
        table.add_column(width=min(names, max(len(row[0]) for row in cells)) + 2, no_wrap=True)
        for _ in head[1:]:
            table.add_column(justify="right", no_wrap=True, min_width=6)
        for i, row in enumerate(cells):
            style = "dim" if i == 0 else ""
            table.add_row(
                *(self._text(("  " if j == 0 else "") + clip(cell, names), style) for j, cell in enumerate(row))
            )
        self._print(table)

    def _line(self, text: str) -> None:
        self._console.print(self._text(text.rstrip(), newlines=True), no_wrap=True, overflow="crop", crop=True)

    def _print(self, renderable: Any) -> None:
        with self._console.capture() as capture:
            self._console.print(renderable)
        for line in capture.get().splitlines():  # columns are filled up with spaces, which nobody wants in a pipe
            self._file.write(line.rstrip() + "\n")
        self._file.flush()

    def _text(self, text: str, style: str = "", newlines: bool = False) -> Text:
        # Names come from files and the command line: nothing in them may act on the terminal.
        return Text("".join(c if self._shows(c) else _PLAIN.get(c, "?") for c in on_one_line(text)), style=style)

    def _shows(self, text: str) -> bool:
        try:
            text.encode(self._encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


def _label(found: PayoffFacts) -> str:
    return short_name(found.drafter)


def _percent(share: float | None) -> str:
    return "never" if share is None else f"{share:.0%}"


def _three(value: float, width: int) -> str:
    """Three significant digits, in as many columns."""
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return text if len(text) <= width else f"{value:.1f}" if value < 10 else f"{value:.0f}"
