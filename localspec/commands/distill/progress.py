"""How a run comes along: a few lines that are drawn again on a terminal; elsewhere a line a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from localspec.model_files.head_card import CurvePoint
from localspec.model_files.sources.base import size_text
from localspec.terminal.text import moves_cursor, on_one_line
from localspec.training.standing import Standing

REDRAWN_SECONDS = 0.25
LINE_SECONDS = 60.0
"""Between two lines where nobody watches."""

_BARS = " ▁▂▃▄▅▆▇█"
_SHOWN_STEPS = 4
_ALL = "all"


class RunDisplay:
    """Shows where a run stands, on standard error.

    Args:
        file: instead of standard error.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._live: Live | None = None
        if moves_cursor(self._file):
            console = Console(file=self._file, highlight=False, markup=False, emoji=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0
        self._phase = ""
        self._n_points = 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove what is drawn; nothing is drawn after it."""
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """A remark that stays."""
        if self._live is not None and self._live.is_started:
            self._live.console.print(Text(on_one_line(line)), soft_wrap=True)
        else:
            print(on_one_line(line), file=self._file, flush=True)

    def show(self, standing: Standing) -> None:
        """Draw it, not more often than somebody can read."""
        now, new = time.monotonic(), standing.phase != self._phase
        if self._live is not None:
            if new or now - self._drawn > REDRAWN_SECONDS:
                self._drawn, self._phase = now, standing.phase
                self._live.update(_drawing(standing, self._live.console.width), refresh=True)
            return
        tested = len(standing.curve) > self._n_points
        if standing.phase == "loading" and not new:
            return
        if new or tested or now - self._drawn > LINE_SECONDS:
            self._drawn, self._phase, self._n_points = now, standing.phase, len(standing.curve)
            parts = [_doing(standing), _counts(standing), _left(standing)]
            if tested:
                parts.append(
                    "right at " + " ".join(f"{rate:.2f}" for rate in standing.curve[-1].acceptance.get(_ALL, ()))
                )
            print("; ".join(part for part in parts if part), file=self._file, flush=True)


def _doing(standing: Standing) -> str:
    if standing.phase == "waiting":
        return "waiting: a chat or server answers on this machine"
    rate = f", {standing.rate:,.0f} tokens a second" if standing.rate else ""
    return (standing.text or standing.phase) + rate


def _counts(standing: Standing) -> str:
    if not standing.n_places:
        return ""
    seen = f", {standing.tokens_seen:,} learned from" if standing.tokens_seen else ""
    size = f" ({size_text(standing.n_bytes)})" if standing.n_bytes else ""
    return f"{standing.n_answers:,} texts of {standing.n_places:,} tokens{size}{seen}"


def _left(standing: Standing) -> str:
    if standing.seconds_left is None:
        return ""
    minutes = standing.seconds_left / 60
    return f"{minutes:.0f} min left" if minutes >= 1.5 else f"{standing.seconds_left:.0f} s left"


def _drawing(standing: Standing, columns: int) -> Group:
    bar = Grid.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=standing.fraction or 0.0, width=min(30, columns // 3)),
        Text(
            " · ".join(part for part in (_left(standing), _doing(standing)) if part), overflow="ellipsis", no_wrap=True
        ),
    )
    lines = [Text(_counts(standing), style="dim", no_wrap=True, overflow="ellipsis")]
    for step, rates in enumerate(_by_step(standing.curve)):
        name = f"{step + 1} in a row right" if step else "next token right"
        lines.append(Text(f"{name} {rates[-1]:.2f} {sparkline(rates, max(8, columns - 30))}", no_wrap=True))
    return Group(bar, *lines)


def _by_step(curve: Sequence[CurvePoint]) -> list[list[float]]:
    """The share of places at which the first n guesses were right, test by test, for n = 1, 2, …"""
    tests = [point.acceptance[_ALL] for point in curve if _ALL in point.acceptance]
    return [list(rates) for rates in zip(*tests, strict=False)][:_SHOWN_STEPS]


def sparkline(rates: Sequence[float], columns: int) -> str:
    """Shares as bars of characters, from 0 to 1; the last ones where there are more than columns."""
    return "".join(_BARS[round(max(0.0, min(1.0, rate)) * (len(_BARS) - 1))] for rate in rates[-columns:])
