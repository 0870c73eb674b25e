"""The results on a terminal or in a pipe, 80 columns wide or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from localspec.commands.bench.record import Record
from localspec.commands.bench.results import ALL, Judgement, Passes, Results, Row
from localspec.commands.bench.words import (
    arm_name,
    ending,
    energy_text,
    engines_text,
    interval_text,
    machine_text,
    memory_text,
    scope,
    seconds_text,
    share_text,
    slower_text,
    times_text,
    title,
    verdicts,
)
from localspec.commands.doctor.screen import DoctorScreen
from localspec.terminal.text import clip

_POSITIONS = 10


class BenchScreen(DoctorScreen):
    """Prints results, section by section."""

    def results(self, record: Record, results: Results) -> None:
        """Everything: the verdict first, then what it rests on."""
        self.section(title(record))
        self.prose(f"{engines_text(record)} · {machine_text(record)}", "dim")
        self.prose(f"{record.settings.mode}: {scope(record, results)}; {ending(record)}", "dim")
        for line in verdicts(record, results):
            self.prose(line, "bold")
        for remark in results.remarks:
            self.prose(f"! {remark}", "yellow")
        for backend in record.settings.backends:
            self._speed(record, results, backend)
        self._duels(results)
        self._acceptance(record, results)
        self._time(record, results)
        for passes in results.passes:
            self._passes(record, passes)
        self._reliability(record, results)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 20, cells: int = 6) -> None:
        """A table of figures: names to the left, the rest to the right in columns of at least ``cells``."""
        table = Table.grid(padding=(0, 1))
        table.add_column(width=min(names, max(len(row[0]) for row in (head, *rows))) + 2, no_wrap=True)
        for _ in head[1:]:
            table.add_column(justify="right", no_wrap=True, min_width=cells)
        for i, row in enumerate((head, *rows)):
            texts = [f"  {clip(row[0], names)}", *row[1:]]
            table.add_row(*(self._text(text, "dim" if i == 0 else "") for text in texts))
        self._print(table)

    def _speed(self, record: Record, results: Results, backend: str) -> None:
        arms = [arm for arm in record.settings.arms if arm != "plain"]
        if not arms:
            row = results.row(ALL, backend, "plain")
            assert row is not None
            self.section(f"Plain decoding · {backend}")
            self.table(["", "tok/s", "first token", "questions"], [_plain(each) for each in results.rows])
            return
        for arm in arms:
            rows = []
            for category in [ALL, *results.categories]:
                row, plain = results.row(category, backend, arm), results.row(category, backend, "plain")
                if row is None:
                    continue
                rows.append(
                    [
                        category,
                        f"{plain.tokens_per_second.median:.1f}" if plain is not None else "–",
                        f"{row.tokens_per_second.median:.1f}",
                        times_text(row.speedup.median if row.speedup else None),
                        interval_text(row.speedup),
                        slower_text(row),
                        f"{row.mean_acceptance_length:.2f}",
                        share_text(row.acceptance_rate),
                    ]
                )
            if rows:
                self.section(f"{arm_name(record, backend, arm)} against plain")
                head = ["", "plain", "tok/s", "speed", "95 %", "slower", "length", "accepted"]
                self.table(head, rows, names=14)
        self.prose("plain, tok/s: medians of tokens per second · slower: questions where it was · length: tokens a "
                   "pass · accepted: of the guesses sent", "dim")  # fmt: skip

    def _duels(self, results: Results) -> None:
        for what in dict.fromkeys(duel.what for duel in results.duels):
            duels = [duel for duel in results.duels if duel.what == what]
            self.section(f"Against each other: {what}")
            rows = [
                [duel.category, duel.first, duel.second, times_text(duel.ratio.median), interval_text(duel.ratio)]
                for duel in duels
            ]
            self.table(["", "this", "against", "speed", "95 %"], rows)

    def _acceptance(self, record: Record, results: Results) -> None:
        rows = [row for backend, arm in results.arms if (row := results.row(ALL, backend, arm)) and row.by_position]
        if not rows:
            return
        n = min(_POSITIONS, max(len(row.by_position) for row in rows))
        self.section("Acceptance by position in the draft, and by drafter")
        self.table(
            ["position", *map(str, range(1, n + 1))],
            [
                [arm_name(record, row.backend, row.arm), *(share_text(each.rate) for each in row.by_position[:n])]
                for row in rows
            ],
        )
        for row in rows:
            by = [f"{name} {each.accepted} of {each.drafted} ({each.rate:.0%})" for name, each in row.by_source.items()]
            self.prose(f"{arm_name(record, row.backend, row.arm)}: {', '.join(by)}", "dim")

    def _time(self, record: Record, results: Results) -> None:
        self.section("Time and memory")
        rows = []
        has_energy = any(row.joules_per_token is not None for row in results.rows)
        for row in (each for each in results.rows if each.category == ALL):
            parts = row.seconds_per_token
            cells = [
                arm_name(record, row.backend, row.arm),
                seconds_text(row.time_to_first_token.median),
                *(f"{parts[name] * 1e3:.1f} ms" for name in ("draft", "verify", "other")),
                f"{row.n_same} of {row.n_compared}",
            ]
            rows.append([*cells, energy_text(record, row) or "–"] if has_energy else cells)
        head = ["per token", "first token", "drafting", "verifying", "other", "same text"]
        self.table([*head, "energy"] if has_energy else head, rows)
        self.prose(memory_text(record), "dim")
        if not has_energy:
            self.prose("energy: not measured, as this system has no counter that may be read", "dim")

    def _passes(self, record: Record, passes: Passes) -> None:
        name = f" · {passes.backend}" if len(record.settings.backends) > 1 else ""
        self.section(f"Cost of a pass over w tokens, t(w){name}")
        widths = [width for width in passes.widths if width.width <= 9 or (width.width in (10, 12, 16))]
        base = next((w.calibrated_ms for w in passes.widths if w.width == 1), None) or 1.0
        self.table(
            ["w", *(str(each.width) for each in widths)],
            [
                ["calibrated ms", *(_ms(each.calibrated_ms) for each in widths)],
                ["here ms", *(_ms(each.observed_ms) for each in widths)],
                ["× t(1)", *(_ms(each.calibrated_ms / base if each.calibrated_ms else None) for each in widths)],
            ],
            cells=4,
        )
        if passes.break_even:
            self.section("Break-even: share of guesses that must be right, by draft length k")
            lengths = next(iter(passes.break_even.values()))
            rows = [
                [source, f"{passes.step_ms[source]:.1f} ms" if passes.step_ms[source] else "free"]
                + ["never" if share is None else f"{share:.0%}" for share in even.values()]
                for source, even in passes.break_even.items()
            ]
            self.table(["k", "a guess", *lengths], rows)

    def _reliability(self, record: Record, results: Results) -> None:
        for found in (each for each in results.judgements if each.source == ALL):
            self.section(f"Predicted and observed acceptance · {arm_name(record, found.backend, found.arm)}")
            bins = found.reliability.bins
            self.table(
                ["predicted", *(f"{each.predicted:.2f}" for each in bins)],
                [
                    ["observed", *(f"{each.observed:.2f}" for each in bins)],
                    ["guesses", *(str(each.n) for each in bins)],
                ],
                cells=5,
            )
            parts = [
                _error(each)
                for each in results.judgements
                if (each.backend, each.arm) == (found.backend, found.arm)
            ]  # fmt: skip
            self.prose(f"expected calibration error: {', '.join(parts)}", "dim")


def _plain(row: Row) -> list[str]:
    first = seconds_text(row.time_to_first_token.median)
    return [row.category, f"{row.tokens_per_second.median:.1f}", first, str(row.n_questions)]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _error(found: Judgement) -> str:
    return f"{found.source} {found.reliability.expected_calibration_error:.3f} ({found.reliability.n} guesses)"
