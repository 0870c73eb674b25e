"""The doctor's findings, as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.commands.doctor.plot import bars
from localspec.commands.doctor.ranking import remarks
from localspec.commands.doctor.report import Check, CostFacts, PayoffFacts, RankFacts, Recommendation
from localspec.model_files.catalog import short_name
from localspec.terminal.sheet import Sheet

_LABEL = 11


class DoctorScreen(Sheet):
    """A ``Sheet`` with the doctor's own sections."""

    def cost(self, cost: CostFacts, checks: Sequence[Check]) -> None:
        """t(w) as bars with its figures, and the price of a guess."""
        self.section(f"Cost of a target pass over w tokens, t(w) · {cost.engine}, {cost.device}")
        widths, gap = list(cost.target.ms), 1
        width = max(3, min(5, (self._console.width - _LABEL - 2) // len(widths) - gap))
        times = list(cost.target.ms.values())
        indent = " " * _LABEL
        for line in bars(times, height=4, width=width, gap=gap, unicode=self.unicode):
            self.line(indent + line)

        def figures(label: str, values: list[str]) -> None:
            self.line(f"  {label:<{_LABEL - 2}}" + (" " * gap).join(f"{value:>{width}}" for value in values))

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
        self.table(
            ["k", *map(str, payoffs[0].break_even)],
            [[_label(p), *(_percent(share) for share in p.break_even.values())] for p in payoffs],
        )
        self.section("Predicted speed-up, by the share of guesses that are right")
        rows = []
        for found in payoffs:
            gains = found.speedup.items()
            rows.append([_label(found), *(f"×{gain:.2f}" if found.best_length[a] else "plain" for a, gain in gains)])
            rows.append(["  with k =", *(str(k) if k else "" for k in found.best_length.values())])
        self.table(["right", *(f"{share:.0%}" for share in payoffs[0].speedup)], rows)
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
        self.table(["", "speed", "extremes", "tok/s", "accepted"], rows, names=36)
        for line in remarks(rank):
            self.prose(line, "dim")

    def recommendation(self, found: Recommendation) -> None:
        """The last word."""
        self.section("Recommendation")
        self.prose(found.text)
        if found.command is not None:
            self.prose(found.command, "bold", indent=4)


def _label(found: PayoffFacts) -> str:
    return short_name(found.drafter)


def _percent(share: float | None) -> str:
    return "never" if share is None else f"{share:.0%}"


def _three(value: float, width: int) -> str:
    """Three significant digits, in as many columns."""
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return text if len(text) <= width else f"{value:.1f}" if value < 10 else f"{value:.0f}"
