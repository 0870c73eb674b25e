"""What a reader of the figures must know of them: a machine that was busy, hot, on battery, or slower in the end."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from localspec.commands.bench.record import Record
from localspec.measuring.answer import NEAR_TIE
from localspec.measuring.statistics import FEWEST

if TYPE_CHECKING:
    from localspec.commands.bench.results import Drift, Row

BUSY = 0.10
"""Share of the CPUs' time in others' hands from which an answer counts as disturbed."""

DRIFT = 0.05
"""Change of plain decoding's speed, from the first third of a run to the last, that is worth a remark."""


def remarks(record: Record, rows: Sequence[Row], drift: Sequence[Drift]) -> list[str]:
    """In sentences, the gravest first."""
    return [*_ending(record), *doubts(record, drift), *_thin(record, rows)]


def doubts(record: Record, drift: Sequence[Drift]) -> list[str]:
    """Those that make timings doubtful: what the machine was like."""
    return [*_machine(record), *_drifting(drift)]


def _ending(record: Record) -> Iterator[str]:
    if record.ended == "interrupted":
        yield "It was interrupted; this is what was measured until then."
    if record.skipped:
        few = ", ".join(record.skipped[:3]) + (", …" if len(record.skipped) > 3 else "")
        n = len(record.skipped)
        yield f"Left out, as they do not fit into the context: {n} question{'s' * (n != 1)} ({few})."
    if len(record.sessions) > 1:
        yield f"It was measured in {len(record.sessions)} parts; each began with the knowledge of a fresh start."


def _machine(record: Record) -> Iterator[str]:
    shares = [sample.others_share for sample in record.samples if sample.others_share is not None]
    disturbed = sum(share > BUSY for share in shares)
    if shares and disturbed > len(shares) / 10:
        yield (
            f"The machine was busy: others took {statistics.fmean(shares):.0%} of the CPUs' time on average, and over "
            f"{BUSY:.0%} during {disturbed} of {len(shares)} answers. Stop them for figures to rely on."
        )
    if any(session.throttled for session in record.sessions):
        yield "The CPU was slowed by heat or a power limit."
    if any(session.on_battery for session in record.sessions):
        yield "It ran on battery, where the clock is lower, as a rule."
    for why in dict.fromkeys(session.slow_clock for session in record.sessions if session.slow_clock):
        yield f"A setting keeps the CPU slow: {why}."
    threads, cores = [engine.threads for engine in record.engines], record.machine.get("cores")
    if cores and max(threads, default=0) > cores:
        yield f"{max(threads)} threads shared {cores} CPUs and waited for each other."


def _drifting(drift: Sequence[Drift]) -> Iterator[str]:
    for each in drift:
        name = f" with {each.backend}" if len(drift) > 1 else ""
        if each.change is None or each.noise is None:
            continue
        if abs(each.change) > max(DRIFT, each.noise):
            what = "slower" if each.change < 0 else "faster"
            yield (
                f"Plain decoding{name} was {abs(each.change):.0%} {what} in the last third of the run than in the "
                "first; speed-ups are unaffected; tok/s are not comparable."
            )
        if each.noise > 2 * DRIFT:
            yield f"Plain decoding{name} itself varied by ±{each.noise:.0%} from answer to answer."


def _thin(record: Record, rows: Sequence[Row]) -> Iterator[str]:
    firm = [row.speedup.is_firm for row in rows if row.speedup is not None]
    if not all(firm):
        where = "Categories of fewer" if any(firm) else "Fewer"
        more = " Run without --quick for a verdict." if record.settings.mode == "quick" and not any(firm) else ""
        yield f"{where} than {FEWEST} questions: the range is shown instead of a 95 % interval.{more}"
    n_apart = sum(sample.parted_by is not None and sample.parted_by > NEAR_TIE for sample in record.samples)
    if n_apart:
        yield (
            f"{n_apart} answer{' parts' if n_apart == 1 else 's part'} from plain's at two tokens over {NEAR_TIE:g} "
            "logits apart, as a rule more than rounding: localspec verify tells."
        )
